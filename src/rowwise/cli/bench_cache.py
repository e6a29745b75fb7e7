"""`rowwise bench cache`: hit rates of the row cache on a trace of accesses, by capacity and policy.

Compared with the closed form of the planner, with one fully associative set, and with Belady's optimum, which no cache
beats. The closed form assumes stationary accesses: rows that appear late, or drift, hit less than it predicts.
"""

import math
import re

import numpy as np
from rich.table import Table as Grid

from rowwise.base.errors import DataError, SpecError
from rowwise.cli.terminal import make_terminal, print_json, say
from rowwise.tables.spec import Value
from rowwise.tables.store.hit_rate import cells_of_counts, hit_rate
from rowwise.tables.store.policy import POLICIES, WAYS, Ints, Policy, sets_of
from rowwise.tables.store.simulate import CacheKind, SimulatedCounts, Trace, simulate

ZIPF = "zipf:"
LAW = re.compile(r"zipf:([0-9]+\.?[0-9]*):([0-9]{1,10})(?::([0-9]{1,10}))?")
MAX_A = 20
ACCESSES_PER_ROW, MAX_ACCESSES = 10, 10_000_000  # of a Zipf trace
MAX_ROWS = 1 << 28
CAPACITIES = "1%,4%,16%,50%"
KINDS: dict[CacheKind, str] = {"full_lru": "one set, LRU", "belady": "optimum"}


class CacheResult(Value, frozen=True):
    """Counts of one kind and capacity of cache on the trace."""

    rows_cached: int
    kind: str  # policy of a 32-way cache, full_lru or belady
    hit_rate: float
    predicted: float | None  # by the closed form; None for caches without one
    hits: int
    misses: int
    evictions: int


class CacheBenchmark(Value, frozen=True):
    """Results by capacity; the first `skipped` accesses fill the caches and are not counted."""

    trace: str
    accesses: int
    rows: int  # rows of the table; for a file, its distinct ids
    skipped: int
    results: tuple[CacheResult, ...]


