"""The frame of a chart: scales, axes, and data attributes for the script. Colours and fonts are in page.css."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rowwise.report.markup import Attributes, Html, join, tag, text
from rowwise.report.scale import Scale, tick_labels, ticks, ticks_inside, widen_range

WIDTH, HEIGHT = 480.0, 262.0
TOP, RIGHT, BOTTOM = 14.0, 14.0, 40.0
RANK_TICKS = 8
LETTER_WIDTH = 7.9  # the width of a digit in the largest font, on phones
Ticks = tuple[tuple[float, str], ...]  # values with their labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """The scales and ticks of a chart."""

    x: Scale
    y: Scale
    x_ticks: Ticks
    y_ticks: Ticks
    x_title: str
    unit: str = ""


def label_ticks(values: Sequence[float], unit: str = "") -> Ticks:
    return tuple(zip(values, tick_labels(values, unit), strict=True))


def left_edge(y_ticks: Ticks) -> float:
    """The x coordinate of the y axis, right of its labels."""
    return 10 + LETTER_WIDTH * max(4, *(len(label) for _, label in y_ticks))


def frame(x_range: tuple[float, float], y_range: tuple[float, float], left: float) -> tuple[Scale, Scale]:
    """The scales of a chart whose y axis is at `left`."""
    x = Scale(low=x_range[0], high=x_range[1], begin=left, end=WIDTH - RIGHT)
    return x, Scale(low=y_range[0], high=y_range[1], begin=HEIGHT - BOTTOM, end=TOP)


def make_plot(x_range: tuple[float, float], y_range: tuple[float, float], x_title: str, unit: str) -> Plot:
    """Scales for these ranges; the y range is extended to whole ticks."""
    y_ticks = label_ticks(ticks(*y_range), unit)
    x_low, x_high = widen_range(*x_range)
    x, y = frame((x_low, x_high), (y_ticks[0][0], y_ticks[-1][0]), left_edge(y_ticks))
    return Plot(x=x, y=y, x_ticks=label_ticks(ticks_inside(x_low, x_high)), y_ticks=y_ticks, x_title=x_title, unit=unit)


def make_rank_plot(ranks: int, max_ms: float) -> Plot:
    """Scales for a bar of milliseconds at each rank, with ticks at whole ranks."""
    area = make_plot((-0.5, ranks - 0.5), (0.0, max_ms), "rank", "ms")
    rank_ticks = tuple(t for t in ticks(0, max(ranks - 1, 1), RANK_TICKS) if t == int(t) and t < ranks)
    return replace(area, x_ticks=label_ticks(rank_ticks))


def draw_line(style: str, x: tuple[float, float], y: tuple[float, float]) -> Html:
    return tag("line", {"class": style, "x1": x[0], "x2": x[1], "y1": y[0], "y2": y[1]})


def draw_label(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> Html:
    attributes = {"class": style} if style else {}
    return tag("text", attributes | {"x": x, "y": y, "text-anchor": anchor}, text(words))


def draw_axes(area: Plot, y_title: str = "") -> Html:
    across, bottom = (area.x.begin, area.x.end), area.y.begin
    parts = []
    for value, label in area.y_ticks:
        y = area.y.at(value)
        parts.append(draw_line("grid", across, (y, y)))
        parts.append(draw_label(across[0] - 7, y + 4, label, "end"))
    for value, label in area.x_ticks:
        x = area.x.at(value)
        parts.append(draw_line("tick", (x, x), (bottom, bottom + 4)))
        parts.append(draw_label(x, bottom + 18, label, "middle"))
    parts.append(draw_line("axis", across, (bottom, bottom)))
    parts.append(draw_label(across[1], HEIGHT - 5, area.x_title, "end", "title"))
    if y_title:
        parts.append(draw_label(across[0] + 6, TOP + 6, y_title, style="title"))
    return join(parts)


def draw_picture(
    key: str, label: str, *children: Html, size: tuple[float, float] = (WIDTH, HEIGHT), data: Attributes | None = None
) -> Html:
    """An `svg` element; with `data`, the script shows its values under the pointer."""
    attributes = {"role": "img", "aria-label": label, "data-chart": key, **(data or {})}
    return tag("svg", attributes | {"viewBox": f"0 0 {size[0]:.0f} {size[1]:.0f}"}, *children)
