"""The section of what a model has learned from, of `rowwise explain`."""

from collections.abc import Mapping, Sequence

from rowwise.base.quantity import format_count, format_metric, format_percent
from rowwise.base.records import Dependence, Drift, IdEffect, Importance, ModelExplanation
from rowwise.report.charts import Chart, ChartLine, draw_chart, draw_deviation_bar, draw_strip
from rowwise.report.markup import Html, cells, data_table, div, lead, legend, note, row, section, tag, text
from rowwise.report.read import RecordedRun

MAX_FEATURES, MAX_IDS, MAX_SLICES = 40, 40, 20
NOTE = (
    "Importance: how much the log loss rises when the values of a column are shuffled among the rows (permutation "
    "importance); the light end of a bar is one standard deviation over the repeats to either side. Columns that say "
    "the same share their importance. Drift: how much the values differ between training rows and these rows "
    "(population stability index), beside what chance alone makes of it; above 0.1 it is usually worth a look. Ids: "
    "how an id moves the prediction of its rows, as a mean change of the logit beside other ids of its column, with "
    "its standard error. Calibration: observed less predicted positives, in standard deviations of chance; beyond 3 "
    "it is hardly chance."
)


def draw_explanation(run: RecordedRun) -> Html:
    """The section; empty before `rowwise explain`."""
    found = run.explanation
    if found is None or not found.importance:
        return Html("")
    said = (
        f"By {format_count(found.rows)} rows, where the log loss of {found.task} is {format_metric(found.loss)}, and "
        f"by {format_count(found.train_rows)} rows of the training."
    )
    parts = [
        lead(said),
        legend(("blue", "importance"), ("sky", "one deviation to either side")),
        _draw_importance(found.importance, {one.feature: one for one in found.drift}),
    ]
    if found.dependence:
        charts = (_draw_dependence(one, found.task) for one in found.dependence)
        parts += [tag("h3", None, text("Mean probability by the value of a number")), div("charts", *charts)]
    if found.ids:
        parts += [tag("h3", None, text("Strongest ids")), _draw_ids(found.ids, found.names)]
    if found.calibration:
        parts += [tag("h3", None, text("Farthest from calibrated")), _draw_slices(found)]
    return section("explanation", "What the model has learned from", *parts, note(NOTE))


def _draw_importance(found: Sequence[Importance], drift: Mapping[str, Drift]) -> Html:
    most = max(one.loss + one.spread for one in found)
    rows = []
    for one in found[:MAX_FEATURES]:
        moved = drift.get(one.feature)
        label = f"{one.feature}: {format_metric(one.loss)}"
        bar = draw_strip("importance", label, ((one.loss - one.spread, "blue"), (2 * one.spread, "sky")), most)
        values = [f"{one.loss:+.4f}", f"{one.spread:.4f}"]
        values += [f"{moved.index:.3f}", f"{moved.chance:.3f}"] if moved else []
        rows.append(row(one.feature, "", tag("td", {"class": "bars"}, bar), *cells(*values)))
    left = len(found) - MAX_FEATURES
    more = note(f"And {left} more features.") if left > 0 else Html("")
    headers = ("Feature", "", "Log loss without it", "Deviation", "Drift", "By chance")
    return div("slice", data_table(headers, rows, "slices"), more)


def _draw_dependence(found: Dependence, task: str) -> Html:
    points = list(zip(found.values, found.probability, strict=True))
    line = ChartLine(name=task, points=points, colour="blue", dots=True)
    chart = Chart(key="dependence", label=found.feature, lines=(line,), x_title=found.feature)
    return tag("figure", None, tag("figcaption", None, text(found.feature)), draw_chart(chart))


def _draw_ids(found: Sequence[IdEffect], names: Mapping[str, Mapping[str, str]]) -> Html:
    ranked = sorted(found, key=lambda one: one.error - abs(one.logit))[:MAX_IDS]
    most = max(abs(one.logit) for one in ranked)
    rows = []
    for one in ranked:
        name = names.get(one.feature, {}).get(str(one.id), str(one.id))
        bar = draw_deviation_bar("id-effect", f"{one.feature} {name}: {one.logit:+.3f}", one.logit, most)
        values = f"{one.logit:+.3f} \u00b1 {one.error:.3f}", format_count(one.rows)
        rows.append(row(name, one.feature, tag("td", {"class": "bars"}, bar), *cells(*values)))
    return div("slice", data_table(("Id", "", "Logit", "Rows"), rows, "slices"))


def _draw_slices(found: ModelExplanation) -> Html:
    shown = found.calibration[:MAX_SLICES]
    most = max(max(abs(one.deviations) for one in shown), 1.0)
    rows = []
    for one in shown:
        name = found.names.get(one.feature, {}).get(one.value, one.value)
        bar = draw_deviation_bar("calibration", f"{one.feature} {name}", one.deviations, most)
        rates = format_percent(one.predicted), format_percent(one.observed)
        values = (*rates, f"{one.deviations:+.1f}", format_count(one.rows))
        rows.append(row(name, one.feature, tag("td", {"class": "bars"}, bar), *cells(*values)))
    return div("slice", data_table(("Value", "", "Predicted", "Observed", "Deviations", "Rows"), rows, "slices"))
