"""The explanation of a plan: a frozen value with a JSON round trip, and its text for a terminal."""

import textwrap
from collections.abc import Sequence

import msgspec

from rowwise.base import quantity
from rowwise.base.records import ExplainedPlan, RankPlacement, StepPlacement, TablePlacement
from rowwise.base.value import parse_json
from rowwise.parallel.plan import TIERS
from rowwise.tables.spec import Value

MANY_RANKS = 32  # more ranks are not listed one by one
BUSIEST, IDLEST = 8, 2  # ranks listed of larger plans
MANY_TABLES = 20
MAX_NAME = 28
EIGHTHS = " ▏▎▍▌▋▊▉"
INDENT = "    "


class StageTime(Value, frozen=True):
    """Seconds of a stage in a step, and its exposed part, in which the main thread does nothing else."""

    name: str
    resource: str
    busy_s: float  # on the rank where it takes longest
    exposed_s: float  # on the rank that computes longest


class StepTimeline(Value, frozen=True):
    """The stages of a step with `depth` steps in flight; dense layers count 0."""

    depth: int  # steps in flight
    sequential_s: float  # one stage after the other
    pipelined_s: float  # from step to step in the middle of a run
    bounded_by: str  # the busiest resource
    bound_s: float  # its seconds of a step
    stages: tuple[StageTime, ...]


class Explanation(ExplainedPlan, frozen=True):
    """A step of a plan, its ranks, its tables and its stages."""

    timeline: StepTimeline | None = None  # None if the cost model has no stages

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Explanation":
        return parse_json(text, cls, "an explanation of a plan")

    def text(self, width: int = 100, *, all_tables: bool = False) -> str:
        """The text for a terminal of `width` columns; only the busiest tables unless `all_tables`."""
        width = max(width, 72)
        shown = self.tables if all_tables else self.tables[:MANY_TABLES]
        stages = _timeline(self.timeline, width)
        lines = [*_header(self, width), "", *stages, "", *_ranks(self, width), "", *_tables(shown, width)]
        more = len(self.tables) - len(shown)
        if more:
            rest = sum(table.bytes for table in self.tables[len(shown) :])
            lines.append(f"and {more:,} more tables of {quantity.format_bytes(rest)}, each faster than these")
        return "\n".join(lines) + "\n"


def _header(facts: Explanation, width: int) -> list[str]:
    step, count = facts.step, len(facts.tables)
    size = quantity.format_bytes(sum(table.bytes for table in facts.tables))
    hosts = f"{facts.hosts} hosts of " if facts.hosts > 1 else ""
    where = f"{hosts}{facts.devices} device{'s' * (facts.devices > 1)}"
    took = quantity.format_seconds(step.seconds)
    limits = [f"{quantity.format_bytes(limit)} of {name}" for _, name, limit in _tiers(facts)]
    lines = [
        f"{count:,} table{'s' * (count > 1)} of {size} on {where}: {took} for a step of {step.batch:,} samples",
        f"Operators take {_operators_phrase(step)} on rank {step.busiest}, "
        f"links {quantity.format_seconds(step.links_s)}"
        f" on rank {step.busiest_links}. Tables may have {' and '.join(limits)} memory of each rank.",
        bound_sentence(step),
        f"By the {step.model}: {step.source}." + (f" Vectors travel as {step.wire}." if step.wire else ""),
    ]
    return [line for long in lines for line in textwrap.wrap(long, width, subsequent_indent="  ")]


def _tiers(facts: Explanation) -> list[tuple[int, str, int]]:
    """Tiers that the machine has: number, name, bytes of each rank."""
    tiers = zip(TIERS, facts.limits_bytes, strict=False)
    return [(number, name, limit) for number, (name, limit) in enumerate(tiers) if limit]


def _operators_phrase(step: StepPlacement) -> str:
    words = quantity.format_seconds(step.operators_s)
    if step.forward_s is None or step.backward_s is None:
        return words
    forward, backward = quantity.format_seconds(step.forward_s), quantity.format_seconds(step.backward_s)
    fixed = quantity.format_seconds(max(step.operators_s - step.forward_s - step.backward_s, 0))
    return f"{words} (forward {forward}, backward {backward}, launches {fixed})"


def bound_sentence(step: StepPlacement) -> str:
    """The bound, and how far the plan is from it."""
    if step.bound_s is None or step.gap is None:
        return "No bound is known for this cost model."
    bound = f"No plan takes less than {quantity.format_seconds(step.bound_s)} ({step.bound} bound)"
    if step.gap < 5e-5:
        return f"{bound}: this plan is optimal."
    return f"{bound}: this one takes at most {step.gap:.{1 if step.gap >= 0.0005 else 2}%} more than the best."


