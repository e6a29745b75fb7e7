"""Per-id weights that learn get the gradient that one device would give them, from whichever rank has the row."""

from dataclasses import replace

import pytest
import torch
from parallel.shard.equal import SEED, Step, apart, given, look_up, make_sharded, make_steps, place, rows_apart
from parallel.shard.layout_cases import CASES
from shared_batches import make_shared

from rowwise import BatchError, Embeddings, Pooling, RowType, RowWiseAdagrad, Sgd, Table, Topology, Uniform
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.plan import Plan
from rowwise.planning.planner.layouts import column_wise, row_wise

TOPOLOGIES = {"3": Topology(devices=3), "2x2": Topology(hosts=2, devices=2)}
TABLES = (
    Table(name="a", rows=400, dim=16, pooling=Pooling.WEIGHTED, features=("a.0", "a.1"), init=Uniform(1.0)),
    Table(name="b", rows=300, dim=8, pooling=Pooling.MEAN, features=("b.0", "b.1")),
    Table(name="c", rows=300, dim=32, pooling=Pooling.WEIGHTED, row_type=RowType.BF16, init=Uniform(1.0)),
    Table(name="d", rows=300, dim=12, pooling=Pooling.SEQUENCE, optimizer=Sgd(lr=0.1)),
)
SIZES_SW = ((9, 0, 30, 1), (1, 20, 3, 17))


def sizes_of(topology):
    """Those of four ranks, dealt to as many as there are."""
    return [tuple(sum(sizes[rank :: topology.world]) for rank in range(topology.world)) for sizes in SIZES_SW]


def learned(step, dtype=torch.float32):
    """The step with weights of its own that learn."""
    weights_N = step.batch.weights_N.detach().to(dtype).clone().requires_grad_()
    return replace(step, batch=replace(step.batch, weights_N=weights_N))


def train(module, steps):
    """What the weights of each step got."""
    for step in steps:
        given(look_up(module, step), step).backward()
        module.update()
    return [step.batch.weights_N.grad for step in steps]


def of_rank(step, gradient_N, rank):
    """A rank's part of the gradient of all weights."""
    return replace(step, batch=replace(step.batch, weights_N=gradient_N)).of(rank).batch.weights_N


def run(tables, plan, topology, elastic=False, dtype=torch.float32, limit=0.0):
    """What differs from one device."""
    steps = make_steps(tables, sizes_of(topology))
    whole = Embeddings(tables, seed=SEED)
    wanted = train(whole, [learned(step, dtype) for step in steps])

    def rank(comm):
        sharded = make_sharded(tables, plan, comm, elastic=elastic)
        mine = train(sharded, [learned(step.of(comm.rank), dtype) for step in steps])
        found = list(rows_apart(sharded, whole))
        for number, (step, gradient, want) in enumerate(zip(steps, mine, wanted, strict=True)):
            assert gradient.dtype == dtype
            found += apart(f"step {number}", gradient, of_rank(step, want, comm.rank), limit)
        return found

    return [text for texts in run_threads(topology, rank, timeout_s=60) for text in texts]


def cuts_columns(plan, tables):
    return any(t.pooling is Pooling.WEIGHTED and x.cols != (0, t.dim) for t in tables for x in plan.tiles_of(t.name))


@pytest.mark.few(5)
@pytest.mark.parametrize(("topology", "elastic"), [("3", False), ("2x2", False), ("2x2", True)])
@pytest.mark.parametrize("layout", CASES)
def test_the_gradient_is_that_of_one_device(layout, topology, elastic):
    """To the bit, where a rank has all columns; else it is a sum over columns in another order."""
    world = TOPOLOGIES[topology]
    plan = place(TABLES, layout, world)
    cut = cuts_columns(plan, TABLES)
    if not (cut and elastic):
        assert not run(TABLES, plan, world, elastic, limit=2e-5 if cut else 0.0)


