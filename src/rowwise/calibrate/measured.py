"""Measured sets as arrays, with the features that a planner would give their tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rowwise.calibrate.samples import SetSample
from rowwise.calibrate.train_network import Sets
from rowwise.perf.access import Curves, Floats
from rowwise.perf.cost import Shards
from rowwise.perf.features import features, work
from rowwise.perf.hardware import Machine, hardware_named
from rowwise.perf.learned import STAGES
from rowwise.perf.roofline import Roofline
from rowwise.planner.kinds import PlacementKind
from rowwise.planner.layouts import TABLE_WISE
from rowwise.planner.options import TableArrays
from rowwise.planner.problem import PlanRequest
from rowwise.spec import Topology


@dataclass(frozen=True, slots=True)
class MeasuredSets:
    """Sets of tables with the seconds of each stage."""

    sets: Sets  # with the seconds of all stages
    stage_s: dict[str, Floats]
    work: dict[str, Floats]
    shards: tuple[tuple[Shards, Curves], ...]

    def of(self, stage: str) -> Sets:
        """What a network of one stage learns from."""
        return Sets(self.sets.features_NF, self.work[stage], self.sets.begin_S1, self.stage_s[stage])

    def whole(self) -> Sets:
        """What a network of all stages together learns from."""
        work_NK = np.concatenate([self.work[stage] for stage in STAGES], axis=1)
        return Sets(self.sets.features_NF, work_NK, self.sets.begin_S1, self.sets.seconds_S)

    def over(self, factor_S: Floats) -> "MeasuredSets":
        stage_s = {stage: seconds_S / factor_S for stage, seconds_S in self.stage_s.items()}
        return replace(self, sets=replace(self.sets, seconds_S=self.sets.seconds_S / factor_S), stage_s=stage_s)

    def take(self, index_S: np.ndarray) -> "MeasuredSets":
        parts = {stage: self.of(stage).take(index_S) for stage in STAGES}
        return MeasuredSets(
            self.sets.take(index_S),
            {stage: part.seconds_S for stage, part in parts.items()},
            {stage: part.work_NK for stage, part in parts.items()},
            tuple(self.shards[s] for s in index_S),
        )


def measured_of(sets: Sequence[SetSample]) -> MeasuredSets:
    """Measurements as arrays, with the features that a planner would give these tables."""
    shards = tuple(_shards(one) for one in sets)
    begins = np.concatenate([[0], np.cumsum([len(one.workloads) for one in sets])])
    stage_s = {"lookup": np.array([s.lookup_s for s in sets]), "update": np.array([s.update_s for s in sets])}
    works = {stage: np.concatenate([work(stage, *pair) for pair in shards]) for stage in STAGES}
    seen_NF = np.concatenate([features(*pair) for pair in shards])
    whole_S: Floats = stage_s["lookup"] + stage_s["update"]
    return MeasuredSets(Sets(seen_NF, np.zeros((len(seen_NF), 0)), begins, whole_S), stage_s, works, shards)


def _shards(one: SetSample) -> tuple[Shards, Curves]:
    machine = Machine(topology=Topology(), hardware=hardware_named("cpu"))
    model = Roofline(machine.hardware, machine.topology)
    question = PlanRequest(workloads=one.workloads, machine=machine, model=model, batch=one.batch)
    shards = TableArrays.of(question).shards(PlacementKind(TABLE_WISE), np.arange(len(one.workloads)), question)
    return shards, Curves.of(one.workloads, one.batch)
