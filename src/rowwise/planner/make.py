"""A question answered: the plan, what it is expected to take, and how far from the best it can be."""

import time
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from rowwise.errors import SpecError
from rowwise.perf.exchange import waits_s
from rowwise.perf.learned import LearnedModel
from rowwise.plan import Forecast, Plan
from rowwise.planner.bound import threshold_bound
from rowwise.planner.methods.named import placement_of, run_method
from rowwise.planner.options import make_problem
from rowwise.planner.problem import Pieces, PlacementProblem, PlanRequest
from rowwise.planner.refine import exchanges_s
from rowwise.planner.search import SearchResult, search, search_best

SECONDS = 0.2  # of search, unless told


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan with what led to it."""

    plan: Plan  # with its forecast
    problem: PlacementProblem
    searched: SearchResult


def make_plan(
    question: PlanRequest, *, seconds: float = SECONDS, seed: int = 0, certify_s: float = 0.0, prove: bool = True
) -> PlanResult:
    """The best plan that is found in about so many seconds; the same one for the same question, seed and seconds.

    With `certify_s`, as long again is spent on proving how good it is; without `prove`, the bound is only what comes
    for nothing. Raises `InfeasibleError` where nothing fits.
    """
    problem = make_problem(question)
    searched = search(problem, seconds=seconds, seed=seed, prove=prove)
    if searched.over:
        from rowwise.planner.infeasible import explain_infeasible

        raise explain_infeasible(problem, searched)
    if certify_s:
        from rowwise.planner.milp import certify

        searched = certify(problem, searched, certify_s)
    return _planned(problem, searched)


def plan_by_method(question: PlanRequest, method: str, seed: int = 0) -> PlanResult:
    """What a published method makes of a question; see `methods.named`. Raises `SpecError` where it finds no plan."""
    problem, begin_s = make_problem(question), time.monotonic()
    placement = placement_of(problem, run_method(method, problem, seed))
    if placement is None:
        want = "want another method, or none: the search finds more, and says why where nothing fits"
        raise SpecError(f"method {method} found no plan that fits and follows all constraints: {want}")
    cost, bound, took_s = problem.cost(placement), threshold_bound(problem), time.monotonic() - begin_s
    return _planned(problem, SearchResult(placement, cost, 0.0, bound, 0, took_s, out_of_time=False))


def make_plans(question: PlanRequest, count: int, *, seconds: float = SECONDS, seed: int = 0) -> list[PlanResult]:
    """The best few plans that the search ends with, all of which fit: to be measured, and the best kept."""
    problem = make_problem(question)
    found = search_best(problem, count, seconds=seconds, seed=seed)
    if found[0].over:
        from rowwise.planner.infeasible import explain_infeasible

        raise explain_infeasible(problem, found[0])
    return [_planned(problem, searched) for searched in found if not searched.over]


def _planned(problem: PlacementProblem, searched: SearchResult) -> PlanResult:
    plan = structs.replace(problem.plan(searched.placement), forecast=forecast(problem, searched))
    plan.validate([w.table for w in problem.question.workloads])
    return PlanResult(plan, problem, searched)


def forecast(problem: PlacementProblem, searched: SearchResult) -> Forecast:
    """What a placement is expected to take."""
    sums, question = problem.sums(searched.placement), problem.question
    stages_s = _stages(problem, problem.plan(searched.placement), sums)
    known = np.isfinite(searched.bound.cost)
    return Forecast(
        model=question.model.name,
        batch=question.batch,
        wire=question.model.wire,
        step_s=float(searched.cost),
        bound_s=float(searched.bound.cost) if known else None,
        bound=searched.bound.kind if known else "",
        operators_s=tuple(problem.phi(sums.load_NK).tolist()),
        links_s=tuple(sums.link_N.tolist()),
        stages_s=stages_s,
        memory_bytes=tuple(tuple(int(size) for size in row) for row in sums.bytes_NM),
        limits_bytes=question.limits_bytes,
    )


def _stages(problem: PlacementProblem, plan: Plan, sums: Pieces) -> dict[str, tuple[float, ...]]:
    """What each rank takes for each stage; nothing where the model does not tell."""
    question, model = problem.question, problem.question.model
    found = {stage.name: stage.seconds(problem.phi, sums.load_NK) for stage in model.stages}
    if not found:
        return {}
    exchanges = question.machine.hardware.exchanges if isinstance(model, LearnedModel) else None
    if exchanges is None or plan.world == 1:
        found["exchange"] = sums.link_N + problem.phi.constant - sum(stage.constant for stage in model.stages)
    else:
        found["exchange"] = exchanges_s(exchanges, plan, question, found["lookup"])
    if plan.world > 1:  # ranks meet after the lookup, and before the next step
        found["wait"] = waits_s(found["lookup"]) + waits_s(found["update"])
    return {name: tuple(seconds.tolist()) for name, seconds in found.items()}
