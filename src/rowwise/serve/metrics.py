"""What a server counts and measures, for Prometheus."""

from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rowwise.serve.version import ServedVersion

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@final
class ServerMetrics:
    """Counters of one process, and the facts of the version that it serves."""

    def __init__(self, version: ServedVersion) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("rowwise_requests", "Answers, by status", ["code"], registry=registry)
        self.rows = Counter("rowwise_rows", "Rows that were computed", registry=registry)
        self.ignored = Counter("rowwise_ignored_columns", "Columns of requests that are not read", registry=registry)
        self.nulls = Counter("rowwise_null_values", "Null values, by column", ["column"], registry=registry)
        self.seconds = Histogram(
            "rowwise_seconds", "Seconds of a request, by stage", ["stage"], buckets=SECONDS, registry=registry
        )
        self.batch_rows = Histogram("rowwise_batch_rows", "Rows of a batch", buckets=ROWS, registry=registry)
        waiting = Gauge("rowwise_waiting_rows", "Rows that wait", registry=registry)
        self.set_waiting = waiting.set_function
        about = Gauge("rowwise_version", "The served version", ["model", "digest", "identity"], registry=registry)
        about.labels(version.name, version.digest, version.identity).set(version.number)
        trained = Gauge("rowwise_trained_null_share", "Null values in training", ["column"], registry=registry)
        for column, stats in version.stats.items():
            trained.labels(column).set(stats.null_share)

    def text(self) -> bytes:
        """All of them in the format that Prometheus scrapes."""
        return generate_latest(self._registry)
