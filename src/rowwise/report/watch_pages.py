"""The pages of `rowwise watch --port`: metrics for Prometheus, all runs, and the report of each run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from rowwise.base.quantity import format_bytes, format_duration
from rowwise.base.storage.folder import Folder
from rowwise.report.markup import Html, tag, text
from rowwise.report.page import draw_page, draw_report
from rowwise.report.read import read_run
from rowwise.report.watched import RunStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.applications import Starlette

REFRESH_s = 10
COLUMNS = ("run", "state", "step", "samples/s", "train", "valid", "waits for data", "memory", "newest line")
SHOWN = ("loss", "ne", "auc", "recall@10")
STATES = ("training", "finished", "stopped", "failed", "killed", "unknown")


def cells_of(run: RunStatus) -> tuple[str, ...]:
    """The cells of a run, in the order of `COLUMNS`."""
    return (
        run.run,
        run.state,
        f"{run.step:,}",
        "" if run.samples_s is None else f"{run.samples_s:,.0f}",
        _scores(run, "train"),
        _scores(run, "valid"),
        "" if run.data_share is None else f"{run.data_share:.0%}",
        "" if run.memory_bytes is None else format_bytes(run.memory_bytes),
        "" if run.age_s is None else f"{format_duration(run.age_s)} ago",
    )


def _scores(run: RunStatus, split: str) -> str:
    parts = [
        f"{task} {name} {value:.4f}" if len(run.metrics[split]) > 1 else f"{name} {value:.4f}"
        for task, values in run.metrics.get(split, {}).items()
        for name in SHOWN
        if (value := values.get(name)) is not None
    ]
    return ", ".join(parts[:4])


def families_of(runs: Sequence[RunStatus]) -> Iterator["Metric"]:
    """The metrics of runs, with the run as a label."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    def family(
        name: str, help_: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float | None]]
    ) -> Metric:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(name, help_, labels=["run", *labels])
        for value_labels, value in values:
            if value is not None:
                metric.add_metric(list(value_labels), value)
        return metric

    def per_run(name: str, help_: str, value: Callable[[RunStatus], float | None]) -> Metric:
        return family(name, help_, (), (((run.run,), value(run)) for run in runs))

    yield per_run("rowwise_train_step", "Steps of the run", lambda run: run.step)
    yield per_run("rowwise_train_samples_total", "Samples that the run has trained on", lambda run: run.samples)
    yield per_run("rowwise_train_samples_per_second", "Since the line before", lambda run: run.samples_s)
    yield per_run("rowwise_train_line_age_seconds", "Since the newest line was written", lambda run: run.age_s)
    yield per_run("rowwise_train_memory_bytes", "Resident memory, maximum over ranks", lambda run: run.memory_bytes)
    yield per_run("rowwise_train_disk_bytes", "Files of tables on disk, of all ranks", lambda run: run.disk_bytes)
    yield per_run("rowwise_train_workers", "Processes that prepare batches", lambda run: run.workers)
    yield per_run("rowwise_train_worker_restarts_total", "Workers that were started again", lambda run: run.restarts)
    yield per_run("rowwise_train_warnings", "Lines of warnings.txt", lambda run: len(run.warnings))
    states = (((run.run, state), float(run.state == state)) for run in runs for state in STATES)
    yield family("rowwise_train_state", "1 for the state of the run, else 0", ("state",), states)
    seconds = (((run.run, phase), s) for run in runs for phase, s in run.seconds.items())
    yield family("rowwise_train_phase_seconds", "Of rank 0 since the line before", ("phase",), seconds)
    hits = (((run.run, table), share) for run in runs for table, share in run.hit_rates.items())
    yield family("rowwise_train_cache_hit_share", "Ids that met their row in memory", ("table",), hits)
    metrics = (
        ((run.run, split, task, name), value)
        for run in runs
        for split, tasks in run.metrics.items()
        for task, values in tasks.items()
        for name, value in values.items()
    )
    yield family("rowwise_train_metric", "Newest metrics", ("split", "task", "metric"), metrics)


def draw_runs(runs: Sequence[RunStatus], reports: bool) -> str:
    """The page of all runs."""

    def row(status: RunStatus) -> Html:
        name, *cells = cells_of(status)
        link = tag("a", {"href": f"report/{quote(name)}"}, text(name)) if reports else text(name)
        notes = [tag("p", {"class": "note"}, text(line)) for line in (status.message, *status.warnings[-1:]) if line]
        return tag("tr", None, tag("td", None, link, *notes), *(tag("td", None, text(cell)) for cell in cells))

    head = tag("tr", None, *(tag("th", None, text(name)) for name in COLUMNS))
    refresh = tag("meta", {"http-equiv": "refresh", "content": str(REFRESH_s)})
    return draw_page("Runs", refresh, tag("h1", None, text("Runs")), tag("table", None, head, *map(row, runs)))


def make_pages(find: Callable[[], dict[str, Folder]], read: Callable[[], Sequence[RunStatus]]) -> "Starlette":
    """The read-only application with /, /metrics and /report/RUN. `find`: folders of runs by name."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    class StatusCollector:
        """Reads the runs at each scrape."""

        def collect(self) -> Iterator["Metric"]:
            return families_of(read())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector())

    def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def runs(_request: Request) -> Response:
        return HTMLResponse(draw_runs(read(), all(isinstance(folder, Path) for folder in find().values())))

    def report(request: Request) -> Response:
        folder = find().get(request.path_params["run"])
        if not isinstance(folder, Path):
            return PlainTextResponse("no such run on this machine: expected a run of the page /", 404)
        return HTMLResponse(draw_report(read_run(folder)))

    return Starlette(routes=[Route("/", runs), Route("/metrics", metrics), Route("/report/{run:path}", report)])
