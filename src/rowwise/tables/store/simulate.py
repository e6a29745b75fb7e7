"""Runs caches over a trace of accesses: those of [Note: Row cache], and two others to compare them with.

`full_lru` is one set of all slots with LRU. `belady` evicts the row whose next access is farthest away: no cache that
every missed row enters has more hits. Both ignore batches, so they pin nothing.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int64, c_void_p
from typing import Any, Literal, NamedTuple, final

import numpy as np

from rowwise.base.errors import SpecError
from rowwise.base.library import Signatures, bind_library
from rowwise.tables.store.policy import Ints, Policy, set_of, sets_of

LIBRARY = "librowwise_simulate.so"
CacheKind = Policy | Literal["full_lru", "belady"]


class _Trace(ctypes.Structure):
    _fields_ = [
        ("row", c_void_p), ("accesses", c_int64), ("rows", c_int64), ("batch_end", c_void_p), ("batches", c_int64),
        ("skip", c_int64),
    ]  # fmt: skip


class _Counts(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("hits", "misses", "evictions", "overflows")]


class SimulatedCounts(NamedTuple):
    """What happened to the accesses of a trace."""

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
        skip: how many accesses come before those that are counted.
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
        """A trace of batches with so many accesses each."""
        return cls([rows_N[begin : begin + batch] for begin in range(0, len(rows_N), batch)], skip)


def simulate(trace: Trace, cache_rows: int, kind: CacheKind) -> SimulatedCounts:
    """Hits, misses and evictions of an empty cache with at least so many slots, over the trace."""
    if cache_rows < 1:
        raise SpecError(f"a cache of {cache_rows} rows", "at least 1")
    numbers = _Trace(
        row=trace.number_N.ctypes.data, accesses=len(trace.number_N), rows=len(trace.ids_R),
        batch_end=trace.end_B.ctypes.data, batches=len(trace.end_B), skip=trace.skip,
    )  # fmt: skip
    counts, library = _Counts(), _library()
    match kind:
        case "lru" | "lfu":
            sets = sets_of(cache_rows)
            set_R = set_of(trace.ids_R, sets)
            done = library.rw_simulate_sets(byref(numbers), set_R.ctypes.data, sets, kind == "lfu", byref(counts))
        case "full_lru":
            done = library.rw_simulate_lru(byref(numbers), cache_rows, byref(counts))
        case "belady":
            done = library.rw_simulate_belady(byref(numbers), cache_rows, byref(counts))
    if not done:
        raise MemoryError(f"no memory for a cache of {cache_rows} rows")
    return SimulatedCounts(counts.hits, counts.misses, counts.evictions, counts.overflows)


@functools.cache
def _library() -> Any:
    trace, counts = POINTER(_Trace), POINTER(_Counts)
    signatures: Signatures = {
        "rw_simulate_sets": (c_int64, [trace, c_void_p, c_int64, c_int64, counts]),
        "rw_simulate_lru": (c_int64, [trace, c_int64, counts]),
        "rw_simulate_belady": (c_int64, [trace, c_int64, counts]),
    }
    return bind_library(LIBRARY, signatures)
