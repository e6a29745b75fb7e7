"""Measures the best few plans on this machine and keeps the fastest.

Only plans for one host of at most `MAX_RANKS` ranks can be measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.planning.calibrate.steps import StepMeasurement, StepTimes, measure_plans
from rowwise.planning.planner.pipeline import PlanResult

MAX_RANKS = 16  # processes on one machine


@dataclass(frozen=True, slots=True)
class MeasuredPlans:
    """Plans in order of predicted seconds, with their measured steps."""

    planned: tuple[PlanResult, ...]
    steps: tuple[StepTimes, ...]

    @property
    def best(self) -> PlanResult:
        """The fastest plan, with its measurement in its forecast."""
        index = min(range(len(self.steps)), key=lambda i: self.steps[i].seconds)
        best = self.planned[index]
        assert best.plan.forecast is not None
        forecast = structs.replace(best.plan.forecast, measured_s=self.steps[index].seconds)
        return replace(best, plan=structs.replace(best.plan, forecast=forecast))

    def lines(self) -> tuple[str, ...]:
        """Times of each plan, one printed line each."""
        min_s = min(step.seconds for step in self.steps)
        lines = []
        for number, (planned, step) in enumerate(zip(self.planned, self.steps, strict=True), start=1):
            forecast = planned.plan.forecast
            assert forecast is not None
            mark = ", kept" if step.seconds == min_s else ""
            times = f"predicted {forecast.expected_s * 1e3:.2f} ms, measured {step.seconds * 1e3:.2f} ms"
            lines.append(f"plan {number} of {len(self.steps)}: {times} (rounds differ by {step.noise:.0%}){mark}")
        return tuple(lines)


def measure_plan_results(planned: Sequence[PlanResult]) -> MeasuredPlans:
    """Measures all plans in turns, with a process of this machine for each rank."""
    request = planned[0].problem.request
    topology = request.machine.topology
    if topology.hosts > 1 or topology.world > MAX_RANKS:
        raise SpecError(
            f"a plan for {topology.hosts} hosts of {topology.devices} devices cannot be measured here",
            f"one host of at most {MAX_RANKS}",
        )
    if topology.world > request.batch:
        raise SpecError(f"a batch of {request.batch} for {topology.world} ranks", "a sample for each rank")
    plans = tuple(p.plan for p in planned)
    steps = measure_plans(StepMeasurement(request.workloads, plans, request.batch, wire=request.model.wire))
    return MeasuredPlans(tuple(planned), tuple(steps))
