"""What each process of `pipeline.py` does in its section timeline: a pipelined step, predicted and measured.

A sequential run records its timeline, which gives the costs of the stages; `rowwise.planning.perf.timeline` overlaps
them.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from parts.pipeline_disk import DiskOrder, DiskSide
from parts.pipeline_ranks import Group, Order, count_latencies
from rowwise.parallel.comm.simulated_link import SimulatedLink

DEPTH = 2
SECONDS = ("begin_s", "end_s")


@dataclass(frozen=True, kw_only=True)
class TimelineOrder:
    """What a group of processes is asked for in one configuration."""

    name: str
    ranks: int
    order: Order
    folder: str  # for runs
    delayed: bool = False
    accumulate: int = 1
    disk: DiskOrder | None = None


def predict_and_measure(comm: Any, asked: TimelineOrder) -> list[dict]:
    """A row of the configuration; blocks of both depths take turns."""
    block = block_of(comm, asked)
    block(DEPTH, None)
    sequential_s, pipelined_s, predicted_s = [], [], []
    for number in range(asked.order.blocks):
        folder = Path(asked.folder) / asked.name.replace(" ", "-") / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        sequential_s.append(block(1, folder))
        pipelined_s.append(block(DEPTH, None))
        if comm.rank == 0:
            predicted_s.append(predicted(folder / "timeline.csv"))
    if comm.rank:
        return []
    times = {"sequential_ms": median(sequential_s), "ms": median(pipelined_s), "predicted_ms": median(predicted_s)}
    about = {"section": "timeline", "side": asked.name, "transport": asked.order.transport, "link": "none"}
    about |= {"link": "simulated"} if asked.delayed else {}
    noise = max(pipelined_s) / min(pipelined_s) - 1
    return [about | {"noise": noise} | {name: seconds * 1e3 for name, seconds in times.items()}]


def block_of(comm: Any, asked: TimelineOrder) -> Callable[[int, Path | None], float]:
    """Seconds an update by depth; a folder is for what the run records."""
    if asked.disk is not None:
        side = DiskSide(comm, asked.disk, Path(asked.folder))
        return lambda depth, folder: side.block(depth, folder).seconds
    group = Group(comm, asked.order, simulated=asked.delayed)
    model = group.model()
    if asked.delayed:
        compute_s, chain = count_latencies(group, model)
        group.set_link(SimulatedLink(group.largest(compute_s / chain)))
    more = {"accumulate": asked.accumulate}
    return lambda depth, folder: group.block(model, pipeline_depth=depth, folder=folder, **more).seconds


def predicted(recording: Path) -> float:
    """Seconds of a pipelined step, from the timeline of a sequential run."""
    from rowwise.planning.perf.timeline import ScheduledStage, training_step_s
    from rowwise.planning.perf.timeline_costs import recorded_costs

    with recording.open() as file:
        recorded = [
            ScheduledStage(
                row["stage"], row["resource"], int(row["rank"]), int(row["step"]), *(float(row[s]) for s in SECONDS)
            )
            for row in csv.DictReader(file)
        ]
    costs = recorded_costs(recorded)
    assert costs is not None, f"{recording}: no step is complete"
    return training_step_s(costs, DEPTH)
