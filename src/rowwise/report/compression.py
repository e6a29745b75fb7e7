"""The page of a compression: quality against bytes for each table, what was chosen, and what all tables come to.

Works from the JSON that `rowwise compress` leaves beside it, whose types are not imported.
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
BANDS = 2.0  # standard deviations
MARGIN = 0.04  # of the axis, beside the outermost points
NOTE = (
    "Each point is the recipe's model, trained on the history with this table alone in fewer bytes, and measured on "
    "later rows: NE above that of the whole model of the same seed, lower is better. Bytes are all that the table "
    "takes: rows, map and projections. The faint line to the left of a point is what its map takes of that. The grey "
    "band is two standard deviations of the whole model's NE between seeds; models of one seed begin alike, which "
    "takes some of it out of a point. The diamond is what the table is to be. Ids are scrambled before any rule sees "
    "them, so no method gains by how they are numbered."
)
CHOICE = (
    "The choice has the least sum of losses that fits the budget, from all measured sizes and those between two of one "
    "method; where more bytes lose more, that is fewer bytes. It takes losses of tables to add up, which one training "
    "with all tables as chosen puts to the test."
)


class RecordedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A table by one method in one size."""

    method: str
    ratio: float
    size_bytes: int
    map_bytes: int
    ne: float
    loss: float
    auc: float


class RecordedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A table, and what it is to be."""

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
    """A table that stays as it is."""

    name: str
    ids: int
    size_bytes: int
    why: str


class RecordedScore(msgspec.Struct, frozen=True, kw_only=True):
    """NE, log loss and AUC of a model."""

    ne: float
    loss: float
    auc: float


class RecordedAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The advice of `rowwise compress`, as its JSON holds it."""

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
    """The colour, shape and line of a method's points."""

    colour: str
    square: bool


Looks = Mapping[str, PointStyle]


def compression_page(content: str | bytes) -> str:
    """The page, from the JSON."""
    try:
        advice = decode_json(content, RecordedAdvice)
    except msgspec.DecodeError as error:
        raise DataError(f"not the advice of a compression: {error}; want what `rowwise compress` writes") from None
    title = tag("h1", None, text("Compression"), span("number", advice.recipe))
    condition = f"History: rows with {' and '.join(advice.history)}" if advice.history else "History: all training rows"
    trained = f"; trials trained on {advice.rows:,} of them at most" if advice.rows is not None else ""
    when = f"{condition}{trained}. Measured on {advice.later}."
    head = tag("header", None, title, tag("p", {"class": "when"}, text(when)))
    looks = _looks(advice)
    figures = [_figure(table, advice.noise, looks) for table in advice.tables]
    drawn = section("curves", "Quality against bytes", _legend(looks), div("charts", *figures), note(NOTE))
    return page(
        "Compression", head, _tiles(advice), _warnings(advice), _choice(advice), drawn, _points(advice), script=False
    )


