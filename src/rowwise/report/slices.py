"""The section with metrics for the values of features."""

from collections.abc import Sequence

from rowwise.base.quantity import format_count, format_metric, format_percent, is_finite
from rowwise.report.charts import draw_deviation_bar
from rowwise.report.markup import Html, cells, data_table, div, lead, note, section, tag, text
from rowwise.report.read import RecordedRun, RecordedSlice

MAX_VALUES = 16
MAX_FEATURES = 24
MIN_DISTANCE, MAX_DISTANCE = 0.02, 1.0  # bounds on the NE distance of a full bar
HEADERS = ("Value", "Samples", "Base rate", "NE", "", "AUC", "Calibration")
NOTE = (
    "NE is the log loss over that of always predicting the average of these rows. Bars show NE - 1: blue bars to the "
    "left are better than the average, red bars to the right are worse. Calibration is predicted over observed "
    "positives."
)


def draw_slices(run: RecordedRun) -> Html:
    """The section; empty without slices."""
    if not run.slices:
        return Html("")
    groups: dict[tuple[str, str], list[RecordedSlice]] = {}
    split = _choose_split(run.slices)
    for group in run.slices:
        if group.split == split:
            groups.setdefault((group.task, group.feature), []).append(group)
    distances = [abs(s.ne - 1) for group in groups.values() for s in group if is_finite(s.ne)]
    limit = min(max([*distances, MIN_DISTANCE]), MAX_DISTANCE)
    shown = list(groups.items())[:MAX_FEATURES]
    several = len({task for task, _ in groups}) > 1
    rendered = (
        _draw_table(f"{feature}, {task}" if several else feature, group, limit) for (task, feature), group in shown
    )
    omitted = len(groups) - len(shown)
    more = note(f"And {omitted} more features.") if omitted else Html("")
    intro = lead(f"Quality of the model on the {split or 'unnamed'} rows with one value of a column.")
    return section("slices", "Slices", intro, div("charts", *rendered), more, note(NOTE + _note_bin_error(run.slices)))


def _note_bin_error(slices: Sequence[RecordedSlice]) -> str:
    """A note of the error bound of binned AUCs."""
    bounds = [s.auc_bound for s in slices if is_finite(s.auc_bound) and s.auc_bound > 0]
    return f" AUC is approximate here, with an error of at most {max(bounds):.1g}." if bounds else ""


def _choose_split(slices: Sequence[RecordedSlice]) -> str:
    """The test split, else valid, else the first split."""
    splits = dict.fromkeys(s.split for s in slices)
    return next((split for split in ("test", "valid") if split in splits), next(iter(splits)))


def _draw_table(title: str, slices: Sequence[RecordedSlice], limit: float) -> Html:
    named = sorted((s for s in slices if s.value != "other"), key=lambda s: -s.count if is_finite(s.count) else 0.0)
    rest = [s for s in slices if s.value == "other"]
    shown = [*named[: MAX_VALUES - len(rest)], *rest]
    total = sum(s.count for s in slices if is_finite(s.count))
    omitted = len(slices) - len(shown)
    more = note(f"And {omitted} more values.") if omitted else Html("")
    grid = data_table(HEADERS, [_draw_row(s, total, limit) for s in shown], "slices")
    return div("slice", tag("h3", None, text(title)), grid, more)


def _draw_row(s: RecordedSlice, total: float, limit: float) -> Html:
    ne = format_metric(s.ne)
    bar = draw_deviation_bar("slice-ne", f"{s.feature} {s.value}: NE {ne}", s.ne - 1, limit)
    part = format_percent(s.count / total) if total and is_finite(s.count) else ""
    return tag(
        "tr",
        None,
        tag("th", {"scope": "row", **({"class": "rest"} if s.value == "other" else {})}, text(s.value)),
        tag("td", None, text(format_count(s.count)), tag("small", None, text(part))),
        *cells(format_metric(s.base_rate), ne),
        tag("td", {"class": "bars"}, bar),
        *cells(format_metric(s.auc), format_metric(s.calibration)),
    )