def test_results_that_are_to_be_elastic_are_refused_where_columns_are_cut():
    """By name, on all ranks; the batch is fine if its weights do not learn, or nobody asks for a gradient."""
    topology = TOPOLOGIES["2x2"]
    tiles = column_wise(TABLES[0], range(4)) + row_wise(TABLES[2], range(4))
    tiles += column_wise(TABLES[1], range(4)) + column_wise(TABLES[3], range(4))
    (step, _) = make_steps(TABLES, sizes_of(topology))

    def rank(comm):
        sharded = make_sharded(TABLES, Plan(world=4, tiles=tiles), comm, elastic=True)
        with pytest.raises(BatchError, match="weights of a require"):
            sharded(learned(step.of(comm.rank)).batch)
        with torch.no_grad():
            sharded(learned(step.of(comm.rank)).batch)
        sharded(step.of(comm.rank).batch)

    run_threads(topology, rank, timeout_s=60)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["row-wise", "replicated", "all on the last rank"])
def test_weights_may_be_of_another_type(layout, dtype):
    topology = TOPOLOGIES["2x2"]
    assert not run(TABLES, place(TABLES, layout, topology), topology, dtype=dtype)


def test_a_model_may_make_the_weights():
    """They are one node of a graph: what comes before it learns, too."""
    topology = TOPOLOGIES["3"]
    plan = place(TABLES, "rows, ranks reversed", topology)
    (step, _) = make_steps(TABLES, sizes_of(topology))

    def made(step, factor):
        return replace(step, batch=replace(step.batch, weights_N=torch.sigmoid(step.batch.weights_N * factor)))

    factor = torch.tensor(0.5, requires_grad=True)
    given(look_up(Embeddings(TABLES, seed=SEED), made(step, factor)), step).backward()

    def rank(comm):
        mine = torch.tensor(0.5, requires_grad=True)
        part = made(step.of(comm.rank), mine)
        given(look_up(make_sharded(TABLES, plan, comm), part), part).backward()
        return mine.grad

    torch.testing.assert_close(sum(run_threads(topology, rank, timeout_s=60)), factor.grad)


@pytest.mark.parametrize("layout", ["row-wise", "column-wise", "replicated", "table-row-wise"])
def test_two_forwards_before_a_backward(layout):
    """All ranks meet the same exchanges in the same order, though only some hold tiles."""
    topology = TOPOLOGIES["2x2"]
    plan = place(TABLES, [layout, "all on the last rank", "uneven rows", "pinwheel"], topology)
    one, two = make_steps(TABLES, sizes_of(topology))

    def both(module, steps: list[Step]):
        steps = [learned(step) for step in steps]
        sum(given(look_up(module, step), step) for step in steps).backward()
        module.update()
        return [step.batch.weights_N.grad for step in steps]

    wanted = both(Embeddings(TABLES, seed=SEED), [one, two])

    def rank(comm):
        found = both(make_sharded(TABLES, plan, comm), [one.of(comm.rank), two.of(comm.rank)])
        for step, mine, want in zip((one, two), found, wanted, strict=True):
            torch.testing.assert_close(mine, of_rank(step, want, comm.rank), rtol=1e-5, atol=1e-5)

    run_threads(topology, rank, timeout_s=60)


def test_with_copies_only_no_weight_travels():
    topology, tables = TOPOLOGIES["3"], (TABLES[0], Table(name="e", rows=9, dim=4, optimizer=RowWiseAdagrad()))
    assert not run(tables, place(tables, ["replicated", "row-wise"], topology), topology)


def test_weights_of_copies_learn_where_samples_share_bags():
    """They stay at home, on every rank; nothing else of the batch learns."""
    tables = TABLES[0], TABLES[1]
    batch = make_shared(tables, ("a.1", "b.0"), [2, 3, 1], seed=5)

    def gradients(module):
        leaves = [x.weights_N.clone().requires_grad_() for x in (batch, batch.shared.jagged)]
        shared = replace(batch.shared, jagged=replace(batch.shared.jagged, weights_N=leaves[1]))
        module(replace(batch, weights_N=leaves[0], shared=shared)).matrix_BS.square().sum().backward()
        module.update()
        return [leaf.grad for leaf in leaves]

    wanted = gradients(Embeddings(tables, seed=SEED))

    def rank(comm):
        mine = gradients(make_sharded(tables, place(tables, "replicated", comm.topology), comm))
        assert all(torch.equal(got, want) for got, want in zip(mine, wanted, strict=True))

    run_threads(TOPOLOGIES["3"], rank, timeout_s=60)
