"""How much of what links do is hidden: a transfer is, while the main thread of its rank computes."""

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
    """From one moment of a timeline to another."""

    begin_s: float
    end_s: float


class Overlap(NamedTuple):
    """Seconds of one kind of transfers, all ranks and steps together."""

    what: str
    busy_s: float
    hidden_s: float


def find_overlaps(stages: Sequence[ScheduledStage]) -> list[Overlap]:
    """For each kind of transfers that there are; transfers of one kind that overlap count once."""
    found: list[Overlap] = []
    for what, kinds in TRANSFERS.items():
        busy_s = hidden_s = 0.0
        for rank in sorted({stage.rank for stage in stages}):
            link, computing = _link(stages, rank, kinds), _computing(stages, rank)
            busy_s += _length_s(link)
            hidden_s += _length_s(link) - _length_s(_without(link, computing))
        if busy_s > 0:
            found.append(Overlap(what, busy_s, hidden_s))
    return found


def exposed_intervals(stages: Sequence[ScheduledStage], rank: int) -> list[Interval]:
    """When the link of a rank transfers and its main thread does not compute."""
    kinds = tuple(kind for kinds in TRANSFERS.values() for kind in kinds)
    return _without(_link(stages, rank, kinds), _computing(stages, rank))


def _link(stages: Iterable[ScheduledStage], rank: int, kinds: Sequence[str]) -> list[Interval]:
    mine = (s for s in stages if s.rank == rank and s.resource == "link" and s.kind in kinds)
    return _union(Interval(stage.begin_s, stage.end_s) for stage in mine)


def _computing(stages: Iterable[ScheduledStage], rank: int) -> list[Interval]:
    mine = (s for s in stages if s.rank == rank and s.resource == "processor" and s.kind not in IDLE_PROCESSOR)
    return _union(Interval(stage.begin_s, stage.end_s) for stage in mine)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not touch, in order."""
    found: list[Interval] = []
    for one in sorted(intervals):
        if found and one.begin_s <= found[-1].end_s:
            found[-1] = Interval(found[-1].begin_s, max(found[-1].end_s, one.end_s))
        else:
            found.append(one)
    return found


def _without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments that are in none of the others; both are unions."""
    found: list[Interval] = []
    place = 0
    for begin_s, end_s in intervals:
        at_s = begin_s
        while place < len(others) and others[place].end_s <= at_s:
            place += 1
        for other in others[place:]:
            if other.begin_s >= end_s:
                break
            if other.begin_s > at_s:
                found.append(Interval(at_s, other.begin_s))
            at_s = max(at_s, other.end_s)
        if at_s < end_s:
            found.append(Interval(at_s, end_s))
    return found


def _length_s(intervals: Iterable[Interval]) -> float:
    return sum(one.end_s - one.begin_s for one in intervals)
