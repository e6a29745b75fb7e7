"""The best few plans, run here, and the fastest kept: what a model gets wrong, a measurement puts right.

Known limits: plans for machines that this one is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from rowwise.calibrate.steps import StepMeasurement, StepTimes, measure_plans
from rowwise.errors import SpecError
from rowwise.planner.make import PlanResult

MOST_RANKS = 16  # processes of one machine


@dataclass(frozen=True, slots=True)
class MeasuredPlans:
    """Plans in the order in which they were predicted, with what a step of each took."""

    planned: tuple[PlanResult, ...]
    steps: tuple[StepTimes, ...]

    @property
    def best(self) -> PlanResult:
        """The one that was fastest, with its measurement in its forecast."""
        index = min(range(len(self.steps)), key=lambda i: self.steps[i].seconds)
        found = self.planned[index]
        assert found.plan.forecast is not None
        forecast = structs.replace(found.plan.forecast, measured_s=self.steps[index].seconds)
        return replace(found, plan=structs.replace(found.plan, forecast=forecast))

    def lines(self) -> tuple[str, ...]:
        best = min(step.seconds for step in self.steps)
        found = []
        for number, (planned, step) in enumerate(zip(self.planned, self.steps, strict=True), start=1):
            forecast = planned.plan.forecast
            assert forecast is not None
            kept = ", kept" if step.seconds == best else ""
            words = f"predicted {forecast.expected_s * 1e3:.2f} ms, measured {step.seconds * 1e3:.2f} ms"
            found.append(f"plan {number} of {len(self.steps)}: {words} (rounds differ by {step.noise:.0%}){kept}")
        return tuple(found)


def keep_truth(planned: Sequence[PlanResult]) -> MeasuredPlans:
    """Run them all on real processes of this machine, in turns."""
    question = planned[0].problem.question
    topology = question.machine.topology
    if topology.hosts > 1 or topology.world > MOST_RANKS:
        got = f"a plan for {topology.hosts} hosts of {topology.devices} devices"
        raise SpecError(f"{got} cannot be measured here: want one host of at most {MOST_RANKS}")
    if topology.world > question.batch:
        raise SpecError(f"a batch of {question.batch} for {topology.world} ranks: want a sample for each")
    plans = tuple(p.plan for p in planned)
    steps = measure_plans(StepMeasurement(question.workloads, plans, question.batch, wire=question.model.wire))
    return MeasuredPlans(tuple(planned), tuple(steps))
