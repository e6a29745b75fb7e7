"""The self-test of `rowwise doctor`: compares kernels with `ops.reference`, and measures their speed.

`doctor` imports this module only when it runs the test, so that the command starts without torch. Known limit: speeds
are measured within seconds, on a machine that may be busy; `benchmarks/` has careful measurements.

Axes: N ids, B samples, D columns of a table, S columns of the output.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowwise.base.errors import IdError, RowwiseError
from rowwise.tables.batch import Jagged
from rowwise.tables.embedding import Embeddings
from rowwise.tables.ops import reference
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.layout import TableGroup, make_group
from rowwise.tables.ops.reference import FeatureBags, UpdateMemory
from rowwise.tables.ops.threads import torch_threads
from rowwise.tables.ops.update import next_step
from rowwise.tables.row_optimizers import OPTIMIZERS, RowOptimizer, RowWiseAdagrad, Sgd
from rowwise.tables.spec import TRAINED_TYPES, Pooling, RowType, Table

DIMS = (4, 12, 64, 100)  # one vector; vectors and a remainder; a full strip; a strip and a remainder
CHECKS_FRACTION = 0.5  # share of the time for checks; the rest measures speed
MIN_REPEATS = 8  # measurements of each kernel
STEPS = 2  # consecutive updates, so that the second uses optimizer state


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check and its result."""

    name: str
    failure: str  # empty if it passed


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeed:
    """The best of many repeats, in rows per second."""

    lookup_rows_s: float
    gather_limit_rows_s: float  # only reading the same rows from memory
    update_rows_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """Checks and speeds of the self-test."""

    checks: tuple[Check, ...]
    rounds: int  # rounds of all checks, each with another seed
    speed: MeasuredSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """Tables and a batch as arguments of the operators."""

    arena: Arena
    group: TableGroup
    bags: FeatureBags

    @classmethod
    def make(cls, tables: Sequence[Table], batch: int, max_ids: int, seed: int) -> "KernelCase":
        """Bags of 0 to `max_ids` ids for each feature; equal seeds give equal cases."""
        generator = torch.Generator().manual_seed(seed)
        arena = Arena.allocate(tables, torch.device("cpu"))
        arena.fill(seed)
        group = make_group(arena.pieces, arena.offsets)
        features = range(len(group.feature_names))
        lengths = [torch.randint(max_ids + 1, (batch,), generator=generator) for _ in features]
        values = [
            torch.randint(group.table_of(index).rows, (int(lengths[index].sum()),), generator=generator)
            for index in features
        ]
        weights_N = torch.rand(sum(len(v) for v in values), generator=generator)
        offsets = torch.ops.rowwise.offsets(torch.cat(lengths))
        bags = FeatureBags(group.features_FC, torch.cat(values), offsets, weights_N, batch)
        return cls(arena=arena, group=group, bags=bags)

    def update_memory(self) -> UpdateMemory:
        """The tensors that the next update changes."""
        return UpdateMemory(self.arena.rows, self.arena.state, self.group.tables_TC, *next_step(self.arena, self.group))

    def pool(self) -> Tensor:
        return torch.ops.rowwise.pool(self.arena.rows, *self.bags, self.group.columns)

    def update(self, grad_BS: Tensor) -> None:
        """Update the arena in place with the kernel."""
        torch.ops.rowwise.update(*self.update_memory()[:5], *self.bags[:4], grad_BS, self.bags.batch, False)

    def gradients(self) -> list[Tensor]:
        """Gradients for STEPS consecutive updates."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(self.bags.batch, self.group.columns, generator=generator) for _ in range(STEPS)]


def run_selftest(isa_sets: Sequence[str], seconds: float, report: Callable[[float], None]) -> SelfTestResult:
    """Check for half of the time, at least once, then measure speed; `report` takes the elapsed seconds."""
    begin = time.perf_counter()
    failures: dict[str, str] = {}
    # Each round has another seed, so more time covers more shapes. The first failure of each check is reported.
    for rounds in itertools.count(1):
        for check in run_checks(isa_sets, seed=rounds):
            failures[check.name] = failures.get(check.name) or check.failure
            report(time.perf_counter() - begin)
        if time.perf_counter() - begin > seconds * CHECKS_FRACTION:
            break
    speed = measure_speed(lambda: time.perf_counter() - begin < seconds, lambda: report(time.perf_counter() - begin))
    checks = tuple(Check(name=name, failure=failure) for name, failure in failures.items())
    return SelfTestResult(checks=checks, rounds=rounds, speed=speed)


def run_checks(isa_sets: Sequence[str], seed: int) -> Iterator[Check]:
    """Run every check once with a seed."""
    # Kernels are compiled once for each instruction set, so a compiler bug may be in one set only.
    for name in isa_sets:
        with limit_isa(name):
            yield _check(f"lookup == reference, {name}", lambda: lookup_matches(seed))
            for optimizer in map(_make_optimizer, OPTIMIZERS.values()):
                title = f"update == reference, {name}, {type(optimizer).__name__}"
                yield _check(title, lambda optimizer=optimizer: update_matches(optimizer, seed))
    yield _check("the same bits on 1 thread and on all", lambda: threads_agree(seed))
    yield _check("an id out of range is refused", refuses_id)


def lookup_matches(seed: int) -> str:
    """Compare pooled and sequence lookups with the reference, for several dims."""
    for shape in _shapes(seed):
        case = KernelCase.make([_table(shape, Sgd())], batch=300, max_ids=12, seed=seed)
        rows, bags = case.arena.rows, case.bags
        difference = find_difference(case.pool(), reference.pool(rows, bags, case.group.columns))
        gathered = torch.ops.rowwise.gather(rows, *bags[:3], bags.batch)
        difference = difference or find_difference(gathered, reference.gather(rows, bags))
        if difference:
            return f"{shape}: {difference}"
    return ""


def update_matches(optimizer: RowOptimizer, seed: int) -> str:
    """Compare rows and optimizer state after updates with the reference, for several dims."""
    for shape in _shapes(seed):
        table = _table(shape, optimizer)
        actual, expected = (KernelCase.make([table], batch=300, max_ids=12, seed=seed) for _ in range(2))
        for grad_BS in actual.gradients():
            actual.update(grad_BS)
            reference.update(expected.update_memory(), expected.bags, grad_BS, False)
        difference = find_difference(actual.arena.weights(0), expected.arena.weights(0))
        difference = difference or find_difference(actual.arena.state, expected.arena.state)
        if difference:
            return f"{shape}: {difference}"
    return ""


def threads_agree(seed: int) -> str:
    """Compare one thread with all, on a batch large enough that threads share a table."""
    table = Table(name="t", rows=50_000, dim=8, optimizer=RowWiseAdagrad(lr=0.1))
    results: list[Tensor] = []
    # At least two threads, even on one core: this checks the order of summation, not speed.
    for count in (1, max(2, torch.get_num_threads())):
        case = KernelCase.make([table], batch=3000, max_ids=40, seed=seed)
        with torch_threads(count):
            for grad_BS in case.gradients():
                case.update(grad_BS)
            state = case.arena.state.view(torch.uint8)
            results.append(torch.cat([case.arena.rows, state, case.pool().flatten().view(torch.uint8)]))
    return find_difference(results[0], results[1])


def refuses_id() -> str:
    """Check that an id past the end of its table raises an error that names the table."""
    module = Embeddings([Table(name="ten rows", rows=10, dim=4)])
    try:
        module(Jagged.from_lists({"ten rows": [[3], [10]]}))
    except IdError as error:
        return "" if "ten rows" in str(error) else f"the error does not name the table: {error}"
    return "id 10 of a table of 10 rows was accepted"


def measure_speed(has_time: Callable[[], bool], report: Callable[[], None]) -> MeasuredSpeed:
    """The best speeds of lookup, memory reads and update, measured in turn so that other load affects all alike."""
    tables = [Table(name=f"t{i}", rows=1 << 18, dim=64) for i in range(4)]  # 268 MB: far larger than caches
    case = KernelCase.make(tables, batch=4096, max_ids=20, seed=0)
    bags, grad_BS = case.bags, case.gradients()[0]
    work: tuple[Callable[[], object], ...] = (
        case.pool,
        lambda: torch.ops.rowwise.touch(case.arena.rows, *bags[:3], bags.batch),
        lambda: case.update(grad_BS),
    )
    # The best, not the mean: other processes can only slow a kernel down.
    best = [_seconds(kernel) for kernel in work]
    repeats = 1  # the first one faults in fresh memory, so a few more are always needed
    while repeats < MIN_REPEATS or has_time():
        repeats += 1
        best = [min(old, _seconds(kernel)) for old, kernel in zip(best, work, strict=True)]
        report()
    lookup, limit, update = (len(bags.values) / seconds for seconds in best)
    return MeasuredSpeed(lookup_rows_s=lookup, gather_limit_rows_s=limit, update_rows_s=update)


def find_difference(actual: Tensor, expected: Tensor) -> str:
    """A description of the first difference; empty if all values are equal."""
    # No tolerance: kernels give the bits of the reference.
    differences = torch.nonzero(actual.flatten() != expected.flatten())
    if not len(differences):
        return ""
    first = int(differences[0])
    values = f"got {float(actual.flatten()[first])!r}, expected {float(expected.flatten()[first])!r}"
    return f"{len(differences)} of {expected.numel()} numbers differ, the first at {first}: {values}"


@contextmanager
def limit_isa(isa: str) -> Iterator[None]:
    """Use kernels of one instruction set inside the block."""
    previous = str(torch.ops.rowwise.isa())
    torch.ops.rowwise.limit_isa(isa)
    try:
        yield
    finally:
        torch.ops.rowwise.limit_isa(previous)


def _check(name: str, test: Callable[[], str]) -> Check:
    """Run a check; an operator that raises fails it."""
    try:
        return Check(name=name, failure=test())
    except (RowwiseError, RuntimeError) as error:
        return Check(name=name, failure=f"{type(error).__name__}: {error}")


class KernelShape(NamedTuple):
    """Properties of a table that select the kernel's code path."""

    dim: int
    pooling: Pooling
    row_type: RowType

    def __str__(self) -> str:
        return f"dim {self.dim}, {self.pooling}, {self.row_type}"


def _shapes(seed: int) -> Iterator[KernelShape]:
    """All pairs of a dim and a row type, with another pooling for each seed."""
    poolings = (Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED)
    for index, (dim, row_type) in enumerate(itertools.product(DIMS, TRAINED_TYPES)):
        yield KernelShape(dim, poolings[(index + seed) % len(poolings)], row_type)


def _make_optimizer(kind: type[RowOptimizer]) -> RowOptimizer:
    """An optimizer with a large learning rate, and with weight decay and l1 if it has these settings."""
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "l1": 0.01}
    return kind(**{field: value for field, value in settings.items() if field in kind.__struct_fields__})


def _table(shape: KernelShape, optimizer: RowOptimizer) -> Table:
    dim, pooling, row_type = shape
    return Table(
        name="t", rows=500, dim=dim, features=("a", "b"), pooling=pooling, optimizer=optimizer, row_type=row_type
    )


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
