"""Rows of tables that are larger than memory: from a cache that workers share, from Redis, and from files.

The rows that a batch needs are copied into the first places of their table's memory, which a process has for itself;
the kernels read them there. So the memory of a table is that of the largest batch, and pages of large ones are given
back.

By default a batch waits for its rows. With a least hit rate, a batch that has this share of its rows in the cache does
not wait: the others are default rows in its answer, which says so, and are fetched meanwhile. See `default_rows.py`.
"""

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import numpy as np
from torch import Tensor

from rowwise.models.inference import RowSpan
from rowwise.serve.later import LaterCalls
from rowwise.serve.redis_rows import RedisRows
from rowwise.serve.row_files import RowFiles
from rowwise.serve.shared_rows import TableInArena
from rowwise.tables.ops.layout import FeatureDescriptor
from rowwise.tables.ops.newer import RowPlaces
from rowwise.tables.store.policy import Ints
from rowwise.tables.store.shared_cache import Bytes, CachedFeatures, MissingRows, SharedCache

KEPT_bytes = 64 << 20  # of the rows of a batch
MAX_LATER = 64  # batches whose rows wait to be fetched
WARMED = 1 << 16  # rows that are read together
NO_FEATURES = np.empty((0, 4), np.int64)


class CachedTableMemory(NamedTuple):
    """The memory of a cached table in this process."""

    place: TableInArena
    key: int  # of row 0
    address: int

    def hot_keys(self, rows_M: Ints, counts_M: Ints) -> tuple[Ints, Ints]:
        """The keys of rows, and their counts; numbers outside the table are left out."""
        inside_M = (rows_M >= 0) & (rows_M < self.place.table.rows)
        return self.key + rows_M[inside_M], counts_M[inside_M]

    def give_back(self) -> None:
        """Free the pages, which are then as they are in the file."""
        begin = -(-self.address // mmap.PAGESIZE) * mmap.PAGESIZE
        size_bytes = self.place.table.rows * self.place.table.row_bytes
        end = (self.address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@dataclass(slots=True)
class RowCounts:
    """Where the distinct rows of batches came from."""

    cache: int = 0
    redis: int = 0
    files: int = 0
    defaults: int = 0  # they were not waited for

    def add(self, other: "RowCounts") -> None:
        self.cache += other.cache
        self.redis += other.redis
        self.files += other.files
        self.defaults += other.defaults


class CachedGroup(NamedTuple):
    """Cached tables of one width: their cache, and where rows are that it lacks."""

    tables: tuple[CachedTableMemory, ...]
    cache: SharedCache
    behind: SharedCache  # the same cache, for a thread
    files: RowFiles  # has all rows
    redis: RedisRows | None  # is asked before the files
    defaults_TB: Bytes  # a row of each table, for those that are not waited for

    def read(self, keys_M: Ints, counts: RowCounts) -> Bytes:
        """Rows that the cache lacks."""
        rows_MB = np.empty((len(keys_M), self.cache.shape.row_bytes), np.uint8)
        if self.redis is None:
            self.files.read(keys_M, rows_MB)
            counts.files += len(keys_M)
            return rows_MB
        tags_M = self.files.tags(keys_M)
        left_M = np.flatnonzero(~self.redis.read(keys_M, tags_M, rows_MB))
        counts.redis += len(keys_M) - len(left_M)
        counts.files += len(left_M)
        if len(left_M):
            keys_L, tags_L, rows_LB = keys_M[left_M], tags_M[left_M], np.empty_like(rows_MB[left_M])
            self.files.read(keys_L, rows_LB)
            rows_MB[left_M] = rows_LB
            self.redis.write_later(keys_L, tags_L, rows_LB)
        return rows_MB

    def features_in(self, descriptors: Sequence[FeatureDescriptor]) -> CachedFeatures:
        """The features of a batch whose tables are in this group."""
        numbers = {table.place.base: number for number, table in enumerate(self.tables)}
        found = [
            (one.source, self.tables[number].key, number, self.tables[number].address)
            for one in descriptors
            if (number := numbers.get(one.base)) is not None
        ]
        return CachedFeatures(np.array(found, np.int64) if found else NO_FEATURES)


@final
class CachedRows:
    """Puts the rows of batches into the memory of their tables.

    Args:
        newer: the places of all rows, where newer ones are behind a table's own ones.
        groups: cached tables; others have all rows in memory.
        hit_rate: the least hit rate of a batch that does not wait for rows; None: all batches wait.
    """

    def __init__(self, newer: RowPlaces, groups: Sequence[CachedGroup], hit_rate: float | None = None) -> None:
        self._newer, self.groups, self._hit_rate = newer, tuple(groups), hit_rate
        self._features: dict[bytes, list[CachedFeatures]] = {}  # by those of batches, of which a model has few
        self._later = LaterCalls(MAX_LATER)
        self._large: list[CachedGroup] = []  # whose tables have pages of a large batch
        self.counts = RowCounts()
        self.exact = False  # whether batches wait whatever their hit rate
        self._defaults_B: dict[str, Ints] = {}

    def take_counts(self) -> RowCounts:
        """The counts since the last call."""
        found, self.counts = self.counts, RowCounts()
        return found

    def take_defaults(self) -> dict[str, Ints]:
        """How many ids of each sample had default rows since the last call, by table."""
        found = self._defaults_B
        self._defaults_B = dict[str, Ints]()
        return found

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """The places of the rows of a batch, which are in memory until the next call."""
        places_N = self._newer.find(features_FC, values_N, offsets, batch)
        while self._large:
            for table in self._large.pop().tables:
                table.give_back()
        places, bounds = places_N.numpy(), offsets.numpy()
        for group, features in zip(self.groups, self._features_of(features_FC), strict=True):
            missing = group.cache.take(features, bounds, batch, places)
            self.counts.cache += missing.distinct - len(missing.rows_M4)
            if len(missing.rows_M4) and self._waits(missing):
                group.cache.put(missing, group.read(missing.keys_M, self.counts))
            elif len(missing.rows_M4):
                self._use_defaults(group, missing)
                self._count_defaults(group, features, missing, bounds, batch, places)
            if missing.distinct * group.cache.shape.row_bytes > KEPT_bytes:
                self._large.append(group)
        return places_N

    def _waits(self, missing: MissingRows) -> bool:
        if self.exact or self._hit_rate is None:
            return True
        return 1 - len(missing.rows_M4) / missing.distinct < self._hit_rate

    def _use_defaults(self, group: CachedGroup, missing: MissingRows) -> None:
        """Let the missing rows be default ones, and fetch them for later batches."""
        group.cache.put_defaults(missing, group.defaults_TB)
        self.counts.defaults += len(missing.rows_M4)
        self._later.add(partial(_fill_cache, group, missing.keys_M))

    def _count_defaults(
        self, group: CachedGroup, features: CachedFeatures, missing: MissingRows, bounds: Ints, batch: int, places: Ints
    ) -> None:
        for source, _, number, _ in features.array.tolist():
            begin_B = bounds[source * batch : (source + 1) * batch]
            begin, end = bounds[source * batch], bounds[(source + 1) * batch]
            at_Z = begin + np.flatnonzero(np.isin(places[begin:end], missing.places_of(number)))
            if len(at_Z):
                name = group.tables[number].place.table.name
                defaults_B = self._defaults_B.setdefault(name, np.zeros(batch, np.int64))
                defaults_B += np.bincount(np.searchsorted(begin_B, at_Z, "right") - 1, minlength=batch)

    def _features_of(self, features_FC: Tensor) -> list[CachedFeatures]:
        key = features_FC.numpy().tobytes()
        if key not in self._features:
            descriptors = FeatureDescriptor.read(features_FC)
            self._features[key] = [group.features_in(descriptors) for group in self.groups]
        return self._features[key]


def _fill_cache(group: CachedGroup, keys_M: Ints) -> None:
    group.behind.warm(keys_M, group.read(keys_M, RowCounts()), np.zeros(len(keys_M), np.int64))


def warm_up(tables: Sequence[CachedRows], hot: Mapping[str, tuple[Ints, Ints]]) -> None:
    """Put rows into caches, those with the highest counts of each cache last; `hot`: rows and counts, by table."""
    for group in (group for one in tables for group in one.groups):
        found = [table.hot_keys(*hot[name]) for table in group.tables if (name := table.place.name) in hot]
        if not found:
            continue
        keys_M, counts_M = (np.concatenate([one[k] for one in found]) for k in (0, 1))
        order = np.argsort(counts_M, kind="stable")[-group.cache.shape.slots :]
        for part in (order[begin : begin + WARMED] for begin in range(0, len(order), WARMED)):
            rows_MB = np.empty((len(part), group.cache.shape.row_bytes), np.uint8)
            group.files.read(keys_M[part], rows_MB)
            group.cache.warm(keys_M[part], rows_MB, counts_M[part])


class CachedBatches:
    """What happened to the cached rows of a request's batches.

    Args:
        tables: of the version.
        exact: whether batches wait for all rows.
    """

    def __init__(self, tables: Sequence[CachedRows], *, exact: bool) -> None:
        self.tables, self.counts = tables, RowCounts()
        self._defaults: list[tuple[RowSpan, dict[str, Ints]]] = []
        for one in tables:
            one.exact = exact
            one.take_counts(), one.take_defaults()  # of a batch that failed, or of a check

    def collect(self, span: RowSpan) -> None:
        """Called after each batch."""
        for one in self.tables:
            self.counts.add(one.take_counts())
            defaults = one.take_defaults()
            if defaults:
                self._defaults.append((span, defaults))

    def defaults_of(self, begin: int, rows: int) -> dict[str, Ints]:
        """How many ids of each of these samples had default rows, by table."""
        found: dict[str, Ints] = {}
        for span, defaults in self._defaults:
            first, end = max(begin, span.begin), min(begin + rows, span.end)
            for name, defaults_B in defaults.items():
                part = defaults_B[first - span.begin : max(first, end) - span.begin]
                if part.any():
                    found.setdefault(name, np.zeros(rows, np.int64))[first - begin : end - begin] += part
        return found
