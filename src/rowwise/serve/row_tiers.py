"""Where a server has its rows: memory, a cache that its workers share, Redis, and the files of versions."""

import mmap
import os
import weakref
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from torch import nn

from rowwise.base.errors import CheckpointError
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.checkpoint.read import Checkpoint
from rowwise.serve.cached_rows import CachedGroup, CachedRows, CachedTableMemory
from rowwise.serve.default_rows import DefaultRow, read_mean_rows, stored_default
from rowwise.serve.redis_rows import RedisAddress, RedisNodes, RedisRows
from rowwise.serve.row_files import RowFiles
from rowwise.serve.row_memory import CachedTables, RowMemory, divide_memory, tables_of
from rowwise.serve.shared_rows import NewerChunks, SharedRows, memory_of_tables
from rowwise.tables.store.shared_cache import Bytes, SharedCache, next_tag


@final
class MemoryFile:
    """A file in memory. Processes that are started with it as an argument have it, too."""

    def __init__(self, file: int) -> None:
        self.file = file
        weakref.finalize(self, os.close, file)
        self._mapped: Bytes | None = None

    @classmethod
    def make(cls, name: str, size_bytes: int) -> "MemoryFile":
        """Zeroed, without memory until it is written; the name is for tools of the system."""
        file = os.memfd_create(name)
        os.ftruncate(file, size_bytes)
        return cls(file)

    @property
    def bytes(self) -> Bytes:
        if self._mapped is None:
            self._mapped = np.frombuffer(mmap.mmap(self.file, 0), np.uint8)
        return self._mapped

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (DupFd(self.file),)


def _detach(given: Any) -> MemoryFile:
    return MemoryFile(given.detach())


class DeviceRows(NamedTuple):
    """The memory of a device for rows, in front of all rows in the memory of the host."""

    device: str
    memory_bytes: int  # of each worker and version
    samples: int  # of a batch


class RowTiers(NamedTuple):
    """How a server has its rows."""

    memory_bytes: int | None = None  # None: all rows are in memory
    layout: RowMemory | None = None  # of the first version, for which the caches were made
    caches: MemoryFile | None = None
    redis: tuple[RedisAddress, ...] = ()
    hit_rate: float | None = None  # see `CachedRows`
    default_row: DefaultRow = DefaultRow.ZERO  # for rows that are not waited for
    device: DeviceRows | None = None  # None: lookups read the memory of the host

    def next_tag(self) -> int:
        """Another tag for cached rows at each call; one process calls at a time."""
        return 0 if self.caches is None else next_tag(self.caches.bytes)

    def divide(self, version: CheckpointManifest, folder: object) -> RowMemory:
        """How the rows of a version are in memory; its caches are those of the first version."""
        found = divide_memory(tables_of(version), self.memory_bytes)
        made = {} if self.layout is None else {one.shape.row_bytes: one for one in self.layout.caches}
        caches: list[CachedTables] = []
        for one in found.caches:
            row_bytes = one.shape.row_bytes
            if row_bytes not in made:
                raise CheckpointError(
                    f"{folder}: rows of {row_bytes} bytes need a cache, which this server was started without",
                    hint="start the server again",
                )
            caches.append(one._replace(shape=made[row_bytes].shape, begin=made[row_bytes].begin))
        return found._replace(caches=tuple(caches))

    def attach(
        self, model: nn.Module, name: str, version: Checkpoint, rows: SharedRows, newer: NewerChunks, memory: RowMemory
    ) -> tuple[CachedRows, ...]:
        """Let lookups of a model have the rows of cached tables; its newer rows are in use already."""
        if not memory.caches:
            return ()
        assert self.caches is not None
        nodes = (RedisNodes(self.redis, name), RedisNodes(self.redis, name)) if self.redis else None  # reads, writes
        means = None
        if self.default_row is DefaultRow.MEAN:
            assert isinstance(version.folder, Path), "versions are served from folders"
            means = read_mean_rows(version.folder)
        arenas = memory_of_tables(model)
        groups: list[list[CachedGroup]] = [[] for _ in arenas]
        for one in memory.caches:
            part, keys, row_bytes = self.caches.bytes[one.begin :], one.first_keys, one.shape.row_bytes
            cache, behind = (SharedCache(part[: one.shape.size_bytes], one.shape, rows.tag) for _ in range(2))
            redis, files = RedisRows(*nodes, row_bytes) if nodes else None, RowFiles(version, one, newer)
            for (arena, tables), of_arena in zip(arenas, groups, strict=True):
                own = [table for table in tables if table.name in keys]
                if own:
                    memories = tuple(CachedTableMemory(t, keys[t.name], arena.rows.data_ptr() + t.base) for t in own)
                    defaults_TB = np.stack([stored_default(means, table.name, table.table) for table in own])
                    of_arena.append(CachedGroup(memories, cache, behind, files, redis, defaults_TB))
        found: list[CachedRows] = []
        for (arena, _), of_arena in zip(arenas, groups, strict=True):
            if of_arena:
                assert arena.places is not None
                arena.places = CachedRows(arena.places, of_arena, self.hit_rate)
                found.append(arena.places)
        return tuple(found)


IN_MEMORY = RowTiers()


def make_tiers(
    version: CheckpointManifest,
    memory_bytes: int | None,
    redis: tuple[RedisAddress, ...] = (),
    hit_rate: float | None = None,
    default_row: DefaultRow = DefaultRow.ZERO,
) -> RowTiers:
    """Tiers for the rows of a version and of those that follow, with the memory of their caches."""
    layout = divide_memory(tables_of(version), memory_bytes)
    caches = MemoryFile.make("rowwise-cache", layout.cache_bytes) if layout.caches else None
    return RowTiers(memory_bytes, layout, caches, redis, hit_rate, default_row)
