"""Does this installation compute what it should, and how fast: the self-test of `rowwise doctor`.

Apart from `doctor`, which only shows the result, so that starting the command needs no torch. The definition it holds
the kernels to is `ops.reference`; the test suite does the same with far more shapes. Known limits: the speeds are
those of a few seconds on a machine that may be busy; `benchmarks/` measures with care.

Shapes: N ids, B samples, D columns of a table, S columns of the output.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.embedding import Embeddings
from rowwise.errors import IdError, RowwiseError
from rowwise.ops import reference
from rowwise.ops.arena import Arena
from rowwise.ops.layout import TableGroup, make_group
from rowwise.ops.reference import FeatureBags, UpdateMemory
from rowwise.ops.threads import torch_threads
from rowwise.ops.update import next_step
from rowwise.row_optimizers import OPTIMIZERS, RowOptimizer, RowWiseAdagrad, Sgd
from rowwise.spec import Pooling, RowType, Table

DIMS = (4, 12, 64, 100)  # one vector, vectors and a rest, a whole strip, a strip and a rest
CHECKS_SHARE = 0.5  # of the time; the other half goes to measuring
LEAST_TURNS = 8  # of measuring
STEPS = 2  # updates in a row, so that the second meets optimizer state


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One property, and how it failed; empty if it holds."""

    name: str
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeed:
    """Rows a second, the best of many repeats."""

    lookup_rows_s: float
    gather_limit_rows_s: float  # reading the same rows from memory and doing nothing with them
    update_rows_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """The checks, rounds and speeds of a self-test."""

    checks: tuple[Check, ...]
    rounds: int  # of all checks, each with other numbers
    speed: MeasuredSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """Tables and a batch, written down for the operators."""

    arena: Arena
    group: TableGroup
    bags: FeatureBags

    @classmethod
    def make(cls, tables: Sequence[Table], batch: int, most: int, seed: int) -> "KernelCase":
        """Bags of 0 to `most` ids for each feature; the same seed gives the same case again."""
        generator = torch.Generator().manual_seed(seed)
        arena = Arena.allocate(tables, torch.device("cpu"))
        arena.fill(seed)
        group = make_group(arena.pieces, arena.places)
        features = range(len(group.feature_names))
        lengths = [torch.randint(most + 1, (batch,), generator=generator) for _ in features]
        values = [
            torch.randint(group.table_of(index).rows, (int(lengths[index].sum()),), generator=generator)
            for index in features
        ]
        weights_N = torch.rand(sum(len(v) for v in values), generator=generator)
        offsets = torch.ops.rowwise.offsets(torch.cat(lengths))
        bags = FeatureBags(group.features_FC, torch.cat(values), offsets, weights_N, batch)
        return cls(arena=arena, group=group, bags=bags)

    def step(self) -> UpdateMemory:
        return UpdateMemory(self.arena.rows, self.arena.state, self.group.tables_TC, *next_step(self.arena, self.group))

    def pool(self) -> Tensor:
        """Look the batch up with the kernel."""
        return torch.ops.rowwise.pool(self.arena.rows, *self.bags, self.group.columns)

    def update(self, grad_BS: Tensor) -> None:
        """Update the arena in place with the kernel."""
        torch.ops.rowwise.update(*self.step(), *self.bags[:4], grad_BS, self.bags.batch, False)

    def gradients(self) -> list[Tensor]:
        """Gradients for a few updates in a row."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(self.bags.batch, self.group.columns, generator=generator) for _ in range(STEPS)]


def run(isa_sets: Sequence[str], seconds: float, tell: Callable[[float], None]) -> SelfTestResult:
    """Check for half of the time, at least once, then measure; `tell` hears the seconds gone by."""
    begin = time.perf_counter()
    failures: dict[str, str] = {}
    # Every round is of another seed: ten seconds see more shapes than one, and a failure keeps its first message.
    for rounds in itertools.count(1):
        for check in checks(isa_sets, seed=rounds):
            failures[check.name] = failures.get(check.name) or check.failure
            tell(time.perf_counter() - begin)
        if time.perf_counter() - begin > seconds * CHECKS_SHARE:
            break
    speed = measure(lambda: time.perf_counter() - begin < seconds, lambda: tell(time.perf_counter() - begin))
    found = tuple(Check(name=name, failure=failure) for name, failure in failures.items())
    return SelfTestResult(checks=found, rounds=rounds, speed=speed)


def checks(isa_sets: Sequence[str], seed: int) -> Iterator[Check]:
    """Every check once, with the numbers of a seed."""
    # Each set is a copy of the kernels of its own, so a fault of the compiler may be in one and not in the others.
    for name in isa_sets:
        with limited_to(name):
            yield _check(f"lookup == reference, {name}", lambda: lookup_matches(seed))
            for optimizer in map(_example, OPTIMIZERS.values()):
                title = f"update == reference, {name}, {type(optimizer).__name__}"
                yield _check(title, lambda optimizer=optimizer: update_matches(optimizer, seed))
    yield _check("the same bits on 1 thread and on all", lambda: threads_agree(seed))
    yield _check("an id out of range is refused", refuses_id)


def lookup_matches(seed: int) -> str:
    """Pooled rows and rows of sequences, for several widths."""
    for shape in _shapes(seed):
        case = KernelCase.make([_table(shape, Sgd())], batch=300, most=12, seed=seed)
        rows, bags = case.arena.rows, case.bags
        difference = compare(case.pool(), reference.pool(rows, bags, case.group.columns))
        gathered = torch.ops.rowwise.gather(rows, *bags[:3], bags.batch)
        difference = difference or compare(gathered, reference.gather(rows, bags))
        if difference:
            return f"{shape}: {difference}"
    return ""


def update_matches(optimizer: RowOptimizer, seed: int) -> str:
    """Rows and optimizer state after a few updates, for several widths."""
    for shape in _shapes(seed):
        kernel, wanted = (KernelCase.make([_table(shape, optimizer)], batch=300, most=12, seed=seed) for _ in range(2))
        for grad_BS in kernel.gradients():
            kernel.update(grad_BS)
            reference.update(wanted.step(), wanted.bags, grad_BS, False)
        difference = compare(kernel.arena.weights(0), wanted.arena.weights(0))
        difference = difference or compare(kernel.arena.state, wanted.arena.state)
        if difference:
            return f"{shape}: {difference}"
    return ""


def threads_agree(seed: int) -> str:
    """A batch large enough that threads share one table."""
    table = Table(name="t", rows=50_000, dim=8, optimizer=RowWiseAdagrad(lr=0.1))
    found: list[Tensor] = []
    # At least two, also on one core: order, not speed, is in question.
    for count in (1, max(2, torch.get_num_threads())):
        case = KernelCase.make([table], batch=3000, most=40, seed=seed)
        with torch_threads(count):
            for grad_BS in case.gradients():
                case.update(grad_BS)
            state = case.arena.state.view(torch.uint8)
            found.append(torch.cat([case.arena.rows, state, case.pool().flatten().view(torch.uint8)]))
    return compare(found[0], found[1])


def refuses_id() -> str:
    """An id past the end of its table must raise by name, not read what lies behind."""
    module = Embeddings([Table(name="ten rows", rows=10, dim=4)])
    try:
        module(Jagged.from_lists({"ten rows": [[3], [10]]}))
    except IdError as error:
        return "" if "ten rows" in str(error) else f"the error does not name the table: {error}"
    return "id 10 of a table of 10 rows was accepted"


def measure(go_on: Callable[[], bool], tell: Callable[[], None]) -> MeasuredSpeed:
    """Lookup, the memory's limit and update in turns, so that all three meet the same machine; the best of each."""
    tables = [Table(name=f"t{i}", rows=1 << 18, dim=64) for i in range(4)]  # 268 MB: far more than caches hold
    case = KernelCase.make(tables, batch=4096, most=20, seed=0)
    bags, grad_BS = case.bags, case.gradients()[0]
    work: tuple[Callable[[], object], ...] = (
        case.pool,
        lambda: torch.ops.rowwise.touch(case.arena.rows, *bags[:3], bags.batch),
        lambda: case.update(grad_BS),
    )
    # The best, not the mean: whatever else the machine does can only make a turn slower.
    best = [_seconds(one) for one in work]
    turns = 1  # the first pays for fresh memory, so a few more are needed however short the time
    while turns < LEAST_TURNS or go_on():
        turns += 1
        best = [min(old, _seconds(one)) for old, one in zip(best, work, strict=True)]
        tell()
    lookup, limit, update = (len(bags.values) / seconds for seconds in best)
    return MeasuredSpeed(lookup_rows_s=lookup, gather_limit_rows_s=limit, update_rows_s=update)


