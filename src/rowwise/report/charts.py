"""The kinds of charts: lines over a common axis, shares stacked over it, and bars that fit into a line of text.

Each takes values and gives one `svg`. They know nothing of runs, and drop what is not a number: a NaN is a gap in its
line. What is far outside the range in which a chart can be read is drawn at its edge; the chart says how far it went.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rowwise import quantity
from rowwise.quantity import usable
from rowwise.report.markup import Html, coordinate, join, tag, text
from rowwise.report.plot import TOP, Plot, axes, drawing, empty, plot
from rowwise.report.scale import Point, Scale, means, thin_points

DOTTED = 60  # a line of more points has no dots
CROWDED = 150  # a line of more points may be drawn as its mean
EARLY = 0.1  # of the axis: where a line that has just begun may leave the range
COLOURS = ("blue", "vermillion", "green", "orange", "purple", "sky", "grey", "black")  # told apart by the colour-blind


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """One curve of a chart."""

    name: str
    points: Sequence[Point]
    colour: str
    thin: bool = False
    dots: bool = False
    noisy: bool = False  # its outliers do not stretch the chart
    spread: bool = False  # where it has many points: its mean, and faintly its extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMark:
    """A single point of a chart."""

    name: str
    point: Point
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLevel:
    """A value across the chart."""

    name: str
    value: float
    wanted: bool = True  # the chart is stretched to show it
    late: bool = False  # its name is at the end of the axis, away from where curves begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines and what is drawn over them."""

    key: str
    label: str
    lines: Sequence[ChartLine]
    marks: Sequence[ChartMark] = ()
    levels: Sequence[ChartLevel] = ()
    rule: float | None = None  # where the best model was
    unit: str = ""
    x_title: str = "samples"
    from_zero: bool = False


def draw(chart: Chart) -> Html:
    lines = [line for line in chart.lines if any(usable(y) for _, y in line.points)]
    marks = [mark for mark in chart.marks if usable(mark.point[1])]
    xs = [x for line in lines for x, _ in line.points] + [mark.point[0] for mark in marks]
    if not xs:
        return empty(chart.key, chart.label, "no values yet")
    low, high = _range(chart, lines, marks)
    area = plot((min(0.0, *xs), max(xs)), (low, high), chart.x_title, chart.unit)
    levels = [level for level in chart.levels if area.y.low <= level.value <= area.y.high]
    return drawing(
        area,
        chart.key,
        chart.label,
        "lines",
        axes(area),
        join(_level(area, level) for level in levels),
        _rule(area, chart.rule),
        join(_line(area, line) for line in lines),
        join(_mark(area, mark) for mark in marks),
        join(_words(area, level) for level in levels if level.name),
        _outside(area, lines, marks),
    )


def _range(chart: Chart, lines: Sequence[ChartLine], marks: Sequence[ChartMark]) -> tuple[float, float]:
    """What the vertical axis has to hold."""
    every = [y for line in lines for _, y in line.points if usable(y)] + [mark.point[1] for mark in marks]
    firm = [y for line in lines if not line.noisy for _, y in line.points if usable(y)]
    firm += [mark.point[1] for mark in marks]
    for line in lines:
        if line.noisy:
            firm += _usual(line.points)
    low, high = min(every), max(every)
    if high - low > 1.7 * (max(firm) - min(firm)) > 0:
        low, high = min(firm), max(firm)
    wanted = [level.value for level in chart.levels if level.wanted and usable(level.value)]
    low, high = min([low, *wanted]), max([high, *wanted])
    return (min(0.0, low) if chart.from_zero else low), high


def _usual(points: Sequence[Point]) -> Sequence[float]:
    """The range of a noisy line without its beginning and its outliers."""
    begin = points[-1][0] * EARLY
    values = sorted(y for x, y in points if usable(y) and x >= begin)
    if not values:
        return [y for _, y in points if usable(y)]
    cut = len(values) // 100
    return values[cut], values[-1 - cut]


def _line(area: Plot, line: ChartLine) -> Html:
    named = {"class": f"line {line.colour}{' thin' * line.thin}", "data-name": line.name}
    if line.spread and len(line.points) > CROWDED:
        extremes = tag("path", {"class": f"line faint {line.colour}", "d": _path(area, thin_points(line.points))})
        return join([extremes, tag("path", named | {"d": _path(area, means(line.points))})])
    points = thin_points(line.points)
    parts = [tag("path", named | {"d": _path(area, points)})]
    known = [(x, y) for x, y in points if usable(y)]
    if line.dots and len(known) <= DOTTED:
        # A dot is a line of no length with round ends: a third of the bytes of a circle.
        dots = "".join(f"M{_place(area, point)}h0" for point in known)
        parts.append(tag("path", {"class": f"dots {line.colour}", "d": dots}))
    return join(parts)


def _path(area: Plot, points: Iterable[Point]) -> str:
    """Straight pieces between neighbours. A point between two gaps becomes a dot."""
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if usable(y):
            pieces[-1].append(_place(area, (x, y)))
        elif pieces[-1]:
            pieces.append([])
    return "".join("M" + " ".join(piece if len(piece) > 1 else piece * 2) for piece in pieces if piece)


def _place(area: Plot, point: Point) -> str:
    # A tenth across is finer than a screen; up and down, values are read back from the place.
    return f"{coordinate(round(area.x.at(point[0]), 1))},{coordinate(area.y.at(point[1]))}"


