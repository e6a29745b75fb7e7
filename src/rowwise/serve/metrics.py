"""Prometheus metrics of the workers of a server; a scrape of any worker has the metrics of all.

Workers write their metrics to files in one folder. The environment variable of `prometheus_client` names it, and must
be set before this module is imported. Without it, a process has only its own metrics.
"""

import os
from collections.abc import Iterable
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from rowwise.serve.cached_rows import RowCounts
from rowwise.serve.traffic import Traffic
from rowwise.serve.version import ServedVersion
from rowwise.tables.ops.host_rows import HostRows

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ORIGINS = tuple(field.name for field in fields(RowCounts))
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
STAGES = ("decode", "queue", "compute", "answer", "request")


@cache
def _cache_process_id() -> None:
    """Avoid a getpid() per count: the system call takes as long as ten counts."""
    if values.ValueClass is not values.MutexValue:
        process = os.getpid()
        values.ValueClass = values.MultiProcessValue(lambda: process)


@final
class WantedMetrics:
    """The wanted version of a server, set by the host process only."""

    VERSION, BEHIND = "rowwise_wanted_version", "rowwise_seconds_behind"

    def __init__(self, registry: CollectorRegistry) -> None:
        newest_gauge = partial(Gauge, registry=registry, multiprocess_mode="livemax")
        self._version = newest_gauge(self.VERSION, "Wanted version")
        self._behind = newest_gauge(self.BEHIND, "Seconds for which the served versions are no longer wanted")

    def set(self, wanted: Traffic, behind_s: float) -> None:
        self._version.set(wanted.current)
        self._behind.set(behind_s)


@final
class _AllWorkers:
    """Collector of the metrics of all workers."""

    def collect(self) -> list[Metric]:
        """Skips empty files: of a worker that starts, or was killed while starting."""
        folder = Path(os.environ[FOLDER])  # noqa: TID251 - prometheus_client finds it there
        files = [str(path) for path in folder.glob("*.db") if _has_content(path)]
        return list(MultiProcessCollector.merge(files, accumulate=True))


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # of a worker that has ended
        return False


@final
class ServerMetrics:
    """Metrics of one worker and of its versions."""

    def __init__(self) -> None:
        _cache_process_id()
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        requests = counter("rowwise_requests", "Responses, by status and version", ["code", "version"])
        self._requests_of = cache(requests.labels)
        self.rows = counter("rowwise_rows", "Computed rows")
        self.ignored = counter("rowwise_ignored_columns", "Unused columns of requests")
        self.unknown = counter("rowwise_unknown_keys", "Unknown keys of side tables")
        self.nulls = counter("rowwise_null_values", "Null values, by column", ["column"])
        self.unrecorded = counter(
            "rowwise_unrecorded_requests", "Sampled requests dropped by the recorder, as the disk is too slow"
        )
        seconds = histogram("rowwise_seconds", "Seconds of a request, by stage", ["stage"], buckets=SECONDS)
        self.stage = {stage: seconds.labels(stage) for stage in STAGES}
        self.batch_rows = histogram("rowwise_batch_rows", "Rows of a batch", buckets=ROWS)
        cached = counter("rowwise_cached_rows", "Distinct rows of batches, by origin", ["origin"])
        self._cached = {origin: cached.labels(origin) for origin in ORIGINS}
        device_rows = "Ids in slots of a device cache, and rows read from the host"
        device_counter = counter("rowwise_device_rows", device_rows, ["origin"])
        self._device_rows = [device_counter.labels(origin) for origin in ("slots", "host")]
        searches = counter("rowwise_searches", "Responses with items, by search method", ["how"])
        self.searches = {how: searches.labels(how) for how in ("exact", "index")}
        self.unknown_items = counter("rowwise_unknown_items", "Unknown keys in filters")
        total, oldest = partial(gauge, multiprocess_mode="livesum"), partial(gauge, multiprocess_mode="livemin")
        self.waiting_searches = total("rowwise_waiting_searches", "Waiting requests for items")
        self.waiting = total("rowwise_waiting_rows", "Waiting rows")
        self._version = oldest("rowwise_current_version", "Oldest current version of the workers")
        self.wanted = WantedMetrics(registry)
        self._trained = gauge(
            "rowwise_trained_null_share", "Share of null values in training", ["column"], multiprocess_mode="livemax"
        )

    def count(self, code: int, version: int | None = None) -> None:
        """Count an answer; errors belong to no version."""
        self._requests_of(code, "" if version is None else version).inc()

    def count_rows(self, counts: RowCounts) -> None:
        """Count the rows of cached tables by origin."""
        for origin, counter in self._cached.items():
            if count := getattr(counts, origin):
                counter.inc(count)

    def count_device(self, caches: Iterable[HostRows]) -> None:
        """Count the rows of a device by origin."""
        for rows in caches:
            for counter, count in zip(self._device_rows, rows.take_counts(), strict=True):
                counter.inc(count)

    def set_version(self, version: ServedVersion) -> None:
        self._version.set(version.number)
        for column, stats in version.stats.items():
            self._trained.labels(column).set(stats.null_share)

    def text(self) -> bytes:
        """Metrics of all workers, or of this process alone, in the Prometheus text format."""
        return generate_latest(self._all_workers())

    def read_wanted(self) -> tuple[int, float]:
        """The wanted version, and the seconds behind it, as set by the host process."""
        samples = {sample.name: sample.value for metric in self._all_workers().collect() for sample in metric.samples}
        return int(samples[WantedMetrics.VERSION]), samples[WantedMetrics.BEHIND]

    def _all_workers(self) -> CollectorRegistry:
        """A registry with the current metrics of all workers."""
        if values.ValueClass is values.MutexValue:  # no folder: not a worker of `rowwise serve`
            return self._registry
        registry = CollectorRegistry()
        registry.register(_AllWorkers())
        return registry
