"""The top of a report: the run's name and status, its main numbers, and its warnings."""

import math

from rowwise.base.quantity import format_count, format_duration, format_metric, format_size, is_finite, pluralise
from rowwise.report.markup import Html, div, join, span, tag, text, tiles
from rowwise.report.metric import find_metric, metric_position
from rowwise.report.read import Curve, RecordedRun

STATUS = {  # text and CSS class
    "finished": ("finished", "good"),
    "stopped": ("stopped early", "fair"),
    "failed": ("failed", "bad"),
}
HIDDEN_METRICS = frozenset({"count", "base_rate", "auc_bound"})  # facts of the data, and error bounds
MAX_TILES = 6


def draw_header(run: RecordedRun) -> Html:
    status, style = describe_status(run)
    when = run.changed.strftime("%Y-%m-%d %H:%M UTC")
    message = "No result yet: the run continues, or it was killed."
    if run.result is not None:
        message = run.result.message or ""
    recipe, _, number = run.name.rpartition(" / ")
    title = tag("h1", None, text(recipe), span("number", f"run {number}"))
    status_line = tag("p", {"class": "when"}, span(f"pill {style}", status), text(f"last written {when}"))
    message_line = tag("p", {"class": f"message {style}"}, text(message)) if message else Html("")
    return tag("header", None, title, status_line, message_line)


def describe_status(run: RecordedRun) -> tuple[str, str]:
    """The status of the run as text, and its CSS class."""
    if run.result is None:
        return "running or killed", "fair"
    return STATUS.get(run.result.status, (run.result.status, "fair"))


def draw_tiles(run: RecordedRun) -> Html:
    """A line of tiles for each task, and one for the run."""
    lines = [_draw_task_tiles(run, task) for task in task_names(run)]
    return div("overview", *lines, tiles(_list_run_facts(run)))


def task_names(run: RecordedRun) -> tuple[str, ...]:
    """The tasks in their order in metrics.csv."""
    tested = list(run.result.test) if run.result else []
    return tuple(dict.fromkeys([*(curve.task for curve in run.curves), *tested]))


def final_metrics(run: RecordedRun, task: str) -> tuple[str, dict[str, float]]:
    """The final metrics and their split: test, else the last values of valid, lifetime or train."""
    tested = run.result.test.get(task, {}) if run.result else {}
    if tested:
        return "test", {name: math.nan if value is None else value for name, value in tested.items()}
    for split in ("test", "valid", "lifetime", "train"):
        values = {c.metric: r[-1].value for c, r in run.curves.items() if (c.task, c.split) == (task, split)}
        if values:
            return split, values
    return "", {}


def best_possible(run: RecordedRun, task: str, name: str) -> float | None:
    """The best possible value of a metric, known for synthetic data."""
    return run.result.ceiling.get(task, {}).get(name) if run.result else None


def best_samples(run: RecordedRun, task: str) -> float | None:
    """The number of samples at which the best model was saved."""
    best = run.result.best if run.result else None
    if best is None or best.task not in (task, ""):
        return None
    readings = run.curves.get(Curve(best.task, best.metric, best.split), ())
    return next((reading.samples for reading in readings if reading.step == best.step), None)


def _draw_task_tiles(run: RecordedRun, task: str) -> Html:
    split, values = final_metrics(run, task)
    names = sorted((name for name in values if name not in HIDDEN_METRICS), key=metric_position)[:MAX_TILES]
    if not names:
        return Html("")
    facts = [(find_metric(n).title, format_metric(values[n]), _compare_value(run, task, n, values[n])) for n in names]
    where = f"last {split}" if split != "test" else split
    head = tag("h3", None, text(task), span("split", where))
    return join([head, tiles(facts)])


