"""How well the model does, over the samples it has seen: a set of charts for each task, one chart for each metric."""

from rowwise import quantity
from rowwise.report.charts import Chart, ChartLevel, ChartLine, ChartMark, draw
from rowwise.report.markup import Html, div, join, note, section, span, tag, text
from rowwise.report.metric import metric, order
from rowwise.report.overview import best_samples, final, limit, tasks
from rowwise.report.read import Curve, Reading, RecordedRun

SPLITS = {
    "train": ("newest batches, mean and range", "grey"),
    "lifetime": ("all samples so far", "sky"),
    "valid": ("", "blue"),
}
ORDER = ("train", "lifetime", "valid", "test")


def curves(run: RecordedRun) -> Html:
    sets = [_task(run, task) for task in tasks(run)]
    if not any(sets):
        return section("curves", "Curves", note("metrics.csv has no values, so there is nothing to draw."))
    return section("curves", "Curves", *sets)


def _task(run: RecordedRun, task: str) -> Html:
    names = metrics_of(run, task)
    if not names:
        return Html("")
    splits = {curve.split for curve in run.curves if curve.task == task}
    splits |= {"test"} if run.result and run.result.test.get(task) else set()
    legend = div("legend", *(_legend(split) for split in sorted(splits, key=_split_order)))
    figures = (_figure(run, task, name) for name in names)
    return join([tag("h3", None, text(task)), legend, _counts(run, task), div("charts", *figures)])


def metrics_of(run: RecordedRun, task: str) -> list[str]:
    """What was measured, as it is shown; counts are told in words."""
    names = dict.fromkeys(curve.metric for curve in run.curves if curve.task == task)
    return sorted((name for name in names if name not in ("count", "auc_bound")), key=_curve_order)


def _curve_order(name: str) -> float:
    # Here the loss comes first: it is what the run minimises.
    return -1 if name == "loss" else {"ne": -0.9, "auc": -0.8}.get(name, order(name))


def _split_order(split: str) -> tuple[int, str]:
    return (ORDER.index(split) if split in ORDER else len(ORDER)), split


def _legend(split: str) -> Html:
    said, colour = SPLITS.get(split, ("", "vermillion"))
    shape = "diamond" if split == "test" else "swatch"
    return tag("span", {"class": "entry"}, span(f"{shape} {colour}", ""), text(f"{split}{f': {said}' if said else ''}"))


def _counts(run: RecordedRun, task: str) -> Html:
    said = [
        f"{curve.split} {quantity.count(readings[-1].value)}"
        for curve, readings in run.curves.items()
        if curve.task == task and curve.metric == "count" and curve.split in ("valid", "test")
    ]
    return note(f"Samples that the metrics are of: {', '.join(said)}.") if said else Html("")


def _figure(run: RecordedRun, task: str, name: str) -> Html:
    found = metric(name)
    of = {c.split: r for c, r in run.curves.items() if (c.task, c.metric) == (task, name)}
    lines = [_line(split, of[split]) for split in sorted(of, key=_split_order) if split != "test"]
    mark = _test(run, task, name)
    marks = [mark] if mark else []
    chart = Chart(
        key=name,
        label=_label(run, task, name),
        lines=lines,
        marks=marks,
        levels=_levels(run, task, name),
        rule=best_samples(run, task),
    )
    ends = [_end(line) for line in lines if line.name == "valid"]
    ends += [span("vermillion end", f"test {quantity.number(m.point[1])}") for m in marks]
    caption = tag(
        "figcaption",
        None,
        tag("b", None, text(found.title)),
        span("hint", found.hint),
        tag("span", {"class": "ends"}, *ends),
    )
    return tag("figure", {"class": "chart"}, caption, draw(chart), _unusable(of))


def _line(split: str, readings: tuple[Reading, ...]) -> ChartLine:
    _, colour = SPLITS.get(split, ("", "purple"))
    points = [(reading.samples, reading.value) for reading in readings]
    running = split in ("train", "lifetime")
    dots, spread = not running, split == "train"
    return ChartLine(name=split, points=points, colour=colour, thin=running, noisy=running, spread=spread, dots=dots)


def _test(run: RecordedRun, task: str, name: str) -> ChartMark | None:
    split, values = final(run, task)
    readings = run.curves.get(Curve(task, name, "test"), ())
    value = readings[-1].value if readings else values.get(name, float("nan"))
    if not quantity.usable(value) or (split != "test" and not readings):
        return None
    places = [r[-1].samples for c, r in run.curves.items() if c.task == task]
    place = readings[-1].samples if readings else max(places, default=0.0)
    return ChartMark(name="test", point=(place, value), colour="vermillion")


def _levels(run: RecordedRun, task: str, name: str) -> list[ChartLevel]:
    found, ceiling = metric(name), limit(run, task, name)
    levels = [ChartLevel(name="ceiling", value=ceiling)] if ceiling is not None and quantity.usable(ceiling) else []
    if found.level is not None:
        levels.append(ChartLevel(name=found.level_name, value=found.level, wanted=found.better == "one", late=True))
    return levels


def _end(line: ChartLine) -> Html:
    known = [y for _, y in line.points if quantity.usable(y)]
    return span(f"{line.colour} end", f"{line.name} {quantity.number(known[-1] if known else None)}")


def _label(run: RecordedRun, task: str, name: str) -> str:
    split, values = final(run, task)
    return f"{metric(name).title} of {task} over samples; {split} ends at {quantity.number(values.get(name))}"


def _unusable(of: dict[str, tuple[Reading, ...]]) -> Html:
    odd = {split: sum(not quantity.usable(r.value) for r in readings) for split, readings in of.items()}
    said = ", ".join(f"{count} of {split}" for split, count in odd.items() if count)
    return note(f"Not a number, so not drawn: {said}.") if said else Html("")
