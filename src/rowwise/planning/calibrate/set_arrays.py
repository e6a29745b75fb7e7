"""Measured sets as arrays, with the features that a planner would compute for their tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rowwise.planning.calibrate.samples import SetSample
from rowwise.planning.calibrate.train_network import Sets
from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.cost import Shards
from rowwise.planning.perf.features import nominal_work, piece_features
from rowwise.planning.perf.hardware import Machine, hardware_named
from rowwise.planning.perf.learned import STAGES
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.planner.kinds import PlacementKind
from rowwise.planning.planner.layouts import TABLE_WISE
from rowwise.planning.planner.options import TableArrays
from rowwise.planning.planner.problem import PlanRequest
from rowwise.tables.spec import Topology


@dataclass(frozen=True, slots=True)
class MeasuredSets:
    """Sets with the seconds of each stage."""

    sets: Sets  # seconds are those of all stages
    stage_s: dict[str, Floats]
    work: dict[str, Floats]  # nominal, by stage
    shards: tuple[tuple[Shards, Curves], ...]

    def of_stage(self, stage: str) -> Sets:
        """Training data for the network of one stage."""
        return Sets(self.sets.features_NF, self.work[stage], self.sets.begin_S1, self.stage_s[stage])

    def all_stages(self) -> Sets:
        """Training data for one network of all stages together."""
        work_NK = np.concatenate([self.work[stage] for stage in STAGES], axis=1)
        return Sets(self.sets.features_NF, work_NK, self.sets.begin_S1, self.sets.seconds_S)

    def without_drift(self, factor_S: Floats) -> "MeasuredSets":
        """The sets with all seconds divided by `factor_S`."""
        stage_s = {stage: seconds_S / factor_S for stage, seconds_S in self.stage_s.items()}
        return replace(self, sets=replace(self.sets, seconds_S=self.sets.seconds_S / factor_S), stage_s=stage_s)

    def take(self, index_S: np.ndarray) -> "MeasuredSets":
        parts = {stage: self.of_stage(stage).take(index_S) for stage in STAGES}
        return MeasuredSets(
            self.sets.take(index_S),
            {stage: part.seconds_S for stage, part in parts.items()},
            {stage: part.work_NK for stage, part in parts.items()},
            tuple(self.shards[s] for s in index_S),
        )


def stack_sets(sets: Sequence[SetSample]) -> MeasuredSets:
    """Measurements as arrays, one set after another."""
    shards = tuple(_make_shards(sample) for sample in sets)
    begins = np.concatenate([[0], np.cumsum([len(sample.workloads) for sample in sets])])
    stage_s = {"lookup": np.array([s.lookup_s for s in sets]), "update": np.array([s.update_s for s in sets])}
    works = {stage: np.concatenate([nominal_work(stage, *pair) for pair in shards]) for stage in STAGES}
    features_NF = np.concatenate([piece_features(*pair) for pair in shards])
    whole_S: Floats = stage_s["lookup"] + stage_s["update"]
    return MeasuredSets(Sets(features_NF, np.zeros((len(features_NF), 0)), begins, whole_S), stage_s, works, shards)


def _make_shards(sample: SetSample) -> tuple[Shards, Curves]:
    machine = Machine(topology=Topology(), hardware=hardware_named("cpu"))
    model = Roofline(machine.hardware, machine.topology)
    request = PlanRequest(workloads=sample.workloads, machine=machine, model=model, batch=sample.batch)
    shards = TableArrays.of(request).shards(PlacementKind(TABLE_WISE), np.arange(len(sample.workloads)), request)
    return shards, Curves.of(sample.workloads, sample.batch)
