"""Draws values as SVG: charts of lines, stacked areas, and bars inside text.

A NaN is a gap in its line. Outliers far outside the readable range are drawn at the edge, and a note gives their value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rowwise.base.quantity import format_duration, format_metric, format_short, is_finite
from rowwise.report.markup import Html, coordinate, figure, join, span, tag, text
from rowwise.report.plot import TOP, Plot, draw_axes, draw_label, draw_line, draw_picture, make_plot, make_rank_plot
from rowwise.report.scale import Point, Scale, bin_means, positive, thin_points

MAX_DOTTED = 60  # points of a line with dots
MAX_UNAVERAGED = 150  # points of a line that is drawn without averaging
FEW = 3  # fewer points are drawn as dots
BAR_GAP = 0.2  # between the bars of two ranks, as a share of a rank's width
MAX_APART = 128  # up to this number of ranks, bars have gaps
WARM_UP = 0.1  # first fraction of the x axis, ignored in the y range of noisy lines
# Distinct for colour-blind readers.
COLOURS = ("blue", "vermillion", "green", "orange", "purple", "sky", "grey", "black")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A curve with its style."""

    name: str
    points: Sequence[Point]
    colour: str
    thin: bool = False
    dots: bool = False
    noisy: bool = False  # its outliers do not extend the axis
    spread: bool = False  # a line of many points is drawn as its mean, with faint extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMark:
    """A point drawn as a diamond."""

    name: str
    point: Point
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLevel:
    """A horizontal line at a reference value."""

    name: str
    value: float
    extends_axis: bool = True
    label_right: bool = False  # at the right end, away from the beginning of curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The content of a chart, before layout."""

    key: str
    label: str
    lines: Sequence[ChartLine]
    marks: Sequence[ChartMark] = ()
    levels: Sequence[ChartLevel] = ()
    rule: float | None = None  # x of the best model
    unit: str = ""
    x_title: str = "samples"
    from_zero: bool = False


def draw_chart(chart: Chart) -> Html:
    lines = [line for line in chart.lines if any(is_finite(y) for _, y in line.points)]
    marks = [mark for mark in chart.marks if is_finite(mark.point[1])]
    xs = [x for line in lines for x, _ in line.points] + [mark.point[0] for mark in marks]
    if not xs:
        return draw_empty(chart.key, chart.label, "no values yet")
    low, high = _find_y_range(chart, lines, marks)
    area = make_plot((min(0.0, *xs), max(xs)), (low, high), chart.x_title, chart.unit)
    levels = [level for level in chart.levels if area.y.low <= level.value <= area.y.high]
    return draw_svg(
        area,
        chart.key,
        chart.label,
        "lines",
        draw_axes(area),
        join(_draw_level(area, level) for level in levels),
        _draw_rule(area, chart.rule),
        join(_draw_line(area, line) for line in lines),
        join(_draw_mark(area, mark) for mark in marks),
        join(_label_level(area, level) for level in levels if level.name),
        _note_extremes(area, lines, marks),
    )


def draw_svg(area: Plot, key: str, label: str, kind: str, *children: Html) -> Html:
    """A picture with its scales for the script."""
    x, y = area.x, area.y
    data = {
        "data-kind": kind,
        "data-unit": area.unit,
        "data-xtitle": area.x_title,
        "data-x": f"{x.low!r} {x.high!r} {x.begin:.2f} {x.end:.2f}",
        "data-y": f"{y.low!r} {y.high!r} {y.begin:.2f} {y.end:.2f}",
    }
    return draw_picture(key, label, *children, data=data)


def draw_empty(key: str, label: str, message: str) -> Html:
    """A chart without values that shows a message."""
    axis, words = draw_line("axis", (14.0, 466.0), (76.0, 76.0)), draw_label(240.0, 48.0, message, "middle")
    return draw_picture(key, f"{label}: {message}", axis, words, size=(480.0, 90.0))


def _find_y_range(chart: Chart, lines: Sequence[ChartLine], marks: Sequence[ChartMark]) -> tuple[float, float]:
    """The range of the y axis: outliers of noisy lines do not extend it, levels can."""
    all_values = [y for line in lines for _, y in line.points if is_finite(y)] + [mark.point[1] for mark in marks]
    steady_values = [y for line in lines if not line.noisy for _, y in line.points if is_finite(y)]
    steady_values += [mark.point[1] for mark in marks]
    for line in lines:
        if line.noisy:
            steady_values += _find_usual_range(line.points)
    low, high = min(all_values), max(all_values)
    if high - low > 1.7 * (max(steady_values) - min(steady_values)) > 0:
        low, high = min(steady_values), max(steady_values)
    levels = [level.value for level in chart.levels if level.extends_axis and is_finite(level.value)]
    low, high = min([low, *levels]), max([high, *levels])
    return (min(0.0, low) if chart.from_zero else low), high


