"""Rows of tables larger than memory: from a cache shared by workers, from Redis, and from files.

The rows of a batch are copied to the begin of the private memory of their table, where kernels read them. So a table
takes the memory of its largest batch, and the pages of large batches are released.

By default a batch waits for its rows. With a minimum hit rate, a batch with this share of its rows in the cache does
not wait: missing rows become default rows, which the response reports, and are fetched later. See `default_rows.py`.
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

MAX_KEPT_bytes = 64 << 20  # of rows of a batch, above which pages are released
MAX_LATER = 64  # batches in the queue of later fetches
WARM_rows = 1 << 16  # rows per read of a warm-up
NO_FEATURES = np.empty((0, 4), np.int64)


class CachedTableMemory(NamedTuple):
    """The private memory of a cached table."""

    place: TableInArena
    key: int  # cache key of row 0
    address: int

    def hot_keys(self, rows_M: Ints, counts_M: Ints) -> tuple[Ints, Ints]:
        """Cache keys of rows, and their counts; drops rows outside the table."""
        inside_M = (rows_M >= 0) & (rows_M < self.place.table.rows)
        return self.key + rows_M[inside_M], counts_M[inside_M]

    def release_pages(self) -> None:
        """Release the private pages, which revert to the file."""
        begin = -(-self.address // mmap.PAGESIZE) * mmap.PAGESIZE
        size_bytes = self.place.table.rows * self.place.table.row_bytes
        end = (self.address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@dataclass(slots=True)
class RowCounts:
    """Origins of the distinct rows of batches."""

    cache: int = 0
    redis: int = 0
    files: int = 0
    defaults: int = 0  # not waited for

    def add(self, other: "RowCounts") -> None:
        self.cache += other.cache
        self.redis += other.redis
        self.files += other.files
        self.defaults += other.defaults


class CachedGroup(NamedTuple):
    """Cached tables of one row width, with their cache and the tiers below it."""

    tables: tuple[CachedTableMemory, ...]
    cache: SharedCache
    behind: SharedCache  # a second handle of the cache, for the background thread
    files: RowFiles  # has all rows
    redis: RedisRows | None  # tier before the files
    defaults_TB: Bytes  # default row of each table

    def read(self, keys_M: Ints, counts: RowCounts) -> Bytes:
        """Read cache misses from Redis, and from files."""
        rows_MB = np.empty((len(keys_M), self.cache.shape.row_bytes), np.uint8)
        if self.redis is None:
            self.files.read(keys_M, rows_MB)
            counts.files += len(keys_M)
            return rows_MB
        tags_M = self.files.tags(keys_M)
        missed_M = np.flatnonzero(~self.redis.read(keys_M, tags_M, rows_MB))
        counts.redis += len(keys_M) - len(missed_M)
        counts.files += len(missed_M)
        if len(missed_M):
            keys_L, tags_L, rows_LB = keys_M[missed_M], tags_M[missed_M], np.empty_like(rows_MB[missed_M])
            self.files.read(keys_L, rows_LB)
            rows_MB[missed_M] = rows_LB
            self.redis.write_later(keys_L, tags_L, rows_LB)
        return rows_MB

    def features_in(self, descriptors: Sequence[FeatureDescriptor]) -> CachedFeatures:
        """The features whose tables are in this group."""
        numbers = {table.place.base: number for number, table in enumerate(self.tables)}
        features = [
            (descriptor.source, self.tables[number].key, number, self.tables[number].address)
            for descriptor in descriptors
            if (number := numbers.get(descriptor.base)) is not None
        ]
        return CachedFeatures(np.array(features, np.int64) if features else NO_FEATURES)


@final
class CachedRows:
    """Copies the rows of batches into the memory of their tables.

    Args:
        newer: positions of all rows, including newer rows behind a table.
        groups: the cached tables; all others are in memory.
        hit_rate: minimum hit rate for a batch not to wait for its misses; None if all batches wait.
    """

    def __init__(self, newer: RowPlaces, groups: Sequence[CachedGroup], hit_rate: float | None = None) -> None:
        self._newer, self.groups, self._hit_rate = newer, tuple(groups), hit_rate
        self._features: dict[bytes, list[CachedFeatures]] = {}  # by feature descriptors, of which a model has few
        self._later = LaterCalls(MAX_LATER)
        self._large: list[CachedGroup] = []  # groups whose last batch was large
        self.counts = RowCounts()
        self.exact = False  # whether batches wait despite `hit_rate`
        self._defaults_B: dict[str, Ints] = {}

    def take_counts(self) -> RowCounts:
        """The counts since the last call."""
        counts, self.counts = self.counts, RowCounts()
        return counts

    def take_defaults(self) -> dict[str, Ints]:
        """Ids with default rows per sample since the last call, by table."""
        defaults = self._defaults_B
        self._defaults_B = dict[str, Ints]()
        return defaults

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """Positions of the rows of a batch, which stay in memory until the next call."""
        places_N = self._newer.find(features_FC, values_N, offsets, batch)
        while self._large:
            for table in self._large.pop().tables:
                table.release_pages()
        places, bounds = places_N.numpy(), offsets.numpy()
        for group, features in zip(self.groups, self._features_of(features_FC), strict=True):
            missing = group.cache.take(features, bounds, batch, places)
            self.counts.cache += missing.distinct - len(missing.rows_M4)
            if len(missing.rows_M4) and self._waits(missing):
                group.cache.put(missing, group.read(missing.keys_M, self.counts))
            elif len(missing.rows_M4):
                self._use_defaults(group, missing)
                self._count_defaults(group, features, missing, bounds, batch, places)
            if missing.distinct * group.cache.shape.row_bytes > MAX_KEPT_bytes:
                self._large.append(group)
        return places_N

    def _waits(self, missing: MissingRows) -> bool:
        if self.exact or self._hit_rate is None:
            return True
        return 1 - len(missing.rows_M4) / missing.distinct < self._hit_rate

    def _use_defaults(self, group: CachedGroup, missing: MissingRows) -> None:
        """Fill missing rows with defaults, and fetch them for later batches."""
        group.cache.put_defaults(missing, group.defaults_TB)
        self.counts.defaults += len(missing.rows_M4)
        self._later.submit(partial(_fill_cache, group, missing.keys_M))

    def _count_defaults(
        self, group: CachedGroup, features: CachedFeatures, missing: MissingRows, bounds: Ints, batch: int, places: Ints
    ) -> None:
        for source, _, number, _ in features.array.tolist():
            begin_B = bounds[source * batch : (source + 1) * batch]
            begin, end = bounds[source * batch], bounds[(source + 1) * batch]
            # Positions of default rows; each belongs to the last sample that begins at or before it.
            positions_Z = begin + np.flatnonzero(np.isin(places[begin:end], missing.places_of(number)))
            if len(positions_Z):
                name = group.tables[number].place.table.name
                defaults_B = self._defaults_B.setdefault(name, np.zeros(batch, np.int64))
                defaults_B += np.bincount(np.searchsorted(begin_B, positions_Z, "right") - 1, minlength=batch)

    def _features_of(self, features_FC: Tensor) -> list[CachedFeatures]:
        key = features_FC.numpy().tobytes()
        if key not in self._features:
            descriptors = FeatureDescriptor.read(features_FC)
            self._features[key] = [group.features_in(descriptors) for group in self.groups]
        return self._features[key]


def _fill_cache(group: CachedGroup, keys_M: Ints) -> None:
    group.behind.warm(keys_M, group.read(keys_M, RowCounts()), np.zeros(len(keys_M), np.int64))


def warm_up(tables: Sequence[CachedRows], hot: Mapping[str, tuple[Ints, Ints]]) -> None:
    """Fill caches with hot rows, the hottest last; `hot` has rows and counts by table."""
    for group in (group for cached in tables for group in cached.groups):
        hot_parts = [table.hot_keys(*hot[name]) for table in group.tables if (name := table.place.name) in hot]
        if not hot_parts:
            continue
        keys_M, counts_M = (np.concatenate([pair[k] for pair in hot_parts]) for k in (0, 1))
        order = np.argsort(counts_M, kind="stable")[-group.cache.shape.slots :]
        for part in (order[begin : begin + WARM_rows] for begin in range(0, len(order), WARM_rows)):
            rows_MB = np.empty((len(part), group.cache.shape.row_bytes), np.uint8)
            group.files.read(keys_M[part], rows_MB)
            group.cache.warm(keys_M[part], rows_MB, counts_M[part])


class CachedBatches:
    """Counts and default rows of the batches of a request.

    Args:
        tables: cached tables of the version.
        exact: whether batches wait for all rows.
    """

    def __init__(self, tables: Sequence[CachedRows], *, exact: bool) -> None:
        self.tables, self.counts = tables, RowCounts()
        self._defaults: list[tuple[RowSpan, dict[str, Ints]]] = []
        for cached in tables:
            cached.exact = exact
            cached.take_counts(), cached.take_defaults()  # discard those of a failed batch or a check

    def collect(self, span: RowSpan) -> None:
        """Called after each batch."""
        for cached in self.tables:
            self.counts.add(cached.take_counts())
            defaults = cached.take_defaults()
            if defaults:
                self._defaults.append((span, defaults))

    def defaults_of(self, begin: int, rows: int) -> dict[str, Ints]:
        """Ids with default rows per sample, by table."""
        result: dict[str, Ints] = {}
        for span, defaults in self._defaults:
            first, end = max(begin, span.begin), min(begin + rows, span.end)
            for name, defaults_B in defaults.items():
                part = defaults_B[first - span.begin : max(first, end) - span.begin]
                if part.any():
                    result.setdefault(name, np.zeros(rows, np.int64))[first - begin : end - begin] += part
        return result
