"""The section on a plan: time and memory of each rank, and the placement of each table with the reason."""

from collections.abc import Sequence
from statistics import fmean

import msgspec

from rowwise.base.errors import DataError
from rowwise.base.quantity import DASH, format_count, format_duration, format_percent, format_ranks, format_size
from rowwise.base.records import ExplainedPlan, RankPlacement, TablePlacement
from rowwise.base.textfile import decode_json
from rowwise.report.charts import draw_amount, draw_rank_bars, draw_strip_picture
from rowwise.report.markup import (
    Html,
    data_table,
    div,
    figure,
    join,
    legend,
    named_cell,
    note,
    row,
    section,
    span,
    tag,
    text,
    tiles,
)
from rowwise.report.read import PLAN

TIERS = ("device", "host", "disk")
MANY_RANKS = 32
BUSIEST_RANKS, IDLEST_RANKS = 8, 2
PAGE_TABLES = 200  # tables shown on the page of a plan
SECTION_TABLES = 40  # tables shown in the report of a run
HEADERS = ("Table", "Size", "Ids a sample", "Time", "Of the busiest rank", "Where", "Why")
STRIP_WIDTH, STRIP_HEIGHT = 1000, 34
MIN_OPACITY = 0.07
NOTE = (
    "Time: a table's operators and links on the rank where they take longest. Of the busiest rank: the table's share "
    "of that rank's operators. Next: the best other layout with all other tables unchanged."
)


def read_explanation(content: str | bytes) -> ExplainedPlan:
    try:
        facts = decode_json(content, ExplainedPlan)
    except msgspec.DecodeError as error:
        raise DataError(f"not an explanation of a plan: {error}", "what `rowwise plan --explain` writes") from None
    if not facts.ranks:
        raise DataError("not an explanation of a plan: it has no ranks", "what `rowwise plan --explain` writes")
    return facts


def describe_plan(facts: ExplainedPlan) -> str:
    """One line: number and bytes of tables, devices and batch."""
    count = len(facts.tables)
    size = format_size(sum(table.bytes for table in facts.tables))
    hosts = f"{facts.hosts} hosts of " if facts.hosts > 1 else ""
    devices = f"{hosts}{facts.devices} device{'s' * (facts.devices > 1)}"
    return f"{count:,} table{'s' * (count > 1)} of {size} on {devices}, {facts.step.batch:,} samples a step"


def draw_summary(facts: ExplainedPlan) -> Html:
    """Tiles with step time, its parts, lower bound and memory of the plan."""
    step = facts.step
    bound, gap = step.bound_s, step.gap
    halves = ""
    if step.forward_s is not None and step.backward_s is not None:
        halves = f"forward {format_duration(step.forward_s)}, backward {format_duration(step.backward_s)}"
    fullest = max(facts.ranks, key=lambda rank: memory_use(facts, rank))
    numbers = (
        ("A step's tables", format_duration(step.seconds), "operators and links of the busiest ranks"),
        ("Operators", format_duration(step.operators_s), f"rank {step.busiest}" + (f": {halves}" if halves else "")),
        ("Links", format_duration(step.links_s), f"rank {step.busiest_links}"),
        ("Lower bound", format_duration(bound), f"no plan takes less: {step.bound} bound" if bound else "not known"),
        ("Gap", format_percent(gap), "at most, above the best plan"),
        ("Fullest device", format_percent(memory_use(facts, fullest)), f"rank {fullest.rank}"),
    )
    wire = f" Vectors travel as {step.wire}." if step.wire else ""
    source = note(f"By the {step.model}: {step.source}.{wire}") if step.model else Html("")
    return join([tiles(numbers), source])


def memory_use(facts: ExplainedPlan, rank: RankPlacement, tier: int = 0) -> float:
    """The used share of a rank's memory in a tier; 0 if the limit is unknown."""
    limit = facts.limits_bytes[tier] if tier < len(facts.limits_bytes) else 0.0
    return rank.memory_bytes[tier] / limit if limit and tier < len(rank.memory_bytes) else 0.0


def draw_placement(content: bytes) -> Html:
    """The section of a run's report; empty without an explanation."""
    if not content:
        return Html("")
    try:
        facts = read_explanation(content)
    except DataError as error:
        return section("plan", "Plan", note(f"{PLAN} was not used: {error}"))
    return section("plan", "Plan", note(describe_plan(facts)), draw_ranks(facts), draw_tables(facts, SECTION_TABLES))


def draw_ranks(facts: ExplainedPlan) -> Html:
    """Charts of time and memory by rank."""
    max_s = max(max(rank.operators_s, rank.links_s) for rank in facts.ranks)
    charts = [
        _draw_figure("Operators", "plan-operators", [r.operators_s for r in facts.ranks], max_s, "blue"),
        _draw_figure("Links", "plan-links", [r.links_s for r in facts.ranks], max_s, "orange"),
    ]
    heats = [_draw_heat_strip(facts, tier) for tier, limit in enumerate(facts.limits_bytes) if limit]
    return join([div("charts", *charts), *heats, _draw_rank_table(facts, max_s)])


def _draw_figure(name: str, key: str, seconds: Sequence[float], max_s: float, colour: str) -> Html:
    ends = f"at most {format_duration(max(seconds))}, mean {format_duration(fmean(seconds))}"
    bars = draw_rank_bars(key, f"{name} by rank", {"": (seconds, colour)}, max_s, mean=True)
    return figure(name, bars, span("ends", ends))


