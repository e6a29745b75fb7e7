"""The page of a compression: NE against bytes of each table, the chosen size of each table, and totals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rowwise.base.quantity import format_count, format_metric, format_percent, format_size
from rowwise.base.records import CompressionAdvice, SizePoint, TableAdvice
from rowwise.report.charts import COLOURS as ALL_COLOURS
from rowwise.report.charts import draw_rule
from rowwise.report.markup import (
    Html,
    coordinate,
    div,
    figure,
    header,
    join,
    note,
    section,
    span,
    tag,
    text,
    text_table,
    tiles,
)
from rowwise.report.overview import draw_box
from rowwise.report.page import draw_page
from rowwise.report.plot import Plot, draw_axes, draw_picture, frame, label_ticks, left_edge
from rowwise.report.scale import ticks

COLOURS = tuple(colour for colour in ALL_COLOURS if colour not in ("grey", "black"))
HEADERS = ("Table", "Ids", "Method", "Ratio", "Uncompressed", "Rows", "Map", "Expected NE", "Size")
POINT_HEADERS = ("Table", "Method", "Target ratio", "Bytes", "Map share", "NE", "Log loss", "AUC")
UNCOMPRESSED_HEADERS = ("Table", "Ids", "Bytes", "Why")
DEVIATIONS = 2.0  # standard deviations in the noise band, on each side
MARGIN = 0.04  # share of the axis outside the outermost points
NOTE = (
    "Each point is the recipe's model, trained on the history with only this table compressed, and measured on later "
    "rows. NE is the difference to the full model of the same seed; lower is better. Bytes include rows, map and "
    "projections; the faint line to the left of a point is the map's part. The grey band is two standard deviations "
    "of the full model's NE between seeds; points vary less, because models of a seed have the same initial weights. "
    "The diamond is the choice for the table. Methods scramble ids first, so none benefits from their order."
)
CHOICE = (
    "The choice minimises the sum of losses within the budget, over measured sizes and sizes interpolated between two "
    "of a method. It uses fewer bytes than the budget where more bytes lose more. It assumes that losses of tables "
    "add up; a training with all chosen tables checks this."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStyle:
    """The style of a method's points; beyond the number of colours, points are squares on dashed lines."""

    colour: str
    square: bool


PointStyles = Mapping[str, PointStyle]


def draw_compression(advice: CompressionAdvice) -> str:
    condition = f"History: rows with {' and '.join(advice.history)}" if advice.history else "History: all training rows"
    trained = f"; trials trained on at most {advice.rows:,} of them" if advice.rows is not None else ""
    head = header("Compression", advice.recipe, f"{condition}{trained}. Measured on {advice.later}.")
    styles = _choose_point_styles(advice)
    figures = [_draw_figure(table, advice.noise, styles) for table in advice.tables]
    charts = section("curves", "Quality against bytes", _draw_legend(styles), div("charts", *figures), note(NOTE))
    warned = draw_box("Warnings", "warned", advice.warnings) if advice.warnings else Html("")
    top = _draw_tiles(advice), warned, _draw_choices(advice)
    return draw_page("Compression", head, *top, charts, _draw_points(advice), script=False)