def bench_cache(trace: str, rows_cached: str | None, policy: str | None, *, as_json: bool) -> None:
    if policy is not None and policy not in POLICIES:
        raise SpecError(f"--policy {policy!r}", " or ".join(POLICIES))
    rows_N = read_trace(trace)
    replay = Trace.of(rows_N, skip=len(rows_N) // 2)
    table_rows = int(trace.split(":")[2]) if trace.startswith(ZIPF) else len(replay.ids_R)
    capacities = [_parse_capacity(text, table_rows) for text in (rows_cached or CAPACITIES).split(",")]
    policies = POLICIES if policy is None else tuple(name for name in POLICIES if name == policy)
    cells = cells_of_counts(np.bincount(replay.number_N))
    results = tuple(
        _result(simulate(replay, slots, kind), slots, kind, cells)
        for slots in sorted(set(capacities))
        for kind in (*policies, *KINDS)
    )
    benchmark = CacheBenchmark(trace=trace, accesses=len(rows_N), rows=table_rows, skipped=replay.skip, results=results)
    if as_json:
        print_json(benchmark)
    else:
        _show(benchmark, policies)


def _result(counts: SimulatedCounts, slots: int, kind: CacheKind, cells: tuple[np.ndarray, np.ndarray]) -> CacheResult:
    predicted = None
    if kind == "lru" or kind == "lfu":
        predicted = float(hit_rate(kind, *cells, np.array([float(slots)]))[0])
    return CacheResult(
        rows_cached=slots, kind=kind, hit_rate=counts.hit_rate, predicted=predicted, hits=counts.hits,
        misses=counts.misses, evictions=counts.evictions,
    )  # fmt: skip


def read_trace(text: str) -> Ints:
    """The rows of a trace: a .npy file, a column of a Parquet file, or draws by Zipf's law."""
    if text.startswith(ZIPF):
        return _draw_zipf(text)
    path, _, column = text.rpartition(":") if ".parquet:" in text else (text, "", "")
    rows_N = _read_parquet(path, column) if column else _read_npy(path)
    if rows_N.ndim != 1 or rows_N.dtype.kind not in "iu" or not len(rows_N):
        raise DataError(f"{text}: {rows_N.dtype} of shape {rows_N.shape}", "ids as whole numbers, in one dimension")
    if rows_N.min() < 0:
        raise DataError(f"{text}: id {rows_N.min()}", "rows from 0 on")
    return rows_N.astype(np.int64)


def _read_npy(path: str) -> np.ndarray:
    if not path.endswith(".npy"):
        raise SpecError(f"--trace {path}", "FILE.npy, FILE.parquet:COLUMN or zipf:POWER:ROWS such as zipf:1.05:100000")
    try:
        return np.load(path)
    except ValueError as error:
        raise DataError(f"{path}: not an array of numpy: {error}") from None


def _read_parquet(path: str, column: str) -> np.ndarray:
    import pyarrow as pa
    from pyarrow import parquet as pq

    try:
        names = pq.read_schema(path).names
        if column not in names:
            raise DataError(f"{path}: no column {column!r}", f"one of {', '.join(names)}")
        values = pq.read_table(path, columns=[column]).column(0).combine_chunks()
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from None
    lists = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    return (values.flatten() if lists else values).drop_null().to_numpy(zero_copy_only=False)


def _draw_zipf(text: str) -> Ints:
    """Rows drawn in proportion to rank ** -POWER, from zipf:POWER:ROWS or zipf:POWER:ROWS:ACCESSES."""
    match = LAW.fullmatch(text)
    a, rows = (float(match[1]), int(match[2])) if match else (0.0, 0)
    accesses = int(match[3]) if match and match[3] else min(ACCESSES_PER_ROW * rows, MAX_ACCESSES)
    if not (a <= MAX_A and 1 <= rows <= MAX_ROWS and 2 <= accesses <= 100 * MAX_ACCESSES):
        raise SpecError(f"--trace {text}", "zipf:POWER:ROWS or zipf:POWER:ROWS:ACCESSES, such as zipf:1.05:100000")
    share = np.arange(1, rows + 1.0) ** -a
    generator = np.random.default_rng(0)
    ranks = np.searchsorted(np.cumsum(share / share.sum()), generator.random(accesses))
    return generator.permutation(rows)[ranks.clip(max=rows - 1)]


def _parse_capacity(text: str, rows: int) -> int:
    """Capacity from a number of rows or a percentage of the table, rounded to whole sets."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) * (rows / 100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < MAX_ROWS or not (percent or value == int(value)):
        raise SpecError(f"--rows-cached {text!r}", "rows, such as 1000,16000, or shares of the rows, such as 1%,16%")
    return WAYS * sets_of(max(int(value), 1))


def _show(benchmark: CacheBenchmark, policies: tuple[Policy, ...]) -> None:
    console = make_terminal()
    measured = benchmark.accesses - benchmark.skipped
    size = f"{benchmark.accesses:,} accesses to {benchmark.rows:,} rows; the last {measured:,} are counted"
    say(console, f"{benchmark.trace}: {size}")
    grid = Grid(box=None, pad_edge=False)
    heads = [
        "rows cached",
        "share",
        *(head for policy in policies for head in (policy.upper(), "closed form")),
        *KINDS.values(),
    ]
    for head in heads:
        grid.add_column(head, justify="right")
    for slots in sorted({result.rows_cached for result in benchmark.results}):
        cells = [f"{slots:,}", f"{slots / benchmark.rows:.1%}"]
        for result in benchmark.results:
            if result.rows_cached == slots:
                cells += [f"{result.hit_rate:.3f}"] + ([] if result.predicted is None else [f"{result.predicted:.3f}"])
        grid.add_row(*cells)
    console.print(grid)