def _draw_heat_strip(facts: ExplainedPlan, tier: int) -> Html:
    """A heat map of memory: a cell per rank, coloured by the used share."""
    name, limit = TIERS[tier], facts.limits_bytes[tier]
    use_W = [memory_use(facts, rank, tier) for rank in facts.ranks]
    width = STRIP_WIDTH / len(use_W)
    cells: list[Html] = []
    for number, use in enumerate(use_W):
        position = {"x": number * width, "y": 0.0, "width": width, "height": float(STRIP_HEIGHT)}
        opacity = MIN_OPACITY + (1 - MIN_OPACITY) * min(max(use, 0.0), 1.0)
        title = f"rank {facts.ranks[number].rank}: {format_percent(use)} of {format_size(limit)}"
        cell = tag("rect", {"class": "bar green", "fill-opacity": f"{opacity:.3f}"} | position)
        cells.append(tag("g", None, tag("title", None, text(title)), cell))
    strip = draw_strip_picture(
        f"plan-{name}", f"{name} memory by rank", *cells, size=f"{STRIP_WIDTH} {STRIP_HEIGHT}", style="heat"
    )
    ends = f"of {format_size(limit)} per rank: {format_percent(min(use_W))} to {format_percent(max(use_W))}"
    caption = tag("figcaption", None, tag("b", None, text(f"{name.capitalize()} memory")), span("ends", ends))
    foot = div("heat-ends", span("", f"rank {facts.ranks[0].rank}"), span("", f"rank {facts.ranks[-1].rank}"))
    return tag("figure", {"class": "chart heats"}, caption, strip, foot)


def _draw_rank_table(facts: ExplainedPlan, max_s: float) -> Html:
    tiers = [tier for tier, limit in enumerate(facts.limits_bytes) if limit]
    names = ["Rank", "Operators", "Links", *(f"{TIERS[t].capitalize()} memory" for t in tiers), "Pieces"]
    shown, omitted = list(facts.ranks), Html("")
    if len(shown) > MANY_RANKS:
        by_load = sorted(shown, key=lambda r: (-r.operators_s - r.links_s, r.rank))
        shown = [*by_load[:BUSIEST_RANKS], by_load[len(by_load) // 2], *by_load[-IDLEST_RANKS:]]
        selection = f"the busiest {BUSIEST_RANKS}, the median rank, and the least busy {IDLEST_RANKS}"
        omitted = note(f"Of {len(by_load):,} ranks: {selection}.")
    rows = [_draw_rank_row(facts, rank, max_s, names) for rank in shown]
    return join([data_table(names, rows, "cards"), omitted])


def _draw_rank_row(facts: ExplainedPlan, rank: RankPlacement, max_s: float, names: Sequence[str]) -> Html:
    cells: list[Html] = []
    for name, value, colour in (("Operators", rank.operators_s, "blue"), ("Links", rank.links_s, "orange")):
        duration = format_duration(value)
        bar = draw_amount(f"rank-{name.lower()}", f"rank {rank.rank}: {duration}", ((value, colour),), max_s, duration)
        cells.append(named_cell(name, bar))
    for tier, limit in enumerate(facts.limits_bytes):
        if limit:
            use = memory_use(facts, rank, tier)
            percent = format_percent(use)
            bar = draw_amount("rank-memory", f"rank {rank.rank}: {percent}", ((use, "green"),), 1.0, percent)
            cells.append(named_cell(f"{TIERS[tier].capitalize()} memory", bar))
    return row(str(rank.rank), "", *cells, named_cell(names[-1], text(f"{rank.pieces:,}")))


def draw_tables(facts: ExplainedPlan, count: int = PAGE_TABLES) -> Html:
    """The placement and reason of each table, as a grid."""
    shown, hidden = facts.tables[:count], facts.tables[count:]
    if not shown:
        return note("There are no tables.")
    max_s = max(table.operators_s + table.links_s for table in shown)
    grid = data_table(HEADERS, [_draw_table_row(table, max_s) for table in shown], "cards placed")
    size = format_size(sum(table.bytes for table in hidden))
    omitted = (
        note(f"The busiest {count} are shown; {len(hidden):,} more take {size} and less time.") if hidden else Html("")
    )
    return join([legend(("blue", "operators"), ("orange", "links")), grid, omitted, note(NOTE)])


def _draw_table_row(table: TablePlacement, max_s: float) -> Html:
    duration = format_duration(table.operators_s + table.links_s)
    parts = (table.operators_s, "blue"), (table.links_s, "orange")
    contents = (
        (text(format_size(table.bytes)), f"{format_count(table.rows)} \u00d7 {format_count(table.dim)}"),
        (text(format_count(table.ids)), ""),
        (draw_amount("placed-time", f"{table.name}: {duration}", parts, max_s, duration), ""),
        (text(format_percent(table.share) if table.share else DASH), ""),
        (text(table.layout), f"rank{'s' * (len(table.ranks) > 1)} {format_ranks(table.ranks)}"),
        (text(table.reason), f"next: {table.next}" if table.next else ""),
    )
    together = f"with {', '.join(table.together)}" if table.together else ""
    cells = (named_cell(header, *content) for header, content in zip(HEADERS[1:], contents, strict=True))
    return row(table.name, together, *cells)
