"""A module with id maps gives what a table with a vector for each id would give, whatever the map and the pooling."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import make_problem
from shared_batches import draw_copies, make_shared
from tables.ids.maps import make_maps
from torch import nn

from rowwise import (
    BatchError,
    Embeddings,
    IdError,
    Jagged,
    Normal,
    Plan,
    Pooling,
    RowType,
    RowWiseAdagrad,
    RowwiseError,
    Sgd,
    SpecError,
    StateError,
    Table,
    UnknownIdWarning,
)
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import shard
from rowwise.planning.planner import row_wise
from rowwise.tables.idmaps import DoubleHashIds, HashIds
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ids.make import make_embeddings
from rowwise.tables.ids.rules import hash_map
from rowwise.tables.ops.jagged import permute

KINDS = tuple(make_maps(40))


def make_tables(draws, ids, poolings=tuple(Pooling)):
    return [
        Table(
            name=f"t{k}",
            rows=ids,
            dim=draws.choice((4, 8)),
            features=tuple(f"f{k}.{i}" for i in range(draws.randint(1, 2))),
            pooling=draws.choice(poolings),
            init=Normal(std=1.0),
            optimizer=Sgd(lr=0.5),
        )
        for k in range(3)
    ]


def vectors_of(weights_ND, batch, table, feature):
    """From a vector for each id, by the plainest means."""
    plain = batch.expanded()
    rows_ND = weights_ND[plain.ids_of(feature).long()]
    if table.pooling is Pooling.SEQUENCE:
        return rows_ND
    if table.pooling is Pooling.WEIGHTED:
        rows_ND = rows_ND * plain.weights_N[slice(*plain.id_ranges()[feature])].unsqueeze(1)
    bags = rows_ND.split(plain.lengths_of(feature).tolist())
    pooled = [bag.mean(0) if table.pooling is Pooling.MEAN and len(bag) else bag.sum(0) for bag in bags]
    return torch.stack(pooled) if pooled else weights_ND[:0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_mapped_is_a_vector_for_each_id(seed):
    draws = random.Random(seed)
    ids = draws.choice((3, 40, 300))
    tables = make_tables(draws, ids)
    made = make_maps(ids, seed)
    maps = {table.name: made[draws.choice(KINDS)] for table in tables[:2]}  # the third has rows of its own
    module = MappedEmbeddings(tables, maps, seed=seed)
    assert module.tables == tuple(tables)
    features = [f for t in tables for f in t.feature_names] + ["not used"]
    common = draws.sample(features, draws.randint(1, len(features)))
    kinds = {name: draws.choice((torch.int32, torch.int64)) for name in ("ids", "lengths")}
    samples = draws.choice((0, 1, 30))
    batch = make_shared(tables, common, draw_copies(draws, samples, draws.choice((1, 12))), seed, **kinds)
    vectors = module(batch)
    for table in tables:
        for feature in table.feature_names:
            found, want = vectors[feature], vectors_of(module.weights(table.name), batch, table, feature)
            assert found.shape == want.shape
            assert torch.allclose(found, want, atol=1e-5), (table.pooling, feature)
    names = [f for t in tables if t.pooling is not Pooling.SEQUENCE for f in t.feature_names]
    assert vectors.keys() == names
    assert vectors.values().shape[1] == sum(t.dim * len(t.feature_names) for t in tables if t.feature_names[0] in names)


@pytest.mark.few(20)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", list(Pooling))
def test_rows_learn_by_the_sum_of_what_their_ids_are_told(kind, pooling):
    """One step of SGD moves the vectors of all ids as autograd through the map says."""
    table = Table(name="t", rows=40, dim=4, pooling=pooling, init=Normal(std=1.0), optimizer=Sgd(lr=0.5))
    module = MappedEmbeddings([table], {"t": make_maps(40)[kind]}, seed=1)
    batch = permute(make_problem([table], 12, 3, 5).jagged, ["t"])
    mapped = module.mapped["t"]
    leaves = [module.stored.weights(s.name).clone().requires_grad_() for s in mapped.stored]
    rows_NC = mapped.look_up_rows(torch.arange(40))
    parts = []
    for index, leaf in enumerate(leaves):
        for at_N in mapped.parts[index].local_rows(rows_NC).unbind(1):
            parts.append(mapped.project(index, leaf[at_N.clamp(min=0)]) * (at_N >= 0).unsqueeze(1))
    whole_ND = torch.stack(parts).prod(0) if kind == "product" else torch.stack(parts).sum(0)
    wanted = vectors_of(whole_ND, batch, table, "t")
    up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (wanted * up).sum().backward()
    projections = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    (module(batch)["t"] * up).sum().backward()
    module.stored.update()
    for stored, leaf in zip(mapped.stored, leaves, strict=True):
        assert torch.allclose(module.stored.weights(stored.name), leaf.detach() - 0.5 * leaf.grad, atol=1e-5)
    for mine, want in zip([p.grad for p in module.parameters() if p.grad is not None], projections, strict=True):
        assert torch.allclose(mine, want, atol=1e-5)


def test_nothing_is_put_together_where_rows_are_just_added_up():
    """A map of one part costs one step over the ids and nothing after the lookup."""
    tables = [Table(name="a", rows=50, dim=4, id_map=DoubleHashIds(rows=7)), Table(name="b", rows=9, dim=4)]
    module = make_embeddings(tables)
    assert isinstance(module, MappedEmbeddings)
    batch = make_problem(tables, 10, 3, 1).jagged
    assert module(batch).matrix_BS.shape == (10, 8)
    assert torch.equal(module(batch).matrix_BS, module.stored(module.map_batch(batch)).matrix_BS)
    assert isinstance(make_embeddings([Table(name="a", rows=5, dim=4)]), Embeddings)


def test_an_id_that_the_map_does_not_know_is_named():
    table = Table(name="film", rows=50, dim=4, features=("seen",), id_map=HashIds(rows=7))
    module = make_embeddings([table])
    with pytest.raises(IdError, match="table 'film': feature 'seen'"):
        module(Jagged.from_lists({"seen": [[3], [1, 50]]}))
    with pytest.raises(IdError, match="id -1"):
        module(Jagged.from_lists({"seen": [[3], [1, -1]]}))
    taking = make_embeddings([Table(name="film", rows=50, dim=4, unknown="last_row", id_map=HashIds(rows=7))])
    with pytest.warns(UnknownIdWarning, match="1 ids of feature 'film'"):
        out = taking(Jagged.from_lists({"film": [[3], [70]]}))
    assert torch.equal(out["film"][1], taking.weights("film")[49])
    assert taking.unknown_ids == {"film": 1}
    with pytest.raises(BatchError, match="the batch lacks film"):
        taking(Jagged.from_lists({"other": [[3], [70]]}))


def test_tables_with_a_map_are_not_looked_up_as_they_are():
    with pytest.raises(SpecError, match="table 'a'"):
        Embeddings([Table(name="a", rows=50, dim=4, id_map=HashIds(rows=7))])


def test_rows_of_another_map_are_refused_by_name():
    def module(seed=0, rows=50, name="a"):
        return make_embeddings([Table(name=name, rows=rows, dim=4, id_map=HashIds(rows=7, seed=seed))], seed=seed)

    first = module()
    again = module()
    again.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="0 saved and 1"):
        module(seed=1).load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="50 saved and 60"):
        module(rows=60).load_state_dict(first.state_dict())


def test_copies_and_state_dicts_hold_the_map():
    table = Table(name="items", rows=50, dim=4)  # the name of a method of torch's containers
    module = MappedEmbeddings([table], {"items": make_maps(50)["listed"]}, seed=3)
    again = copy.deepcopy(module)
    batch = make_problem([table], 6, 3, 1).jagged
    assert torch.equal(module(batch).matrix_BS, again(batch).matrix_BS)
    assert {"maps.items.words", "maps.items.identity", "stored.items"} == set(module.state_dict())


def test_narrow_rows_and_row_types():
    table = Table(name="t", rows=40, dim=8, row_type=RowType.BF16, optimizer=RowWiseAdagrad(lr=0.1))
    for kind, made in make_maps(40).items():
        module = MappedEmbeddings([table], {"t": made}, seed=1)
        batch = make_problem([table], 8, 3, 2).jagged
        module(batch)["t"].sum().backward()
        module.stored.update()
        assert torch.isfinite(module.weights("t")).all(), kind


def test_the_numbers_of_a_map_are_what_numpy_says():
    made = hash_map(1000, 17, 5)
    module = MappedEmbeddings([Table(name="t", rows=1000, dim=4)], {"t": made})
    rows_NC = module.mapped["t"].look_up_rows(torch.arange(1000))
    assert rows_NC.shape == (1000, 1)
    assert np.bincount(rows_NC[:, 0].numpy(), minlength=17).min() > 20


def test_a_bad_batch_of_one_rank_is_an_error_of_all():
    """Ids are checked before they become rows, and the other ranks do not wait for a rank that has none."""
    table = Table(name="film", rows=50, dim=4, id_map=HashIds(rows=8))
    net = nn.ModuleDict({"tables": make_embeddings([table])})
    stored = net["tables"].stored.tables[0]
    plan = Plan(world=2, tiles=row_wise(stored, range(2)))
    models = [copy.deepcopy(net) for _ in range(2)]

    def on_a_rank(comm):
        module = shard(models[comm.rank], plan, comm)["tables"]
        first = module(Jagged.from_lists({"film": [[3], [comm.rank]]}))["film"]
        with pytest.raises(RowwiseError) as caught:
            module(Jagged.from_lists({"film": [[3], [1, 50 if comm.rank else 4]]}))
        return first, str(caught.value)

    found = run_threads(2, on_a_rank, timeout_s=30)
    assert torch.equal(found[0][0][1], net["tables"].weights("film")[0])
    assert torch.equal(found[1][0][1], net["tables"].weights("film")[1])
    for _, message in found:
        assert "table 'film': feature 'film', sample 1, position 1: id 50 is not in 0..49" in message
    assert "rank 1" in found[0][1]