def _compare_value(run: RecordedRun, task: str, name: str, value: float) -> str:
    """A reference for a value: its ceiling, the result of trees or of several seeds, or the recipe's; else a hint."""
    ceiling = best_possible(run, task, name)
    if is_finite(ceiling) and ceiling is not None:
        gap = abs(ceiling - value)
        return f"ceiling {format_metric(ceiling)}, gap {format_metric(gap)}"
    trees = run.baseline.test.get(name) if run.baseline is not None and run.baseline.task == task else None
    seeds = run.ensemble.test.get(task, {}).get(name) if run.ensemble is not None else None
    references = [f"LightGBM {format_metric(trees)}"] if trees is not None else []
    if run.ensemble is not None and seeds is not None:
        references.append(f"mean of {run.ensemble.runs} runs {format_metric(seeds)}")
    if references:
        return ", ".join(references)
    for source in ("expected", "published"):
        number = (getattr(run.result, source, None) or {}).get(name)
        if number is not None:
            return f"{source} {format_metric(number)}"
    return find_metric(name).hint


def _list_run_facts(run: RecordedRun) -> list[tuple[str, str, str]]:
    speed, wall, peak, samples, steps = run_totals(run)
    epochs = run.result.epochs if run.result else None
    epochs_text = f", {epochs:.3g} epoch{'s' * (epochs != 1)}" if epochs is not None and is_finite(epochs) else ""
    best = run.result.best if run.result else None
    facts = [
        ("Throughput", format_count(speed), "samples/s"),
        ("Wall time", format_duration(wall), ""),
        ("Peak memory", format_size(peak), ""),
        ("Steps", format_count(steps), f"{format_count(samples)} samples{epochs_text}"),
    ]
    staleness = run.settings.get("train.staleness", "0")
    if staleness != "0":
        facts.append(("Staleness", staleness, "newest steps whose row updates lookups may miss"))
    if best:
        value = f"{best.split} {find_metric(best.metric).title} {format_metric(best.value)}"
        facts.append(("Best", f"step {format_count(best.step)}", f"{value}, {best.task}"))
    return facts


def run_totals(run: RecordedRun) -> tuple[float | None, float | None, float | None, float | None, float | None]:
    """Samples/s, seconds, peak bytes, samples and steps of the result; missing values are taken from steps.csv."""
    columns = run.steps
    samples, seconds = _last_finite(columns.get("samples", ())), _last_finite(columns.get("time_s", ()))
    memory = [value for value in columns.get("memory_bytes", ()) if is_finite(value)]
    speed = samples / seconds if samples and seconds else None
    logged = (speed, seconds, max(memory, default=None), samples, _last_finite(columns.get("step", ())))
    result = run.result
    if result is None:
        return logged
    written = (result.samples_s, result.wall_s, result.peak_memory_bytes, result.samples, result.steps)
    speed, wall, peak, samples, steps = (b if a is None else a for a, b in zip(written, logged, strict=True))
    return speed, wall, peak, samples, steps


def _last_finite(values: tuple[float, ...]) -> float | None:
    return next((value for value in reversed(values) if is_finite(value)), None)


def draw_warnings(run: RecordedRun) -> Html:
    """Boxes for quarantined rows, warnings, and missing files."""
    boxes = []
    if run.result is not None and run.result.bad_rows:
        rows = pluralise(run.result.bad_rows, "row")
        boxes.append(draw_box(f"{rows} quarantined in bad_rows/", "aside", run.result.bad_reasons))
    if run.warnings:
        boxes.append(draw_box("Warnings", "warned", run.warnings))
    if run.notes:
        boxes.append(draw_box("Missing from this report", "missing", run.notes))
    return join(boxes)


def draw_box(title: str, style: str, lines: tuple[str, ...]) -> Html:
    items = [tag("li", None, text(line)) for line in lines[:40]]
    if len(lines) > 40:
        items.append(tag("li", None, text(f"and {len(lines) - 40} more")))
    return tag("section", {"class": f"box {style}"}, tag("h2", None, text(title)), tag("ul", None, *items))
