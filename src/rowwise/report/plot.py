"""The empty chart: its place on the page, its scales, its axes, and the attributes by which the script finds values.

Colours and type sizes are the page's (page.css); here are lengths only, in units of the drawing.
"""

from dataclasses import dataclass

from rowwise.report.markup import Html, join, tag, text
from rowwise.report.scale import Scale, inside, tick_labels, ticks, widen_range

WIDTH, HEIGHT = 480.0, 262.0
TOP, RIGHT, BOTTOM = 14.0, 14.0, 40.0
LETTER = 7.9  # the width of a digit where type is largest, on a phone


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Two scales and their ticks."""

    x: Scale
    y: Scale
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_title: str
    unit: str


def plot(x_range: tuple[float, float], y_range: tuple[float, float], x_title: str, unit: str) -> Plot:
    """Axes for values in these ranges; the vertical one is made longer, to its next ticks."""
    y_ticks = ticks(*y_range)
    labels = tick_labels(y_ticks, unit)
    left = 10 + LETTER * max(4, *(len(label) for label in labels))
    x_low, x_high = widen_range(*x_range)
    return Plot(
        x=Scale(low=x_low, high=x_high, begin=left, end=WIDTH - RIGHT),
        y=Scale(low=y_ticks[0], high=y_ticks[-1], begin=HEIGHT - BOTTOM, end=TOP),
        x_ticks=inside(x_low, x_high),
        y_ticks=y_ticks,
        x_title=x_title,
        unit=unit,
    )


def axes(area: Plot) -> Html:
    """Grid, ticks and their labels."""
    left, right, bottom = area.x.begin, area.x.end, area.y.begin
    parts = []
    for value, label in zip(area.y_ticks, tick_labels(area.y_ticks, area.unit), strict=True):
        y = area.y.at(value)
        parts.append(tag("line", {"class": "grid", "x1": left, "x2": right, "y1": y, "y2": y}))
        parts.append(tag("text", {"x": left - 7, "y": y + 4, "text-anchor": "end"}, text(label)))
    for value, label in zip(area.x_ticks, tick_labels(area.x_ticks), strict=True):
        x = area.x.at(value)
        parts.append(tag("line", {"class": "tick", "x1": x, "x2": x, "y1": bottom, "y2": bottom + 4}))
        parts.append(tag("text", {"x": x, "y": bottom + 18, "text-anchor": "middle"}, text(label)))
    parts.append(tag("line", {"class": "axis", "x1": left, "x2": right, "y1": bottom, "y2": bottom}))
    title = {"class": "title", "x": right, "y": HEIGHT - 5, "text-anchor": "end"}
    return join([*parts, tag("text", title, text(area.x_title))])


def drawing(area: Plot, key: str, label: str, kind: str, *inside: Html) -> Html:
    """The `svg` element; its scales travel along for the script."""
    x, y = area.x, area.y
    attributes = {
        "role": "img",
        "aria-label": label,
        "data-chart": key,
        "data-kind": kind,
        "data-unit": area.unit,
        "data-xtitle": area.x_title,
        "data-x": f"{x.low!r} {x.high!r} {x.begin:.2f} {x.end:.2f}",
        "data-y": f"{y.low!r} {y.high!r} {y.begin:.2f} {y.end:.2f}",
        "viewBox": f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
    }
    return tag("svg", attributes, *inside)


def empty(key: str, label: str, words: str) -> Html:
    """A chart of nothing, which says so."""
    attributes = {"role": "img", "aria-label": f"{label}: {words}", "data-chart": key, "viewBox": "0 0 480 90"}
    line = tag("line", {"class": "axis", "x1": 14.0, "x2": 466.0, "y1": 76.0, "y2": 76.0})
    return tag("svg", attributes, line, tag("text", {"x": 240.0, "y": 48.0, "text-anchor": "middle"}, text(words)))
