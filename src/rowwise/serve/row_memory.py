"""Decides which tables of a version are in memory, and which in a cache; pure, by bytes.

Memory is divided by max-min fairness: each table has an equal share, and a table below its share is in memory and
leaves the rest to the others. The other tables share a cache per row width, for the most accessed rows of all of them.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_bytes
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.serve.shared_rows import spare_rows
from rowwise.tables.store.shared_cache import CacheShape

PAGE_bytes = 4096


class StoredTable(NamedTuple):
    """A table of a version."""

    name: str  # of the tensor
    rows: int
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


class CachedTables(NamedTuple):
    """Tables of one row width, with their cache. The key of a row is its number among the rows of all of them."""

    tables: tuple[StoredTable, ...]
    shape: CacheShape
    begin: int  # offset of the cache in the file of all caches

    @property
    def first_keys(self) -> Mapping[str, int]:
        """The key of row 0 of each table; spare keys for newer rows follow its rows."""
        firsts = accumulate((table.rows + spare_rows(table.rows) for table in self.tables), initial=0)
        return dict(zip((table.name for table in self.tables), firsts, strict=False))


class RowMemory(NamedTuple):
    """Placement of the rows of a version in memory and caches."""

    tables: tuple[StoredTable, ...]
    caches: tuple[CachedTables, ...] = ()

    @property
    def cached(self) -> frozenset[str]:
        """Tensor names of cached tables."""
        return frozenset(table.name for group in self.caches for table in group.tables)

    @property
    def cache_bytes(self) -> int:
        """Size of the file of all caches."""
        return max((group.begin + group.shape.size_bytes for group in self.caches), default=0)

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
    """Divide memory between tables; all are in memory if `memory_bytes` is None."""
    if memory_bytes is None:
        return RowMemory(tuple(tables))
    divided = _divide(tables, memory_bytes)
    if divided is not None:
        return divided
    # Bisect the smallest sufficient memory, for the error message.
    low, high = memory_bytes, sum(table.size_bytes for table in tables)
    while high - low > max(PAGE_bytes, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if _divide(tables, middle) is None else (low, middle)
    raise SpecError(
        f"--memory {format_bytes(memory_bytes)} is too small for a cache of the version's rows",
        f"at least {format_bytes(high)}",
    )


def _divide(tables: Sequence[StoredTable], memory_bytes: int) -> RowMemory | None:
    left_bytes, cached = memory_bytes, sorted(tables, key=lambda table: table.size_bytes)
    while cached and cached[0].size_bytes <= left_bytes // len(cached):
        left_bytes -= cached.pop(0).size_bytes
    total = sum(table.size_bytes for table in cached)
    caches: list[CachedTables] = []
    begin = 0
    for row_bytes in sorted({table.row_bytes for table in cached}):
        chosen = tuple(table for table in tables if table in cached and table.row_bytes == row_bytes)
        keys = sum(table.rows + spare_rows(table.rows) for table in chosen)
        cache_bytes = left_bytes * sum(table.size_bytes for table in chosen) // total // PAGE_bytes * PAGE_bytes
        shape = CacheShape.within(cache_bytes, row_bytes, keys)
        if not shape.slots:
            return None
        caches.append(CachedTables(chosen, shape, begin))
        begin += cache_bytes
    return RowMemory(tuple(tables), tuple(caches))
