"""A plan, drawn: what each rank has to do and to hold, and where each table is and why.

Works from the JSON of an explanation, whose types are not imported: a report must be possible for a plan of another
version, so unknown keys are ignored.
"""

import dataclasses
from collections.abc import Sequence

import msgspec

from rowwise import quantity
from rowwise.errors import DataError
from rowwise.report.charts import stacked_bar
from rowwise.report.markup import Html, div, join, note, section, span, tag, text
from rowwise.report.plot import HEIGHT, WIDTH, axes, plot
from rowwise.report.read import PLAN
from rowwise.report.scale import ticks
from rowwise.textfile import decode_json

TIERS = ("device", "host", "disk")
MANY_RANKS = 32
BUSIEST, LEAST = 8, 2
MOST = 200  # tables of a page
FEW = 40  # of a section
RANK_TICKS = 8
GAP = 0.18  # of a bar's width, between two
HEADS = ("Table", "Size", "Ids a sample", "Time", "Of the busiest rank", "Where", "Why")
STRIP = 1000.0, 34.0  # a heat strip's width and height
FAINTEST = 0.07
NOTE = (
    "Time: a table's part of the operators, and its links, on the rank where they are most. Of the busiest rank: its "
    "part of that rank's operators. Next: the best other layout, all other tables staying where they are."
)


class PlacedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted seconds of a step."""

    seconds: float
    operators_s: float
    forward_s: float | None = None
    backward_s: float | None = None
    links_s: float
    busiest: int = 0
    busiest_links: int = 0
    bound_s: float | None = None
    bound: str = ""
    batch: int = 0
    model: str = ""
    hardware: str = ""
    source: str = ""
    wire: str = ""


class PlacedRank(msgspec.Struct, frozen=True, kw_only=True):
    """The work and memory of a rank."""

    rank: int
    operators_s: float
    links_s: float
    memory_bytes: tuple[float, ...]
    pieces: int = 0


class PlacedTable(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a table."""

    name: str
    rows: float
    dim: float
    bytes: float
    ids: float = 0.0
    layout: str = ""
    ranks: tuple[int, ...] = ()
    operators_s: float = 0.0
    links_s: float = 0.0
    share: float = 0.0
    reason: str = ""
    next: str = ""
    together: tuple[str, ...] = ()


class ExplainedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An explanation of a plan."""

    hosts: int
    devices: int
    limits_bytes: tuple[float, ...]
    step: PlacedStep
    ranks: tuple[PlacedRank, ...]
    tables: tuple[PlacedTable, ...]


def explained(content: str | bytes) -> ExplainedPlan:
    try:
        facts = decode_json(content, ExplainedPlan)
    except msgspec.DecodeError as error:
        raise DataError(f"not an explanation of a plan: {error}; want what `rowwise plan --explain` writes") from None
    if not facts.ranks:
        raise DataError("not an explanation of a plan: it has no ranks; want what `rowwise plan --explain` writes")
    return facts


def in_one_line(facts: ExplainedPlan) -> str:
    """How many tables on how many devices."""
    count = len(facts.tables)
    size = quantity.size(sum(table.bytes for table in facts.tables))
    hosts = f"{facts.hosts} hosts of " if facts.hosts > 1 else ""
    devices = f"{hosts}{facts.devices} device{'s' * (facts.devices > 1)}"
    return f"{count:,} table{'s' * (count > 1)} of {size} on {devices}, {facts.step.batch:,} samples a step"


def summary(facts: ExplainedPlan) -> Html:
    """The numbers people look for first."""
    step = facts.step
    bound, gap = step.bound_s, None if not step.bound_s else step.seconds / step.bound_s - 1
    halves = ""
    if step.forward_s is not None and step.backward_s is not None:
        halves = f"forward {quantity.duration(step.forward_s)}, backward {quantity.duration(step.backward_s)}"
    fullest = max(facts.ranks, key=lambda rank: fill(facts, rank))
    tiles = (
        ("A step's tables", quantity.duration(step.seconds), "operators and links of the busiest ranks"),
        ("Operators", quantity.duration(step.operators_s), f"rank {step.busiest}" + (f": {halves}" if halves else "")),
        ("Links", quantity.duration(step.links_s), f"rank {step.busiest_links}"),
        ("Lower bound", quantity.duration(bound), f"no plan takes less: {step.bound} bound" if bound else "not known"),
        ("Gap", quantity.share(gap), "at most, above the best plan"),
        ("Fullest device", quantity.share(fill(facts, fullest)), f"rank {fullest.rank}"),
    )
    made = (div("tile", span("name", name), span("value", value), span("beside", said)) for name, value, said in tiles)
    travel = f" Vectors travel as {step.wire}." if step.wire else ""
    by = note(f"By the {step.model}: {step.source}.{travel}") if step.model else Html("")
    return join([div("tiles", *made), by])


def fill(facts: ExplainedPlan, rank: PlacedRank, tier: int = 0) -> float:
    """What part of a tier of a rank is taken."""
    limit = facts.limits_bytes[tier] if tier < len(facts.limits_bytes) else 0.0
    return rank.memory_bytes[tier] / limit if limit and tier < len(rank.memory_bytes) else 0.0


def placement(content: bytes) -> Html:
    """The section of a run's report; nothing where a run has no explanation of its plan."""
    if not content:
        return Html("")
    try:
        facts = explained(content)
    except DataError as error:
        return section("plan", "Plan", note(f"{PLAN} was not used: {error}"))
    return section("plan", "Plan", note(in_one_line(facts)), drawn_ranks(facts), drawn_tables(facts, FEW))