def _looks(advice: RecordedAdvice) -> Looks:
    """One look a method, the same on all plots."""
    methods = dict.fromkeys(point.method for table in advice.tables for point in table.points)
    return {
        method: PointStyle(colour=COLOURS[index % len(COLOURS)], square=index // len(COLOURS) % 2 == 1)
        for index, method in enumerate(methods)
    }


def _legend(looks: Looks) -> Html:
    entries = [
        tag("span", {"class": f"entry {look.colour}"}, _swatch(look), text(method)) for method, look in looks.items()
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
        ("expected NE", f"{advice.ne:+.5f}", "above the whole model, the sum over tables"),
        ("whole model", quantity.number(advice.full.ne), f"NE, the mean of {advice.seeds} seeds"),
        ("noise", f"{advice.noise:.5f}", "standard deviation between seeds"),
    ]
    if advice.together is not None:
        beside = f"with all tables as chosen; AUC {advice.together.auc:+.5f}"
        facts.insert(3, ("measured NE", f"{advice.together.ne:+.5f}", beside))
    shown = (div("tile", span("name", name), span("value", value), span("beside", more)) for name, value, more in facts)
    return div("tiles", *shown)


def _warnings(advice: RecordedAdvice) -> Html:
    if not advice.warnings:
        return Html("")
    lines = (tag("li", None, text(line)) for line in advice.warnings)
    return tag("div", {"class": "box"}, tag("h2", None, text("To be aware of")), tag("ul", None, *lines))


def _choice(advice: RecordedAdvice) -> Html:
    rows = [_cells(table) for table in advice.tables]
    left = [(one.name, quantity.count(one.ids), quantity.size(one.size_bytes), one.why) for one in advice.left]
    parts = [_table(HEADS, rows), note(CHOICE)]
    if advice.error:
        parts.append(note(f"No choice among these has less NE by more than {advice.error:.5f}."))
    if left:
        parts += [tag("h3", None, text("Tables that stay as they are")), _table(LEFT_HEADS, left)]
    return section("choice", "What each table is to be", *parts)


def _cells(table: RecordedChoice) -> Sequence[str]:
    return (
        table.name,
        quantity.count(table.ids),
        table.method or "as it is",
        f"{table.full_bytes / max(table.size_bytes, 1):.1f}",
        quantity.size(table.full_bytes),
        quantity.size(table.size_bytes - table.map_bytes),
        quantity.size(table.map_bytes),
        f"{table.ne:+.5f}",
        "measured" if table.measured else "between measured ones",
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
    return section("points", "All measurements", _table(POINT_HEADS, rows), note("Above those of the whole model."))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    head = tag("thead", None, tag("tr", None, *(tag("th", None, text(word)) for word in heads)))
    body = (tag("tr", None, *(tag("td", None, text(cell)) for cell in row)) for row in rows)
    return div("wide", tag("table", None, head, tag("tbody", None, *body)))


def _figure(table: RecordedChoice, noise: float, looks: Looks) -> Html:
    hint = f"{quantity.count(table.ids)} ids, {quantity.size(table.full_bytes)} as it is"
    caption = tag("figcaption", None, tag("b", None, text(table.name)), span("hint", hint))
    return tag("figure", {"class": "chart"}, caption, curves(table, noise, looks))


def curves(table: RecordedChoice, noise: float, looks: Looks) -> Html:
    """NE above the whole model's against the logarithm of bytes."""
    x, y, marks = _scales(table, noise)
    lines = [
        _method(x, y, list(points), looks[method])
        for method, points in groupby(table.points, key=lambda point: point.method)
    ]
    attributes = {
        "role": "img",
        "aria-label": f"{table.name}: NE above the whole model against bytes",
        "viewBox": f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
    }
    chosen = _diamond(x, y, table)
    return tag("svg", attributes, _band(x, y, noise), _axes(x, y, marks), _whole(x, y, table), *lines, chosen)


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
    parts.append(tag("text", {"class": "title", "x": x.begin + 6, "y": TOP + 6}, text("NE above the whole model")))
    return join(parts)


def _whole(x: Scale, y: Scale, table: RecordedChoice) -> Html:
    """Where the table is as it is."""
    at = x.at(math.log10(max(1, table.full_bytes)))
    line = tag("line", {"class": "rule", "x1": at, "x2": at, "y1": y.begin, "y2": y.end})
    place = {"class": "small", "x": at - 4, "y": y.begin - 6, "text-anchor": "end"}
    return join([line, tag("text", place, text("as it is"))])


def _round_sizes(low: float, high: float) -> list[float]:
    """One and three times the powers of ten, or only the powers, where there are many."""
    steps = (1, 3) if high - low < 2.5 else (1,)
    found = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in found if low <= math.log10(value) <= high]


def _band(x: Scale, y: Scale, noise: float) -> Html:
    """Where the whole model itself is, by chance."""
    top, bottom = y.at(BANDS * noise), y.at(-BANDS * noise)
    shape = {"class": "track", "x": x.begin, "y": top, "width": x.end - x.begin, "height": max(0.5, bottom - top)}
    return tag("g", None, tag("title", None, text(f"noise: NE {BANDS * noise:.5f} either way")), tag("rect", shape))


def _method(x: Scale, y: Scale, points: Sequence[RecordedPoint], look: PointStyle) -> Html:
    """The curve of one method, and what of each point is its map."""
    parts: list[Html] = []
    colour, dashes = look.colour, {"stroke-dasharray": "5 4"} if look.square else {}
    ordered = sorted(points, key=lambda point: point.size_bytes)
    places = [(x.at(math.log10(max(1, point.size_bytes))), y.at(point.ne)) for point in ordered]
    for point, (across, down) in zip(ordered, places, strict=True):
        if point.map_bytes:
            rows = x.at(math.log10(max(1, point.size_bytes - point.map_bytes)))
            parts.append(
                tag("path", {"class": f"line faint {colour}", "d": f"M{_at(rows, down)}H{coordinate(across)}"})
            )
    through = "M" + " ".join(_at(*place) for place in places)
    parts.append(tag("path", {"class": f"line {colour}", "d": through} | dashes))
    for point, place in zip(ordered, places, strict=True):
        share = f", {quantity.share(point.map_bytes / point.size_bytes)} of it the map" if point.map_bytes else ""
        words = f"{point.method}: {quantity.size(point.size_bytes)}{share}, NE {point.ne:+.5f}, AUC {point.auc:+.5f}"
        # A line of no length with round ends is a dot; a short one with straight ends is a square.
        dot = {"class": f"dots {colour}", "d": f"M{_at(*place)}h0"}
        if look.square:
            dot |= {"d": f"M{_at(place[0] - 3, place[1])}h6", "style": "stroke-linecap:butt"}
        parts.append(tag("g", None, tag("title", None, text(words)), tag("path", dot)))
    return join(parts)


def _diamond(x: Scale, y: Scale, table: RecordedChoice) -> Html:
    across, down = x.at(math.log10(max(1, table.size_bytes))), y.at(table.ne)
    words = f"chosen: {table.method or 'as it is'}, {quantity.size(table.size_bytes)}, NE {table.ne:+.5f} expected"
    shape = {"class": "mark black", "d": f"M{coordinate(across - 6)},{coordinate(down)}l6,-6 6,6 -6,6z"}
    return tag("g", None, tag("title", None, text(words)), tag("path", shape))


def _at(across: float, down: float) -> str:
    return f"{coordinate(across)},{coordinate(down)}"