def _find_usual_range(points: Sequence[Point]) -> Sequence[float]:
    """The 1 % and 99 % quantiles of a noisy line without its beginning."""
    begin = points[-1][0] * WARM_UP
    values = sorted(y for x, y in points if is_finite(y) and x >= begin)
    if not values:
        return [y for _, y in points if is_finite(y)]
    cut = len(values) // 100
    return values[cut], values[-1 - cut]


def _draw_line(area: Plot, line: ChartLine) -> Html:
    attributes = {"class": f"line {line.colour}{' thin' * line.thin}", "data-name": line.name}
    if line.spread and len(line.points) > MAX_UNAVERAGED:
        extremes = tag("path", {"class": f"line faint {line.colour}", "d": _path_data(area, thin_points(line.points))})
        return join([extremes, tag("path", attributes | {"d": _path_data(area, bin_means(line.points))})])
    points = thin_points(line.points)
    parts = [tag("path", attributes | {"d": _path_data(area, points)})]
    known = [(x, y) for x, y in points if is_finite(y)]
    if line.dots and len(known) <= MAX_DOTTED:
        # A dot is a zero-length line with round caps: a third of the bytes of a circle.
        dots = "".join(f"M{_point_data(area, point)}h0" for point in known)
        parts.append(tag("path", {"class": f"dots {line.colour}", "d": dots}))
    return join(parts)


def _path_data(area: Plot, points: Iterable[Point]) -> str:
    """A path with gaps at NaNs; a point between two gaps becomes a dot."""
    runs: list[list[str]] = [[]]
    for x, y in points:
        if is_finite(y):
            runs[-1].append(_point_data(area, (x, y)))
        elif runs[-1]:
            runs.append([])
    return "".join("M" + " ".join(run if len(run) > 1 else run * 2) for run in runs if run)


def _point_data(area: Plot, point: Point) -> str:
    # One decimal suffices for x; the script reads values back from y.
    return f"{coordinate(round(area.x.at(point[0]), 1))},{coordinate(area.y.at(point[1]))}"


def _draw_mark(area: Plot, mark: ChartMark) -> Html:
    x, y = area.x.at(mark.point[0]), area.y.at(mark.point[1])
    corners = f"M{coordinate(x - 6)},{coordinate(y)}l6,-6 6,6 -6,6z"
    value = f"{mark.name} {format_metric(mark.point[1])}"
    attributes = {"class": f"mark {mark.colour}", "d": corners, "data-at": f"{coordinate(x)},{coordinate(y)}"}
    return tag("g", None, tag("title", None, text(value)), tag("path", attributes | {"data-name": mark.name}))


def _draw_level(area: Plot, level: ChartLevel) -> Html:
    y = area.y.at(level.value)
    return draw_line("level", (area.x.begin, area.x.end), (y, y))


def _label_level(area: Plot, level: ChartLevel) -> Html:
    y = area.y.at(level.value)
    label = f"{level.name} {format_short(level.value)}"
    x, anchor = (area.x.end - 5, "end") if level.label_right else (area.x.begin + 5, "start")
    return draw_label(x, y + 13 if y < TOP + 16 else y - 5, label, anchor, "small")


def _draw_rule(area: Plot, x: float | None) -> Html:
    if x is None:
        return Html("")
    x_pixels = area.x.at(x)
    right = x_pixels > (area.x.begin + area.x.end) / 2
    return draw_rule(area, x_pixels, "best", right=right)


def draw_rule(area: Plot, x: float, name: str, *, right: bool) -> Html:
    """A vertical line; its name is left of it if the line is in the right half."""
    label_x, anchor = (x - 4, "end") if right else (x + 4, "start")
    label = draw_label(label_x, area.y.begin - 6, name, anchor, "small")
    return join([draw_line("rule", (x, x), (area.y.begin, area.y.end)), label])


def _note_extremes(area: Plot, lines: Sequence[ChartLine], marks: Sequence[ChartMark]) -> Html:
    """A note with the extreme values that are drawn at the edge."""
    values = [y for line in lines for _, y in line.points if is_finite(y)] + [mark.point[1] for mark in marks]
    limits = []
    if max(values) > area.y.high:
        limits.append(f"\u2191 up to {format_metric(max(values))}")
    if min(values) < area.y.low:
        limits.append(f"\u2193 down to {format_metric(min(values))}")
    if not limits:
        return Html("")
    return draw_label(area.x.end, TOP - 3, ", ".join(limits), "end", "small outside")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartBand:
    """A band of a stacked chart: its share of the total at each x."""

    name: str
    shares: Sequence[float]
    colour: str