def _timeline(timeline: StepTimeline | None, width: int) -> list[str]:
    """The stages of a step, and what their overlap saves."""
    if timeline is None:
        return ["The cost model has no stages, so no overlap is predicted."]
    seconds = quantity.format_seconds
    lines = [f"{'stage':<10} {'resource':<10} {'busy':>10} {'exposed':>10}"]
    for stage in timeline.stages:
        lines.append(
            f"{stage.name:<10} {stage.resource:<10} {seconds(stage.busy_s):>10} {seconds(stage.exposed_s):>10}"
        )
    facts = (
        f"{seconds(timeline.pipelined_s)} a step with {timeline.depth} steps in flight, "
        f"{seconds(timeline.sequential_s)} one stage after the other. The {timeline.bounded_by} bounds it: busy for "
        f"{seconds(timeline.bound_s)}. A transfer waits for those before it, which is exposed with it. "
        f"Dense layers are not known and count 0; in a run, exchanges hide behind them as well."
    )
    return [*lines, *textwrap.wrap(facts, width, subsequent_indent="  ")]


def _ranks(facts: Explanation, width: int) -> list[str]:
    tiers, (shown, note) = _tiers(facts), ranks_to_list(facts.ranks)
    wide = max(1, (width - 37 - 6 * len(tiers)) // (2 + len(tiers)))
    scale = max(*(rank.operators_s for rank in facts.ranks), *(rank.links_s for rank in facts.ranks), 1e-30)
    names = [f"{'operators':<{wide + 10}}", f"{'links':<{wide + 10}}", *(f"{name:<{wide + 5}}" for _, name, _ in tiers)]
    lines = [" ".join(["rank", *(name[: wide + 10] for name in names), "pieces"])]
    for rank in shown:
        cells = [f"{rank.rank:>4}"]
        for value in (rank.operators_s, rank.links_s):
            cells.append(f"{_bar(value / scale, wide)} {quantity.format_seconds(value):>9}")
        for number, _, limit in tiers:
            fill = rank.memory_bytes[number] / limit
            cells.append(f"{_bar(fill, wide)} {fill:>4.0%}")
        lines.append(" ".join([*cells, f"{rank.pieces:>6}"]))
    return lines + ([note] if note else [])


def ranks_to_list(ranks: Sequence[RankPlacement]) -> tuple[list[RankPlacement], str]:
    """The ranks to list, and a line about those that are left out."""
    if len(ranks) <= MANY_RANKS:
        return list(ranks), ""
    ordered = sorted(ranks, key=lambda r: (-r.operators_s - r.links_s, r.rank))
    shown = [*ordered[:BUSIEST], ordered[len(ordered) // 2], *ordered[-IDLEST:]]
    return shown, f"of {len(ranks):,} ranks: the busiest {BUSIEST}, the one in the middle, the least busy {IDLEST}"


def _bar(share: float, wide: int) -> str:
    eighths = round(min(max(share, 0), 1) * wide * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(wide)


def _tables(shown: Sequence[TablePlacement], width: int) -> list[str]:
    rows: list[tuple[str, ...]] = [("table", "rows x columns", "size", "ids", "time", "of top", "ranks", "layout")]
    rows += [_table_cells(table) for table in shown]
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    for number, row in enumerate(rows):
        left = {0, 6, 7}
        cells = [
            word.ljust(w) if k in left else word.rjust(w) for k, (word, w) in enumerate(zip(row, wide, strict=True))
        ]
        lines.append(_truncate("  ".join(cells).rstrip(), width))
        if number:
            lines += _reason_lines(shown[number - 1], width)
    return lines


def _table_cells(table: TablePlacement) -> tuple[str, ...]:
    return (
        _truncate(table.name, MAX_NAME),
        f"{quantity.format_rows(table.rows)} x {table.dim}",
        quantity.format_bytes(table.bytes),
        f"{table.ids:,.3g}",
        quantity.format_seconds(table.operators_s + table.links_s),
        f"{table.share:.1%}" if table.share else "",
        quantity.format_ranks(table.ranks),
        table.layout,
    )


def _truncate(words: str, width: int) -> str:
    return words if len(words) <= width else words[: width - 1] + "…"


def _reason_lines(table: TablePlacement, width: int) -> list[str]:
    words = table.reason + (f"; next: {table.next}" if table.next else "")
    if table.together:
        words = f"with {', '.join(table.together)}; {words}"
    return textwrap.wrap(words, width, initial_indent=INDENT, subsequent_indent=INDENT)
