"""The page of a compression: NE against bytes for each table, the choice for each, and totals.

Reads the advice.json of `rowwise compress` without importing its types.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from rowwise import quantity
from rowwise.errors import DataError
from rowwise.report.charts import COLOURS as ALL_COLOURS
from rowwise.report.markup import Html, coordinate, div, join, note, section, span, tag, text
from rowwise.report.page import page
from rowwise.report.plot import BOTTOM, HEIGHT, LETTER, RIGHT, TOP, WIDTH
from rowwise.report.scale import Scale, tick_labels, ticks
from rowwise.textfile import decode_json

COLOURS = tuple(colour for colour in ALL_COLOURS if colour not in ("grey", "black"))
HEADS = ("Table", "Ids", "Method", "Ratio", "As it is", "Rows", "Map", "Expected NE", "Size")
POINT_HEADS = ("Table", "Method", "Asked ratio", "Bytes", "Of it map", "NE", "Log loss", "AUC")
LEFT_HEADS = ("Table", "Ids", "Bytes", "Why")
BANDS = 2.0  # standard deviations in the band
MARGIN = 0.04  # of the axis, outside the outermost points
NOTE = (
    "Each point is the recipe's model, trained on the history with only this table compressed, and measured on later "
    "rows. NE is the difference to the full model of the same seed; lower is better. Bytes are those of rows, map and "
    "projections; the faint line to the left of a point is the map's part. The grey band is two standard deviations "
    "of the full model's NE between seeds; points vary less, because models of one seed begin alike. The diamond is "
    "the choice for the table. Methods scramble ids first, so none benefits from their order."
)
CHOICE = (
    "The choice has the least sum of losses within the budget, over measured sizes and sizes between two of one "
    "method. It uses fewer bytes where more bytes lose more. It assumes that losses of tables add up, which one "
    "training with all chosen tables checks."
)


class RecordedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of a table, by method and size."""

    method: str
    ratio: float
    size_bytes: int
    map_bytes: int
    ne: float
    loss: float
    auc: float


class RecordedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A table with its measurements and its choice."""

    name: str
    ids: int
    full_bytes: int
    points: tuple[RecordedPoint, ...]
    method: str
    size_bytes: int
    map_bytes: int
    ne: float
    measured: bool


class RecordedKeptTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table that is not compressed."""

    name: str
    ids: int
    size_bytes: int
    why: str


