"""The page of a calibration: how well a profile predicts sets of tables that it was not made from.

Works from the JSON that `rowwise calibrate` leaves beside the profile, whose types are not imported.
"""

import math
from collections.abc import Sequence

import msgspec

from rowwise import quantity
from rowwise.errors import DataError
from rowwise.report.markup import Html, div, join, note, section, span, tag, text
from rowwise.report.page import page
from rowwise.report.plot import BOTTOM, HEIGHT, RIGHT, TOP, WIDTH
from rowwise.report.scale import Scale
from rowwise.textfile import decode_json

LEFT = 62.0
CLOSE = 0.1  # on either side of the diagonal
HEADS = ("Predicted by", "Error", "Error with drift", "Rank correlation")
NOTE = (
    "A point is a set of 1 to 15 tables, looked up and updated together, that nothing was learned from. On the line "
    "the prediction is right; dotted lines are a tenth away. Error: mean of the absolute relative error. Noise: the "
    "error that a perfect prediction would have, as two measurements of one set differ. Drift: how fast the machine "
    "was from moment to moment, as sets measured just before and after say; taken out, but where it says with drift."
)


class RecordedError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a cost model."""

    model: str
    error: float
    tau: float
    raw_error: float


class RecordedQuality(msgspec.Struct, frozen=True, kw_only=True):
    """The accuracy of a calibration, as its JSON holds it."""

    sets: int
    held_out: int
    again: int
    noise: float
    raw_noise: float
    drift: float
    errors: tuple[RecordedError, ...]
    links: int
    links_error: float | None = None
    networks_error: float | None = None
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    stages: dict[str, RecordedError]
    doubts: tuple[str, ...] = ()


def calibration_page(name: str, source: str, content: str | bytes) -> str:
    """The page, from a calibration's JSON."""
    try:
        quality = decode_json(content, RecordedQuality)
    except msgspec.DecodeError as error:
        raise DataError(f"not the quality of a calibration: {error}; want what `rowwise calibrate` writes") from None
    title = tag("h1", None, text("Calibration"), span("number", name))
    head = tag("header", None, title, tag("p", {"class": "when"}, text(source)))
    caption = tag("figcaption", None, tag("b", None, text("Seconds of a set")), span("hint", "predicted over measured"))
    figure = tag("figure", {"class": "chart"}, caption, scatter(quality))
    drawn = section("calibration", "Predicted and measured", div("charts", figure), note(NOTE))
    errors = section("errors", "Errors", _table(quality), _links(quality))
    return page("Calibration", head, *_doubts(quality), _tiles(quality), drawn, errors, script=False)


def _doubts(quality: RecordedQuality) -> tuple[Html, ...]:
    if not quality.doubts:
        return ()
    return (note(f"Not to be trusted: {'; '.join(quality.doubts)}. Plans are made by the roofline of fitted rates."),)


def _tiles(quality: RecordedQuality) -> Html:
    best = quality.errors[0]
    facts = (
        ("error", quantity.share(best.error), "on sets held out"),
        ("rank correlation", quantity.number(best.tau), "Kendall's"),
        ("noise", quantity.share(quality.noise), f"{quality.again} sets measured twice"),
        ("drift", quantity.share(quality.drift), "by which the machine's speed varied"),
        ("sets", quantity.count(quality.sets), f"{quality.held_out} held out"),
        ("exchanges", quantity.count(quality.links), "between ranks"),
    )
    shown = (div("tile", span("name", name), span("value", value), span("beside", more)) for name, value, more in facts)
    return div("tiles", *shown)


def scatter(quality: RecordedQuality) -> Html:
    """Predicted over measured, both on logarithmic scales."""
    pairs = list(zip(quality.measured_s, quality.predicted_s, strict=True))
    values = [value for pair in pairs for value in pair if value > 0]
    if not values:
        raise DataError("a calibration without sets that were held out: measure for more minutes")
    low, high = math.floor(math.log10(min(values)) * 2) / 2, math.ceil(math.log10(max(values)) * 2) / 2
    x = Scale(low=low, high=high, begin=LEFT, end=WIDTH - RIGHT)
    y = Scale(low=low, high=high, begin=HEIGHT - BOTTOM, end=TOP)
    points = "".join(f"M{x.at(math.log10(m)):.1f} {y.at(math.log10(p)):.1f}h0" for m, p in pairs if m > 0 and p > 0)
    off = math.log10(1 + CLOSE)
    lines = [_line("level", x, y, 0.0), _line("rule", x, y, off), _line("rule", x, y, -off)]
    dots = tag("path", {"class": "dots blue", "d": points, "style": "stroke-width:3px;opacity:.55"})
    attributes = {
        "role": "img",
        "aria-label": "Predicted over measured seconds",
        "viewBox": f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
    }
    return tag("svg", attributes, _axes(x, y), *lines, dots)


def _line(look: str, x: Scale, y: Scale, off: float) -> Html:
    """Where the prediction is the measurement, or a share more or less."""
    low, high = max(x.low, x.low - off), min(x.high, x.high - off)
    ends = {"x1": x.at(low), "y1": y.at(low + off), "x2": x.at(high), "y2": y.at(high + off)}
    return tag("line", {"class": look, **ends})


def _axes(x: Scale, y: Scale) -> Html:
    parts: list[Html] = []
    for power in range(math.ceil(x.low), math.floor(x.high) + 1):
        words = text(quantity.duration(10.0**power))
        across, down = x.at(power), y.at(power)
        parts.append(tag("line", {"class": "grid", "x1": x.begin, "x2": x.end, "y1": down, "y2": down}))
        parts.append(tag("line", {"class": "grid", "x1": across, "x2": across, "y1": y.begin, "y2": y.end}))
        parts.append(tag("text", {"x": x.begin - 7, "y": down + 4, "text-anchor": "end"}, words))
        parts.append(tag("text", {"x": across, "y": y.begin + 18, "text-anchor": "middle"}, words))
    parts.append(tag("line", {"class": "axis", "x1": x.begin, "x2": x.end, "y1": y.begin, "y2": y.begin}))
    parts.append(tag("text", {"class": "title", "x": x.end, "y": HEIGHT - 5, "text-anchor": "end"}, text("measured")))
    parts.append(tag("text", {"class": "title", "x": x.begin + 6, "y": TOP + 6}, text("predicted")))
    return join(parts)


def _table(quality: RecordedQuality) -> Html:
    best = quality.errors[0].model
    stages = [msgspec.structs.replace(e, model=f"{best}, {name} alone") for name, e in quality.stages.items()]
    rows = [_row(one) for one in (*quality.errors, *stages)]
    head = tag("thead", None, tag("tr", None, *(tag("th", None, text(word)) for word in HEADS)))
    return div("wide", tag("table", None, head, tag("tbody", None, *rows)))


def _row(one: RecordedError) -> Html:
    cells: Sequence[str] = (
        one.model,
        quantity.share(one.error),
        quantity.share(one.raw_error),
        quantity.number(one.tau),
    )
    return tag("tr", None, *(tag("td", None, text(cell)) for cell in cells))


def _links(quality: RecordedQuality) -> Html:
    words = []
    if quality.links_error is not None:
        words.append(f"exchanges that begin together, by latency and rates: {quantity.share(quality.links_error)}")
    if quality.networks_error is not None:
        words.append(f"all exchanges, by networks: {quantity.share(quality.networks_error)}")
    return note("Links: " + "; ".join(words) + "." if words else "No exchanges were measured.")