def drawn_ranks(facts: ExplainedPlan) -> Html:
    """Bars for each rank, and how full its memory is."""
    most = max(max(rank.operators_s, rank.links_s) for rank in facts.ranks)
    charts = [
        _figure("Operators", "plan-operators", [r.operators_s * 1000 for r in facts.ranks], most * 1000, "blue"),
        _figure("Links", "plan-links", [r.links_s * 1000 for r in facts.ranks], most * 1000, "orange"),
    ]
    heats = [_heat(facts, tier) for tier, limit in enumerate(facts.limits_bytes) if limit]
    return join([div("charts", *charts), *heats, _rank_list(facts, most)])


def _figure(name: str, key: str, values: Sequence[float], most: float, colour: str) -> Html:
    mean = sum(values) / len(values)
    ends = f"at most {quantity.duration(max(values) / 1000)}, mean {quantity.duration(mean / 1000)}"
    caption = tag("figcaption", None, tag("b", None, text(name)), span("ends", ends))
    return tag("figure", {"class": "chart"}, caption, _bars(name, key, values, most, colour))


def _bars(name: str, key: str, values: Sequence[float], most: float, colour: str) -> Html:
    """A bar for each rank, and their mean as a line."""
    area = plot((-0.5, len(values) - 0.5), (0.0, most), "rank", "ms")
    whole = [t for t in ticks(0, max(len(values) - 1, 1), RANK_TICKS) if t == int(t) and t < len(values)]
    area = dataclasses.replace(area, x_ticks=tuple(whole))
    width = (area.x.end - area.x.begin) / len(values)
    gap = GAP * width if len(values) <= 4 * MANY_RANKS else 0.0
    parts: list[Html] = []
    for rank, value in enumerate(values):
        top = area.y.at(value)
        place = {
            "x": area.x.begin + rank * width + gap / 2,
            "y": top,
            "width": width - gap,
            "height": area.y.begin - top,
        }
        said = tag("title", None, text(f"rank {rank}: {quantity.duration(value / 1000)}"))
        parts.append(tag("g", None, said, tag("rect", {"class": f"bar {colour}"} | place)))
    mean = area.y.at(sum(values) / len(values))
    level = tag("line", {"class": "level", "x1": area.x.begin, "x2": area.x.end, "y1": mean, "y2": mean})
    box = {
        "role": "img",
        "aria-label": f"{name} by rank",
        "data-chart": key,
        "viewBox": f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
    }
    return tag("svg", box, axes(area), *parts, level)


def _heat(facts: ExplainedPlan, tier: int) -> Html:
    """A cell for each rank, the stronger the fuller."""
    name, limit = TIERS[tier], facts.limits_bytes[tier]
    fills = [fill(facts, rank, tier) for rank in facts.ranks]
    width = STRIP[0] / len(fills)
    cells: list[Html] = []
    for number, share in enumerate(fills):
        place = {"x": number * width, "y": 0.0, "width": width, "height": STRIP[1]}
        shade = FAINTEST + (1 - FAINTEST) * min(max(share, 0.0), 1.0)
        said = f"rank {facts.ranks[number].rank}: {quantity.share(share)} of {quantity.size(limit)}"
        cell = tag("rect", {"class": "bar green", "fill-opacity": f"{shade:.3f}"} | place)
        cells.append(tag("g", None, tag("title", None, text(said)), cell))
    box = {"role": "img", "aria-label": f"{name} memory by rank", "data-chart": f"plan-{name}", "class": "heat"}
    box |= {"viewBox": f"0 0 {STRIP[0]:.0f} {STRIP[1]:.0f}", "preserveAspectRatio": "none"}
    ends = f"of {quantity.size(limit)} a rank: {quantity.share(min(fills))} to {quantity.share(max(fills))}"
    caption = tag("figcaption", None, tag("b", None, text(f"{name.capitalize()} memory")), span("ends", ends))
    foot = div("heat-ends", span("", f"rank {facts.ranks[0].rank}"), span("", f"rank {facts.ranks[-1].rank}"))
    return tag("figure", {"class": "chart heats"}, caption, tag("svg", box, *cells), foot)


