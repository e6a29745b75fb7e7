"""When each stage of a training step begins and ends on each rank, from seconds by stage: for any look-ahead and ranks.

[Note: Timeline] A stage works on one resource: the processor (the main thread), the link (transfers), the disk, the
reader (the thread that reads batches), or another that it names. A resource has one stage at a time, in the order of
the program. Transfers are in order too, as a communicator runs collectives in the order of their calls: two at once
would share the bandwidth. Only the latency of a transfer passes beside others. A collective begins on a rank when that
rank calls it, and ends when the last rank of its group has begun and its own bytes have travelled. The rest is maxima
and sums: a stage begins when its resource is free and the stages before it have ended.

A step is that of a batch: with look-ahead, the ids of step i + 1 travel while the model computes step i.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.step_program import (
    PROGRAM,
    ScheduledStage,
    StageCosts,
    StageRef,
    TimelineStage,
    training_stages,
)

WARM_UP = 16  # steps until a schedule has its period


class StageTimes(NamedTuple):
    """A stage of a step on all ranks."""

    stage: TimelineStage
    step: int
    begin_W: Floats
    end_W: Floats
    idle_W: Floats  # of its resource, before it
    ready_W: Sequence[Floats]  # ends of the stages before it
    before: Sequence[StageRef]


def stage_times(
    stages: Sequence[TimelineStage], steps: int, costs_S: Sequence[StageCosts] = ()
) -> Iterator[StageTimes]:
    """The stages of `steps` steps, and those run ahead for later ones; see [Note: Timeline].

    `costs_S` are costs of unequal steps, which are repeated in turn; without them, all steps have the stages' seconds.
    """
    check_stages(stages)
    world = max(len(stage.seconds_W) for stage in stages)
    seconds = {stage.name: np.asarray(stage.seconds_W, dtype=float) for stage in stages}
    groups = {stage.name: np.asarray(stage.group_W) for stage in stages if len(stage.group_W)}
    free: dict[str, Floats] = defaultdict(lambda: np.zeros(world))
    ends: dict[StageRef, Floats] = {}  # by stage and step
    for turn in range(-max(stage.ahead for stage in stages), steps):
        for stage in stages:
            step = turn + stage.ahead
            if step < 0:
                continue
            before = [ref for ref in stage.after if step >= ref.steps_back]
            ready_W = [ends[StageRef(ref.name, step - ref.steps_back)] for ref in before]
            begin_W = np.maximum.reduce([free[stage.resource], *ready_W])
            seconds_W = np.array(costs_S[step % len(costs_S)].of(stage.name)) if costs_S else seconds[stage.name]
            # A collective transfers only once the last rank of its group has begun.
            end_W = (_last_begin(begin_W, groups.get(stage.name)) if stage.joins else begin_W) + seconds_W
            yield StageTimes(stage, step, begin_W, end_W, begin_W - free[stage.resource], ready_W, before)
            ends[StageRef(stage.name, step)] = end_W
            # The next transfer may overlap with the latency of this one, not with its bytes.
            free[stage.resource] = end_W - np.minimum(stage.latency_s, seconds_W) if stage.latency_s else end_W


def _last_begin(begin_W: Floats, group_W: NDArray[np.int64] | None) -> Floats:
    """For each rank, when the last of its group has begun."""
    if group_W is None:
        return np.full(len(begin_W), begin_W.max())
    last_G = np.zeros(group_W.max() + 1)
    np.maximum.at(last_G, group_W, begin_W)
    return last_G[group_W]


def schedule(
    stages: Sequence[TimelineStage], steps: int, costs_S: Sequence[StageCosts] = ()
) -> tuple[ScheduledStage, ...]:
    """The stages of `stage_times`, rank by rank."""
    scheduled: list[ScheduledStage] = []
    for stage, step, begin_W, end_W, idle_W, ready_W, before in stage_times(stages, steps, costs_S):
        last_W = np.argmax(ready_W, axis=0).tolist() if before and idle_W.any() else []
        for rank, times in enumerate(zip(begin_W.tolist(), end_W.tolist(), idle_W.tolist(), strict=True)):
            waits_for = before[last_W[rank]].name if times[2] > 0 else ""
            scheduled.append(ScheduledStage(stage.name, stage.resource, rank, step, *times, waits_for))
    return tuple(scheduled)


def check_stages(stages: Sequence[TimelineStage]) -> None:
    """Raise for stages that `schedule` cannot place."""
    names = [stage.name for stage in stages]
    places = {name: place for place, name in enumerate(names)}
    world = max(1, *(len(stage.seconds_W) for stage in stages))
    for place, stage in enumerate(stages):
        lead = f"stage {stage.name!r}"
        if places[stage.name] != place:
            raise SpecError(f"{lead} appears {names.count(stage.name)} times", "each name once")
        if len(stage.seconds_W) not in (1, world) or not np.min(stage.seconds_W) >= 0:
            raise SpecError(f"{lead} takes {stage.seconds_W} s", f"0 or more, of each rank or one for all {world}")
        if len(stage.group_W) not in (0, world) or (len(stage.group_W) and np.min(stage.group_W) < 0):
            raise SpecError(f"{lead} has groups {stage.group_W}", f"a number of at least 0 for each of {world} ranks")
        for ref in stage.after:
            if ref.name not in places:
                raise SpecError(f"{lead} is after {ref.name!r}: no such stage, there are {', '.join(names)}")
            before = stages[places[ref.name]]
            # The program has done a stage for steps up to its turn plus `ahead`; this turn's only if it comes earlier.
            if stage.ahead - ref.steps_back > before.ahead - (places[ref.name] >= place):
                raise SpecError(f"{lead} is after {ref.name!r}, which the program does later", "an earlier step of it")


def step_seconds(scheduled: Iterable[ScheduledStage], warm_up: int = 0, last: str = "update") -> float:
    """Mean seconds from the end of a step's stage `last` to that of the next, on the slowest rank; NaN for one step."""
    ends_W: dict[int, dict[int, float]] = defaultdict(dict)
    for stage in scheduled:
        if stage.kind == last and stage.resource == "processor":
            ends_W[stage.rank][stage.step] = max(stage.end_s, ends_W[stage.rank].get(stage.step, 0.0))
    periods: list[float] = []
    for ends in ends_W.values():
        steps = sorted(ends)[warm_up:]
        if len(steps) > 1:
            periods.append((ends[steps[-1]] - ends[steps[0]]) / (steps[-1] - steps[0]))
    return max(periods, default=float("nan"))


