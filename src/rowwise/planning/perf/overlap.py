"""Seconds of transfers, and the part of them that is hidden: while the main thread of their rank computes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rowwise.planning.perf.step_program import ScheduledStage
from rowwise.planning.perf.timeline_costs import IDLE_PROCESSOR

TRANSFERS = {  # by the stages in which their collectives are called
    "exchange of vectors": ("exchange", "return"),
    "transfers of layers": ("forward", "backward"),  # of sharded parameters, or of items to compare users with
    "dense gradients": ("reduce",),
}


class Interval(NamedTuple):
    """Begin and end on the clock of a timeline."""

    begin_s: float
    end_s: float


class Overlap(NamedTuple):
    """Seconds of one kind of transfers, all ranks and steps together."""

    what: str
    busy_s: float
    hidden_s: float


def find_overlaps(stages: Sequence[ScheduledStage]) -> list[Overlap]:
    """The overlap of each kind of transfers in the timeline; concurrent transfers of one kind count once."""
    overlaps: list[Overlap] = []
    for what, kinds in TRANSFERS.items():
        busy_s = hidden_s = 0.0
        for rank in sorted({stage.rank for stage in stages}):
            link, computing = _transfer_intervals(stages, rank, kinds), _compute_intervals(stages, rank)
            busy_s += _length_s(link)
            hidden_s += _length_s(link) - _length_s(_subtract(link, computing))
        if busy_s > 0:
            overlaps.append(Overlap(what, busy_s, hidden_s))
    return overlaps


def exposed_intervals(stages: Sequence[ScheduledStage], rank: int) -> list[Interval]:
    """Intervals in which the link of a rank transfers and its main thread does not compute."""
    kinds = tuple(kind for kinds in TRANSFERS.values() for kind in kinds)
    return _subtract(_transfer_intervals(stages, rank, kinds), _compute_intervals(stages, rank))


def _transfer_intervals(stages: Iterable[ScheduledStage], rank: int, kinds: Sequence[str]) -> list[Interval]:
    transfers = (s for s in stages if s.rank == rank and s.resource == "link" and s.kind in kinds)
    return _union(Interval(stage.begin_s, stage.end_s) for stage in transfers)


def _compute_intervals(stages: Iterable[ScheduledStage], rank: int) -> list[Interval]:
    computing = (s for s in stages if s.rank == rank and s.resource == "processor" and s.kind not in IDLE_PROCESSOR)
    return _union(Interval(stage.begin_s, stage.end_s) for stage in computing)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as sorted, disjoint intervals."""
    merged: list[Interval] = []
    for interval in sorted(intervals):
        if merged and interval.begin_s <= merged[-1].end_s:
            merged[-1] = Interval(merged[-1].begin_s, max(merged[-1].end_s, interval.end_s))
        else:
            merged.append(interval)
    return merged


def _subtract(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """The parts of intervals outside of the removed ones; both are sorted and disjoint."""
    rest: list[Interval] = []
    first = 0
    for begin_s, end_s in intervals:
        at_s = begin_s
        while first < len(removed) and removed[first].end_s <= at_s:
            first += 1
        for gap in removed[first:]:
            if gap.begin_s >= end_s:
                break
            if gap.begin_s > at_s:
                rest.append(Interval(at_s, gap.begin_s))
            at_s = max(at_s, gap.end_s)
        if at_s < end_s:
            rest.append(Interval(at_s, end_s))
    return rest


def _length_s(intervals: Iterable[Interval]) -> float:
    return sum(interval.end_s - interval.begin_s for interval in intervals)
