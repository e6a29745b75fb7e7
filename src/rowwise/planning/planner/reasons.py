"""Why a table has its layout, in one sentence, from the costs of its options.

Rules are tried in order; each compares two numbers. Known limit: a rule looks at one table, while the search compares
whole plans, so reasons that lie in several tables at once are not found.
"""

from dataclasses import dataclass

import numpy as np

from rowwise.base import quantity
from rowwise.planning.perf.access import Floats
from rowwise.planning.planner.alternatives import Alternatives
from rowwise.planning.planner.bound import OptionTotals
from rowwise.planning.planner.kinds import PlacementKind
from rowwise.planning.planner.layouts import TABLE_WISE, layout_named
from rowwise.planning.planner.options import SMALL_SHARE
from rowwise.planning.planner.problem import Pieces, PlacementProblem
from rowwise.planning.planner.search import SearchResult

EPSILON = 1e-30
CLEAR_RATIO = 1.05  # smaller ratios are not mentioned
CLEAR_SHARE = 1e-3  # of a step


@dataclass(frozen=True, slots=True)
class ReasonInputs:
    """A search result, its alternatives, and totals that rules compare."""

    problem: PlacementProblem
    searched: SearchResult
    alternatives: Alternatives
    totals: OptionTotals
    work_O: Floats  # seconds of operators of all pieces, summed over ranks
    due_s: float  # mean seconds of operators of a rank, beyond the constant
    due_link_s: float  # mean link seconds of a rank

    @classmethod
    def of(
        cls, problem: PlacementProblem, searched: SearchResult, alternatives: Alternatives, sums: Pieces
    ) -> "ReasonInputs":
        phi = problem.phi
        alone_N = phi(problem.pieces.load_NK) - phi.constant
        mean_s = float((phi(sums.load_NK) - phi.constant).mean())
        return cls(
            problem=problem,
            searched=searched,
            alternatives=alternatives,
            totals=OptionTotals.of(problem),
            work_O=np.add.reduceat(alone_N, problem.option_begin[:-1]) * problem.ranks_of_O,
            due_s=max(mean_s, EPSILON),
            due_link_s=max(float(sums.link_N.mean()), EPSILON),
        )

    def taken(self, item: int) -> int:
        return int(self.searched.placement.choice_I[item])

    def whole(self, item: int) -> int | None:
        """The option of the whole table on one device, if it has one."""
        return next(
            (o for o in self.problem.options_of(item) if self.problem.kind_of(o) == PlacementKind(TABLE_WISE)), None
        )

    def share(self, option: int) -> float:
        """The largest piece's operators or link seconds, over the mean of a rank, whichever is more."""
        return max(self.operators_share(option), float(self.totals.link_O[option]) / self.due_link_s)

    def operators_share(self, option: int) -> float:
        return (float(self.totals.phi_O[option]) - self.problem.phi.constant) / self.due_s

    def next_best(self, item: int) -> int | None:
        """The best option not taken: the cheapest that fits, else the one least over memory; None without another."""

        def order(option: int) -> tuple[bool, float, float]:
            change, over, fits = self.alternatives.change_O[option], self.alternatives.over_O[option], self.fits(option)
            return not fits, change if fits else 0.0, over if np.isfinite(change) else 0.0

        return min((o for o in self.problem.options_of(item) if o != self.taken(item)), key=order, default=None)

    def best_alternative(self, item: int) -> int | None:
        """The cheapest option not taken that fits."""
        option = self.next_best(item)
        return option if option is not None and self.fits(option) else None

    def fits(self, option: int) -> bool:
        """Whether an option fits with all other tables where they are."""
        return self.alternatives.over_O[option] == 0 and bool(np.isfinite(self.alternatives.change_O[option]))

    def words(self, option: int) -> str:
        return str(self.problem.kind_of(option))


def layout_reason(case: ReasonInputs, item: int) -> str:
    for rule in (
        _only_device,
        _limited_by_constraints,
        _search_incomplete,
        _exceeds_device,
        _in_lower_tier,
        _is_replicated,
        _is_small,
        _fits_whole,
    ):
        words = rule(case, item)
        if words:
            return words
    return _is_cut(case, item)


def _allowed_layouts(case: ReasonInputs, item: int) -> frozenset[str]:
    """The layouts that all tables of an item may have."""
    request, group = case.problem.request, case.problem.members[item]
    names = [request.workloads[table].table.name for table in group]
    return frozenset.intersection(*(frozenset(request.constraints.layouts_of(name)) for name in names))


def _only_device(case: ReasonInputs, item: int) -> str:
    return (
        "the machine has one device"
        if case.problem.topology.world == 1 and len(case.problem.options_of(item)) == 1
        else ""
    )


