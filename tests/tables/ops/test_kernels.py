"""kernel == reference, bit for bit, for every operator, shape and instruction set."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import OPTIMIZERS, ROW_TYPES, Problem, make_problem, problems

from rowwise import Ftrl, Pooling, RowWiseAdagrad, Table
from rowwise.tables.ops import reference
from rowwise.tables.ops.operators import OPERATORS
from rowwise.tables.ops.reference import FeatureBags, UpdateMemory
from rowwise.tables.ops.update import next_step

ops = torch.ops.rowwise
INTERACT = {"interact", "interact_grad", "pair_sums", "pair_sums_grad", "dots", "relu_grad"}


def parts(problem: Problem):
    arena = problem.arena()
    group = problem.group(arena)
    return arena, group, problem.sources(group), ops.offsets(problem.jagged.lengths_FB)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


@given(st.lists(st.integers(0, 1 << 40), max_size=50), st.sampled_from([torch.int32, torch.int64]))
def test_offsets(lengths, dtype):
    lengths = torch.tensor(lengths).remainder(1 << 24).to(dtype)
    assert same(ops.offsets(lengths), reference.offsets(lengths))


@pytest.mark.usefixtures("isa")
@given(problem=problems())
def test_pool(problem):
    arena, group, sources, offsets = parts(problem)
    bags = FeatureBags(sources, problem.jagged.values_N, offsets, problem.jagged.weights_N, problem.jagged.batch_size)
    assert same(ops.pool(arena.rows, *bags, group.columns), reference.pool(arena.rows, bags, group.columns))


@pytest.mark.usefixtures("isa")
@given(problem=problems(poolings=(Pooling.SEQUENCE,)))
def test_gather(problem):
    arena, _, sources, offsets = parts(problem)
    bags = FeatureBags(sources, problem.jagged.values_N, offsets, None, problem.jagged.batch_size)
    assert same(ops.gather(arena.rows, *bags[:3], bags.batch), reference.gather(arena.rows, bags))


@pytest.mark.usefixtures("isa")
@given(problem=problems())
def test_pool_weight_grad(problem):
    arena, group, sources, offsets = parts(problem)
    grad = torch.randn(problem.jagged.batch_size, group.columns)
    bags = FeatureBags(sources, problem.jagged.values_N, offsets, problem.jagged.weights_N, problem.jagged.batch_size)
    native = ops.pool_weight_grad(arena.rows, *bags[:4], grad, bags.batch)
    assert same(native, reference.pool_weight_grad(arena.rows, bags, grad))


def check_update(problem: Problem, per_id: bool) -> None:
    a, group, sources, offsets = parts(problem)
    b = problem.arena()
    jagged = problem.jagged
    if per_id:
        shape = (sum(int(n) * t.dim for t in problem.tables for f in t.feature_names for n in [ids_of(jagged, f)]),)
    else:
        shape = (jagged.batch_size, group.columns)
    for step in range(2):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        bags = FeatureBags(sources, jagged.values_N, offsets, jagged.weights_N, jagged.batch_size)
        hyper, keys = next_step(a, group)
        ops.update(a.rows, a.state, group.tables_TC, hyper, keys, *bags[:4], grad, bags.batch, per_id)
        reference.update(UpdateMemory(b.rows, b.state, group.tables_TC, hyper, keys), bags, grad, per_id)
    assert same(a.rows, b.rows)
    assert same(a.state, b.state)


def ids_of(jagged, feature) -> int:
    return int(jagged.lengths_FB.view(len(jagged.features), -1)[jagged.features.index(feature)].sum())


@pytest.mark.usefixtures("isa")
@given(problem=problems())
def test_update(problem):
    check_update(problem, per_id=False)


@pytest.mark.usefixtures("isa")
def test_update_of_every_width():
    """Around each number of whole vectors, lines and blocks of four; the last are sums of many columns."""
    tables = tuple(
        Table(name=f"t{dim}", rows=30, dim=dim, optimizer=RowWiseAdagrad()) for dim in (*range(1, 82), 127, 270)
    )
    check_update(make_problem(tables, batch=20, most=4, seed=2), per_id=False)


@pytest.mark.usefixtures("isa")
@given(problem=problems(poolings=(Pooling.SEQUENCE,)))
def test_update_of_sequences(problem):
    check_update(problem, per_id=True)


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED])
@pytest.mark.parametrize("threads_", [1, 2, 5])
def test_update_of_one_table_shared_by_threads(optimizer, pooling, threads_, threads):
    """More ids than a bucket holds, so that threads split the table."""
    threads(threads_)
    table = Table(name="t", rows=50_000, dim=8, features=("a", "b"), pooling=pooling, optimizer=optimizer)
    check_update(make_problem((table,), batch=3000, most=50, seed=1), per_id=False)


def same_or_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and same(a.nan_to_num(7.0), b.nan_to_num(7.0))


def refuses(update) -> bool:
    try:
        update()
    except (RuntimeError, ArithmeticError):
        return True
    return False


EXTREMES = [t for t in ROW_TYPES if t[1] != 48]


@pytest.mark.few(20)
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e18, 1e20, 3e38])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_update_by_gradients_near_the_ends_of_their_range(optimizer, scale):
    """Where squares vanish or overflow: still the definition's bits, and numbers."""
    tables = tuple(
        Table(name=f"t{k}", rows=30, dim=20, optimizer=optimizer, row_type=row_type, column_group=group)
        for k, (row_type, group) in enumerate(EXTREMES)
    )
    problem = make_problem(tables, batch=40, most=1, seed=1)
    a, b = problem.arena(), problem.arena()
    group, sources = problem.group(a), problem.sources(problem.group(a))
    jagged = problem.jagged
    bags = FeatureBags(sources, jagged.values_N, ops.offsets(jagged.lengths_FB), None, jagged.batch_size)
    for step in range(3):
        grad = torch.rand(40, group.columns, generator=torch.Generator().manual_seed(step))
        grad = (grad * 2 - 1) * scale
        numbers = group.tables_TC, *next_step(a, group)
        kernel = partial(ops.update, a.rows, a.state, *numbers, *bags[:4], grad, 40, False)
        wanted = partial(reference.update, UpdateMemory(b.rows, b.state, *numbers), bags, grad, False)
        assert refuses(kernel) == refuses(wanted)  # merged rows past the range, which then stay
        for index, table in enumerate(tables):
            assert same_or_nan(a.weights(index), b.weights(index)), f"{table.row_type} rows differ after step {step}"
        assert same_or_nan(a.state, b.state)
        if scale < 1e19 or not isinstance(optimizer, Ftrl):  # which divides by what squares add up to
            assert all(a.weights(index).isfinite().all() for index in range(len(tables)))


