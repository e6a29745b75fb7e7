"""The tiers of rows of a server: memory, a cache shared by its workers, Redis, and the files of versions."""

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
    """A memfd, inherited by processes that receive it as an argument."""

    def __init__(self, file: int) -> None:
        self.file = file
        weakref.finalize(self, os.close, file)
        self._mapped: Bytes | None = None

    @classmethod
    def make(cls, name: str, size_bytes: int) -> "MemoryFile":
        """A zeroed file, whose pages are allocated on write; the name is for debugging."""
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


def _detach(handle: Any) -> MemoryFile:
    return MemoryFile(handle.detach())


class DeviceRows(NamedTuple):
    """The row cache in device memory, in front of all rows in host memory."""

    device: str
    memory_bytes: int  # per worker and version
    samples: int  # per batch


class RowTiers(NamedTuple):
    """Configuration of the row tiers of a server."""

    memory_bytes: int | None = None  # None for all rows in memory
    layout: RowMemory | None = None  # of the first version, which determines the caches
    caches: MemoryFile | None = None
    redis: tuple[RedisAddress, ...] = ()
    hit_rate: float | None = None  # see `CachedRows`
    default_row: DefaultRow = DefaultRow.ZERO  # for rows that are not waited for
    device: DeviceRows | None = None  # None for lookups in host memory

    def next_tag(self) -> int:
        """A new tag for cached rows per call; one process may call at a time."""
        return 0 if self.caches is None else next_tag(self.caches.bytes)

    def divide(self, version: CheckpointManifest, folder: object) -> RowMemory:
        """Placement of the rows of a version, in the caches of the first version."""
        memory = divide_memory(tables_of(version), self.memory_bytes)
        caches_by_width = {} if self.layout is None else {group.shape.row_bytes: group for group in self.layout.caches}
        caches: list[CachedTables] = []
        for group in memory.caches:
            row_bytes = group.shape.row_bytes
            if row_bytes not in caches_by_width:
                raise CheckpointError(
                    f"{folder}: rows of {row_bytes} bytes need a cache, which this server lacks",
                    hint="restart the server",
                )
            caches.append(
                group._replace(shape=caches_by_width[row_bytes].shape, begin=caches_by_width[row_bytes].begin)
            )
        return memory._replace(caches=tuple(caches))

    def attach(
        self, model: nn.Module, name: str, version: Checkpoint, rows: SharedRows, newer: NewerChunks, memory: RowMemory
    ) -> tuple[CachedRows, ...]:
        """Attach caches to the cached tables of a model, after `use_newer`."""
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
        for group in memory.caches:
            part, keys, row_bytes = self.caches.bytes[group.begin :], group.first_keys, group.shape.row_bytes
            cache, background = (SharedCache(part[: group.shape.size_bytes], group.shape, rows.tag) for _ in range(2))
            redis, files = RedisRows(*nodes, row_bytes) if nodes else None, RowFiles(version, group, newer)
            for (arena, tables), arena_groups in zip(arenas, groups, strict=True):
                local = [table for table in tables if table.name in keys]
                if local:
                    memories = tuple(CachedTableMemory(t, keys[t.name], arena.rows.data_ptr() + t.base) for t in local)
                    defaults_TB = np.stack([stored_default(means, table.name, table.table) for table in local])
                    arena_groups.append(CachedGroup(memories, cache, background, files, redis, defaults_TB))
        cached: list[CachedRows] = []
        for (arena, _), arena_groups in zip(arenas, groups, strict=True):
            if arena_groups:
                assert arena.places is not None
                arena.places = CachedRows(arena.places, arena_groups, self.hit_rate)
                cached.append(arena.places)
        return tuple(cached)


IN_MEMORY = RowTiers()


def make_tiers(
    version: CheckpointManifest,
    memory_bytes: int | None,
    redis: tuple[RedisAddress, ...] = (),
    hit_rate: float | None = None,
    default_row: DefaultRow = DefaultRow.ZERO,
) -> RowTiers:
    """Row tiers for a version and later ones, with allocated caches."""
    layout = divide_memory(tables_of(version), memory_bytes)
    caches = MemoryFile.make("rowwise-cache", layout.cache_bytes) if layout.caches else None
    return RowTiers(memory_bytes, layout, caches, redis, hit_rate, default_row)