def training_step_s(costs: StageCosts, pipeline_depth: int, processor_factor: float = 1.0) -> float:
    """Seconds from step to step in the middle of a run."""
    stages = training_stages(costs, pipeline_depth, processor_factor)
    ends = [times.end_W for times in stage_times(stages, 2 * WARM_UP) if times.stage.name == "update"]
    return float((ends[-1] - ends[WARM_UP]).max()) / (len(ends) - 1 - WARM_UP)


class SteadyStep(NamedTuple):
    """A step in the middle of a run, on the rank that computes longest."""

    step_s: float
    busy_s: dict[str, float]  # by resource
    exposed_s: dict[str, float]  # that the processor computes, or waits for another resource; adds up to the step


def steady_step(stages: Sequence[TimelineStage], steps: int = 8, last: str = "update") -> SteadyStep:
    """The last of `steps` steps, from the end of `last` in the step before it."""
    busy_W: dict[str, Floats] = defaultdict(lambda: np.zeros(1))
    for stage in stages:
        busy_W[stage.resource] = busy_W[stage.resource] + np.asarray(stage.seconds_W, dtype=float)
    slowest = int(np.argmax(busy_W["processor"]))
    resource_of = {stage.name: stage.resource for stage in stages}
    ends: list[float] = []
    exposed_s: dict[str, float] = defaultdict(float)
    for stage, step, begin_W, end_W, idle_W, ready_W, before in stage_times(stages, steps):
        if stage.name == last:
            ends.append(float(end_W.max()))
        rank = slowest % len(end_W)
        if step == steps - 1 and stage.resource == "processor":
            exposed_s["processor"] += float(end_W[rank] - begin_W[rank])
            if idle_W[rank] > 0:
                waited = before[int(np.argmax([ready[rank] for ready in ready_W]))].name
                exposed_s[resource_of[waited]] += float(idle_W[rank])
    busy_s = {name: float(taken_W[slowest % len(taken_W)]) for name, taken_W in busy_W.items()}
    return SteadyStep(ends[-1] - ends[-2], busy_s, dict(exposed_s))


def sequential_s(costs: StageCosts) -> float:
    """Seconds of a step without any overlap: the slowest rank of each stage."""
    return sum(max(costs.of(name)) for name in PROGRAM)


def exposed_seconds(scheduled: Iterable[ScheduledStage], steps: range) -> dict[str, float]:
    """Seconds of a step by the kind of stage that the main thread executes or waits for; they add up to the step.

    On the rank that computes longest, as the mean over `steps`. A stage on another resource is exposed where the main
    thread is idle until it ends.
    """
    busy_W: dict[int, float] = defaultdict(float)
    exposed_W: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stage in scheduled:
        if stage.resource == "processor" and stage.step in steps:
            spent_s = stage.end_s - stage.begin_s
            busy_W[stage.rank] += spent_s
            exposed_W[stage.rank][stage.kind] += spent_s / len(steps)
            exposed_W[stage.rank][stage.waits_for.partition(".")[0]] += stage.idle_s / len(steps)
    exposed = exposed_W[max(busy_W, key=busy_W.__getitem__)]
    return {kind: seconds for kind, seconds in exposed.items() if kind}