@pytest.mark.parametrize("rows", [(1 << 32) + 100])
def test_ids_past_32_bits(rows):
    """Rows are addressed with 64 bits: a table's far end is where it should be (memory is only touched there)."""
    arena = ops.zeros(rows * 4)
    features = torch.tensor([[0, 0, 0, rows, 1, 0, 0, 0, 0]])
    tables = torch.tensor([[0, rows, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, -1]])
    ids = torch.tensor([rows - 1, 5, rows - 1])
    offsets = torch.tensor([0, 1, 2, 3])
    grad = torch.tensor([[1.0], [2.0], [4.0]])
    state, hyper, keys = torch.empty(0), torch.tensor([[1.0] + [0] * 7]), torch.tensor([0])
    ops.update(arena, state, tables, hyper, keys, features, ids, offsets, None, grad, 3, False)
    assert ops.pool(arena, features, ids, offsets, None, 3, 1).flatten().tolist() == [-5.0, -2.0, -5.0]


@given(st.integers(-(1 << 62), 1 << 62), st.integers(0, 1 << 40), st.integers(0, 3000))
def test_fill_uniform(key, start, n):
    a, b = torch.empty(n), torch.empty(n)
    ops.fill_uniform(a, key, start, -0.25, 0.5)
    reference.fill_uniform(b, key, start, -0.25, 0.5)
    assert same(a, b)
    assert n < 1000 or abs(float(a.mean()) - 0.125) < 0.05
    assert not n or (float(a.min()) >= -0.25 and float(a.max()) < 0.5)
    starts = torch.tensor([start, start + 5, start])
    rows, others = torch.empty(3, n), torch.empty(3, n)
    ops.fill_uniform_rows(rows, starts, key, -0.25, 0.5)
    reference.fill_uniform_rows(others, starts, key, -0.25, 0.5)
    assert same(rows, others)
    assert same(rows[0], a)
    assert same(rows[2], a)
    assert same(rows[1, : max(0, n - 5)], a[5:])


