"""Request to plan: options, search, bound and forecast, in the order in which `make_plan` runs them."""

import time
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import Forecast, Plan
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.exchange import waits_s
from rowwise.planning.perf.learned import LearnedModel
from rowwise.planning.perf.timeline import training_step_s
from rowwise.planning.planner.bound import threshold_bound
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.explanation import StepTimeline
from rowwise.planning.planner.infeasible import check_feasible
from rowwise.planning.planner.kinds import CACHED
from rowwise.planning.planner.methods.named import placement_of, run_method
from rowwise.planning.planner.methods.recshard import CUTS, RECSHARD, pin_hottest
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.problem import Pieces, PlacementProblem, PlanRequest
from rowwise.planning.planner.rank_exchange import ExchangeSeconds, exchanges_s, split_exchange
from rowwise.planning.planner.search import SearchResult, search, search_best
from rowwise.planning.planner.step_timeline import DEPTH, plan_costs, step_timeline
from rowwise.tables.spec import Topology

SECONDS = 0.2  # of search, by default


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan with its forecast, the problem it solves, and the search that found it."""

    plan: Plan
    problem: PlacementProblem
    searched: SearchResult


def make_plan(
    request: PlanRequest, *, seconds: float = SECONDS, seed: int = 0, certify_s: float = 0.0, prove: bool = True
) -> PlanResult:
    """The best plan of a search of about `seconds`; deterministic in request, seed and seconds.

    With `certify_s`, a solver then spends about that long on a better bound. Without `prove`, only the fast bound is
    computed. Raises `InfeasibleError` where nothing fits.
    """
    problem = make_problem(request)
    searched = search(problem, seconds=seconds, seed=seed, prove=prove)
    check_feasible(problem, searched)
    if certify_s:
        from rowwise.planning.planner.milp import certify

        searched = certify(problem, searched, certify_s)
    return _plan_result(problem, searched)


def one_device_forecast(request: PlanRequest) -> Forecast | None:
    """The forecast of the same global batch with all tables on one device; None where its memory is too small."""
    single = replace(request.on(Topology()), constraints=Constraints(reserve=request.constraints.reserve))
    problem = make_problem(single)
    searched = search(problem, seconds=0.0, prove=False)
    return None if searched.over else forecast(problem, searched)


def plan_by_method(request: PlanRequest, method: str, seed: int = 0) -> PlanResult:
    """The plan of a published method; see `methods.named`. Raises `SpecError` where it finds none."""
    begin_s, cuts = time.monotonic(), CUTS if method == RECSHARD else CACHED
    problem = make_problem(request, cuts)
    placement = placement_of(problem, run_method(method, problem, seed))
    if placement is None:
        raise SpecError(
            f"method {method} found no plan that fits memory and constraints",
            hint="take another method, or plan without --method: the search finds more plans, and explains why none "
            "fits",
        )
    cost, bound, took_s = problem.cost(placement), threshold_bound(problem), time.monotonic() - begin_s
    result = _plan_result(problem, SearchResult(placement, cost, 0.0, bound, 0, took_s, out_of_time=False))
    return replace(result, plan=pin_hottest(result.plan, request)) if method == RECSHARD else result


def make_plans(request: PlanRequest, count: int, *, seconds: float = SECONDS, seed: int = 0) -> list[PlanResult]:
    """Up to `count` plans that fit, the cheapest first, of which `calibrate` measures and keeps the fastest."""
    problem = make_problem(request)
    candidates = search_best(problem, count, seconds=seconds, seed=seed)
    check_feasible(problem, candidates[0])
    return [_plan_result(problem, searched) for searched in candidates if not searched.over]


def _plan_result(problem: PlacementProblem, searched: SearchResult) -> PlanResult:
    plan = structs.replace(problem.plan(searched.placement), forecast=forecast(problem, searched))
    plan.validate([w.table for w in problem.request.workloads])
    return PlanResult(plan, problem, searched)


def forecast(problem: PlacementProblem, searched: SearchResult) -> Forecast:
    sums, request = problem.sums(searched.placement), problem.request
    stages_s, exchange = _stage_seconds(problem, problem.plan(searched.placement), sums)
    pipelined_s = training_step_s(plan_costs(stages_s, exchange, request.dense_s), DEPTH) if exchange else None
    known = np.isfinite(searched.bound.cost)
    return Forecast(
        model=request.model.name,
        batch=request.batch,
        wire=request.model.wire,
        step_s=float(searched.cost),
        pipelined_s=pipelined_s,
        bound_s=float(searched.bound.cost) if known else None,
        bound=searched.bound.kind if known else "",
        operators_s=tuple(problem.phi(sums.load_NK).tolist()),
        links_s=tuple(sums.link_N.tolist()),
        stages_s={name: tuple(seconds.tolist()) for name, seconds in stages_s.items()},
        memory_bytes=tuple(tuple(int(size) for size in row) for row in sums.bytes_NM),
        limits_bytes=request.limits_bytes,
    )


def plan_timeline(problem: PlacementProblem, searched: SearchResult) -> StepTimeline | None:
    """The step as a timeline; None if the cost model has no stages."""
    plan = problem.plan(searched.placement)
    stages_s, exchange = _stage_seconds(problem, plan, problem.sums(searched.placement))
    return step_timeline(plan_costs(stages_s, exchange, problem.request.dense_s)) if exchange else None


def _stage_seconds(
    problem: PlacementProblem, plan: Plan, sums: Pieces
) -> tuple[dict[str, Floats], ExchangeSeconds | None]:
    """Seconds of each rank by stage, and the parts of its exchange; empty if the cost model has no stages."""
    request, model = problem.request, problem.request.model
    by_stage = {stage.name: stage.seconds(problem.phi, sums.load_NK) for stage in model.stages}
    if not by_stage:
        return {}, None
    exchanges = request.machine.hardware.exchanges if isinstance(model, LearnedModel) else None
    if exchanges is None or plan.world == 1:
        exchange_W = sums.link_N + problem.phi.constant - sum(stage.constant for stage in model.stages)
        exchange = split_exchange(plan, request, exchange_W)
    else:
        exchange = exchanges_s(exchanges, plan, request, by_stage["lookup"])
    by_stage["exchange"] = exchange.total_W
    if plan.world > 1:  # ranks meet after the lookup, and before the next step
        by_stage["wait"] = waits_s(by_stage["lookup"]) + waits_s(by_stage["update"])
    return by_stage, exchange
