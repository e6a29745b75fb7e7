"""What the workers of a server count and measure, for Prometheus: a scrape of any of them has the numbers of all.

Workers write their numbers to files of one folder; the environment variable of `prometheus_client` names it, and has to
be set before this module is loaded. Without it, a process has its own numbers.
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
def _ask_once_for_the_process() -> None:
    """Not at each count: a system call takes as long as ten counts."""
    if values.ValueClass is not values.MutexValue:
        process = os.getpid()
        values.ValueClass = values.MultiProcessValue(lambda: process)


@final
class WantedMetrics:
    """What is wanted of a server. The process that reads it shows it; the workers of a server show nothing."""

    VERSION, BEHIND = "rowwise_wanted_version", "rowwise_seconds_behind"

    def __init__(self, registry: CollectorRegistry) -> None:
        newest = partial(Gauge, registry=registry, multiprocess_mode="livemax")
        self._version = newest(self.VERSION, "The version that is wanted")
        self._behind = newest(self.BEHIND, "Seconds for which others than the versions that answer have been wanted")

    def show(self, wanted: Traffic, behind_s: float) -> None:
        self._version.set(wanted.current)
        self._behind.set(behind_s)


@final
class _AllWorkers:
    """Collects the metrics of all workers."""

    def collect(self) -> list[Metric]:
        """A file is empty while a worker begins it, and stays so if the worker is killed."""
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
    """Counters of one worker, and facts of the versions that it serves."""

    def __init__(self) -> None:
        _ask_once_for_the_process()
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        requests = counter("rowwise_requests", "Answers, by status and version", ["code", "version"])
        self._requests_of = cache(requests.labels)
        self.rows = counter("rowwise_rows", "Rows that were computed")
        self.ignored = counter("rowwise_ignored_columns", "Columns of requests that are not read")
        self.unknown = counter("rowwise_unknown_keys", "Keys that no side table has")
        self.nulls = counter("rowwise_null_values", "Null values, by column", ["column"])
        self.unrecorded = counter("rowwise_unrecorded_requests", "Requests to record that the disk was too slow for")
        seconds = histogram("rowwise_seconds", "Seconds of a request, by stage", ["stage"], buckets=SECONDS)
        self.stage = {stage: seconds.labels(stage) for stage in STAGES}
        self.batch_rows = histogram("rowwise_batch_rows", "Rows of a batch", buckets=ROWS)
        cached = counter("rowwise_cached_rows", "Distinct rows of batches, by origin", ["origin"])
        self._cached = {origin: cached.labels(origin) for origin in ORIGINS}
        device_rows = "Ids in slots of a device, and rows that it read from the host"
        of_device = counter("rowwise_device_rows", device_rows, ["origin"])
        self._of_device = [of_device.labels(origin) for origin in ("slots", "host")]
        searches = counter("rowwise_searches", "Answers with items, by how they were found", ["how"])
        self.searches = {how: searches.labels(how) for how in ("exact", "index")}
        self.unknown_items = counter("rowwise_unknown_items", "Keys in filters that are of no item")
        total, oldest = partial(gauge, multiprocess_mode="livesum"), partial(gauge, multiprocess_mode="livemin")
        self.waiting_searches = total("rowwise_waiting_searches", "Requests for items that wait")
        self.waiting = total("rowwise_waiting_rows", "Rows that wait")
        self._version = oldest("rowwise_current_version", "The oldest version that a worker answers by")
        self.wanted = WantedMetrics(registry)
        self._trained = gauge(
            "rowwise_trained_null_share", "Null values in training", ["column"], multiprocess_mode="livemax"
        )

    def count(self, code: int, version: int | None = None) -> None:
        """Count an answer; errors belong to no version."""
        self._requests_of(code, "" if version is None else version).inc()

    def count_rows(self, counts: RowCounts) -> None:
        """Count where rows of tables that are larger than memory came from."""
        for origin, counter in self._cached.items():
            if count := getattr(counts, origin):
                counter.inc(count)

    def count_device(self, caches: Iterable[HostRows]) -> None:
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
        return generate_latest(self._of_all())

    def read_wanted(self) -> tuple[int, float]:
        """The version that is wanted, and the seconds behind it, as the process that reads it has shown them."""
        found = {sample.name: sample.value for metric in self._of_all().collect() for sample in metric.samples}
        return int(found[WantedMetrics.VERSION]), found[WantedMetrics.BEHIND]

    def _of_all(self) -> CollectorRegistry:
        """The numbers of all workers, as they are now."""
        if values.ValueClass is values.MutexValue:  # no folder was named: this is no worker of `rowwise serve`
            return self._registry
        registry = CollectorRegistry()
        registry.register(_AllWorkers())
        return registry