def _exceeds_device(case: ReasonInputs, item: int) -> str:
    whole = case.whole(item)
    if whole is None or whole == case.taken(item):
        return ""
    need, limit = float(case.totals.bytes_OM[whole, 0]) * case.problem.topology.world, float(case.problem.limit_M[0])
    if need <= limit:
        return ""
    return f"larger than a device ({quantity.format_bytes(need)} of {quantity.format_bytes(limit)})"


def _limited_by_constraints(case: ReasonInputs, item: int) -> str:
    """One allowed layout, or all of its allowed ranks."""
    problem, taken = case.problem, case.taken(item)
    if len(_allowed_layouts(case, item)) == 1:
        return "the only layout allowed"
    rule = int(problem.rule_I[item])
    if rule < 0:
        return ""
    allowed = np.flatnonzero(problem.allowed_RU[rule, : problem.topology.world]).tolist()
    units = {int(unit) for unit in case.searched.placement.unit_N[problem.pieces_of(taken)]}
    if {rank for unit in units for rank in problem.ranks_of(unit)} != set(allowed):
        return ""
    return f"constraints allow only rank{'s' * (len(allowed) > 1)} {quantity.format_ranks(allowed)}"


def _search_incomplete(case: ReasonInputs, item: int) -> str:
    """Another layout of this item alone would be clearly faster."""
    other = case.best_alternative(item)
    if other is None or case.alternatives.change_O[other] > -CLEAR_SHARE * case.searched.cost:
        return ""
    return f"the search ended early: {case.words(other)} would take less, so search longer"


def _in_lower_tier(case: ReasonInputs, item: int) -> str:
    kind = case.problem.kind_of(case.taken(item))
    if kind.tier == "device":
        return ""
    on_device = [o for o in case.problem.options_of(item) if case.problem.kind_of(o).tier == "device"]
    if not any(case.fits(o) for o in on_device):
        return f"devices are full, so its rows are on the {kind.tier}"
    return f"rarely looked up: rows on the {kind.tier} leave device memory to tables that gain more"


def _is_replicated(case: ReasonInputs, item: int) -> str:
    taken, whole = case.taken(item), case.whole(item)
    if not case.problem.kind_of(taken).layout.is_replicated:
        return ""
    if whole is not None:
        moved = float(case.totals.links_O[taken]) / max(float(case.totals.links_O[whole]), EPSILON)
        if moved < 1:
            return f"small and looked up by all ranks: a replica moves {moved:.1%} of the bytes of an exchange"
    return f"small and looked up by all ranks: replicas spread its lookups over {case.problem.topology.world} ranks"


def _is_small(case: ReasonInputs, item: int) -> str:
    taken, share = case.taken(item), case.share(case.taken(item))
    if taken != case.whole(item) or share > SMALL_SHARE:
        return ""
    tried = "" if len(case.problem.options_of(item)) > 1 else ", so cuts are not tried"
    return f"small: {share:.1%} of a rank's even share{tried}"


def _fits_whole(case: ReasonInputs, item: int) -> str:
    taken, share = case.taken(item), case.share(case.taken(item))
    if taken != case.whole(item):
        return ""
    part = f"fits on one rank: {share:.0%} of a rank's even share"
    if len(case.problem.options_of(item)) == 1:
        layouts = [layout_named(name) for name in _allowed_layouts(case, item)]
        columns = any(layout.cuts_columns for layout in layouts) and all(
            layout.is_whole or layout.cuts_columns for layout in layouts
        )
        return part + (", and too few columns to be cut" if columns else ", and no other layout is possible")
    other = case.best_alternative(item)
    if other is None:
        return part
    more = float(case.work_O[other]) / max(float(case.work_O[taken]), EPSILON)
    sent = float(case.totals.links_O[other]) / max(float(case.totals.links_O[taken]), EPSILON)
    if sent > max(more, CLEAR_RATIO):
        return f"{part}, and the next best layout would send {sent:.1f}x as much"
    if more > CLEAR_RATIO:
        return f"{part}, and the next best layout is {more:.1f}x the work"
    return part


def _is_cut(case: ReasonInputs, item: int) -> str:
    """Why the table is not whole; if whole was no option, why not the best other option."""
    whole, other = case.whole(item), case.best_alternative(item)
    if whole is None:
        return "the only way that fits" if other is None else "the cheapest of its allowed layouts"
    share = case.operators_share(whole)
    if share > 1:
        return f"whole, it would be {share:.1f}x a rank's even share"
    if not case.fits(whole):
        over = quantity.format_bytes(float(case.alternatives.over_O[whole]))
        return f"whole, it does not fit with the other tables: {over} over on rank {case.alternatives.rank_O[whole]}"
    sent = float(case.totals.link_O[whole]) / case.due_link_s
    if sent > 1:
        return f"whole, its rank would send {sent:.1f}x the mean of ranks"
    change = float(case.alternatives.change_O[whole])
    if change <= CLEAR_SHARE * case.searched.cost:
        return "no slower than whole, with the other tables where they are"
    return "it balances the ranks" + ("" if other == whole else f": whole, {quantity.format_change(change)}")