class RecordedScore(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a model."""

    ne: float
    loss: float
    auc: float


class RecordedAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The content of advice.json."""

    recipe: str
    history: tuple[str, ...]
    later: str
    rows: int | None
    full: RecordedScore
    noise: float
    seeds: int
    full_bytes: int
    budget_bytes: int
    size_bytes: int
    ne: float
    error: float
    together: RecordedScore | None
    tables: tuple[RecordedChoice, ...]
    left: tuple[RecordedKeptTable, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStyle:
    """The style of a method's points; when colours run out they repeat as squares on dashed lines."""

    colour: str
    square: bool


PointStyles = Mapping[str, PointStyle]


def compression_page(content: str | bytes) -> str:
    try:
        advice = decode_json(content, RecordedAdvice)
    except msgspec.DecodeError as error:
        raise DataError(f"not an advice.json: {error}: want the one that `rowwise compress` writes") from None
    title = tag("h1", None, text("Compression"), span("number", advice.recipe))
    condition = f"History: rows with {' and '.join(advice.history)}" if advice.history else "History: all training rows"
    trained = f"; trials trained on at most {advice.rows:,} of them" if advice.rows is not None else ""
    when = f"{condition}{trained}. Measured on {advice.later}."
    head = tag("header", None, title, tag("p", {"class": "when"}, text(when)))
    styles = _point_styles(advice)
    figures = [_figure(table, advice.noise, styles) for table in advice.tables]
    drawn = section("curves", "Quality against bytes", _legend(styles), div("charts", *figures), note(NOTE))
    return page(
        "Compression", head, _tiles(advice), _warnings(advice), _choice(advice), drawn, _points(advice), script=False
    )


def _point_styles(advice: RecordedAdvice) -> PointStyles:
    methods = dict.fromkeys(point.method for table in advice.tables for point in table.points)
    return {
        method: PointStyle(colour=COLOURS[index % len(COLOURS)], square=index // len(COLOURS) % 2 == 1)
        for index, method in enumerate(methods)
    }


def _legend(styles: PointStyles) -> Html:
    entries = [
        tag("span", {"class": f"entry {look.colour}"}, _swatch(look), text(method)) for method, look in styles.items()
    ]
    return div("legend", *entries, tag("span", {"class": "entry black"}, span("diamond", ""), text("chosen")))


def _swatch(look: PointStyle) -> Html:
    shape = {"style": "width:9px;height:9px;border-radius:0"} if look.square else {}
    return tag("span", {"class": "swatch"} | shape)


def _tiles(advice: RecordedAdvice) -> Html:
    ratio = advice.full_bytes / max(advice.size_bytes, 1)
    sizes = f"{quantity.size(advice.size_bytes)} of {quantity.size(advice.full_bytes)}"
    facts = [
        ("smaller by", f"{ratio:.1f} x", sizes),
        ("budget", quantity.size(advice.budget_bytes), "for all tables, maps included"),
        ("expected NE", f"{advice.ne:+.5f}", "above the full model, summed over tables"),
        ("full model", quantity.number(advice.full.ne), f"NE, the mean of {advice.seeds} seeds"),
        ("noise", f"{advice.noise:.5f}", "standard deviation between seeds"),
    ]
    if advice.together is not None:
        beside = f"with all chosen tables; AUC {advice.together.auc:+.5f}"
        facts.insert(3, ("measured NE", f"{advice.together.ne:+.5f}", beside))
    shown = (div("tile", span("name", name), span("value", value), span("beside", more)) for name, value, more in facts)
    return div("tiles", *shown)


def _warnings(advice: RecordedAdvice) -> Html:
    if not advice.warnings:
        return Html("")
    lines = (tag("li", None, text(line)) for line in advice.warnings)
    return tag("div", {"class": "box"}, tag("h2", None, text("Warnings")), tag("ul", None, *lines))


def _choice(advice: RecordedAdvice) -> Html:
    rows = [_choice_cells(table) for table in advice.tables]
    left = [(one.name, quantity.count(one.ids), quantity.size(one.size_bytes), one.why) for one in advice.left]
    parts = [_table(HEADS, rows), note(CHOICE)]
    if advice.error:
        parts.append(note(f"The best choice has at most {advice.error:.5f} less NE."))
    if left:
        parts += [tag("h3", None, text("Tables that are not compressed")), _table(LEFT_HEADS, left)]
    return section("choice", "Choice for each table", *parts)


def _choice_cells(table: RecordedChoice) -> Sequence[str]:
    return (
        table.name,
        quantity.count(table.ids),
        table.method or "uncompressed",
        f"{table.full_bytes / max(table.size_bytes, 1):.1f}",
        quantity.size(table.full_bytes),
        quantity.size(table.size_bytes - table.map_bytes),
        quantity.size(table.map_bytes),
        f"{table.ne:+.5f}",
        "measured" if table.measured else "between measured sizes",
    )


def _points(advice: RecordedAdvice) -> Html:
    rows = [
        (
            table.name,
            point.method,
            f"{point.ratio:g}",
            quantity.size(point.size_bytes),
            quantity.share(point.map_bytes / max(point.size_bytes, 1)),
            f"{point.ne:+.5f}",
            f"{point.loss:+.5f}",
            f"{point.auc:+.5f}",
        )
        for table in advice.tables
        for point in table.points
    ]
    return section(
        "points", "All measurements", _table(POINT_HEADS, rows), note("Metrics are differences to the full model.")
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    head = tag("thead", None, tag("tr", None, *(tag("th", None, text(word)) for word in heads)))
    body = (tag("tr", None, *(tag("td", None, text(cell)) for cell in row)) for row in rows)
    return div("wide", tag("table", None, head, tag("tbody", None, *body)))


def _figure(table: RecordedChoice, noise: float, styles: PointStyles) -> Html:
    hint = f"{quantity.count(table.ids)} ids, {quantity.size(table.full_bytes)} uncompressed"
    caption = tag("figcaption", None, tag("b", None, text(table.name)), span("hint", hint))
    return tag("figure", {"class": "chart"}, caption, curves(table, noise, styles))


def curves(table: RecordedChoice, noise: float, styles: PointStyles) -> Html:
    """A chart of NE above the full model against the logarithm of bytes."""
    x, y, marks = _scales(table, noise)
    lines = [
        _method(x, y, list(points), styles[method])
        for method, points in groupby(table.points, key=lambda point: point.method)
    ]
    attributes = {
        "role": "img",
        "aria-label": f"{table.name}: NE above the full model against bytes",
        "viewBox": f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
    }
    chosen = _choice_mark(x, y, table)
    return tag("svg", attributes, _band(x, y, noise), _axes(x, y, marks), _full_size_line(x, y, table), *lines, chosen)


def _scales(table: RecordedChoice, noise: float) -> tuple[Scale, Scale, tuple[float, ...]]:
    sizes = [table.full_bytes, table.size_bytes, *(point.size_bytes for point in table.points)]
    sizes += [point.size_bytes - point.map_bytes for point in table.points if point.size_bytes > point.map_bytes]
    low, high = (math.log10(max(1, end)) for end in (min(sizes), max(sizes)))
    more = MARGIN * max(high - low, 0.5)
    losses = [0.0, table.ne, BANDS * noise, -BANDS * noise, *(point.ne for point in table.points)]
    marks = ticks(min(losses), max(losses))
    left = 10 + LETTER * max(4, *(len(label) for label in tick_labels(marks)))
    x = Scale(low=low - more, high=high + more, begin=left, end=WIDTH - RIGHT)
    return x, Scale(low=marks[0], high=marks[-1], begin=HEIGHT - BOTTOM, end=TOP), marks


def _axes(x: Scale, y: Scale, marks: Sequence[float]) -> Html:
    parts: list[Html] = []
    for value, label in zip(marks, tick_labels(marks), strict=True):
        at = y.at(value)
        parts.append(tag("line", {"class": "grid", "x1": x.begin, "x2": x.end, "y1": at, "y2": at}))
        parts.append(tag("text", {"x": x.begin - 7, "y": at + 4, "text-anchor": "end"}, text(label)))
    for value in _round_sizes(x.low, x.high):
        at = x.at(math.log10(value))
        parts.append(tag("line", {"class": "tick", "x1": at, "x2": at, "y1": y.begin, "y2": y.begin + 4}))
        words = text(quantity.size(value))
        parts.append(tag("text", {"x": at, "y": y.begin + 18, "text-anchor": "middle"}, words))
    parts.append(tag("line", {"class": "axis", "x1": x.begin, "x2": x.end, "y1": y.begin, "y2": y.begin}))
    parts.append(tag("text", {"class": "title", "x": x.end, "y": HEIGHT - 5, "text-anchor": "end"}, text("bytes")))
    parts.append(tag("text", {"class": "title", "x": x.begin + 6, "y": TOP + 6}, text("NE above the full model")))
    return join(parts)


def _full_size_line(x: Scale, y: Scale, table: RecordedChoice) -> Html:
    """A vertical line at the uncompressed size."""
    at = x.at(math.log10(max(1, table.full_bytes)))
    line = tag("line", {"class": "rule", "x1": at, "x2": at, "y1": y.begin, "y2": y.end})
    place = {"class": "small", "x": at - 4, "y": y.begin - 6, "text-anchor": "end"}
    return join([line, tag("text", place, text("uncompressed"))])


def _round_sizes(low: float, high: float) -> list[float]:
    """Powers of ten, and three times them where few are in the range."""
    steps = (1, 3) if high - low < 2.5 else (1,)
    found = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in found if low <= math.log10(value) <= high]


def _band(x: Scale, y: Scale, noise: float) -> Html:
    """The noise of the full model."""
    top, bottom = y.at(BANDS * noise), y.at(-BANDS * noise)
    shape = {"class": "track", "x": x.begin, "y": top, "width": x.end - x.begin, "height": max(0.5, bottom - top)}
    return tag("g", None, tag("title", None, text(f"noise: NE {BANDS * noise:.5f} either way")), tag("rect", shape))


def _method(x: Scale, y: Scale, points: Sequence[RecordedPoint], look: PointStyle) -> Html:
    """The curve of a method, with the map's part of each point."""
    parts: list[Html] = []
    colour, dashes = look.colour, {"stroke-dasharray": "5 4"} if look.square else {}
    ordered = sorted(points, key=lambda point: point.size_bytes)
    places = [(x.at(math.log10(max(1, point.size_bytes))), y.at(point.ne)) for point in ordered]
    for point, (across, down) in zip(ordered, places, strict=True):
        if point.map_bytes:
            rows = x.at(math.log10(max(1, point.size_bytes - point.map_bytes)))
            parts.append(
                tag("path", {"class": f"line faint {colour}", "d": f"M{_point(rows, down)}H{coordinate(across)}"})
            )
    through = "M" + " ".join(_point(*place) for place in places)
    parts.append(tag("path", {"class": f"line {colour}", "d": through} | dashes))
    for point, place in zip(ordered, places, strict=True):
        share = f", {quantity.share(point.map_bytes / point.size_bytes)} in the map" if point.map_bytes else ""
        words = f"{point.method}: {quantity.size(point.size_bytes)}{share}, NE {point.ne:+.5f}, AUC {point.auc:+.5f}"
        # A zero-length line with round caps is a dot; a short one with butt caps is a square.
        dot = {"class": f"dots {colour}", "d": f"M{_point(*place)}h0"}
        if look.square:
            dot |= {"d": f"M{_point(place[0] - 3, place[1])}h6", "style": "stroke-linecap:butt"}
        parts.append(tag("g", None, tag("title", None, text(words)), tag("path", dot)))
    return join(parts)


def _choice_mark(x: Scale, y: Scale, table: RecordedChoice) -> Html:
    across, down = x.at(math.log10(max(1, table.size_bytes))), y.at(table.ne)
    words = f"chosen: {table.method or 'uncompressed'}, {quantity.size(table.size_bytes)}, NE {table.ne:+.5f} expected"
    shape = {"class": "mark black", "d": f"M{coordinate(across - 6)},{coordinate(down)}l6,-6 6,6 -6,6z"}
    return tag("g", None, tag("title", None, text(words)), tag("path", shape))


def _point(across: float, down: float) -> str:
    return f"{coordinate(across)},{coordinate(down)}"
