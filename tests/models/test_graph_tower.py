"""Graph towers against their equations in dense torch, on one rank and on several."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rowwise import (
    BatchError,
    Embeddings,
    GraphSage,
    GraphTower,
    Jagged,
    LightGCN,
    Plan,
    Pooling,
    Sgd,
    SpecError,
    Table,
)
from rowwise.models.graph_tower import user_item_graph
from rowwise.models.inference import evaluation_mode
from rowwise.models.retrieval import in_batch_bpr
from rowwise.parallel.comm.gather import all_gather_rows
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import shard
from rowwise.planning.planner import replicated, row_wise, table_wise

USERS, ITEMS, DIM = 7, 5, 8
PAIRS = torch.tensor([(0, 0), (0, 1), (1, 1), (2, 1), (2, 3), (2, 3), (4, 0), (5, 3), (5, 1), (0, 3)])  # one twice
USERS_E, ITEMS_E = PAIRS.unbind(1)


def make_tables(**more):
    settings = {"dim": DIM, "optimizer": Sgd(lr=0.5), **more}
    return [Table(name=name, rows=rows, **settings) for name, rows in (("user", USERS), ("item", ITEMS))]


def make_tower(encoder=None, weights="symmetric", **more):
    torch.manual_seed(0)
    graph = user_item_graph(USERS_E, ITEMS_E, USERS, ITEMS, weights)
    return GraphTower(Embeddings(make_tables(), seed=1), graph, encoder or LightGCN(2), **more)


def adjacency():
    pairs_UI = torch.zeros(USERS, ITEMS, dtype=torch.float64)
    pairs_UI[USERS_E, ITEMS_E] = 1
    top = torch.cat((torch.zeros(USERS, USERS, dtype=torch.float64), pairs_UI), 1)
    return torch.cat((top, torch.cat((pairs_UI.t(), torch.zeros(ITEMS, ITEMS, dtype=torch.float64)), 1)))


def rows_of(tower):
    return torch.cat([tower.embeddings.table(name) for name in ("user", "item")]).double()


def batch_of(users, items):
    return Jagged.from_lists({"user": [[u] for u in users], "item": [[i] for i in items]})


def test_light_gcn_is_its_equation():
    tower, edges_NN = make_tower(), adjacency()
    degrees_N = edges_NN.sum(1).clamp(min=1)
    normal_NN = edges_NN / (degrees_N.unsqueeze(1) * degrees_N).sqrt()
    rows_ND = rows_of(tower)
    want_ND = (rows_ND + normal_NN @ rows_ND + normal_NN @ normal_NN @ rows_ND) / 3
    found_ND = torch.cat(tower.node_vectors())
    torch.testing.assert_close(found_ND.double(), want_ND, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_ND[3].double(), rows_ND[3] / 3)  # a user without a pair keeps a third of their row


def test_graph_sage_is_its_equation():
    tower, edges_NN = make_tower(GraphSage(DIM, (6, 4)), "mean"), adjacency()
    mean_NN = edges_NN / edges_NN.sum(1, keepdim=True).clamp(min=1)
    x_ND = rows_of(tower)
    for index, layer in enumerate(tower.encoder.layers):
        own, others = layer.weight.double().chunk(2, 1)
        x_ND = x_ND @ own.t() + mean_NN @ x_ND @ others.t() + layer.bias.double()
        x_ND = x_ND if index else x_ND.relu()
    torch.testing.assert_close(torch.cat(tower.node_vectors()).double(), F.normalize(x_ND), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("encoder", [LightGCN(2), GraphSage(DIM, (6, 4))])
def test_an_update_is_that_of_plain_torch(encoder):
    tower = make_tower(encoder)
    rows_ND = nn.Parameter(rows_of(tower).float())
    users, items = torch.tensor([0, 2, 5]), torch.tensor([1, 3, 3])
    plain_ND = copy.deepcopy(encoder)(rows_ND, tower.graph)
    (plain_ND[users] * plain_ND[items + USERS]).sum().sigmoid().backward()
    users_BD, items_BD = tower.vectors(torch.empty(3, 0), batch_of(users.tolist(), items.tolist()))
    (users_BD * items_BD).sum().sigmoid().backward()
    tower.embeddings.update()
    want_ND = rows_ND.detach() - 0.5 * rows_ND.grad
    torch.testing.assert_close(rows_of(tower).float(), want_ND, rtol=1e-5, atol=1e-6)


@pytest.mark.few(4)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make_encoder", [lambda: LightGCN(2), lambda: GraphSage(DIM, (8, 8))])
def test_ranks_train_as_one(world, shared, make_encoder):
    """Each with some of the samples, and where it is shared with a part of the nodes; the loss is added up over all."""
    users, items = [0, 2, 5, 4, 1, 2], [1, 3, 3, 0, 1, 1]

    def loss_of(tower, mine):
        users_BD, items_BD = tower.vectors(torch.empty(len(users[mine]), 0), batch_of(users[mine], items[mine]))
        return (users_BD * items_BD).sum(1).sigmoid().sum()

    encoder = make_encoder()
    one = make_tower(copy.deepcopy(encoder))
    untrained_ND = torch.cat(one.node_vectors()).detach()
    loss_of(one, slice(None)).backward()
    one.embeddings.update()
    user, item = make_tables()
    tiles = (
        *row_wise(user, list(range(world))),
        *(replicated(item, list(range(world))) if world > 2 else table_wise(item, 0)),
    )

    def rank(comm):
        tower = shard(make_tower(copy.deepcopy(encoder)), Plan(world=world, tiles=tiles), comm)
        if shared:
            tower.share(comm.rank, world, partial(all_gather_rows, comm, purpose="graph"))
        before_ND = torch.cat(tower.node_vectors()).detach()
        size = len(users) // world
        loss_of(tower, slice(comm.rank * size, (comm.rank + 1) * size)).backward()
        tower.embeddings.update()
        grads = [p.grad for p in tower.encoder.parameters()]
        with torch.no_grad():
            return before_ND, torch.cat(tower.node_vectors()), grads

    results = run_threads(world, rank, timeout_s=60)
    for before_ND, found_ND, _ in results:
        assert torch.equal(before_ND, untrained_ND) or len(list(encoder.parameters()))
        torch.testing.assert_close(found_ND, torch.cat(one.node_vectors()), rtol=1e-5, atol=1e-6)
    for k, parameter in enumerate(one.encoder.parameters()):
        torch.testing.assert_close(sum(grads[k] for *_, grads in results), parameter.grad, rtol=1e-5, atol=1e-6)


def test_evaluation_reads_the_sampled_graph():
    exact = make_tower()
    tower = make_tower(sampled=exact.graph.sampled(1))
    assert torch.equal(torch.cat(tower.node_vectors()), torch.cat(exact.node_vectors()))
    with evaluation_mode(tower), evaluation_mode(exact):
        assert not torch.equal(torch.cat(tower.node_vectors()), torch.cat(exact.node_vectors()))


@pytest.mark.parametrize("make_encoder", [lambda: LightGCN(2), lambda: GraphSage(DIM, (8, 8))])
def test_pairs_of_the_graph_come_to_score_above_others(make_encoder):
    torch.manual_seed(0)
    tower = make_tower(make_encoder(), temperature=0.2)
    dense = torch.optim.Adam(
        [*(p for p in tower.parameters() if p.requires_grad), nn.Parameter(torch.zeros(1))], lr=0.02
    )
    ids = batch_of(USERS_E.tolist(), ITEMS_E.tolist())
    for _ in range(60):
        dense.zero_grad()
        users_BD, items_BD = tower.vectors(torch.empty(len(PAIRS), 0), ids)
        in_batch_bpr(tower.scores(users_BD, items_BD), ITEMS_E).backward()
        dense.step()
        tower.embeddings.update()
    users_UD, items_ID = tower.node_vectors()
    scores_UI, seen_UI = tower.scores(users_UD, items_ID), torch.zeros(USERS, ITEMS, dtype=torch.bool)
    seen_UI[USERS_E, ITEMS_E] = True
    assert scores_UI[seen_UI].mean() > scores_UI[~seen_UI].mean() + 0.5
    logits_B1 = tower(torch.empty(len(PAIRS), 0), ids)
    torch.testing.assert_close(logits_B1[:, 0], scores_UI[USERS_E, ITEMS_E])


def test_what_cannot_be_is_refused():
    graph = user_item_graph(USERS_E, ITEMS_E, USERS, ITEMS)
    user, item = make_tables()
    with pytest.raises(SpecError, match="tables user of user"):
        GraphTower(Embeddings([user]), graph, LightGCN())
    with pytest.raises(SpecError, match="graph tower: tables user"):
        GraphTower(Embeddings(make_tables(pooling=Pooling.SEQUENCE)), graph, LightGCN())
    with pytest.raises(SpecError, match="'item' has dim 4"):
        GraphTower(Embeddings([user, Table(name="item", rows=ITEMS, dim=4)]), graph, LightGCN())
    small = user_item_graph(USERS_E, ITEMS_E, USERS, ITEMS - 1)
    with pytest.raises(SpecError, match="11 x 11 nodes"):
        GraphTower(Embeddings([user, item]), graph, LightGCN(), sampled=small)
    with pytest.raises(SpecError, match="more than 0"):
        make_tower(temperature=0)
    with pytest.raises(SpecError, match="least 1"):
        LightGCN(0)
    with pytest.raises(SpecError, match=r"sizes=\(\): expected at least"):
        GraphSage(8, ())
    with pytest.raises(SpecError, match="'symmetric' or 'mean'"):
        user_item_graph(USERS_E, ITEMS_E, USERS, ITEMS, "max")
    with pytest.raises(BatchError, match="edge 4: source 3"):
        user_item_graph(USERS_E, ITEMS_E, USERS, 3)
    tower = make_tower()
    with pytest.raises(BatchError, match="feature 'user' has 2"):
        tower.vectors(torch.empty(2, 0), Jagged.from_lists({"user": [[1], [2, 3]], "item": [[1], [2]]}))
    with pytest.raises(BatchError, match="'item' has id 9"):
        tower.vectors(torch.empty(2, 0), batch_of([0, 1], [2, 9]))
