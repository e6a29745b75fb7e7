"""`SharedCache`: rows of one width in memory that processes share, looked up batch by batch.

A row has a key: its number among the rows of all tables. Sets, ways and the choice of a victim are those of
[Note: Row cache] in `policy.py`, with three differences. A row that the cache lacks enters after its batch, so no way
is pinned. Rows that a batch needs are copied out, so their slots may be reused at any time. Counts are halved once in
64 accesses of a slot, so rows that are no longer accessed are evicted.

Processes never wait for each other; see [Note: Shared sets] in `_cpp/shared_cache.cpp`.
"""

import ctypes
import os
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import StoreError
from rowwise.base.library import CLibrary, Int64s, Uint8s, address_of
from rowwise.tables.store.native import LIBRARY
from rowwise.tables.store.policy import DEFAULT_POLICY, WAYS, Ints, Policy

Bytes = NDArray[np.uint8]
TAGS, MAX_TAGS = 16, 1 << 20  # byte offset of the counter of tags in a cache's memory


class _Shape(Structure):
    _fields_ = [(name, c_int64) for name in ("slots", "row_bytes", "keys", "lfu")]


library = CLibrary(
    LIBRARY,
    {
        "shared_cache_bytes": (c_int64, [_Shape]),
        "shared_cache_open": (c_void_p, [Uint8s, _Shape]),
        "shared_cache_close": (None, [c_void_p]),
        "shared_cache_take": (
            c_int64,
            [c_void_p, c_int64, c_int64, Int64s, Int64s, c_int64, Int64s, POINTER(c_int64)],
        ),
        "shared_cache_missing": (c_void_p, [c_void_p]),
        "shared_cache_put": (None, [c_void_p, c_int64, c_int64, Int64s, Uint8s]),
        "shared_cache_warm": (None, [c_void_p, c_int64, c_int64, Int64s, Uint8s, Int64s]),
        "read_rows": (c_int32, [c_int32, c_int64, Int64s, c_int64, Uint8s]),
    },
)


class CacheShape(NamedTuple):
    """The size of a cache."""

    slots: int  # a multiple of 32
    row_bytes: int
    keys: int  # bound on keys; larger ones share the counts of others
    policy: Policy = DEFAULT_POLICY

    @property
    def size_bytes(self) -> int:
        """Memory of the cache."""
        return int(library.shared_cache_bytes(self._native))

    @property
    def _native(self) -> _Shape:
        return _Shape(self.slots, self.row_bytes, self.keys, self.policy == "lfu")

    @classmethod
    def within(cls, size_bytes: int, row_bytes: int, keys: int, policy: Policy = DEFAULT_POLICY) -> "CacheShape":
        """The shape with the most slots that fit; 0 slots if not even one set fits."""
        fixed = cls(0, row_bytes, keys, policy).size_bytes
        set_bytes = cls(WAYS << 10, row_bytes, keys, policy).size_bytes - fixed >> 10
        shape = cls(max(0, size_bytes - fixed) // set_bytes * WAYS, row_bytes, keys, policy)
        while shape.slots and shape.size_bytes > size_bytes:  # its parts are rounded up
            shape = shape._replace(slots=shape.slots - WAYS)
        return shape


class CachedFeatures(NamedTuple):
    """The features of a batch whose tables are cached, as the library takes them."""

    array: Ints  # [F, 4]: the feature's index in the batch, key of row 0, number of the table, address of its memory


class MissingRows(NamedTuple):
    """Rows that a batch needs and the cache lacks."""

    rows_M4: Ints  # in the library's layout: key, address, number of the table, place in its memory
    distinct: int  # number of distinct rows of the batch

    @property
    def keys_M(self) -> Ints:
        return np.ascontiguousarray(self.rows_M4[:, 0])

    def places_of(self, table: int) -> Ints:
        """The places of rows of a table."""
        return self.rows_M4[self.rows_M4[:, 2] == table, 3]


@final
class SharedCache:
    """One process's view of a cache.

    Args:
        memory: of `shape.size_bytes`, mapped by all processes, zeroed before the first one uses it.
        shape: of the cache.
        tag: rows of another tag are other rows; see `next_tag`.
    """

    def __init__(self, memory: Bytes, shape: CacheShape, tag: int = 0) -> None:
        assert memory.nbytes >= shape.size_bytes
        self.shape, self.tag, self._memory = shape, tag, memory
        self._library = library  # for `__del__`, when modules may be gone
        self._cache = library.shared_cache_open(memory, shape._native)
        if not self._cache:
            raise StoreError("no memory to open a cache of rows")

    def __del__(self) -> None:
        if getattr(self, "_cache", None):
            self._library.shared_cache_close(self._cache)

    def take(self, features: CachedFeatures, offsets: Ints, batch: int, rows_N: Ints) -> MissingRows:
        """Replace the rows of a batch by places in their table's memory, and copy cached rows to their places.

        Rows and offsets are not checked. Places of a table begin with 0, in the order of the batch.
        """
        distinct = c_int64()
        missing = library.shared_cache_take(
            self._cache, self.tag, len(features.array), features.array, offsets, batch, rows_N, distinct
        )
        if missing < 0:
            raise StoreError(f"no memory for the map of a batch of {len(rows_N)} ids")
        if not missing:
            return MissingRows(np.empty((0, 4), np.int64), distinct.value)
        address = library.shared_cache_missing(self._cache)
        rows_M4 = np.ctypeslib.as_array(ctypes.cast(address, POINTER(c_int64)), (missing, 4)).copy()
        return MissingRows(rows_M4, distinct.value)

    def put(self, missing: MissingRows, rows_MB: Bytes) -> None:
        """Copy rows into the memory of their tables, and into the cache."""
        library.shared_cache_put(self._cache, self.tag, len(missing.rows_M4), missing.rows_M4, rows_MB)

    def put_defaults(self, missing: MissingRows, rows_TB: Bytes) -> None:
        """Copy a table's default row to each of these places; the cache itself does not get them."""
        first, row_bytes = address_of(rows_TB), self.shape.row_bytes
        for _, address, table, _ in missing.rows_M4.tolist():
            ctypes.memmove(address, first + table * row_bytes, row_bytes)

    def warm(self, keys_M: Ints, rows_MB: Bytes, counts_M: Ints) -> None:
        """Fill the cache with rows and their counts of accesses; the last ones are evicted last."""
        keys_M, counts_M = (np.ascontiguousarray(x, np.int64) for x in (keys_M, counts_M))
        library.shared_cache_warm(self._cache, self.tag, len(keys_M), keys_M, rows_MB, counts_M)


def next_tag(memory: Bytes) -> int:
    """A tag that no cached row has: each call advances a counter in the memory. Not safe between threads."""
    count = memory[TAGS : TAGS + 8].view(np.int64)
    count[0] = (count[0] + 1) % MAX_TAGS
    return int(count[0])


def read_rows(file: int, begins_M: Ints, rows_MB: Bytes) -> None:
    """Read rows from places in a file; raises OSError. Reads that miss the page cache run in parallel."""
    begins_M = np.ascontiguousarray(begins_M, np.int64)
    count, row_bytes = rows_MB.shape
    error = library.read_rows(file, count, begins_M, row_bytes, rows_MB)
    if error:
        raise OSError(error, os.strerror(error))
