"""What `rowwise watch --port` answers: metrics for Prometheus, a page of all runs, and the report of each."""

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


def cells_of(one: RunStatus) -> tuple[str, ...]:
    """A run as cells below COLUMNS."""
    return (
        one.run,
        one.state,
        f"{one.step:,}",
        "" if one.samples_s is None else f"{one.samples_s:,.0f}",
        _scores(one, "train"),
        _scores(one, "valid"),
        "" if one.data_share is None else f"{one.data_share:.0%}",
        "" if one.memory_bytes is None else format_bytes(one.memory_bytes),
        "" if one.age_s is None else f"{format_duration(one.age_s)} ago",
    )


def _scores(one: RunStatus, split: str) -> str:
    parts = [
        f"{task} {name} {value:.4f}" if len(one.metrics[split]) > 1 else f"{name} {value:.4f}"
        for task, values in one.metrics.get(split, {}).items()
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
        made = kind(name, help_, labels=["run", *labels])
        for value_labels, value in values:
            if value is not None:
                made.add_metric(list(value_labels), value)
        return made

    def of_each(name: str, help_: str, value: Callable[[RunStatus], float | None]) -> Metric:
        return family(name, help_, (), (((one.run,), value(one)) for one in runs))

    yield of_each("rowwise_train_step", "Steps of the run", lambda one: one.step)
    yield of_each("rowwise_train_samples_total", "Samples that the run has trained on", lambda one: one.samples)
    yield of_each("rowwise_train_samples_per_second", "Since the line before", lambda one: one.samples_s)
    yield of_each("rowwise_train_line_age_seconds", "Since the newest line was written", lambda one: one.age_s)
    yield of_each("rowwise_train_memory_bytes", "Resident memory, the most of any rank", lambda one: one.memory_bytes)
    yield of_each("rowwise_train_disk_bytes", "Files of tables on disk, of all ranks", lambda one: one.disk_bytes)
    yield of_each("rowwise_train_workers", "Processes that prepare batches", lambda one: one.workers)
    yield of_each("rowwise_train_worker_restarts_total", "Workers that were started again", lambda one: one.restarts)
    yield of_each("rowwise_train_warnings", "Lines of warnings.txt", lambda one: len(one.warnings))
    states = (((one.run, state), float(one.state == state)) for one in runs for state in STATES)
    yield family("rowwise_train_state", "1 for the state that the run is in", ("state",), states)
    seconds = (((one.run, phase), s) for one in runs for phase, s in one.seconds.items())
    yield family("rowwise_train_phase_seconds", "Of rank 0 since the line before", ("phase",), seconds)
    hits = (((one.run, table), share) for one in runs for table, share in one.hit_rates.items())
    yield family("rowwise_train_cache_hit_share", "Ids that met their row in memory", ("table",), hits)
    metrics = (
        ((one.run, split, task, name), value)
        for one in runs
        for split, tasks in one.metrics.items()
        for task, values in tasks.items()
        for name, value in values.items()
    )
    yield family("rowwise_train_metric", "Newest metrics", ("split", "task", "metric"), metrics)


def draw_runs(runs: Sequence[RunStatus], reports: bool) -> str:
    """The page of all runs."""

    def row(one: RunStatus) -> Html:
        name, *others = cells_of(one)
        link = tag("a", {"href": f"report/{quote(name)}"}, text(name)) if reports else text(name)
        why = [tag("p", {"class": "note"}, text(line)) for line in (one.message, *one.warnings[-1:]) if line]
        return tag("tr", None, tag("td", None, link, *why), *(tag("td", None, text(cell)) for cell in others))

    head = tag("tr", None, *(tag("th", None, text(name)) for name in COLUMNS))
    refresh = tag("meta", {"http-equiv": "refresh", "content": str(REFRESH_s)})
    return draw_page("Runs", refresh, tag("h1", None, text("Runs")), tag("table", None, head, *map(row, runs)))


def make_pages(find: Callable[[], dict[str, Folder]], look: Callable[[], Sequence[RunStatus]]) -> "Starlette":
    """The application: /, /metrics and /report/RUN. It reads, and nothing else."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    class StatusCollector:
        """Collects at each scrape."""

        def collect(self) -> Iterator["Metric"]:
            return families_of(look())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector())

    def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def runs(_request: Request) -> Response:
        return HTMLResponse(draw_runs(look(), all(isinstance(place, Path) for place in find().values())))

    def report(request: Request) -> Response:
        place = find().get(request.path_params["run"])
        if not isinstance(place, Path):
            return PlainTextResponse("no such run on this machine: expected a run of the page /", 404)
        return HTMLResponse(draw_report(read_run(place)))

    return Starlette(routes=[Route("/", runs), Route("/metrics", metrics), Route("/report/{run:path}", report)])
