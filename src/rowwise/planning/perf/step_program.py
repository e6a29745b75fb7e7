"""The program of a training step: its stages, the resource of each, and the order in which the main thread calls them.

Values only, without numpy; `timeline` schedules them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from rowwise.base.errors import SpecError

if TYPE_CHECKING:  # pages of reports draw these values without numpy
    import numpy as np
    from numpy.typing import NDArray

Resource = Literal["processor", "link", "disk", "reader"]
RESOURCES: tuple[Resource, ...] = ("processor", "link", "disk", "reader")
READ_AHEAD = 2  # batches that the reader holds


class StageRef(NamedTuple):
    """A stage that has to end first, in the step `steps_back` earlier."""

    name: str
    steps_back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStage:
    """A stage of the program of one step, the same on all ranks."""

    name: str
    resource: str
    seconds_W: "Sequence[float] | NDArray[np.float64]"  # of each rank; one entry where all are alike
    after: tuple[StageRef, ...] = ()
    joins: bool = False  # a collective
    group_W: "Sequence[int] | NDArray[np.int64]" = ()  # ranks of one number meet in a collective; empty if all ranks do
    latency_s: float = 0.0  # the part of its seconds in which the resource already works for the next stage
    ahead: int = 0  # steps by which the program runs this stage before the others of its batch


class ScheduledStage(NamedTuple):
    """A stage of a step on a rank, with the time that its resource was idle before it, and for which stage."""

    name: str
    resource: str
    rank: int
    step: int
    begin_s: float
    end_s: float
    idle_s: float = 0.0
    waits_for: str = ""

    @property
    def kind(self) -> str:
        """The stage without its part: `route` of `route.ids`."""
        return self.name.partition(".")[0]


# Resource, and the stages of the same batch that have to end first.
PROGRAM: dict[str, tuple[Resource, tuple[str, ...]]] = {
    "data": ("reader", ()),
    "route.pack": ("processor", ("data",)),
    "route.counts": ("link", ("route.pack",)),  # with the header of the step
    "route.send": ("processor", ("route.counts",)),
    "route.ids": ("link", ("route.send",)),
    "route.unpack": ("processor", ("route.ids",)),
    "prefetch": ("disk", ("route.unpack",)),
    "lookup": ("processor", ("prefetch",)),
    "exchange.pack": ("processor", ()),
    "exchange.send": ("link", ("exchange.pack",)),
    "forward.bottom": ("processor", ()),
    "exchange.unpack": ("processor", ("exchange.send",)),
    "forward.rest": ("processor", ()),
    "backward.top": ("processor", ()),
    "return.pack": ("processor", ()),
    "return.send": ("link", ("return.pack",)),
    "reduce.early": ("link", ("return.pack",)),  # buckets of the layers above the vectors
    "backward.bottom": ("processor", ()),
    "reduce.late": ("link", ("backward.bottom",)),
    "status": ("link", ("backward.bottom",)),
    "return.unpack": ("processor", ("return.send",)),
    "reduce.unpack": ("processor", ("reduce.early", "reduce.late")),
    "other": ("processor", ("status",)),
    "update": ("processor", ()),
}
AHEAD = ("data", "route.pack", "route.counts", "route.send", "route.ids", "route.unpack", "prefetch")
# With look-ahead, the stages before which the program does those of a later batch.
PLACES = {"lookup": AHEAD[:3], "backward.top": AHEAD[3:5], "update": AHEAD[5:]}


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of each rank by stage of `PROGRAM`; a missing stage takes none."""

    world: int
    seconds: Mapping[str, tuple[float, ...]]
    latency_s: float = 0.0  # of the link: this part of a transfer overlaps with other transfers

    def __post_init__(self) -> None:
        for name, seconds_W in self.seconds.items():
            if name not in PROGRAM:
                raise SpecError(f"stage {name!r}: no such stage of a step, there are {', '.join(PROGRAM)}")
            if len(seconds_W) != self.world:
                raise SpecError(f"stage {name!r} has {len(seconds_W)} ranks", self.world)

    def of(self, name: str) -> tuple[float, ...]:
        return self.seconds.get(name, (0.0,) * self.world)

    def busy_s(self, resource: Resource) -> float:
        """Seconds of a step that a resource works, on the rank where that is most."""
        names = [name for name, (own, _) in PROGRAM.items() if own == resource]
        return max(sum(self.of(name)[rank] for name in names) for rank in range(self.world))


def training_stages(costs: StageCosts, pipeline_depth: int, processor_factor: float = 1.0) -> tuple[TimelineStage, ...]:
    """The program of a training step with `pipeline_depth` steps in flight; `train/pipeline.py` runs it.

    At any depth, vectors and gradients travel beside the layers that do not need them. With look-ahead, ranks meet in
    the middle of a step as well, which may cost more than it hides where their forwards and backwards are uneven.
    `processor_factor` is the slowdown of computation where ranks share processors.
    """
    if pipeline_depth < 1:
        raise SpecError(f"pipeline_depth={pipeline_depth}", "at least 1")
    stages: list[TimelineStage] = []
    for name, (resource, before) in PROGRAM.items():
        factor = processor_factor if resource == "processor" else 1.0
        queue = (StageRef("route.pack", READ_AHEAD),) if name == "data" else ()
        stages.append(
            TimelineStage(
                name=name,
                resource=resource,
                seconds_W=tuple(factor * seconds for seconds in costs.of(name)),
                after=(*map(StageRef, before), *queue),
                joins=resource == "link",
                latency_s=costs.latency_s if resource == "link" else 0.0,
            )
        )
    return look_ahead(stages, pipeline_depth)


def look_ahead(stages: Sequence[TimelineStage], pipeline_depth: int) -> tuple[TimelineStage, ...]:
    """The stages of a step in the order of a program that prepares the batches of later steps.

    A place is the first stage of that name or of a part of it.
    """
    if pipeline_depth == 1:
        return tuple(stages)
    by_name = {stage.name: replace(stage, ahead=pipeline_depth - 1) for stage in stages if stage.name in AHEAD}
    pending, order = dict(PLACES), list[TimelineStage]()
    for stage in stages:
        place = next((name for name in pending if f"{stage.name}.".startswith(f"{name}.")), None)
        if place is not None:
            order += [by_name[name] for name in pending.pop(place) if name in by_name]
        if stage.name not in by_name:
            order.append(stage)
    return tuple(order)
