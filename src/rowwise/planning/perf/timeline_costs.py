"""Costs of stages from a recorded timeline: seconds that each resource works, without the waits of the main thread.

A recording has kinds of stages (`route`), not their parts (`route.pack`). Parts follow from the order of intervals
in a step: the first one of a kind is its first part, all others are the second. Of a forward and of the all-reduces of
dense gradients, the last one is the second part: layers that need vectors, and buckets that are full at the end.

The shortest transfer has hardly any bytes, so it takes as long as the latency of the link. Transfers overlap
for that long; in a longer overlap, the later transfer waited for the bytes of the earlier.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median

from rowwise.planning.perf.step_program import PROGRAM, ScheduledStage, StageCosts

# First and second part by resource and kind.
PARTS = {
    ("processor", "route"): ("route.pack", "route.unpack"),
    ("link", "route"): ("route.counts", "route.ids"),
    ("processor", "exchange"): ("exchange.pack", "exchange.unpack"),
    ("processor", "forward"): ("forward.bottom", "forward.rest"),
    ("processor", "backward"): ("backward.top", "backward.bottom"),
    ("processor", "return"): ("return.pack", "return.unpack"),
    ("link", "reduce"): ("reduce.early", "reduce.late"),
}
UNSPLIT: dict[tuple[str, str], str] = {  # kinds without parts, and those of which one part is on this resource
    (resource, name.partition(".")[0]): name
    for name, (resource, _) in PROGRAM.items()
    if (resource, name.partition(".")[0]) not in PARTS
}
LAST = ("forward", "reduce")  # kinds of which the last interval is the second part
UNKNOWN = {"processor": "other", "link": "status", "disk": "prefetch", "reader": "data"}
IDLE = "wait"
IDLE_PROCESSOR = (IDLE, "data")  # kinds in which the main thread waits: for transfers, ranks, the disk; for the reader
Occurrences = dict[int, list[ScheduledStage]]  # intervals of one step, resource and kind, in order, by rank


def recorded_costs(recorded: Sequence[ScheduledStage]) -> StageCosts | None:
    """Mean costs over the complete steps of a recording; None without any."""
    costs_S = costs_by_step(recorded)
    if not costs_S:
        return None
    names = dict.fromkeys(name for costs in costs_S for name in costs.seconds)
    means = {name: tuple(map(fmean, zip(*(costs.of(name) for costs in costs_S), strict=True))) for name in names}
    return StageCosts(costs_S[0].world, means, costs_S[0].latency_s)


def costs_by_step(recorded: Sequence[ScheduledStage]) -> tuple[StageCosts, ...]:
    """Costs of each complete step of a recording."""
    world = 1 + max((stage.rank for stage in recorded), default=0)
    steps = complete_steps(recorded)
    totals: dict[int, dict[str, list[float]]] = {step: defaultdict(lambda: [0.0] * world) for step in sorted(steps)}
    by_key: dict[tuple[int, str, str], Occurrences] = defaultdict(lambda: defaultdict(list))
    for stage in sorted(_align_clocks(recorded), key=lambda stage: (stage.begin_s, stage.end_s)):
        if stage.step in steps and not (stage.resource == "processor" and stage.kind in IDLE_PROCESSOR):
            by_key[stage.step, stage.resource, stage.kind][stage.rank].append(stage)
    parts = [
        stage._replace(name=_name_part(resource, kind, number, len(intervals)))
        for (_, resource, kind), occurrences in by_key.items()
        for intervals in (_joined_transfers(occurrences, world) if resource == "link" else occurrences).values()
        for number, stage in enumerate(intervals)
    ]
    latency_s = _latency_s(parts)
    for stage, seconds in _busy_seconds(parts, latency_s):
        totals[stage.step][stage.name][stage.rank] += seconds
    return tuple(
        StageCosts(world, {name: tuple(own_W) for name, own_W in own.items()}, latency_s) for own in totals.values()
    )


def complete_steps(recorded: Iterable[ScheduledStage]) -> set[int]:
    """The steps that all ranks have recorded up to their update: a run may be killed while it writes."""
    ranks: set[int] = set()
    updated: dict[int, set[int]] = defaultdict(set)
    for stage in recorded:
        ranks.add(stage.rank)
        if stage.resource == "processor" and stage.kind == "update":
            updated[stage.step].add(stage.rank)
    return {step for step, updaters in updated.items() if updaters == ranks}


def _name_part(resource: str, kind: str, number: int, count: int) -> str:
    if (resource, kind) not in PARTS:
        return UNSPLIT.get((resource, kind), UNKNOWN[resource])
    first, second = PARTS[resource, kind]
    if kind in LAST:
        return second if number == count - 1 else first
    return first if number == 0 else second


def _align_clocks(recorded: Sequence[ScheduledStage]) -> list[ScheduledStage]:
    """The intervals on the clock of rank 0: the gathers of status, which are short, end on all ranks at once."""
    ends_W: dict[int, dict[int, float]] = defaultdict(dict)
    for stage in recorded:
        if stage.resource == "link" and stage.kind == "status":
            ends_W[stage.rank][stage.step] = max(stage.end_s, ends_W[stage.rank].get(stage.step, stage.end_s))
    late_W: dict[int, float] = {}
    for rank, ends in ends_W.items():
        late = [end - ends_W[0][step] for step, end in ends.items() if step in ends_W[0]]
        late_W[rank] = median(late) if late else 0.0
    return [
        stage._replace(begin_s=stage.begin_s - late, end_s=stage.end_s - late)
        for stage in recorded
        for late in [late_W.get(stage.rank, 0.0)]
    ]


def _joined_transfers(occurrences: Occurrences, world: int) -> Occurrences:
    """Collectives from the begin of the last rank; unchanged where ranks have recorded different numbers of them."""
    counts = {len(intervals) for intervals in occurrences.values()}
    if len(occurrences) < world or len(counts) > 1:
        return occurrences
    begins = [max(stage.begin_s for stage in calls) for calls in zip(*occurrences.values(), strict=True)]
    return {
        rank: [
            stage._replace(begin_s=min(max(begin, stage.begin_s), stage.end_s))
            for begin, stage in zip(begins, intervals, strict=True)
        ]
        for rank, intervals in occurrences.items()
    }


def _latency_s(parts: Iterable[ScheduledStage]) -> float:
    """The least time that a stage of the link takes on a rank; 0 without any."""
    taken: dict[tuple[int, str], list[float]] = defaultdict(list)
    for stage in parts:
        if stage.resource == "link":
            taken[stage.rank, stage.name].append(stage.end_s - stage.begin_s)
    return min(map(median, taken.values()), default=0.0)


def _busy_seconds(parts: Iterable[ScheduledStage], latency_s: float) -> Iterator[tuple[ScheduledStage, float]]:
    """Each interval with the seconds that its resource had no earlier work, except for latencies of the link."""
    busy_until: dict[tuple[int, str], float] = {}  # by rank and resource
    part_until: dict[tuple[int, int, str], float] = {}
    for stage in sorted(parts, key=lambda stage: (stage.begin_s, stage.end_s)):
        resource, part = (stage.rank, stage.resource), (stage.rank, stage.step, stage.name)
        overlap_s = latency_s if stage.resource == "link" else 0.0
        # Transfers of one part are one transfer to the model, so they have no latency beside each other.
        free_s = max(busy_until.get(resource, stage.begin_s) - overlap_s, part_until.get(part, stage.begin_s))
        yield stage, max(stage.end_s - max(stage.begin_s, free_s), 0.0)
        busy_until[resource] = max(busy_until.get(resource, stage.end_s), stage.end_s)
        part_until[part] = max(part_until.get(part, stage.end_s), stage.end_s)
