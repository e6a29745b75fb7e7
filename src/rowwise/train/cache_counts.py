"""Hits, misses and evictions of row caches in training: caches.csv and, for tables on disk, cells of steps.csv.

Cached are rows of tables on disk, and on a GPU rows of tables in host memory.

Lookups of validation and checkpoints are excluded. Each rank counts its own caches, and rank 0 adds them up for each
line. Counts are not part of a checkpoint: a resumed run begins with empty caches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from msgspec import structs

from rowwise.parallel.shard.embeddings import AnyEmbeddings
from rowwise.tables.store.row_store import StoreUse, sum_up
from rowwise.train.run_folder import Cell


@final
class CacheCounts:
    """The counts of this rank since the last `take`."""

    def __init__(self, tables: Sequence[AnyEmbeddings]) -> None:
        stores = [arena.store for module in tables for arena in module.arenas]
        self._stores = [store for store in stores if store is not None]
        self._before = self._read()
        self._paused_at: StoreUse | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the counts of the with block."""
        if not self._stores:
            yield
            return
        paused_at = self._paused_at = self._read()
        try:
            yield
        finally:
            inside = self._read().since(paused_at)
            self._paused_at, self._before = None, self._before.plus(inside)

    def take(self) -> StoreUse:
        """The counts since the last call."""
        if not self._stores:
            return StoreUse()
        now = self._paused_at or self._read()
        before, self._before = self._before, now
        return now.since(before)

    def _read(self) -> StoreUse:
        return structs.replace(sum_up(store.use() for store in self._stores), ranks=min(1, len(self._stores)))


def cache_rows_of_csv(step: int, sums: StoreUse) -> list[dict[str, Cell]]:
    """The lines of caches.csv."""
    return [
        {"step": step, "table": name, **{key: getattr(counts, key) for key in counts.__struct_fields__}}
        for name, counts in sums.tables.items()
    ]


def disk_cells(sums: StoreUse) -> dict[str, Cell]:
    """The cells of steps.csv; empty without tables on disk."""
    if not sums.disk_bytes:
        return {}
    seconds = {"disk_wait_s": sums.read_wait_s + sums.write_wait_s, "disk_busy_s": sums.busy_s}
    counts = {name: getattr(sums, name) for name in ("reads", "read_bytes", "written_bytes", "disk_bytes")}
    return {**counts, **{name: value / sums.ranks for name, value in seconds.items()}}