def _rank_list(facts: ExplainedPlan, most: float) -> Html:
    tiers = [tier for tier, limit in enumerate(facts.limits_bytes) if limit]
    names = ["Rank", "Operators", "Links", *(f"{TIERS[t].capitalize()} memory" for t in tiers), "Pieces"]
    shown, said = list(facts.ranks), Html("")
    if len(shown) > MANY_RANKS:
        ordered = sorted(shown, key=lambda r: (-r.operators_s - r.links_s, r.rank))
        shown = [*ordered[:BUSIEST], ordered[len(ordered) // 2], *ordered[-LEAST:]]
        left = f"Of {len(ordered):,} ranks: the busiest {BUSIEST}, the one in the middle, and the least busy {LEAST}."
        said = note(left)
    head = tag("tr", None, *(tag("th", None, text(name)) for name in names))
    body = join(_rank_row(facts, rank, most, names) for rank in shown)
    return join(
        [div("wide", tag("table", {"class": "cards"}, tag("thead", None, head), tag("tbody", None, body))), said]
    )


def _rank_row(facts: ExplainedPlan, rank: PlacedRank, most: float, names: Sequence[str]) -> Html:
    cells = [tag("th", {"scope": "row"}, text(str(rank.rank)))]
    for name, value, colour in (("Operators", rank.operators_s, "blue"), ("Links", rank.links_s, "orange")):
        bar = stacked_bar(
            f"rank-{name.lower()}", f"rank {rank.rank}: {quantity.duration(value)}", ((value, colour),), most
        )
        cells.append(_cell(name, tag("span", {"class": "amount"}, bar, text(quantity.duration(value)))))
    for tier, limit in enumerate(facts.limits_bytes):
        if limit:
            share, name = fill(facts, rank, tier), f"{TIERS[tier].capitalize()} memory"
            bar = stacked_bar("rank-memory", f"rank {rank.rank}: {quantity.share(share)}", ((share, "green"),), 1.0)
            cells.append(_cell(name, tag("span", {"class": "amount"}, bar, text(quantity.share(share)))))
    return tag("tr", None, *cells, _cell(names[-1], text(f"{rank.pieces:,}")))


def drawn_tables(facts: ExplainedPlan, count: int = MOST) -> Html:
    """Each table: where, and why."""
    shown, left = facts.tables[:count], facts.tables[count:]
    if not shown:
        return note("There are no tables.")
    most = max(table.operators_s + table.links_s for table in shown)
    head = tag("tr", None, *(tag("th", None, text(name)) for name in HEADS))
    body = join(_table_row(table, most) for table in shown)
    grid = tag("table", {"class": "cards placed"}, tag("thead", None, head), tag("tbody", None, body))
    size = quantity.size(sum(table.bytes for table in left))
    rest = note(f"The busiest {count} are shown; {len(left):,} more take {size} and less time.") if left else Html("")
    return join([_legend(), div("wide", grid), rest, note(NOTE)])


def _legend() -> Html:
    entries = (("blue", "operators"), ("orange", "links"))
    made = (tag("span", {"class": "entry"}, span(f"swatch {colour}", ""), text(name)) for colour, name in entries)
    return div("legend", *made)


def _table_row(table: PlacedTable, most: float) -> Html:
    took = table.operators_s + table.links_s
    parts = ((table.operators_s, "blue"), (table.links_s, "orange"))
    bar = stacked_bar("placed-time", f"{table.name}: {quantity.duration(took)}", parts, most)
    beside = tag("small", None, text(f"with {', '.join(table.together)}")) if table.together else Html("")
    next_best = tag("small", None, text(f"next: {table.next}")) if table.next else Html("")
    rows = tag("small", None, text(f"{quantity.count(table.rows)} \u00d7 {quantity.count(table.dim)}"))
    where = tag("small", None, text(f"rank{'s' * (len(table.ranks) > 1)} {quantity.of_ranks(table.ranks)}"))
    return tag(
        "tr",
        None,
        tag("th", {"scope": "row"}, text(table.name), beside),
        _cell(HEADS[1], text(quantity.size(table.bytes)), rows),
        _cell(HEADS[2], text(quantity.count(table.ids))),
        _cell(HEADS[3], tag("span", {"class": "amount"}, bar, text(quantity.duration(took)))),
        _cell(HEADS[4], text(quantity.share(table.share) if table.share else quantity.NONE)),
        _cell(HEADS[5], text(table.layout), where),
        _cell(HEADS[6], text(table.reason), next_best),
    )


def _cell(head: str, *inside: Html) -> Html:
    return tag("td", {"data-head": head}, *inside)
