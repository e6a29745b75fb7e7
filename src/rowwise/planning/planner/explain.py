"""Explains a plan: the step by rank; for each table where it is, why, and what the best alternative costs."""

import dataclasses

import numpy as np

from rowwise.base import quantity
from rowwise.base.records import RankPlacement, StepPlacement, TablePlacement
from rowwise.parallel.plan import TIERS
from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.planner.alternatives import compute_alternatives
from rowwise.planning.planner.explanation import Explanation
from rowwise.planning.planner.options import TableArrays, price_pieces
from rowwise.planning.planner.pipeline import PlanResult, plan_timeline
from rowwise.planning.planner.problem import NO_UNIT, Pieces, Placement, PlacementProblem
from rowwise.planning.planner.reasons import ReasonInputs, layout_reason
from rowwise.tables.spec import stored_bytes

EPSILON = 1e-30


def explain(planned: PlanResult) -> Explanation:
    """The explanation of a plan: facts only, which `Explanation.text` and reports print."""
    problem, placement = planned.problem, planned.searched.placement
    sums = problem.sums(placement)
    alternatives = compute_alternatives(problem, placement)
    case = ReasonInputs.of(problem, planned.searched, alternatives, sums)
    parts = _LoadShares.of(problem, placement, sums)
    tables = [_table(case, parts, item, table) for item, group in enumerate(problem.members) for table in group]
    return Explanation(
        hosts=problem.topology.hosts,
        devices=problem.topology.devices,
        limits_bytes=problem.request.limits_bytes,
        step=_step(planned, sums),
        ranks=_ranks(problem, placement, sums),
        tables=tuple(sorted(tables, key=lambda t: (-t.operators_s - t.links_s, -t.bytes, t.name))),
        timeline=plan_timeline(problem, planned.searched),
    )


def _step(planned: PlanResult, sums: Pieces) -> StepPlacement:
    problem, searched = planned.problem, planned.searched
    phi, request = problem.phi, problem.request
    phi_W = phi(sums.load_NK)
    busiest = int(phi_W.argmax())
    stages = {stage.name: stage for stage in request.model.stages}
    parts_s = {name: float(s.seconds(phi, sums.load_NK[busiest]) - s.constant) for name, s in stages.items()}
    known = bool(np.isfinite(searched.bound.cost))
    return StepPlacement(
        seconds=float(phi_W.max() + sums.link_N.max()),
        operators_s=float(phi_W.max()),
        forward_s=parts_s.get("lookup"),
        backward_s=parts_s.get("update"),
        links_s=float(sums.link_N.max()),
        busiest=busiest,
        busiest_links=int(sums.link_N.argmax()),
        bound_s=float(searched.bound.cost) if known else None,
        bound=searched.bound.kind if known else "",
        batch=request.batch,
        model=request.model.name,
        hardware=request.machine.hardware.name,
        source=request.machine.hardware.source,
        wire=request.model.wire.in_words(request.machine.topology),
    )


def _ranks(problem: PlacementProblem, placement: Placement, sums: Pieces) -> tuple[RankPlacement, ...]:
    pieces_W = np.zeros(problem.topology.world, dtype=int)
    for unit in placement.unit_N[placement.unit_N != NO_UNIT]:
        pieces_W[problem.ranks_of(int(unit))] += 1
    phi_W = problem.phi(sums.load_NK)
    return tuple(
        RankPlacement(
            rank=rank,
            operators_s=float(phi_W[rank]),
            links_s=float(sums.link_N[rank]),
            memory_bytes=tuple(int(size) for size in sums.bytes_NM[rank]),
            pieces=int(pieces_W[rank]),
        )
        for rank in range(problem.topology.world)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _LoadShares:
    """The share of a rank's operators that a load causes.

    A rank's operators do not take the sum of its pieces' own seconds. The joint time is divided by phi's slopes, which
    for sums and norms add up to all of it but the constant.
    """

    problem: PlacementProblem
    placement: Placement
    slope_WK: Floats  # share of a rank's operators per unit of load
    over_W: Floats  # seconds of operators beyond the constant
    busiest: int

    @classmethod
    def of(cls, problem: PlacementProblem, placement: Placement, sums: Pieces) -> "_LoadShares":
        phi = problem.phi
        slope_WK = phi.gradient(sums.load_NK)
        total_W = (slope_WK * sums.load_NK).sum(1)
        phi_W = phi(sums.load_NK)
        slope_WK = slope_WK / np.maximum(total_W, EPSILON)[:, None]
        return cls(problem, placement, slope_WK, phi_W - phi.constant, int(phi_W.argmax()))

    def shares(self, item: int, pieces: Pieces) -> tuple[Floats, Floats]:
        """By rank: the share of its operators that these pieces of an item cause, and their link seconds."""
        share_W, link_W = np.zeros(len(self.over_W)), np.zeros(len(self.over_W))
        taken = self.problem.pieces_of(int(self.placement.choice_I[item]))
        for number, piece in enumerate(taken):
            ranks = self.problem.ranks_of(int(self.placement.unit_N[piece]))
            unit_ranks = slice(ranks.start, ranks.stop)
            share_W[unit_ranks] += self.slope_WK[unit_ranks] @ pieces.load_NK[number]
            link_W[unit_ranks] += pieces.link_N[number]
        return share_W, link_W


def _table(case: ReasonInputs, parts: _LoadShares, item: int, index: int) -> TablePlacement:
    problem, placement = case.problem, case.searched.placement
    workload, group = problem.request.workloads[index], problem.members[item]
    table, option = workload.table, int(placement.choice_I[item])
    taken = np.array(problem.pieces_of(option))
    pieces = problem.pieces.take(taken) if len(group) == 1 else _pieces_of_table(problem, option, index)
    share_W, link_W = parts.shares(item, pieces)
    units = {int(placement.unit_N[piece]) for piece in taken}
    return TablePlacement(
        name=table.name,
        rows=table.rows,
        dim=table.dim,
        bytes=stored_bytes(table),
        ids=workload.access.pooling,
        layout=str(problem.kind_of(option)),
        ranks=tuple(sorted({rank for unit in units for rank in problem.ranks_of(unit)})),
        operators_s=float((share_W * parts.over_W).max()),
        links_s=float(link_W.max()),
        share=float(share_W[parts.busiest]),
        reason=layout_reason(case, item),
        next=_best_alternative(case, item),
        together=tuple(problem.request.workloads[t].table.name for t in group if t != index),
    )


def _pieces_of_table(problem: PlacementProblem, option: int, index: int) -> Pieces:
    """The pieces of one table of an item with several."""
    request = problem.request
    curves = Curves.of(request.workloads, request.batch)
    return price_pieces(request, TableArrays.of(request), curves, problem.kind_of(option), np.array([index]))


def _best_alternative(case: ReasonInputs, item: int) -> str:
    """The best option that was not taken, in words; empty if there is none."""
    best, alternatives = case.next_best(item), case.alternatives
    if best is None:
        return ""
    layout, change = case.words(best), float(alternatives.change_O[best])
    if not np.isfinite(change):
        return f"{layout}: not on the ranks allowed"
    if case.fits(best):
        return f"{layout}: {quantity.format_change(change)}"
    tier = TIERS[int(alternatives.tier_O[best])]
    where = f"rank {int(alternatives.rank_O[best])}" + (f" ({tier})" if tier != TIERS[0] else "")
    return f"{layout}: does not fit, {quantity.format_bytes(int(alternatives.over_O[best]))} over on {where}"
