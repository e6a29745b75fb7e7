"""Where the model does well and where it does not: its metrics for the values of a feature."""

from collections.abc import Sequence

from rowwise import quantity
from rowwise.quantity import usable
from rowwise.report.charts import diverging_bar
from rowwise.report.markup import Html, div, join, note, section, tag, text
from rowwise.report.read import RecordedRun, RecordedSlice

MOST_VALUES = 16
MOST_FEATURES = 24
LEAST, MOST = 0.02, 1.0  # of what the bars are long for
HEADS = ("Value", "Samples", "Base rate", "NE", "", "AUC", "Calibration")
NOTE = (
    "The bar is the normalised entropy's distance from 1, which is that of a model knowing the base rate alone: "
    "blue to the left is better than that, red to the right is worse."
)


def slices(run: RecordedRun) -> Html:
    """The section; empty for a run without slices."""
    if not run.slices:
        return Html("")
    groups: dict[tuple[str, str], list[RecordedSlice]] = {}
    split = _split(run.slices)
    for found in run.slices:
        if found.split == split:
            groups.setdefault((found.task, found.feature), []).append(found)
    distances = [abs(s.ne - 1) for found in groups.values() for s in found if usable(s.ne)]
    most = min(max([*distances, LEAST]), MOST)
    shown = list(groups.items())[:MOST_FEATURES]
    several = len({task for task, _ in groups}) > 1
    made = (_table(f"{feature}, {task}" if several else feature, found, most) for (task, feature), found in shown)
    left = len(groups) - len(shown)
    more = note(f"And {left} more features.") if left else Html("")
    said = tag("p", {"class": "lead"}, text(f"Metrics of the {split or 'unnamed'} split by the values of a feature."))
    return section("slices", "Slices", said, div("charts", *made), more, note(NOTE + _bound(run.slices)))


def _bound(found: Sequence[RecordedSlice]) -> str:
    """How far the AUCs may be off, where they were binned."""
    bounds = [s.auc_bound for s in found if usable(s.auc_bound) and s.auc_bound > 0]
    return f" AUC is binned, and at most {max(bounds):.1g} off." if bounds else ""


def _split(found: Sequence[RecordedSlice]) -> str:
    """The split that says most about what is to come."""
    splits = dict.fromkeys(s.split for s in found)
    return next((split for split in ("test", "valid") if split in splits), next(iter(splits)))


def _table(title: str, found: Sequence[RecordedSlice], most: float) -> Html:
    named = sorted((s for s in found if s.value != "other"), key=lambda s: -s.count if usable(s.count) else 0.0)
    rest = [s for s in found if s.value == "other"]
    shown = [*named[: MOST_VALUES - len(rest)], *rest]
    whole = sum(s.count for s in found if usable(s.count))
    head = tag("tr", None, *(tag("th", None, text(name)) for name in HEADS))
    body = join(_row(s, whole, most) for s in shown)
    left = len(found) - len(shown)
    more = note(f"And {left} more values.") if left else Html("")
    grid = tag("table", {"class": "slices"}, tag("thead", None, head), tag("tbody", None, body))
    return div("slice", tag("h3", None, text(title)), div("wide", grid), more)


def _row(s: RecordedSlice, whole: float, most: float) -> Html:
    ne = quantity.number(s.ne)
    bar = diverging_bar("slice-ne", f"{s.feature} {s.value}: NE {ne}", s.ne - 1, most)
    part = quantity.share(s.count / whole) if whole and usable(s.count) else ""
    return tag(
        "tr",
        None,
        tag("th", {"scope": "row", **({"class": "rest"} if s.value == "other" else {})}, text(s.value)),
        tag("td", None, text(quantity.count(s.count)), tag("small", None, text(part))),
        tag("td", None, text(quantity.number(s.base_rate))),
        tag("td", None, text(ne)),
        tag("td", {"class": "bars"}, bar),
        tag("td", None, text(quantity.number(s.auc))),
        tag("td", None, text(quantity.number(s.calibration))),
    )