def compare(got: Tensor, want: Tensor) -> str:
    """Empty when every number is the same."""
    # Exactly equal, not close: the kernels promise the reference's bits.
    different = torch.nonzero(got.flatten() != want.flatten())
    if not len(different):
        return ""
    at = int(different[0])
    values = f"got {float(got.flatten()[at])!r}, want {float(want.flatten()[at])!r}"
    return f"{len(different)} of {want.numel()} numbers differ, the first at {at}: {values}"


@contextmanager
def limited_to(isa: str) -> Iterator[None]:
    """Run kernels of one instruction set; the former choice comes back afterwards."""
    before = str(torch.ops.rowwise.isa())
    torch.ops.rowwise.limit_isa(isa)
    try:
        yield
    finally:
        torch.ops.rowwise.limit_isa(before)


def _check(name: str, test: Callable[[], str]) -> Check:
    """An operator that raises has failed its check; the others still run."""
    try:
        return Check(name=name, failure=test())
    except (RowwiseError, RuntimeError) as error:
        return Check(name=name, failure=f"{type(error).__name__}: {error}")


class KernelShape(NamedTuple):
    """A dim, pooling and row type for which kernels take a path of their own."""

    dim: int
    pooling: Pooling
    row_type: RowType

    def __str__(self) -> str:
        return f"dim {self.dim}, {self.pooling}, {self.row_type}"


def _shapes(seed: int) -> Iterator[KernelShape]:
    """Each width with every row type, and with another pooling every round."""
    poolings = (Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED)
    for index, (dim, row_type) in enumerate(itertools.product(DIMS, RowType)):
        yield KernelShape(dim, poolings[(index + seed) % len(poolings)], row_type)


def _example(kind: type[RowOptimizer]) -> RowOptimizer:
    """With a rate that shows, and what it has that makes weights smaller."""
    numbers: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "l1": 0.01}
    return kind(**{field: value for field, value in numbers.items() if field in kind.__struct_fields__})


def _table(shape: KernelShape, optimizer: RowOptimizer) -> Table:
    dim, pooling, row_type = shape
    return Table(
        name="t", rows=500, dim=dim, features=("a", "b"), pooling=pooling, optimizer=optimizer, row_type=row_type
    )


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
