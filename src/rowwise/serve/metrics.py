"""What the workers of a server count and measure, for Prometheus: a scrape of any of them has the numbers of all.

Workers write their numbers to files of one folder; the environment variable of `prometheus_client` names it, and has to
be set before this module is loaded. Without it, a process has its own numbers.
"""

import os
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector

from rowwise.ops.device_cache import DeviceCache
from rowwise.serve.cached_rows import RowCounts
from rowwise.serve.version import ServedVersion

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ORIGINS = tuple(field.name for field in fields(RowCounts))
STAGES = ("decode", "queue", "compute", "answer", "request")


@cache
def _ask_once_for_the_process() -> None:
    """Not at each count: a system call takes as long as ten counts."""
    if values.ValueClass is not values.MutexValue:
        process = os.getpid()
        values.ValueClass = values.MultiProcessValue(lambda: process)


@final
class ServerMetrics:
    """Counters of one worker, and facts of the versions that it serves."""

    def __init__(self) -> None:
        _ask_once_for_the_process()
        self._registry = registry = CollectorRegistry()
        requests = Counter("rowwise_requests", "Answers, by status and version", ["code", "version"], registry=registry)
        self._requests_of = cache(requests.labels)
        self.rows = Counter("rowwise_rows", "Rows that were computed", registry=registry)
        self.ignored = Counter("rowwise_ignored_columns", "Columns of requests that are not read", registry=registry)
        self.unknown = Counter("rowwise_unknown_keys", "Keys that no side table has", registry=registry)
        self.nulls = Counter("rowwise_null_values", "Null values, by column", ["column"], registry=registry)
        self.unrecorded = Counter(
            "rowwise_unrecorded_requests", "Requests to record that the disk was too slow for", registry=registry
        )
        seconds = Histogram(
            "rowwise_seconds", "Seconds of a request, by stage", ["stage"], buckets=SECONDS, registry=registry
        )
        self.stage = {stage: seconds.labels(stage) for stage in STAGES}
        self.batch_rows = Histogram("rowwise_batch_rows", "Rows of a batch", buckets=ROWS, registry=registry)
        cached = Counter("rowwise_cached_rows", "Distinct rows of batches, by origin", ["origin"], registry=registry)
        self._cached = {origin: cached.labels(origin) for origin in ORIGINS}
        of_device = Counter(
            "rowwise_device_rows", "Ids in slots of a device, and rows that it read from the host", ["origin"],
            registry=registry,
        )  # fmt: skip
        self._of_device = [of_device.labels(origin) for origin in ("slots", "host")]
        searches = Counter("rowwise_searches", "Answers with items, by how they were found", ["how"], registry=registry)
        self.searches = {how: searches.labels(how) for how in ("exact", "index")}
        self.unknown_items = Counter("rowwise_unknown_items", "Keys in filters that are of no item", registry=registry)
        self.waiting_searches = Gauge(
            "rowwise_waiting_searches", "Requests for items that wait", registry=registry, multiprocess_mode="livesum"
        )
        self.waiting = Gauge("rowwise_waiting_rows", "Rows that wait", registry=registry, multiprocess_mode="livesum")
        self._version = Gauge(
            "rowwise_current_version", "The oldest version that a worker answers by", registry=registry,
            multiprocess_mode="livemin",
        )  # fmt: skip
        self._trained = Gauge(
            "rowwise_trained_null_share", "Null values in training", ["column"], registry=registry,
            multiprocess_mode="livemax",
        )  # fmt: skip

    def count(self, code: int, version: int | None = None) -> None:
        """Count an answer; errors belong to no version."""
        self._requests_of(code, "" if version is None else version).inc()

    def count_rows(self, counts: RowCounts) -> None:
        """Count where rows of tables that are larger than memory came from."""
        for origin, counter in self._cached.items():
            if count := getattr(counts, origin):
                counter.inc(count)

    def count_device(self, caches: Iterable[DeviceCache]) -> None:
        """Count where a device had the rows of a batch."""
        for one in caches:
            for counter, count in zip(self._of_device, one.take_counts(), strict=True):
                counter.inc(count)

    def show_version(self, version: ServedVersion) -> None:
        self._version.set(version.number)
        for column, stats in version.stats.items():
            self._trained.labels(column).set(stats.null_share)

    def text(self) -> bytes:
        """The numbers of all workers, or of this process alone, in the format that Prometheus scrapes."""
        if values.ValueClass is values.MutexValue:  # no folder was named: this is no worker of `rowwise serve`
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)
