"""Triton kernels in Triton's interpreter: the reference's bits, in any order of programs, and nothing shared by two.

`test_triton.py` runs this file in a process of its own, as TRITON_INTERPRET is read when a kernel is decorated.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parents[2]))

from from_benchmarks import part
from problems import OPTIMIZERS, Problem, make_problem, problems, tables_of_row_types

from rowwise import Embeddings, Pooling, RowWiseAdagrad, Sgd, Table
from rowwise.base.errors import DeviceError
from rowwise.tables.ops import reference
from rowwise.tables.ops._triton import launch, operators, slots
from rowwise.tables.ops.faults import FaultWord
from rowwise.tables.ops.host_rows import HostRows
from rowwise.tables.ops.layout import Choice, FeatureDescriptor
from rowwise.tables.ops.reference import FeatureBags, UpdateMemory
from rowwise.tables.ops.update import next_step
from rowwise.tables.store.row_store import SlotIds

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # by numpy, which interprets
watch = part("gpu_trace").watch
MAX_IDS = 400  # the interpreter takes about a millisecond for each
FEW = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def parts(problem: Problem):
    arena = problem.arena()
    group = problem.group(arena)
    offsets = torch.ops.rowwise.offsets(problem.jagged.lengths_FB)
    jagged, features = problem.jagged, problem.sources(group)
    return arena, group, FeatureBags(features, jagged.values_N, offsets, jagged.weights_N, jagged.batch_size)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_clean(seen) -> None:
    assert not [one for one in seen.launches if one.races or one.atomics or one.outside]


def check_lookups(problem: Problem, per_id: bool) -> None:
    arena, group, bags = parts(problem)
    with watch(shuffle=1) as seen:
        if per_id:
            got = operators.gather(arena.rows, *bags[:3], bags.batch)
            assert same(got, reference.gather(arena.rows, bags))
        else:
            got = operators.pool(arena.rows, *bags, group.columns)
            assert same(got, reference.pool(arena.rows, bags, group.columns))
            grad = torch.randn(bags.batch, group.columns)
            got = operators.pool_weight_grad(arena.rows, *bags[:4], grad, bags.batch)
            assert same(got, reference.pool_weight_grad(arena.rows, bags, grad))
        touched = [torch.zeros(sum(t.rows for t in problem.tables), dtype=torch.uint8) for _ in range(2)]
        rows = torch.tensor([0, *(t.rows for t in problem.tables)]).cumsum(0)
        starts = rows[bags.features[:, 1]]
        operators.mark(touched[0], starts, arena.rows, *bags[:3], bags.batch)
        reference.mark(touched[1], starts, bags)
        assert same(*touched)
    check_clean(seen)


def check_update(problem: Problem, per_id: bool, steps: int = 2) -> None:
    a, group, bags = parts(problem)
    b = problem.arena()
    shape = (bags.batch, group.columns)
    if per_id:
        shape = (sum(len(bags.ids(f)) * f.dim for f in FeatureDescriptor.read(bags.features)),)
    for step in range(steps):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        hyper, keys = next_step(a, group)
        launch._memory.clear()  # so that it is NaN again: reading what was not written shows
        with watch(shuffle=step) as seen:
            operators.update(a.rows, a.state, group.tables_TC, hyper, keys, *bags[:4], grad, bags.batch, per_id)
        reference.update(UpdateMemory(b.rows, b.state, group.tables_TC, hyper, keys), bags, grad, per_id)
        assert same(a.state, b.state)
        assert same(a.rows, b.rows)
        check_clean(seen)


def small(problem: Problem) -> bool:
    return len(problem.jagged.values_N) <= MAX_IDS


@pytest.mark.slow
@FEW
@given(problem=problems(max_batch=40).filter(small))
def test_pooled(problem):
    check_lookups(problem, per_id=False)
    check_update(problem, per_id=False, steps=1)


@FEW
@given(problem=problems(poolings=(Pooling.SEQUENCE,), max_batch=40).filter(small))
def test_sequences(problem):
    check_lookups(problem, per_id=True)
    check_update(problem, per_id=True, steps=1)


@pytest.mark.parametrize("pooling", [Pooling.WEIGHTED, Pooling.SEQUENCE])
def test_rows_of_int4_are_looked_up(pooling):
    tables = [Table(name=f"t{dim}", rows=20, dim=dim, pooling=pooling, row_type="int4") for dim in (1, 5, 16, 36)]
    check_lookups(make_problem(tuple(tables), batch=8, most=4, seed=0), per_id=pooling is Pooling.SEQUENCE)


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_every_optimizer_and_row_type(optimizer):
    tables = tables_of_row_types(optimizer, 9, (20, 5, 16, 12, 52, 100))
    check_update(make_problem(tables, batch=6, most=2, seed=1), per_id=False)


@pytest.mark.few(1)
@pytest.mark.parametrize(("batch", "features"), [(700, 1), (2600, 1), (300, 3)])
def test_hot_rows(batch, features):
    """Rows that are cut into units, blocks of samples that miss one, several contributions of a sample."""
    names = tuple(f"f{k}" for k in range(features))
    table = Table(name="t", rows=4, dim=4, features=names, pooling=Pooling.MEAN, optimizer=RowWiseAdagrad())
    problem = make_problem((table,), batch=batch, most=1, seed=3, hot=True)
    check_update(problem, per_id=False, steps=1)


def test_a_gradient_that_is_one_row_of_an_expanded_tensor():
    """Its stride is 0, as that of no other."""
    table = Table(name="t", rows=6, dim=8, pooling=Pooling.MEAN, optimizer=Sgd(lr=0.1))
    problem = make_problem((table,), batch=1, most=5, seed=3)
    a, group, bags = parts(problem)
    b, (hyper, keys) = problem.arena(), next_step(a, group)
    grad = torch.randn(1, group.columns).expand(5, group.columns)[:1]
    assert grad.stride(0) == 0
    assert len(bags.values) > 1
    operators.update(a.rows, a.state, group.tables_TC, hyper, keys, *bags[:4], grad, 1, False)
    reference.update(UpdateMemory(b.rows, b.state, group.tables_TC, hyper, keys), bags, grad, False)
    assert same(a.rows, b.rows)


def test_wide_rows():
    tables = tuple(Table(name=f"t{dim}", rows=5, dim=dim, optimizer=RowWiseAdagrad()) for dim in (260, 600))
    check_lookups(make_problem(tables, batch=4, most=3, seed=5), per_id=False)
    check_update(make_problem(tables, batch=4, most=3, seed=5), per_id=False, steps=1)


@pytest.mark.parametrize(("vectors", "dim"), [(2, 3), (5, 16), (27, 20), (40, 64), (300, 64)])
def test_interactions_equal_the_reference_up_to_rounding(vectors, dim):
    """The last does not fit into a program and is the reference."""
    dense, pooled = torch.randn(3, dim), torch.randn(3, (vectors - 1) * dim)
    with watch(shuffle=2) as seen:
        out = operators.interact(dense, pooled)
        grad = torch.randn_like(out)
        grads = operators.interact_grad(dense, pooled, grad)
    check_clean(seen)
    torch.testing.assert_close(out, reference.interact(dense, pooled))
    for got, want in zip(grads, reference.interact_grad(dense, pooled, grad), strict=True):
        torch.testing.assert_close(got, want)
    assert operators.interact(dense[:0], pooled[:0]).shape == (0, out.shape[1])


@pytest.mark.parametrize(("dim", "group"), [(1, 0), (5, 0), (64, 0), (20, 16), (100, 48), (33, 8)])
def test_packed_rows_have_the_bits_of_the_reference(dim, group):
    rows = torch.randn(6, dim) * torch.tensor([1.0, 1e30, 1e-42, 1.0, 1.0, 0.0]).unsqueeze(1)
    rows[3], rows[4, 0] = 0.25, float("inf")
    with watch(shuffle=3) as seen:
        packed = operators.pack(rows, group)
        unpacked = operators.unpack(packed, dim, group)
    check_clean(seen)
    want = reference.pack(rows, group)
    header = want.shape[1] - -(-dim // 4) * 4
    floats = [x[:, :header].contiguous().view(torch.float32) for x in (packed, want)]
    assert torch.equal(*(x.nan_to_num(7.0) for x in floats))
    assert torch.equal(packed[:, header:], want[:, header:])
    assert same(unpacked[:4], reference.unpack(want, dim, group)[:4])
    assert unpacked[4].isnan().any()


@pytest.mark.parametrize("dim", [1, 7, 8, 17, 100, 1100])
def test_rows_of_four_bits_have_the_bits_of_the_reference(dim):
    """Rows of which some are flat, tiny, huge, of both zeros, heavy in their tails, or not finite."""
    rows = torch.randn(9, dim, generator=torch.Generator().manual_seed(dim))
    rows *= torch.tensor([1.0, 1e30, 1e-41, 1.0, 1.0, 0.0, 1.0, 2e37, 1.0]).unsqueeze(1)
    rows[3], rows[4, 0], rows[6, 0], rows[8] = 0.25, float("inf"), float("nan"), rows[8] ** 5
    with watch(shuffle=3) as seen:
        packed = operators.pack4(rows)
        unpacked = operators.unpack4(packed, dim)
    check_clean(seen)
    want = reference.pack4(rows)
    assert same(packed, want)
    assert torch.equal(unpacked.nan_to_num(7.0), reference.unpack4(want, dim).nan_to_num(7.0))
    finite = torch.tensor([0, 1, 2, 3, 5, 7, 8])
    assert same(unpacked[finite], reference.unpack4(want, dim)[finite])


@pytest.mark.parametrize("choice", Choice)
@pytest.mark.parametrize(("dim", "rescaled"), [(5, True), (64, False)])
def test_sampled_edges_have_the_bits_of_the_reference(choice, dim, rescaled):
    """Of nodes without edges, with few, with many, and with a degree that the prime of strides divides."""
    starts = torch.tensor([0, 0, 577, 579, 586, 596])
    ids = torch.cat((torch.arange(577) % 6, torch.randint(6, (19,), generator=torch.Generator().manual_seed(0)))).int()
    args = torch.randn(6, dim), ids, starts, torch.rand(len(ids))
    with watch(shuffle=1) as seen:
        got = operators.sum_sampled(*args, 4, int(choice), rescaled)
    check_clean(seen)
    assert same(got, reference.sum_sampled(*args, 4, int(choice), rescaled))
    ids[3] = 6
    with pytest.raises(DeviceError, match="outside its table"):
        operators.sum_sampled(*args, 600, int(choice), rescaled)


def bad_ids():
    table = Table(name="t", rows=10, dim=8, optimizer=Sgd())
    problem = make_problem((table,), batch=6, most=3, seed=2)
    arena, group, bags = parts(problem)
    values = bags.values.clone()
    first = FeatureDescriptor.read(bags.features)[0].source * bags.batch
    values[bags.offsets[first]], values[bags.offsets[first] + 1] = -1, 10
    return arena, group, bags._replace(values=values)


def test_a_bad_id_touches_nothing():
    arena, group, bags = bad_ids()
    before = arena.rows.clone()
    with pytest.raises(DeviceError, match="outside its table"):
        operators.pool(arena.rows, *bags, group.columns)
    hyper, keys = next_step(arena, group)
    with pytest.raises(DeviceError, match="outside its table"):
        operators.update(
            arena.rows, arena.state, group.tables_TC, hyper, keys, *bags[:4],
            torch.zeros(bags.batch, group.columns), bags.batch, False,
        )  # fmt: skip
    assert same(before, arena.rows)
    assert not FaultWord.of(torch.device("cpu")).begin().any()  # and the next call has none


def test_a_row_whose_gradient_is_not_finite_keeps_its_value():
    problem = make_problem((Table(name="t", rows=50, dim=8, optimizer=Sgd()),), batch=6, most=1, seed=2)
    arena, group, bags = parts(problem)
    grad = torch.ones(bags.batch, group.columns)
    feature = FeatureDescriptor.read(bags.features)[0]
    row = bags.ids(feature)[0]
    grad[bags.samples(feature)[0]] = float("nan")
    before = arena.rows.view(torch.float32).view(-1, 8).clone()
    hyper, keys = next_step(arena, group)
    with pytest.raises(DeviceError, match="not finite"):
        operators.update(arena.rows, arena.state, group.tables_TC, hyper, keys, *bags[:4], grad, bags.batch, False)
    after = arena.rows.view(torch.float32).view(-1, 8)
    assert same(before[row], after[row])
    assert not same(before, after)


def make_cache(rows_T, dims_T, cache_rows, types):
    """A cache of tables with random rows, on the CPU."""
    tables = [
        Table(name=f"t{k}", rows=rows, dim=dim, optimizer=RowWiseAdagrad(), row_type=types[k % len(types)])
        for k, (rows, dim) in enumerate(zip(rows_T, dims_T, strict=True))
    ]
    return Embeddings(tables, seed=1).cache_on("cpu", dict.fromkeys((t.name for t in tables), cache_rows)).arena.store


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows_T", "cache_rows", "types", "ids"),
    [
        ([90], 1, ("fp32",), torch.int64),
        ([3000, 1], 64, ("fp16",), torch.int32),
        ([40, 500, 20], 1, ("int8", "fp32"), torch.int64),
    ],
)
def test_the_cache_of_a_device(rows_T, cache_rows, types, ids):
    """Slots, what is known of them, and every byte that is moved, with features that are not cached and bad ids."""
    rng, dims = torch.Generator().manual_seed(0), (3, 8, 20)[: len(rows_T)]
    ours, wanted = (make_cache(rows_T, dims, cache_rows, types) for _ in range(2))
    for step in range(3):
        cached = [*torch.randperm(len(rows_T), generator=rng).tolist(), -1]  # the last feature has no cached table
        counts = [int(torch.randint(0, 90, (), generator=rng)) for _ in cached]
        drawn = [torch.rand(n, generator=rng) ** 2 * (rows_T[k] + 1) for k, n in zip(cached, counts, strict=True)]
        values = torch.cat(drawn).to(ids) - 1
        bounds = torch.tensor([0, *counts]).cumsum(0).repeat_interleave(3)[::3]  # a view, as every batch-th offset is
        changes = bool(step % 2)
        pins = [one.pin(SlotIds(values, bounds, cached), changes=changes, counts=not changes) for one in (ours, wanted)]
        our_slots, wanted_slots = ExitStack(), ExitStack()
        with pytest.MonkeyPatch.context() as patch, watch(shuffle=step) as seen:
            patch.setattr(HostRows, "_operators", slots)
            got = our_slots.enter_context(pins[0])
        want = wanted_slots.enter_context(pins[1])
        assert same(got, want)
        for one, cache in ((got, ours), (want, wanted)):
            for feature, number in enumerate(cached[:-1]) if changes else ():
                at = one[bounds[feature] : bounds[feature + 1]].long()
                cache.tables[number].state_memory[at[at >= 0]] += 1
        for a, b in zip(ours._memory, wanted._memory, strict=True):
            assert same(a, b)
        with pytest.MonkeyPatch.context() as patch, watch(shuffle=step) as left:
            patch.setattr(HostRows, "_operators", slots)
            our_slots.close()
        wanted_slots.close()
        for a, b in zip(ours.tables, wanted.tables, strict=True):
            assert same(a.rows, b.rows)
            assert same(a.state, b.state)
        launches = [*seen.launches, *left.launches]
        assert not [one for one in launches if one.races or one.atomics]
        assert not [one for one in launches if one.outside and one.name not in ("move", "leave_overflow")]


@triton.jit
def racing(x, out, FLAW: tl.constexpr):
    i = tl.program_id(0)
    if FLAW == 0:
        tl.store(out, tl.load(out) + tl.load(x + i))
    elif FLAW == 1:
        tl.store(out + i, tl.load(out + i + 1))
    else:
        tl.store(out, i.to(tl.float32))


@triton.jit
def one_too_many(out):
    tl.store(out + tl.arange(0, 4), tl.load(out + 1 + tl.arange(0, 4)))


def test_places_outside_of_tensors_are_found():
    with watch() as seen:
        one_too_many[(1,)](torch.frombuffer(bytearray(20), dtype=torch.float32, count=4))
        one_too_many[(1,)](torch.zeros(5))
    assert [one.outside for one in seen.launches] == [{"load"}, set()]


@pytest.mark.parametrize("flaw", [0, 1, 2])
def test_races_are_found(flaw):
    with watch() as seen:
        racing[(3,)](torch.ones(4), torch.zeros(4), FLAW=flaw)
    assert seen.launches[0].races == {"out"}


@triton.jit
def atomic(out):
    tl.atomic_add(out, 1.0)


def test_atomics_are_found():
    with watch() as seen:
        atomic[(2,)](torch.zeros(1))
    assert seen.launches[0].atomics == 2
