"""Which tables of a version have all rows in memory, and which a cache: a pure choice by bytes.

Tables are given equal shares of the memory. A table that needs less than its share is in memory, and what it leaves is
shared by the others. Tables that need more have a cache together, one for each width of rows, in which the rows that
are asked for most often are, whatever their table.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_bytes
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.serve.shared_rows import room_of
from rowwise.tables.store.shared_cache import CacheShape

PAGE_bytes = 4096


class StoredTable(NamedTuple):
    """A table of a version."""

    name: str  # of its tensor
    rows: int
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


class CachedTables(NamedTuple):
    """Tables whose rows have one width, and their cache. A row's key is its number among the rows of all of them."""

    tables: tuple[StoredTable, ...]
    shape: CacheShape
    begin: int  # of the cache in the file of all caches

    @property
    def first_keys(self) -> Mapping[str, int]:
        """The key of row 0 of each table. Newer rows are behind its own ones."""
        firsts = accumulate((table.rows + room_of(table.rows) for table in self.tables), initial=0)
        return dict(zip((table.name for table in self.tables), firsts, strict=False))


class RowMemory(NamedTuple):
    """How the rows of a version are in memory."""

    tables: tuple[StoredTable, ...]
    caches: tuple[CachedTables, ...] = ()

    @property
    def cached(self) -> frozenset[str]:
        """Tables that are cached, by tensor."""
        return frozenset(table.name for one in self.caches for table in one.tables)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the file of all caches."""
        return max((one.begin + one.shape.size_bytes for one in self.caches), default=0)

    @property
    def resident_bytes(self) -> int:
        return sum(table.size_bytes for table in self.tables if table.name not in self.cached)


def tables_of(version: CheckpointManifest) -> tuple[StoredTable, ...]:
    """The tables of a version."""
    return tuple(
        StoredTable(name, entry.rows, entry.row_bytes)
        for name, entry in version.tensors.items()
        if entry.row_type is not None
    )


def divide_memory(tables: Sequence[StoredTable], memory_bytes: int | None) -> RowMemory:
    """Divide memory between tables; None: there is enough for all."""
    if memory_bytes is None:
        return RowMemory(tuple(tables))
    found = _divide(tables, memory_bytes)
    if found is not None:
        return found
    low, high = memory_bytes, sum(table.size_bytes for table in tables)
    while high - low > max(PAGE_bytes, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if _divide(tables, middle) is None else (low, middle)
    raise SpecError(
        f"--memory {format_bytes(memory_bytes)} is too small for a cache of the version's rows",
        f"at least {format_bytes(high)}",
    )


def _divide(tables: Sequence[StoredTable], memory_bytes: int) -> RowMemory | None:
    left, cached = memory_bytes, sorted(tables, key=lambda table: table.size_bytes)
    while cached and cached[0].size_bytes <= left // len(cached):
        left -= cached.pop(0).size_bytes
    total = sum(table.size_bytes for table in cached)
    caches: list[CachedTables] = []
    begin = 0
    for row_bytes in sorted({table.row_bytes for table in cached}):
        chosen = tuple(table for table in tables if table in cached and table.row_bytes == row_bytes)
        keys = sum(table.rows + room_of(table.rows) for table in chosen)
        part = left * sum(table.size_bytes for table in chosen) // total // PAGE_bytes * PAGE_bytes
        shape = CacheShape.within(part, row_bytes, keys)
        if not shape.slots:
            return None
        caches.append(CachedTables(chosen, shape, begin))
        begin += part
    return RowMemory(tuple(tables), tuple(caches))