def _mark(area: Plot, mark: ChartMark) -> Html:
    x, y = area.x.at(mark.point[0]), area.y.at(mark.point[1])
    corners = f"M{coordinate(x - 6)},{coordinate(y)}l6,-6 6,6 -6,6z"
    value = f"{mark.name} {quantity.number(mark.point[1])}"
    attributes = {"class": f"mark {mark.colour}", "d": corners, "data-at": f"{coordinate(x)},{coordinate(y)}"}
    return tag("g", None, tag("title", None, text(value)), tag("path", attributes | {"data-name": mark.name}))


def _level(area: Plot, level: ChartLevel) -> Html:
    y = area.y.at(level.value)
    return tag("line", {"class": "level", "x1": area.x.begin, "x2": area.x.end, "y1": y, "y2": y})


def _words(area: Plot, level: ChartLevel) -> Html:
    """A level's name, on top of all lines."""
    y = area.y.at(level.value)
    words = f"{level.name} {quantity.short(level.value)}"
    side = {"x": area.x.end - 5, "text-anchor": "end"} if level.late else {"x": area.x.begin + 5}
    return tag("text", {"class": "small", "y": y + 13 if y < TOP + 16 else y - 5} | side, text(words))


def _rule(area: Plot, x: float | None) -> Html:
    if x is None:
        return Html("")
    at = area.x.at(x)
    line = {"class": "rule", "x1": at, "x2": at, "y1": area.y.begin, "y2": area.y.end}
    late = at > (area.x.begin + area.x.end) / 2
    place = {"class": "small", "x": at - 4 if late else at + 4, "y": area.y.begin - 6}
    return join([tag("line", line), tag("text", place | {"text-anchor": "end" if late else "start"}, text("best"))])


def _outside(area: Plot, lines: Sequence[ChartLine], marks: Sequence[ChartMark]) -> Html:
    """How far those values went that are drawn at the edge."""
    values = [y for line in lines for _, y in line.points if usable(y)] + [mark.point[1] for mark in marks]
    words = []
    if max(values) > area.y.high:
        words.append(f"\u2191 up to {quantity.number(max(values))}")
    if min(values) < area.y.low:
        words.append(f"\u2193 down to {quantity.number(min(values))}")
    if not words:
        return Html("")
    place = {"class": "small outside", "x": area.x.end, "y": TOP - 3, "text-anchor": "end"}
    return tag("text", place, text(", ".join(words)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartBand:
    """A part of a stacked chart, at each place of the axis."""

    name: str
    shares: Sequence[float]
    colour: str


def draw_stack(key: str, label: str, xs: Sequence[float], bands: Sequence[ChartBand]) -> Html:
    """Parts of one, from the bottom up, as areas."""
    if not xs or not bands:
        return empty(key, label, "no values yet")
    area = plot((min(xs), max(xs)), (0.0, 100.0), "samples", "%")
    paths: list[Html] = []
    bottoms = [0.0] * len(xs)
    for band in bands:
        bottoms = [low + 100 * share for low, share in zip(bottoms, band.shares, strict=True)]
        top = " ".join(_place(area, point) for point in zip(xs, bottoms, strict=True))
        left, right, base = coordinate(area.x.at(xs[0])), coordinate(area.x.at(xs[-1])), coordinate(area.y.begin)
        attributes = {
            "class": f"area {band.colour}",
            "data-name": band.name,
            "d": f"M{left},{base} {top} {right},{base}z",
        }
        paths.append(tag("path", attributes))
    # The highest first: each then covers the lower part of the one before, and no path needs a lower edge.
    return drawing(area, key, label, "stack", axes(area), join(reversed(paths)))


def stacked_bar(key: str, label: str, parts: Sequence[tuple[float, str]], whole: float) -> Html:
    """One horizontal bar of coloured parts; it stretches to the width that it is given."""
    scale = Scale(low=0.0, high=whole if usable(whole) and whole > 0 else 1.0, begin=0.0, end=100.0)
    rects, x = [tag("rect", {"class": "track", "width": 100.0, "height": 10.0})], 0.0
    done = 0.0
    for value, colour in parts:
        done += value if usable(value) and value > 0 else 0.0
        end = scale.at(done)
        rects.append(tag("rect", {"class": f"bar {colour}", "x": x, "width": end - x, "height": 10.0}))
        x = end
    attributes = {"role": "img", "aria-label": label, "data-chart": key, "class": "strip"}
    return tag("svg", attributes | {"viewBox": "0 0 100 10", "preserveAspectRatio": "none"}, *rects)


def diverging_bar(key: str, label: str, value: float, most: float) -> Html:
    """A bar from the middle: to the left, in blue, if below 0, else to the right."""
    scale = Scale(low=-most, high=most, begin=0.0, end=100.0)
    at = scale.at(value if usable(value) else 0.0)
    bar = {
        "class": f"bar {'blue' if at < 50 else 'vermillion'}",
        "x": min(at, 50.0),
        "width": abs(at - 50),
        "height": 10.0,
    }
    middle = tag("line", {"class": "middle", "x1": 50.0, "x2": 50.0, "y1": 0.0, "y2": 10.0})
    attributes = {"role": "img", "aria-label": label, "data-chart": key, "class": "strip"}
    track = tag("rect", {"class": "track", "width": 100.0, "height": 10.0})
    return tag(
        "svg", attributes | {"viewBox": "0 0 100 10", "preserveAspectRatio": "none"}, track, tag("rect", bar), middle
    )
