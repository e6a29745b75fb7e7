"""Reads of tables on disk, for the step breakdown: when they were in flight, and how long lookups waited for them."""

from collections.abc import Sequence
from time import perf_counter
from typing import final

from rowwise.parallel.shard.embeddings import AnyEmbeddings


@final
class DiskReads:
    """Waits and intervals of disk reads since the last call."""

    def __init__(self, tables: Sequence[AnyEmbeddings]) -> None:
        stores = [arena.store for module in tables for arena in module.arenas]
        self._disks = [store for store in stores if store is not None and store.reads_ahead]
        self._wait_s = self._total_wait_s()
        self._since_s = perf_counter()

    @property
    def any(self) -> bool:
        """Whether any of the tables is on disk."""
        return bool(self._disks)

    def take_wait_s(self) -> float:
        """Seconds in which calls waited for reads."""
        before, self._wait_s = self._wait_s, self._total_wait_s()
        return self._wait_s - before

    def take_intervals(self) -> list[tuple[float, float]]:
        """Intervals with reads in flight, sorted; times are of `time.perf_counter`."""
        intervals = sorted(interval for disk in self._disks for interval in disk.read_intervals(self._since_s))
        self._since_s = max((end_s for _, end_s in intervals), default=self._since_s)
        return intervals

    def _total_wait_s(self) -> float:
        return sum(disk.use().read_wait_s for disk in self._disks)
