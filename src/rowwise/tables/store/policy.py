"""The row cache as pure functions, one access after another: the reference of the native cache.

[Note: Row cache] A cache of `cache_rows` rows is a number of *sets* of 32 *ways*; a row may be in any way of one set,
which a hash of its number chooses. The accesses of a batch come in order, and each advances a clock of 32 bits.

- A hit, and a row that enters, stamp their way with the clock.
- LFU counts the accesses of every row, cached or not, up to 65,535; the access itself is counted first.
- Each missed row enters. It takes the first empty way of its set, else the place of a *victim*.
- Rows accessed in this batch are pinned: they are not evicted until the batch ends.
- The victim is the unpinned way with the oldest stamp (LRU), or with the row of the lowest count and of those the
  oldest stamp (LFU); of equals, the first way.
- Where all ways are pinned the row goes to the *overflow*, whose slots follow those of the sets. It is a miss, later
  accesses of it in the batch are hits, and it is evicted after the batch.
"""

from typing import Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Policy = Literal["lru", "lfu"]
POLICIES: tuple[Policy, ...] = ("lru", "lfu")
DEFAULT_POLICY: Policy = "lfu"
WAYS = 32
MAX_COUNT = (1 << 16) - 1
CLOCK = 1 << 32
EMPTY = -1
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def sets_of(cache_rows: int) -> int:
    """Sets of a cache with at least `cache_rows` slots."""
    return -(-cache_rows // WAYS)


def mix64(word_N: Words) -> Words:
    """The finalizer of MurmurHash3 for 64 bits."""
    h = word_N ^ (word_N >> np.uint64(33))
    h = h * np.uint64(0xFF51AFD7ED558CCD)
    h = h ^ (h >> np.uint64(33))
    h = h * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


def set_of(rows_N: Ints, sets: int) -> Ints:
    """The set of each row: the high half of the 128-bit product of its hash and the number of sets."""
    hash_N, count = mix64(rows_N.astype(np.uint64)), np.uint64(sets)
    low = (hash_N & LOW) * count  # sets are fewer than 2**32
    return (((hash_N >> HALF) * count + (low >> HALF)) >> HALF).astype(np.int64)


@final
class CacheState(NamedTuple):
    """Rows and stamps of all ways, the counts of a table's rows, and the clock."""

    rows_SW: Ints  # EMPTY: no row
    stamp_SW: Ints
    count_R: Ints
    clock: int = 0

    @classmethod
    def empty(cls, table_rows: int, cache_rows: int) -> "CacheState":
        shape = sets_of(cache_rows), WAYS
        return cls(np.full(shape, EMPTY), np.zeros(shape, np.int64), np.zeros(table_rows, np.int64))


class BatchAccess(NamedTuple):
    """For each access of a batch: whether it was a hit, the row's slot, and the row that left it."""

    hit_N: NDArray[np.bool_]
    slot_N: Ints  # set * 32 + way; slots of the overflow follow all of these
    evicted_N: Ints  # EMPTY: none


def choose_way(policy: Policy, rows_W: Ints, stamp_W: Ints, count_W: Ints, pinned_W: NDArray[np.bool_]) -> int | None:
    """The way of a set that a missed row takes; None if all are pinned."""
    empty_W = np.flatnonzero(rows_W == EMPTY)
    if len(empty_W):
        return int(empty_W[0])
    free_W = np.flatnonzero(~pinned_W)
    first = count_W[free_W] if policy == "lfu" else np.zeros(len(free_W), np.int64)
    order = np.lexsort((free_W, stamp_W[free_W], first))
    return int(free_W[order[0]]) if len(order) else None


def access_batch(state: CacheState, rows_N: Ints, policy: Policy) -> tuple[CacheState, BatchAccess]:
    """The cache after a batch of accesses, and the outcome of each. See [Note: Row cache]."""
    rows_SW, stamp_SW, count_R, clock = state.rows_SW.copy(), state.stamp_SW.copy(), state.count_R.copy(), state.clock
    overflow: dict[int, int] = {}
    pinned: set[int] = set()
    access = BatchAccess(np.zeros(len(rows_N), bool), np.zeros(len(rows_N), np.int64), np.full(len(rows_N), EMPTY))
    for n, (row, index) in enumerate(zip(rows_N.tolist(), set_of(rows_N, len(rows_SW)).tolist(), strict=True)):
        clock = (clock + 1) % CLOCK
        count_R[row] = min(count_R[row] + 1, MAX_COUNT)
        pinned.add(row)
        ways = np.flatnonzero(rows_SW[index] == row)
        access.hit_N[n] = len(ways) or row in overflow
        if len(ways):
            way: int | None = int(ways[0])
        elif row in overflow:
            way = None
        else:
            pinned_W = np.array([cached in pinned for cached in rows_SW[index].tolist()])
            way = choose_way(policy, rows_SW[index], stamp_SW[index], count_R[rows_SW[index]], pinned_W)
        if way is None:
            access.slot_N[n] = rows_SW.size + overflow.setdefault(row, len(overflow))
            continue
        if rows_SW[index, way] != row:
            access.evicted_N[n] = rows_SW[index, way]
        rows_SW[index, way], stamp_SW[index, way] = row, clock
        access.slot_N[n] = index * WAYS + way
    return CacheState(rows_SW, stamp_SW, count_R, clock), access
