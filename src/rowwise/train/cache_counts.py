"""Counts what caches of rows do in training: the lines of caches.csv and, of tables on disk, cells of steps.csv.

Cached are rows of tables on disk, and on a GPU rows of tables in host memory.

Validation and checkpoints read rows, too, which are left out. Each rank counts its own caches, and rank 0 adds them up
for each line. Counts are not part of a checkpoint: a run that is resumed begins with empty caches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import msgspec
from msgspec import structs

from rowwise.shard.embeddings import AnyEmbeddings
from rowwise.spec import Value
from rowwise.store.row_store import RowStore
from rowwise.train.run_folder import Cell

COUNTERS = ("hits", "misses", "new_rows", "evictions", "writes")  # of each table
DISK_COUNTERS = ("reads", "read_bytes", "written_bytes", "read_wait_s", "write_wait_s", "busy_s")


class CacheSums(Value, frozen=True, kw_only=True):
    """Counts of a table's caches, and the memory that these take."""

    hits: int = 0
    misses: int = 0
    new_rows: int = 0
    evictions: int = 0
    writes: int = 0
    memory_bytes: int = 0

    def plus(self, other: "CacheSums") -> "CacheSums":
        return CacheSums(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def since(self, before: "CacheSums") -> "CacheSums":
        """The counts that are not in `before`; memory is not a count."""
        counts = {name: getattr(self, name) - getattr(before, name) for name in COUNTERS}
        return CacheSums(**counts, memory_bytes=self.memory_bytes)


class DiskSums(Value, frozen=True, kw_only=True):
    """Counts of all tables on disk, reads and writes of their files, and bytes of these; seconds add up over ranks."""

    tables: dict[str, CacheSums] = msgspec.field(default_factory=dict)
    reads: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    busy_s: float = 0.0
    ranks: int = 0  # with tables on disk
    disk_bytes: int = 0

    def plus(self, other: "DiskSums") -> "DiskSums":
        tables = {**self.tables}
        for name, sums in other.tables.items():
            tables[name] = tables.get(name, CacheSums()).plus(sums)
        sums = {name: getattr(self, name) + getattr(other, name) for name in (*DISK_COUNTERS, "ranks", "disk_bytes")}
        return DiskSums(tables=tables, **sums)

    def since(self, before: "DiskSums") -> "DiskSums":
        tables = {name: sums.since(before.tables.get(name, CacheSums())) for name, sums in self.tables.items()}
        sums = {name: getattr(self, name) - getattr(before, name) for name in DISK_COUNTERS}
        return DiskSums(tables=tables, ranks=self.ranks, disk_bytes=self.disk_bytes, **sums)

    @property
    def hit_rate(self) -> float:
        hits, misses = (sum(getattr(one, name) for one in self.tables.values()) for name in ("hits", "misses"))
        return hits / max(1, hits + misses)


NOTHING = DiskSums()


@final
class CacheCounts:
    """The counts of this rank since the last `take`."""

    def __init__(self, tables: Sequence[AnyEmbeddings]) -> None:
        stores = [arena.store for module in tables for arena in module.arenas]
        self._stores = [store for store in stores if store is not None]
        self._before = self._read()
        self._paused_at: DiskSums | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is counted inside."""
        if not self._stores:
            yield
            return
        paused_at = self._paused_at = self._read()
        try:
            yield
        finally:
            inside = self._read().since(paused_at)
            self._paused_at, self._before = None, self._before.plus(inside)

    def take(self) -> DiskSums:
        """The counts, which then begin again."""
        if not self._stores:
            return NOTHING
        now = self._paused_at or self._read()
        before, self._before = self._before, now
        return now.since(before)

    def _read(self) -> DiskSums:
        return structs.replace(sum_up(list(map(_sums_of, self._stores))), ranks=min(1, len(self._stores)))


def sum_up(sums: Sequence[DiskSums]) -> DiskSums:
    total = NOTHING
    for one in sums:
        total = total.plus(one)
    return total


def cache_rows_of_csv(step: int, sums: DiskSums) -> list[dict[str, Cell]]:
    """The lines of caches.csv."""
    return [
        {"step": step, "table": name, **{key: getattr(one, key) for key in one.__struct_fields__}}
        for name, one in sums.tables.items()
    ]


def disk_cells(sums: DiskSums) -> dict[str, Cell]:
    """The cells of steps.csv; empty without tables on disk."""
    if not sums.disk_bytes:
        return {}
    seconds = {"disk_wait_s": sums.read_wait_s + sums.write_wait_s, "disk_busy_s": sums.busy_s}
    counts = {name: getattr(sums, name) for name in ("reads", "read_bytes", "written_bytes", "disk_bytes")}
    return {**counts, **{name: value / sums.ranks for name, value in seconds.items()}}


def _sums_of(store: RowStore) -> DiskSums:
    use = store.use()
    sums = {name: getattr(use.disk, name) for name in DISK_COUNTERS}
    total = DiskSums(disk_bytes=use.disk_bytes, **sums)
    for name, counters, memory_bytes in use.tables:
        counts = {key: getattr(counters, key) for key in COUNTERS}
        total = total.plus(DiskSums(tables={name: CacheSums(**counts, memory_bytes=memory_bytes)}))
    return total