def draw_stack(key: str, label: str, xs: Sequence[float], bands: Sequence[ChartBand]) -> Html:
    """A chart of areas stacked from the bottom up."""
    if not xs or not bands:
        return draw_empty(key, label, "no values yet")
    area = make_plot((min(xs), max(xs)), (0.0, 100.0), "samples", "%")
    paths: list[Html] = []
    bottoms = [0.0] * len(xs)
    for band in bands:
        bottoms = [low + 100 * share for low, share in zip(bottoms, band.shares, strict=True)]
        top = " ".join(_point_data(area, point) for point in zip(xs, bottoms, strict=True))
        left, right, base = coordinate(area.x.at(xs[0])), coordinate(area.x.at(xs[-1])), coordinate(area.y.begin)
        attributes = {
            "class": f"area {band.colour}",
            "data-name": band.name,
            "d": f"M{left},{base} {top} {right},{base}z",
        }
        paths.append(tag("path", attributes))
    # Drawn from the top band down: each covers the lower part of the one before, so no path needs a lower edge.
    return draw_svg(area, key, label, "stack", draw_axes(area), join(reversed(paths)))


def draw_strip_picture(key: str, label: str, *children: Html, size: str = "100 10", style: str = "strip") -> Html:
    """A picture that fills its container."""
    attributes = {"role": "img", "aria-label": label, "data-chart": key, "class": style}
    return tag("svg", attributes | {"viewBox": f"0 0 {size}", "preserveAspectRatio": "none"}, *children)


def draw_strip(key: str, label: str, parts: Sequence[tuple[float, str]], full: float) -> Html:
    """A horizontal bar of parts (value, colour); a sum of `full` fills its container."""
    scale = Scale(low=0.0, high=positive(full) or 1.0, begin=0.0, end=100.0)
    rects, x = [tag("rect", {"class": "track", "width": 100.0, "height": 10.0})], 0.0
    total = 0.0
    for value, colour in parts:
        total += positive(value)
        end = scale.at(total)
        rects.append(tag("rect", {"class": f"bar {colour}", "x": x, "width": end - x, "height": 10.0}))
        x = end
    return draw_strip_picture(key, label, *rects)


def draw_amount(key: str, label: str, parts: Sequence[tuple[float, str]], full: float, amount: str) -> Html:
    """A strip beside its amount as text."""
    return tag("span", {"class": "amount"}, draw_strip(key, label, parts, full), text(amount))


def draw_deviation_bar(key: str, label: str, value: float, limit: float) -> Html:
    """A bar from the middle, clamped to +-limit: left and blue for a negative value, else right and vermillion."""
    scale = Scale(low=-limit, high=limit, begin=0.0, end=100.0)
    end = scale.at(value if is_finite(value) else 0.0)
    bar = {
        "class": f"bar {'blue' if end < 50 else 'vermillion'}",
        "x": min(end, 50.0),
        "width": abs(end - 50),
        "height": 10.0,
    }
    middle = draw_line("middle", (50.0, 50.0), (0.0, 10.0))
    track = tag("rect", {"class": "track", "width": 100.0, "height": 10.0})
    return draw_strip_picture(key, label, track, tag("rect", bar), middle)


def draw_rank_bars(
    key: str, label: str, series: Mapping[str, tuple[Sequence[float], str]], max_s: float, *, mean: bool = False
) -> Html:
    """Grouped bars: for each rank a bar of seconds per series (seconds, colour); with `mean`, a line at the mean."""
    ranks = len(next(iter(series.values()))[0])
    area = make_rank_plot(ranks, max_s * 1000)
    width = (area.x.end - area.x.begin) / ranks
    gap = BAR_GAP * width if ranks <= MAX_APART else 0.0
    parts: list[Html] = []
    for rank in range(ranks):
        for number, (name, (seconds_W, colour)) in enumerate(series.items()):
            top, left = area.y.at(seconds_W[rank] * 1000), area.x.begin + rank * width + gap / 2
            bar_width = (width - gap) / len(series)
            position = {"x": left + number * bar_width, "y": top, "width": bar_width, "height": area.y.begin - top}
            title = f"rank {rank}{', ' * bool(name)}{name}: {format_duration(seconds_W[rank])}"
            bar = tag("rect", {"class": f"bar {colour}"} | position)
            parts.append(tag("g", None, tag("title", None, text(title)), bar))
    if mean:
        mean_y = area.y.at(1000 * fmean(second for seconds_W, _ in series.values() for second in seconds_W))
        parts.append(draw_line("level", (area.x.begin, area.x.end), (mean_y, mean_y)))
    return draw_picture(key, label, draw_axes(area), *parts)


def draw_series(line: ChartLine, key: str, summary: str, hint: str, *, unit: str = "", from_zero: bool = False) -> Html:
    """A figure of one line over samples; `summary` is its last value, median or peak as text."""
    lines, label = [replace(line, dots=len(line.points) < FEW)], f"{line.name} over samples: {summary}"
    chart = draw_chart(Chart(key=key, label=label, lines=lines, unit=unit, from_zero=from_zero))
    return figure(line.name, chart, span("hint", hint), span("ends", summary))