def test_merge_order_is_blockwise():
    """The definition itself, spelled out: in order inside 256 samples, then pairs of neighbouring blocks."""
    samples = torch.tensor([0, 255, 256, 300, 1024, 1280])
    g = torch.randn(6, 3)
    _, merged = reference.merge(torch.zeros(6, dtype=torch.int64), samples, g)
    left = (g[0] + g[1]) + (g[2] + g[3])
    right = g[4] + g[5]
    assert torch.equal(merged[0], left + right)


def test_column_sum_is_a_tree_over_blocks_of_four():
    x = torch.randn(5, 12)
    block = [(x[:, c] + x[:, c + 1]) + (x[:, c + 2] + x[:, c + 3]) for c in (0, 4, 8)]
    assert torch.equal(reference.column_sum(x), (block[0] + block[1]) + block[2])


@pytest.mark.parametrize("pooling", [Pooling.WEIGHTED, Pooling.SEQUENCE])
def test_operators_of_devices_without_kernels(pooling):
    """What is registered for such devices takes the operators' arguments and gives their results."""
    flat = {name: one.reference for name, one in OPERATORS.items()}
    table = Table(name="t", rows=40, dim=8, features=("a", "b"), pooling=pooling)
    problem = make_problem((table,), batch=300, most=4, seed=3)
    arena, group, sources, offsets = parts(problem)
    ids, weights, batch = problem.jagged.values_N, problem.jagged.weights_N, problem.jagged.batch_size
    of_batches = {
        "lengths",
        "in_range",
        "find_newer",
        "take",
        "bucketize",
        "deduplicate",
        "expand",
        "spread",
    }  # see test_jagged.py
    of_ranks = {"place", "pack_ids"}  # see test_exchange.py
    of_checkpoints = {"pack4", "unpack4", "keep_largest"}  # see test_quantise.py
    of_maps = {"map_ids"}  # see test_idmap.py
    of_graphs = {"sum_sampled"}  # see test_graph.py
    of_inference = {"layers"}  # see test_layers.py
    fills = {"fill_uniform", "fill_uniform_rows"}
    named = fills | {"offsets", "pool", "pool_weight_grad", "gather", "update", "mark", "pack", "unpack"}
    assert set(flat) - of_batches - of_ranks - of_checkpoints - of_maps - of_graphs - of_inference - INTERACT == named
    pooled = ops.pool(arena.rows, sources, ids, offsets, weights, batch, group.columns)
    assert same(pooled, flat["pool"](arena.rows, sources, ids, offsets, weights, batch, group.columns))
    rows = ops.gather(arena.rows, sources, ids, offsets, batch)
    assert same(rows, flat["gather"](arena.rows, sources, ids, offsets, batch))
    weight_grad = ops.pool_weight_grad(arena.rows, sources, ids, offsets, weights, pooled, batch)
    assert same(weight_grad, flat["pool_weight_grad"](arena.rows, sources, ids, offsets, weights, pooled, batch))
    marks = [torch.zeros(table.rows, dtype=torch.uint8) for _ in range(2)]
    starts = torch.zeros(len(sources), dtype=torch.int64)
    for mark, touched in zip((ops.mark, flat["mark"]), marks, strict=True):
        mark(touched, starts, arena.rows, sources, ids, offsets, batch)
    assert marks[0].any()
    assert marks[0].equal(marks[1])
    per_id = pooling is Pooling.SEQUENCE
    other = problem.arena()
    args = (
        group.tables_TC,
        *next_step(arena, group),
        sources,
        ids,
        offsets,
        weights,
        rows if per_id else pooled,
        batch,
        per_id,
    )
    ops.update(arena.rows, arena.state, *args)
    flat["update"](other.rows, other.state, *args)
    assert same(arena.rows, other.rows)
