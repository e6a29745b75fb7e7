"""The section that compares predicted with observed rates on the test rows."""

from rowwise.base.quantity import format_count, format_percent, is_finite
from rowwise.report.charts import Chart, ChartLine, draw_chart
from rowwise.report.markup import Html, div, figure, note, section, span
from rowwise.report.read import RecordedRates, RecordedRun

NOTE = (
    "Test rows in ten groups by their predicted probability, with the lowest on the left. On the grey line predicted "
    "and observed rates are equal. Above it the model predicts too low a rate; below it, too high a rate."
)


def draw_reliability(run: RecordedRun) -> Html:
    """The section; empty for a run without a test."""
    by_task: dict[str, list[RecordedRates]] = {}
    for group in run.rates:
        if is_finite(group.predicted) and is_finite(group.observed):
            by_task.setdefault(group.task, []).append(group)
    if not by_task:
        return Html("")
    figures = [_draw_figure(task, groups) for task, groups in by_task.items()]
    return section("reliability", "Predicted and observed rates", div("charts", *figures), note(NOTE))


def _draw_figure(task: str, groups: list[RecordedRates]) -> Html:
    points = sorted((100 * group.predicted, 100 * group.observed) for group in groups)
    low, high = (pick(x for point in points for x in point) for pick in (min, max))
    lines = [
        ChartLine(name="as predicted", points=[(low, low), (high, high)], colour="grey", thin=True),
        ChartLine(name=task, points=points, colour="blue", dots=True),
    ]
    count = sum(group.count for group in groups if is_finite(group.count))
    worst = max(groups, key=lambda group: abs(group.predicted - group.observed))
    summary = f"{format_percent(worst.predicted)} predicted, {format_percent(worst.observed)} observed"
    chart = Chart(key="reliability", label=f"{task}: {summary}", lines=lines, x_title="% predicted", from_zero=True)
    remarks = span("hint", f"% observed, of {format_count(count)} rows"), span("ends", f"largest difference: {summary}")
    return figure(task, draw_chart(chart), *remarks)