def _choose_point_styles(advice: CompressionAdvice) -> PointStyles:
    methods = dict.fromkeys(point.method for table in advice.tables for point in table.points)
    return {
        method: PointStyle(colour=COLOURS[index % len(COLOURS)], square=index // len(COLOURS) % 2 == 1)
        for index, method in enumerate(methods)
    }


def _draw_legend(styles: PointStyles) -> Html:
    entries = [tag("span", {"class": f"entry {s.colour}"}, _draw_swatch(s), text(name)) for name, s in styles.items()]
    return div("legend", *entries, tag("span", {"class": "entry black"}, span("diamond", ""), text("chosen")))


def _draw_swatch(style: PointStyle) -> Html:
    attributes = {"style": "width:9px;height:9px;border-radius:0"} if style.square else {}
    return tag("span", {"class": "swatch"} | attributes)


def _draw_tiles(advice: CompressionAdvice) -> Html:
    ratio = advice.full_bytes / max(advice.size_bytes, 1)
    sizes = f"{format_size(advice.size_bytes)} of {format_size(advice.full_bytes)}"
    facts = [
        ("smaller by", f"{ratio:.1f} x", sizes),
        ("budget", format_size(advice.budget_bytes), "for all tables, maps included"),
        ("expected NE", f"{advice.ne:+.5f}", "above the full model, summed over tables"),
        ("full model", format_metric(advice.full.ne), f"NE, the mean of {advice.seeds} seeds"),
        ("noise", f"{advice.noise:.5f}", "standard deviation between seeds"),
    ]
    if advice.together is not None:
        remark = f"with all chosen tables; AUC {advice.together.auc:+.5f}"
        facts.insert(3, ("measured NE", f"{advice.together.ne:+.5f}", remark))
    return tiles(facts)


def _draw_choices(advice: CompressionAdvice) -> Html:
    rows = [_choice_cells(table) for table in advice.tables]
    uncompressed = [(t.name, format_count(t.ids), format_size(t.size_bytes), t.why) for t in advice.left]
    parts = [text_table(HEADERS, rows), note(CHOICE)]
    if advice.error:
        parts.append(note(f"The best choice has at most {advice.error:.5f} less NE."))
    if uncompressed:
        title = tag("h3", None, text("Tables that are not compressed"))
        parts += [title, text_table(UNCOMPRESSED_HEADERS, uncompressed)]
    return section("choice", "Choice for each table", *parts)


def _choice_cells(table: TableAdvice) -> Sequence[str]:
    return (
        table.name,
        format_count(table.ids),
        table.method or "uncompressed",
        f"{table.full_bytes / max(table.size_bytes, 1):.1f}",
        format_size(table.full_bytes),
        format_size(table.size_bytes - table.map_bytes),
        format_size(table.map_bytes),
        f"{table.ne:+.5f}",
        "measured" if table.measured else "between measured sizes",
    )


def _draw_points(advice: CompressionAdvice) -> Html:
    rows = [
        (
            table.name,
            point.method,
            f"{point.ratio:g}",
            format_size(point.size_bytes),
            format_percent(point.map_bytes / max(point.size_bytes, 1)),
            f"{point.ne:+.5f}",
            f"{point.loss:+.5f}",
            f"{point.auc:+.5f}",
        )
        for table in advice.tables
        for point in table.points
    ]
    explanation = note("Metrics are differences to the full model.")
    return section("points", "All measurements", text_table(POINT_HEADERS, rows), explanation)


def _draw_figure(table: TableAdvice, noise: float, styles: PointStyles) -> Html:
    hint = f"{format_count(table.ids)} ids, {format_size(table.full_bytes)} uncompressed"
    return figure(table.name, draw_trade_off(table, noise, styles), span("hint", hint))


def draw_trade_off(table: TableAdvice, noise: float, styles: PointStyles) -> Html:
    """A chart of NE above the full model against the logarithm of bytes."""
    area = _make_plot(table, noise)
    lines = [
        _draw_method(area, list(points), styles[method])
        for method, points in groupby(table.points, key=lambda point: point.method)
    ]
    behind = _draw_noise_band(area, noise), draw_axes(area, "NE above the full model"), _draw_full_size(area, table)
    label = f"{table.name}: NE above the full model against bytes"
    return draw_picture("trade-off", label, *behind, *lines, _draw_choice(area, table))


def _make_plot(table: TableAdvice, noise: float) -> Plot:
    sizes = [table.full_bytes, table.size_bytes, *(point.size_bytes for point in table.points)]
    sizes += [point.size_bytes - point.map_bytes for point in table.points if point.size_bytes > point.map_bytes]
    low, high = (math.log10(max(1, end)) for end in (min(sizes), max(sizes)))
    margin = MARGIN * max(high - low, 0.5)
    losses = [0.0, table.ne, DEVIATIONS * noise, -DEVIATIONS * noise, *(point.ne for point in table.points)]
    y_ticks = label_ticks(ticks(min(losses), max(losses)))
    x, y = frame((low - margin, high + margin), (y_ticks[0][0], y_ticks[-1][0]), left_edge(y_ticks))
    x_ticks = tuple((math.log10(value), format_size(value)) for value in _round_sizes(x.low, x.high))
    return Plot(x=x, y=y, x_ticks=x_ticks, y_ticks=y_ticks, x_title="bytes")


def _draw_full_size(area: Plot, table: TableAdvice) -> Html:
    """A vertical line at the uncompressed size."""
    return draw_rule(area, _at_bytes(area, table.full_bytes), "uncompressed", right=True)


def _at_bytes(area: Plot, size_bytes: float) -> float:
    return area.x.at(math.log10(max(1, size_bytes)))


def _round_sizes(low: float, high: float) -> list[float]:
    """Powers of ten in the range 10^low..10^high; over short ranges also three times these."""
    steps = (1, 3) if high - low < 2.5 else (1,)
    sizes = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in sizes if low <= math.log10(value) <= high]


