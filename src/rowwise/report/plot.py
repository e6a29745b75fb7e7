"""The frame of a chart: scales, axes, and data attributes for the script. Colours and fonts are in page.css."""

from dataclasses import dataclass, replace

from rowwise.report.markup import Html, join, tag, text
from rowwise.report.scale import Scale, tick_labels, ticks, ticks_inside, widen_range

WIDTH, HEIGHT = 480.0, 262.0
TOP, RIGHT, BOTTOM = 14.0, 14.0, 40.0
RANK_TICKS = 8
LETTER_WIDTH = 7.9  # the width of a digit in the largest font, on phones


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """The scales and ticks of a chart."""

    x: Scale
    y: Scale
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_title: str
    unit: str


def make_plot(x_range: tuple[float, float], y_range: tuple[float, float], x_title: str, unit: str) -> Plot:
    """Scales for these ranges; the vertical one is extended to whole ticks."""
    y_ticks = ticks(*y_range)
    labels = tick_labels(y_ticks, unit)
    left = 10 + LETTER_WIDTH * max(4, *(len(label) for label in labels))
    x_low, x_high = widen_range(*x_range)
    return Plot(
        x=Scale(low=x_low, high=x_high, begin=left, end=WIDTH - RIGHT),
        y=Scale(low=y_ticks[0], high=y_ticks[-1], begin=HEIGHT - BOTTOM, end=TOP),
        x_ticks=ticks_inside(x_low, x_high),
        y_ticks=y_ticks,
        x_title=x_title,
        unit=unit,
    )


def make_rank_plot(ranks: int, most_ms: float) -> Plot:
    """Scales for a bar of milliseconds at each rank, with ticks at whole ranks."""
    area = make_plot((-0.5, ranks - 0.5), (0.0, most_ms), "rank", "ms")
    whole = tuple(t for t in ticks(0, max(ranks - 1, 1), RANK_TICKS) if t == int(t) and t < ranks)
    return replace(area, x_ticks=whole)


def draw_axes(area: Plot) -> Html:
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


def draw_svg(area: Plot, key: str, label: str, kind: str, *children: Html) -> Html:
    """The `svg` element, with its scales as attributes for the script."""
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
    return tag("svg", attributes, *children)


def draw_empty(key: str, label: str, message: str) -> Html:
    """A chart without values that shows `words`."""
    attributes = {"role": "img", "aria-label": f"{label}: {message}", "data-chart": key, "viewBox": "0 0 480 90"}
    line = tag("line", {"class": "axis", "x1": 14.0, "x2": 466.0, "y1": 76.0, "y2": 76.0})
    return tag("svg", attributes, line, tag("text", {"x": 240.0, "y": 48.0, "text-anchor": "middle"}, text(message)))
