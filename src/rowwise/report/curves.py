"""The section with curves of metrics over samples: for each task a chart of each metric."""

from rowwise.base.quantity import format_count, format_metric, is_finite
from rowwise.report.charts import Chart, ChartLevel, ChartLine, ChartMark, draw_chart
from rowwise.report.markup import Html, div, figure, join, note, section, span, tag, text
from rowwise.report.metric import find_metric, metric_position
from rowwise.report.overview import best_possible, best_samples, final_metrics, task_names
from rowwise.report.read import Curve, Reading, RecordedRun

SPLITS = {
    "train": ("rows of the newest batches, before they are learned from; mean and range", "grey"),
    "lifetime": ("all training rows so far, before they are learned from", "sky"),
    "valid": ("rows that are not trained on, which choose the best step", "blue"),
    "test": ("rows that neither train nor choose", "vermillion"),
}
SPLIT_ORDER = ("train", "lifetime", "valid", "test")


def draw_curves(run: RecordedRun) -> Html:
    sets = [_draw_task(run, task) for task in task_names(run)]
    if not any(sets):
        return section("curves", "Curves", note("metrics.csv has no values, so there is nothing to draw."))
    return section("curves", "Curves", *sets)


def _draw_task(run: RecordedRun, task: str) -> Html:
    names = metric_names(run, task)
    if not names:
        return Html("")
    splits = {curve.split for curve in run.curves if curve.task == task}
    splits |= {"test"} if run.result and run.result.test.get(task) else set()
    legend = div("legend", *(_draw_legend_entry(split) for split in sorted(splits, key=_split_position)))
    figures = (_draw_figure(run, task, name) for name in names)
    return join([tag("h3", None, text(task)), legend, _note_sample_counts(run, task), div("charts", *figures)])


def metric_names(run: RecordedRun, task: str) -> list[str]:
    """Metrics of a task in their order on the page, without counts."""
    names = dict.fromkeys(curve.metric for curve in run.curves if curve.task == task)
    return sorted((name for name in names if name not in ("count", "auc_bound")), key=_chart_position)


def _chart_position(name: str) -> float:
    # The loss comes first: the run minimises it.
    return -1 if name == "loss" else {"ne": -0.9, "auc": -0.8}.get(name, metric_position(name))


def _split_position(split: str) -> tuple[int, str]:
    return (SPLIT_ORDER.index(split) if split in SPLIT_ORDER else len(SPLIT_ORDER)), split


def _draw_legend_entry(split: str) -> Html:
    description, colour = SPLITS.get(split, ("", "vermillion"))
    shape = "diamond" if split == "test" else "swatch"
    label = f"{split}: {description}" if description else split
    return tag("span", {"class": "entry"}, span(f"{shape} {colour}", ""), text(label))


def _note_sample_counts(run: RecordedRun, task: str) -> Html:
    counts = [
        f"{curve.split} {format_count(readings[-1].value)}"
        for curve, readings in run.curves.items()
        if curve.task == task and curve.metric == "count" and curve.split in ("valid", "test")
    ]
    best = "" if best_samples(run, task) is None else " A dashed line marks the best step."
    return note(f"Rows: {', '.join(counts)}.{best}") if counts else Html("")


def _draw_figure(run: RecordedRun, task: str, name: str) -> Html:
    metric = find_metric(name)
    readings_by_split = {c.split: r for c, r in run.curves.items() if (c.task, c.metric) == (task, name)}
    splits = sorted(readings_by_split, key=_split_position)
    lines = [_make_line(split, readings_by_split[split]) for split in splits if split != "test"]
    mark = _make_test_mark(run, task, name)
    marks = [mark] if mark else []
    chart = Chart(
        key=name,
        label=_describe_curve(run, task, name),
        lines=lines,
        marks=marks,
        levels=_make_levels(run, task, name),
        rule=best_samples(run, task),
    )
    ends = [_draw_last_value(line) for line in lines if line.name == "valid"]
    ends += [span("vermillion end", f"test {format_metric(m.point[1])}") for m in marks]
    remarks = span("hint", metric.hint), tag("span", {"class": "ends"}, *ends)
    return figure(metric.title, join([draw_chart(chart), _note_undrawn(readings_by_split)]), *remarks)


def _make_line(split: str, readings: tuple[Reading, ...]) -> ChartLine:
    _, colour = SPLITS.get(split, ("", "purple"))
    points = [(reading.samples, reading.value) for reading in readings]
    running = split in ("train", "lifetime")
    dots, spread = not running, split == "train"
    return ChartLine(name=split, points=points, colour=colour, thin=running, noisy=running, spread=spread, dots=dots)


def _make_test_mark(run: RecordedRun, task: str, name: str) -> ChartMark | None:
    split, values = final_metrics(run, task)
    readings = run.curves.get(Curve(task, name, "test"), ())
    value = readings[-1].value if readings else values.get(name, float("nan"))
    if not is_finite(value) or (split != "test" and not readings):
        return None
    last_samples = [r[-1].samples for c, r in run.curves.items() if c.task == task]
    samples = readings[-1].samples if readings else max(last_samples, default=0.0)
    return ChartMark(name="test", point=(samples, value), colour="vermillion")


def _make_levels(run: RecordedRun, task: str, name: str) -> list[ChartLevel]:
    metric, ceiling = find_metric(name), best_possible(run, task, name)
    levels = [ChartLevel(name="ceiling", value=ceiling)] if ceiling is not None and is_finite(ceiling) else []
    if metric.level is not None:
        levels.append(
            ChartLevel(
                name=metric.level_name, value=metric.level, extends_axis=metric.better == "one", label_right=True
            )
        )
    return levels


def _draw_last_value(line: ChartLine) -> Html:
    known = [y for _, y in line.points if is_finite(y)]
    return span(f"{line.colour} end", f"{line.name} {format_metric(known[-1] if known else None)}")


def _describe_curve(run: RecordedRun, task: str, name: str) -> str:
    split, values = final_metrics(run, task)
    return f"{find_metric(name).title} of {task} over samples; {split} ends at {format_metric(values.get(name))}"


def _note_undrawn(readings_by_split: dict[str, tuple[Reading, ...]]) -> Html:
    undrawn = {split: sum(not is_finite(r.value) for r in readings) for split, readings in readings_by_split.items()}
    counts = ", ".join(f"{count} of {split}" for split, count in undrawn.items() if count)
    return note(f"Not drawn, as not a number: {counts}.") if counts else Html("")
