"""The section of `rowwise explain`: importance and drift of features, effects of ids, calibration."""

from collections.abc import Mapping, Sequence

from rowwise.base.quantity import format_count, format_metric, format_percent
from rowwise.base.records import Dependence, Drift, IdEffect, Importance, ModelExplanation
from rowwise.report.charts import Chart, ChartLine, draw_chart, draw_deviation_bar, draw_strip
from rowwise.report.markup import Html, cells, data_table, div, lead, legend, note, row, section, tag, text
from rowwise.report.read import RecordedRun

MAX_FEATURES, MAX_IDS, MAX_SLICES = 40, 40, 20
NOTE = (
    "Importance: the rise of the log loss when the values of a column are shuffled among the rows (permutation "
    "importance); the light end of a bar is one standard deviation over the repeats to either side. Correlated columns "
    "share their importance. Drift: the difference of values between training rows and these rows (population "
    "stability index), and its expectation by chance; above 0.1 it usually needs attention. Ids: the effect of an id "
    "on the prediction of its rows, as mean change of the logit compared with other ids of its column, with its "
    "standard error. Calibration: observed minus predicted positives, in standard deviations of chance; beyond 3, "
    "chance is unlikely."
)


def draw_explanation(run: RecordedRun) -> Html:
    """The section; empty before `rowwise explain`."""
    explained = run.explanation
    if explained is None or not explained.importance:
        return Html("")
    task, loss = explained.task, format_metric(explained.loss)
    summary = (
        f"By {format_count(explained.rows)} rows, where the log loss of {task} is {loss}, and "
        f"by {format_count(explained.train_rows)} rows of the training."
    )
    parts = [
        lead(summary),
        legend(("blue", "importance"), ("sky", "one deviation to either side")),
        _draw_importance(explained.importance, {drift.feature: drift for drift in explained.drift}),
    ]
    if explained.dependence:
        charts = (_draw_dependence(dependence, task) for dependence in explained.dependence)
        parts += [tag("h3", None, text("Mean probability by the value of a number")), div("charts", *charts)]
    if explained.ids:
        parts += [tag("h3", None, text("Strongest ids")), _draw_ids(explained.ids, explained.names)]
    if explained.calibration:
        parts += [tag("h3", None, text("Farthest from calibrated")), _draw_slices(explained)]
    return section("explanation", "What the model has learned from", *parts, note(NOTE))


def _draw_importance(features: Sequence[Importance], drifts: Mapping[str, Drift]) -> Html:
    longest = max(feature.loss + feature.spread for feature in features)
    rows = []
    for feature in features[:MAX_FEATURES]:
        name, loss, spread, drift = feature.feature, feature.loss, feature.spread, drifts.get(feature.feature)
        label = f"{name}: {format_metric(loss)}"
        bar = draw_strip("importance", label, ((loss - spread, "blue"), (2 * spread, "sky")), longest)
        values = [f"{loss:+.4f}", f"{spread:.4f}"]
        values += [f"{drift.index:.3f}", f"{drift.chance:.3f}"] if drift else []
        rows.append(row(name, "", tag("td", {"class": "bars"}, bar), *cells(*values)))
    omitted = len(features) - MAX_FEATURES
    more = note(f"And {omitted} more features.") if omitted > 0 else Html("")
    headers = ("Feature", "", "Log loss without it", "Deviation", "Drift", "By chance")
    return div("slice", data_table(headers, rows, "slices"), more)


def _draw_dependence(dependence: Dependence, task: str) -> Html:
    points = list(zip(dependence.values, dependence.probability, strict=True))
    line = ChartLine(name=task, points=points, colour="blue", dots=True)
    chart = Chart(key="dependence", label=dependence.feature, lines=(line,), x_title=dependence.feature)
    return tag("figure", None, tag("figcaption", None, text(dependence.feature)), draw_chart(chart))


def _draw_ids(effects: Sequence[IdEffect], names: Mapping[str, Mapping[str, str]]) -> Html:
    ranked = sorted(effects, key=lambda effect: effect.error - abs(effect.logit))[:MAX_IDS]
    limit = max(abs(effect.logit) for effect in ranked)
    rows = []
    for effect in ranked:
        feature, logit, id_ = effect.feature, effect.logit, str(effect.id)
        name = names.get(feature, {}).get(id_, id_)
        bar = draw_deviation_bar("id-effect", f"{feature} {name}: {logit:+.3f}", logit, limit)
        values = f"{logit:+.3f} \u00b1 {effect.error:.3f}", format_count(effect.rows)
        rows.append(row(name, feature, tag("td", {"class": "bars"}, bar), *cells(*values)))
    return div("slice", data_table(("Id", "", "Logit", "Rows"), rows, "slices"))


def _draw_slices(explained: ModelExplanation) -> Html:
    slices = explained.calibration[:MAX_SLICES]
    limit = max(max(abs(part.deviations) for part in slices), 1.0)
    rows = []
    for part in slices:
        name = explained.names.get(part.feature, {}).get(part.value, part.value)
        bar = draw_deviation_bar("calibration", f"{part.feature} {name}", part.deviations, limit)
        rates = format_percent(part.predicted), format_percent(part.observed)
        values = (*rates, f"{part.deviations:+.1f}", format_count(part.rows))
        rows.append(row(name, part.feature, tag("td", {"class": "bars"}, bar), *cells(*values)))
    return div("slice", data_table(("Value", "", "Predicted", "Observed", "Deviations", "Rows"), rows, "slices"))
