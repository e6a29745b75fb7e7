"""The page of a calibration: the profile's errors on held-out sets of tables."""

import math
from collections.abc import Sequence

import msgspec

from rowwise.base.errors import DataError
from rowwise.base.quantity import format_count, format_duration, format_metric, format_percent
from rowwise.base.records import ModelError, ProfileQuality
from rowwise.report.markup import Html, div, figure, header, note, section, span, tag, text_table, tiles
from rowwise.report.page import draw_page
from rowwise.report.plot import Plot, draw_axes, draw_line, draw_picture, frame
from rowwise.report.scale import Scale

LEFT = 62.0
DOTTED_ERROR = 0.1  # relative error of the dotted lines
HEADERS = ("Predicted by", "Error", "Error with drift", "Rank correlation")
NOTE = (
    "Each point is a held-out set of 1 to 15 tables that are looked up and updated together. On the line the "
    "prediction is exact; dotted lines are 10% off. Error: mean absolute relative error. Noise: the error of a "
    "perfect prediction, from sets that were measured twice. Drift: changes of the machine's speed over time, from "
    "sets measured just before and after; it is removed except in the column with drift."
)


def draw_calibration(name: str, source: str, quality: ProfileQuality) -> str:
    head = header("Calibration", name, source)
    chart = figure("Seconds of a set", draw_scatter(quality), span("hint", "predicted over measured"))
    scatter = section("calibration", "Predicted and measured", div("charts", chart), note(NOTE))
    errors = section("errors", "Errors", _draw_table(quality), _describe_links(quality))
    return draw_page("Calibration", head, *_draw_doubts(quality), _draw_tiles(quality), scatter, errors, script=False)


def _draw_doubts(quality: ProfileQuality) -> tuple[Html, ...]:
    if not quality.doubts:
        return ()
    return (note(f"Unreliable: {'; '.join(quality.doubts)}. Plans use the roofline model with fitted rates instead."),)


def _draw_tiles(quality: ProfileQuality) -> Html:
    best = quality.errors[0]
    facts = (
        ("error", format_percent(best.error), "on sets held out"),
        ("rank correlation", format_metric(best.tau), "Kendall's"),
        ("noise", format_percent(quality.noise), f"{quality.again} sets measured twice"),
        ("drift", format_percent(quality.drift), "variation of the machine's speed"),
        ("sets", format_count(quality.sets), f"{quality.held_out} held out"),
        ("exchanges", format_count(quality.links), "between ranks"),
    )
    return tiles(facts)


def draw_scatter(quality: ProfileQuality) -> Html:
    pairs = list(zip(quality.measured_s, quality.predicted_s, strict=True))
    values = [value for pair in pairs for value in pair if value > 0]
    if not values:
        raise DataError("the calibration has no held-out sets", hint="calibrate again with more --minutes")
    low, high = math.floor(math.log10(min(values)) * 2) / 2, math.ceil(math.log10(max(values)) * 2) / 2
    x, y = frame((low, high), (low, high), LEFT)
    powers = range(math.ceil(low), math.floor(high) + 1)
    labels = tuple((float(power), format_duration(10.0**power)) for power in powers)
    area = Plot(x=x, y=y, x_ticks=labels, y_ticks=labels, x_title="measured")
    grid = (draw_line("grid", (x.at(power), x.at(power)), (y.begin, y.end)) for power in powers)
    points = "".join(f"M{x.at(math.log10(m)):.1f} {y.at(math.log10(p)):.1f}h0" for m, p in pairs if m > 0 and p > 0)
    offset = math.log10(1 + DOTTED_ERROR)
    diagonals = (("level", 0.0), ("rule", offset), ("rule", -offset))
    lines = [_draw_diagonal(style, x, y, exponent) for style, exponent in diagonals]
    dots = tag("path", {"class": "dots blue", "d": points, "style": "stroke-width:3px;opacity:.55"})
    axes = draw_axes(area, "predicted")
    return draw_picture("calibration", "Predicted over measured seconds", *grid, axes, *lines, dots)


def _draw_diagonal(style: str, x: Scale, y: Scale, offset: float) -> Html:
    """The diagonal on which prediction = measurement x 10^offset."""
    low, high = max(x.low, x.low - offset), min(x.high, x.high - offset)
    return draw_line(style, (x.at(low), x.at(high)), (y.at(low + offset), y.at(high + offset)))


def _draw_table(quality: ProfileQuality) -> Html:
    best = quality.errors[0].model
    stages = [msgspec.structs.replace(error, model=f"{best}, {name} alone") for name, error in quality.stages.items()]
    return text_table(HEADERS, map(_error_cells, (*quality.errors, *stages)))


def _error_cells(error: ModelError) -> Sequence[str]:
    return error.model, format_percent(error.error), format_percent(error.raw_error), format_metric(error.tau)


def _describe_links(quality: ProfileQuality) -> Html:
    errors = []
    if quality.links_error is not None:
        errors.append(f"exchanges that begin together, by latency and rates: {format_percent(quality.links_error)}")
    if quality.networks_error is not None:
        errors.append(f"all exchanges, by networks: {format_percent(quality.networks_error)}")
    return note("Links: " + "; ".join(errors) + "." if errors else "No exchanges were measured.")