def _draw_noise_band(area: Plot, noise: float) -> Html:
    """The noise of the full model."""
    x, top, bottom = area.x, area.y.at(DEVIATIONS * noise), area.y.at(-DEVIATIONS * noise)
    shape = {"class": "track", "x": x.begin, "y": top, "width": x.end - x.begin, "height": max(0.5, bottom - top)}
    return tag(
        "g", None, tag("title", None, text(f"noise: NE {DEVIATIONS * noise:.5f} either way")), tag("rect", shape)
    )


def _draw_method(area: Plot, points: Sequence[SizePoint], style: PointStyle) -> Html:
    """The curve of a method, with the map's part of each point."""
    parts: list[Html] = []
    colour, dashes = style.colour, {"stroke-dasharray": "5 4"} if style.square else {}
    points_by_size = sorted(points, key=lambda point: point.size_bytes)
    positions = [(_at_bytes(area, point.size_bytes), area.y.at(point.ne)) for point in points_by_size]
    for point, (across, down) in zip(points_by_size, positions, strict=True):
        if point.map_bytes:
            rows = _at_bytes(area, point.size_bytes - point.map_bytes)
            parts.append(
                tag("path", {"class": f"line faint {colour}", "d": f"M{_point_data(rows, down)}H{coordinate(across)}"})
            )
    curve = "M" + " ".join(_point_data(*position) for position in positions)
    parts.append(tag("path", {"class": f"line {colour}", "d": curve} | dashes))
    for point, position in zip(points_by_size, positions, strict=True):
        share = f", {format_percent(point.map_bytes / point.size_bytes)} in the map" if point.map_bytes else ""
        title = f"{point.method}: {format_size(point.size_bytes)}{share}, NE {point.ne:+.5f}, AUC {point.auc:+.5f}"
        # A zero-length line with round caps is a dot; a short one with butt caps is a square.
        dot = {"class": f"dots {colour}", "d": f"M{_point_data(*position)}h0"}
        if style.square:
            dot |= {"d": f"M{_point_data(position[0] - 3, position[1])}h6", "style": "stroke-linecap:butt"}
        parts.append(tag("g", None, tag("title", None, text(title)), tag("path", dot)))
    return join(parts)


def _draw_choice(area: Plot, table: TableAdvice) -> Html:
    across, down = _at_bytes(area, table.size_bytes), area.y.at(table.ne)
    title = f"chosen: {table.method or 'uncompressed'}, {format_size(table.size_bytes)}, NE {table.ne:+.5f} expected"
    shape = {"class": "mark black", "d": f"M{coordinate(across - 6)},{coordinate(down)}l6,-6 6,6 -6,6z"}
    return tag("g", None, tag("title", None, text(title)), tag("path", shape))


def _point_data(across: float, down: float) -> str:
    return f"{coordinate(across)},{coordinate(down)}"
