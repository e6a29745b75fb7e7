"""The section that compares predicted with observed rates on the test rows."""

from rowwise.base.quantity import format_count, format_percent, is_finite
from rowwise.report.charts import Chart, ChartLine, draw_chart
from rowwise.report.markup import Html, div, figure, note, section, span
from rowwise.report.read import RecordedRates, RecordedRun

NOTE = (
    "Test rows in ten groups by their predicted probability, with the lowest on the left. On the grey line the rate of "
    "positives is what the model predicts. Points above it: the model predicts too little there; below it: too much."
)


def draw_reliability(run: RecordedRun) -> Html:
    """The section; empty for a run without a test."""
    by_task: dict[str, list[RecordedRates]] = {}
    for one in run.rates:
        if is_finite(one.predicted) and is_finite(one.observed):
            by_task.setdefault(one.task, []).append(one)
    if not by_task:
        return Html("")
    figures = [_draw_figure(task, groups) for task, groups in by_task.items()]
    return section("reliability", "Predicted and observed rates", div("charts", *figures), note(NOTE))


def _draw_figure(task: str, groups: list[RecordedRates]) -> Html:
    points = sorted((100 * one.predicted, 100 * one.observed) for one in groups)
    low, high = (pick(x for point in points for x in point) for pick in (min, max))
    lines = [
        ChartLine(name="as predicted", points=[(low, low), (high, high)], colour="grey", thin=True),
        ChartLine(name=task, points=points, colour="blue", dots=True),
    ]
    count = sum(one.count for one in groups if is_finite(one.count))
    farthest = max(groups, key=lambda one: abs(one.predicted - one.observed))
    said = f"{format_percent(farthest.predicted)} predicted, {format_percent(farthest.observed)} observed"
    chart = Chart(key="reliability", label=f"{task}: {said}", lines=lines, x_title="% predicted", from_zero=True)
    hint = span("hint", f"% observed, of {format_count(count)} rows"), span("ends", f"farthest: {said}")
    return figure(task, draw_chart(chart), *hint)
