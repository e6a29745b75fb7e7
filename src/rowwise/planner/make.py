"""A question answered: the plan, what it is expected to take, and how far from the best it can be.

Its own file because it is what users call; how plans are found is `search`, how bounds are proven `bound` and `milp`.
"""

from dataclasses import dataclass

import numpy as np
from msgspec import structs

from rowwise.plan import Forecast, Plan
from rowwise.planner.options import problem_of
from rowwise.planner.problem import Problem, Question
from rowwise.planner.search import Searched, search

SECONDS = 0.2  # of search, unless told


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what led to it."""

    plan: Plan  # with its forecast
    problem: Problem
    searched: Searched


def make_plan(
    question: Question, *, seconds: float = SECONDS, seed: int = 0, certify_s: float = 0.0, prove: bool = True
) -> Planned:
    """The best plan that is found in about so many seconds; the same one for the same question, seed and seconds.

    With `certify_s`, as long again is spent on proving how good it is; without `prove`, the bound is only what comes
    for nothing. Raises `InfeasibleError` where nothing fits.
    """
    problem = problem_of(question)
    searched = search(problem, seconds=seconds, seed=seed, prove=prove)
    if searched.over:
        from rowwise.planner.infeasible import explain_infeasible

        raise explain_infeasible(problem, searched)
    if certify_s:
        from rowwise.planner.milp import certify

        searched = certify(problem, searched, certify_s)
    plan = structs.replace(problem.plan(searched.placement), forecast=forecast(problem, searched))
    plan.validate([w.table for w in question.workloads])
    return Planned(plan, problem, searched)


def forecast(problem: Problem, searched: Searched) -> Forecast:
    """What a placement is expected to take."""
    sums, question = problem.sums(searched.placement), problem.question
    known = np.isfinite(searched.bound.cost)
    return Forecast(
        model=question.model.name,
        batch=question.batch,
        step_s=float(searched.cost),
        bound_s=float(searched.bound.cost) if known else None,
        bound=searched.bound.kind if known else "",
        operators_s=tuple(problem.phi(sums.load_NK).tolist()),
        links_s=tuple(sums.link_N.tolist()),
        memory_bytes=tuple(tuple(int(size) for size in row) for row in sums.bytes_NM),
        limits_bytes=question.limits_bytes,
    )
