"""The top of a report: the run's name and status, its main numbers, and its warnings."""

import math

from rowwise import quantity
from rowwise.report.markup import Html, div, join, span, tag, text
from rowwise.report.metric import metric, order
from rowwise.report.read import Curve, RecordedRun

STATUS = {  # words, and CSS class
    "finished": ("finished", "good"),
    "stopped": ("stopped early", "fair"),
    "failed": ("failed", "bad"),
}
HIDDEN_METRICS = frozenset({"count", "base_rate", "auc_bound"})  # facts of the data, and error bounds
MOST_TILES = 6


def header(run: RecordedRun) -> Html:
    word, look = status(run)
    when = run.changed.strftime("%Y-%m-%d %H:%M UTC")
    message = "No result yet: the run is still going, or it was killed."
    if run.result is not None:
        message = run.result.message or ""
    recipe, _, number = run.name.rpartition(" / ")
    title = tag("h1", None, text(recipe), span("number", f"run {number}"))
    line = tag("p", {"class": "when"}, span(f"pill {look}", word), text(f"last written {when}"))
    said = tag("p", {"class": f"message {look}"}, text(message)) if message else Html("")
    return tag("header", None, title, line, said)


def status(run: RecordedRun) -> tuple[str, str]:
    """The end of the run in words, and its CSS class."""
    if run.result is None:
        return "running or killed", "fair"
    return STATUS.get(run.result.status, (run.result.status, "fair"))


def tiles(run: RecordedRun) -> Html:
    """A line of tiles for each task, and one for the run."""
    lines = [_task_tiles(run, task) for task in tasks(run)]
    return div("overview", *lines, div("tiles", *(_tile(*facts) for facts in _run_facts(run))))


def tasks(run: RecordedRun) -> tuple[str, ...]:
    """The tasks in their order in metrics.csv."""
    tested = list(run.result.test) if run.result else []
    return tuple(dict.fromkeys([*(curve.task for curve in run.curves), *tested]))


def final_metrics(run: RecordedRun, task: str) -> tuple[str, dict[str, float]]:
    """The final metrics and their split: test, else the last values of valid, lifetime or train."""
    tested = run.result.test.get(task, {}) if run.result else {}
    if tested:
        return "test", {name: math.nan if value is None else value for name, value in tested.items()}
    for split in ("test", "valid", "lifetime", "train"):
        found = {c.metric: r[-1].value for c, r in run.curves.items() if (c.task, c.split) == (task, split)}
        if found:
            return split, found
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


def _task_tiles(run: RecordedRun, task: str) -> Html:
    split, values = final_metrics(run, task)
    names = sorted((name for name in values if name not in HIDDEN_METRICS), key=order)[:MOST_TILES]
    if not names:
        return Html("")
    made = (_tile(metric(n).title, quantity.number(values[n]), _compare_value(run, task, n, values[n])) for n in names)
    where = f"last {split}" if split != "test" else split
    head = tag("h3", None, text(task), span("split", where))
    return join([head, div("tiles", *made)])


def _compare_value(run: RecordedRun, task: str, name: str, value: float) -> str:
    """The best possible value, that of trees on the same rows, the expected one, or which direction is better."""
    ceiling = best_possible(run, task, name)
    if quantity.usable(ceiling) and ceiling is not None:
        gap = abs(ceiling - value)
        return f"ceiling {quantity.number(ceiling)}, gap {quantity.number(gap)}"
    trees = run.baseline.test.get(name) if run.baseline is not None and run.baseline.task == task else None
    if trees is not None:
        return f"LightGBM {quantity.number(trees)}"
    expected = (run.result.expected or {}).get(name) if run.result else None
    if expected is not None:
        return f"expected {quantity.number(expected)}"
    return metric(name).hint


def _run_facts(run: RecordedRun) -> list[tuple[str, str, str]]:
    speed, wall, peak, samples, steps = totals(run)
    epochs = run.result.epochs if run.result else None
    passes = f", {epochs:.3g} epoch{'s' * (epochs != 1)}" if epochs is not None and quantity.usable(epochs) else ""
    best = run.result.best if run.result else None
    facts = [
        ("Throughput", quantity.count(speed), "samples/s"),
        ("Wall time", quantity.duration(wall), ""),
        ("Peak memory", quantity.size(peak), ""),
        ("Steps", quantity.count(steps), f"{quantity.count(samples)} samples{passes}"),
    ]
    if best:
        value = f"{best.split} {metric(best.metric).title} {quantity.number(best.value)}"
        facts.append(("Best", f"step {quantity.count(best.step)}", f"{value}, {best.task}"))
    return facts


def totals(run: RecordedRun) -> tuple[float | None, float | None, float | None, float | None, float | None]:
    """Samples/s, seconds, peak bytes, samples and steps of the result; what it lacks is taken from steps.csv."""
    column = run.steps
    samples, spent = _last(column.get("samples", ())), _last(column.get("time_s", ()))
    memory = [value for value in column.get("memory_bytes", ()) if quantity.usable(value)]
    speed = samples / spent if samples and spent else None
    logged = (speed, spent, max(memory, default=None), samples, _last(column.get("step", ())))
    if run.result is None:
        return logged
    r = run.result
    return (
        logged[0] if r.samples_s is None else r.samples_s,
        logged[1] if r.wall_s is None else r.wall_s,
        logged[2] if r.peak_memory_bytes is None else r.peak_memory_bytes,
        logged[3] if r.samples is None else r.samples,
        logged[4] if r.steps is None else r.steps,
    )


def _last(values: tuple[float, ...]) -> float | None:
    return next((value for value in reversed(values) if quantity.usable(value)), None)


def _tile(name: str, value: str, beside: str) -> Html:
    return div("tile", span("name", name), span("value", value), span("beside", beside))


def warnings(run: RecordedRun) -> Html:
    """Boxes for quarantined rows, warnings, and missing files."""
    boxes = []
    if run.result is not None and run.result.bad_rows:
        boxes.append(_box(f"{_rows(run.result.bad_rows)} quarantined in bad_rows/", "aside", run.result.bad_reasons))
    if run.warnings:
        boxes.append(_box("Warnings", "warned", run.warnings))
    if run.notes:
        boxes.append(_box("Missing from this report", "missing", run.notes))
    return join(boxes)


def _rows(count: float) -> str:
    return f"{count:,.0f} row{'s' * (count != 1)}"


def _box(title: str, look: str, lines: tuple[str, ...]) -> Html:
    shown = [tag("li", None, text(line)) for line in lines[:40]]
    if len(lines) > 40:
        shown.append(tag("li", None, text(f"and {len(lines) - 40} more")))
    return tag("section", {"class": f"box {look}"}, tag("h2", None, text(title)), tag("ul", None, *shown))
