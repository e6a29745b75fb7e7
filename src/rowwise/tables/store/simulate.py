"""Runs caches over a trace of accesses: those of [Note: Row cache], and two others to compare them with.

`full_lru` is one set of all slots with LRU. `belady` evicts the row whose next access is farthest away: no cache that
every missed row enters has more hits. Both ignore batches, so they pin nothing.
"""

from collections.abc import Sequence
from ctypes import Structure, c_int64
from typing import Literal, NamedTuple, final

import numpy as np

from rowwise.base.errors import SpecError
from rowwise.base.library import CLibrary, Int32s, Int64s, NativeStruct
from rowwise.tables.store.policy import Ints, Policy, set_of, sets_of

CacheKind = Policy | Literal["full_lru", "belady"]


class _Trace(NativeStruct):
    _fields_ = (
        ("row", Int32s), ("accesses", c_int64), ("rows", c_int64), ("batch_end", Int64s), ("batches", c_int64),
        ("skip", c_int64),
    )  # fmt: skip


class _Counts(Structure):
    _fields_ = [(name, c_int64) for name in ("hits", "misses", "evictions", "overflows")]


library = CLibrary(
    "librowwise_simulate.so",
    {
        "rw_simulate_sets": (c_int64, [_Trace, Int64s, c_int64, c_int64, _Counts]),
        "rw_simulate_lru": (c_int64, [_Trace, c_int64, _Counts]),
        "rw_simulate_belady": (c_int64, [_Trace, c_int64, _Counts]),
    },
)


class SimulatedCounts(NamedTuple):
    """Outcomes of the accesses of a trace."""

    hits: int
    misses: int
    evictions: int
    overflows: int  # misses whose row found all ways of its set pinned

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)


@final
class Trace:
    """Accesses to the rows of one table, batch by batch.

    Args:
        batches: the rows of each batch, in order.
        skip: number of leading accesses that are not counted.
    """

    def __init__(self, batches: Sequence[Ints], skip: int = 0) -> None:
        rows_N = np.concatenate([*batches, np.zeros(0, np.int64)]).astype(np.int64)
        if len(rows_N) and rows_N.min() < 0:
            raise SpecError(f"a trace with row {rows_N.min()}", "rows from 0 on")
        self.ids_R, number_N = np.unique(rows_N, return_inverse=True)
        self.number_N = number_N.astype(np.int32)
        self.end_B = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
        self.skip = skip

    @classmethod
    def of(cls, rows_N: Ints, batch: int = 1, skip: int = 0) -> "Trace":
        """A trace in batches of `batch` accesses."""
        return cls([rows_N[begin : begin + batch] for begin in range(0, len(rows_N), batch)], skip)


def simulate(trace: Trace, cache_rows: int, kind: CacheKind) -> SimulatedCounts:
    """Hits, misses and evictions over a trace, of an initially empty cache with at least `cache_rows` slots."""
    if cache_rows < 1:
        raise SpecError(f"a cache of {cache_rows} rows", "at least 1")
    numbers = _Trace(
        row=trace.number_N, accesses=len(trace.number_N), rows=len(trace.ids_R),
        batch_end=trace.end_B, batches=len(trace.end_B), skip=trace.skip,
    )  # fmt: skip
    counts = _Counts()
    match kind:
        case "lru" | "lfu":
            sets = sets_of(cache_rows)
            done = library.rw_simulate_sets(numbers, set_of(trace.ids_R, sets), sets, kind == "lfu", counts)
        case "full_lru":
            done = library.rw_simulate_lru(numbers, cache_rows, counts)
        case "belady":
            done = library.rw_simulate_belady(numbers, cache_rows, counts)
    if not done:
        raise MemoryError(f"no memory for a cache of {cache_rows} rows")
    return SimulatedCounts(counts.hits, counts.misses, counts.evictions, counts.overflows)
