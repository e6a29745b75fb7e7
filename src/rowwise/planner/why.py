"""Why a table has the layout that it has, in one sentence, from what its options cost.

Known limits: reasons that lie in several tables at once. The search compares whole plans; a sentence compares options.
"""

from dataclasses import dataclass

import numpy as np

from rowwise import quantity
from rowwise.perf.access import Floats
from rowwise.planner.alternatives import Alternatives
from rowwise.planner.bound import Totals
from rowwise.planner.kinds import PlacementKind
from rowwise.planner.layouts import TABLE_WISE, layout_named
from rowwise.planner.options import SMALL
from rowwise.planner.problem import Pieces, PlacementProblem
from rowwise.planner.search import SearchResult

NONE = 1e-30
CLEARLY = 1.05  # times as much is worth a word
CLEARLY_s = 1e-3  # of a step


@dataclass(frozen=True, slots=True)
class ReasonInputs:
    """A placement, and what reasons are made of."""

    problem: PlacementProblem
    searched: SearchResult
    others: Alternatives
    totals: Totals
    work_O: Floats  # seconds of operators of all pieces on all ranks
    due_s: float  # operators that a rank should bear, beyond the constant
    due_link_s: float

    @classmethod
    def of(
        cls, problem: PlacementProblem, searched: SearchResult, others: Alternatives, sums: Pieces
    ) -> "ReasonInputs":
        """For what a search found."""
        phi = problem.phi
        alone_N = phi(problem.pieces.load_NK) - phi.constant
        mean_s = float((phi(sums.load_NK) - phi.constant).mean())
        return cls(
            problem=problem,
            searched=searched,
            others=others,
            totals=Totals.of(problem),
            work_O=np.add.reduceat(alone_N, problem.option_begin[:-1]) * problem.ranks_of_O,
            due_s=max(mean_s, NONE),
            due_link_s=max(float(sums.link_N.mean()), NONE),
        )

    def options(self, item: int) -> range:
        return range(int(self.problem.item_begin[item]), int(self.problem.item_begin[item + 1]))

    def taken(self, item: int) -> int:
        """The option that an item has."""
        return int(self.searched.placement.choice_I[item])

    def whole(self, item: int) -> int | None:
        """The option of staying whole on a device."""
        return next((o for o in self.options(item) if self.problem.kind_of(o) == PlacementKind(TABLE_WISE)), None)

    def share(self, option: int) -> float:
        """The largest piece's part of what a rank should bear, of operators or links."""
        return max(self.operators_share(option), float(self.totals.link_O[option]) / self.due_link_s)

    def operators_share(self, option: int) -> float:
        return (float(self.totals.phi_O[option]) - self.problem.phi.constant) / self.due_s

    def best_other(self, item: int) -> int | None:
        """Of the options not taken that fit, the one that costs least."""
        fits = [o for o in self.options(item) if o != self.taken(item) and self.fits(o)]
        return min(fits, key=lambda o: self.others.change_O[o], default=None)

    def fits(self, option: int) -> bool:
        """Whether it fits beside all other tables."""
        return self.others.over_O[option] == 0 and bool(np.isfinite(self.others.change_O[option]))

    def words(self, option: int) -> str:
        return str(self.problem.kind_of(option))


def layout_reason(case: ReasonInputs, item: int) -> str:
    """Why an item has its layout."""
    for rule in (_one_device, _limited, _improved, _too_large, _lowered, _copied, _small, _whole):
        words = rule(case, item)
        if words:
            return words
    return _cut(case, item)


def _layouts(case: ReasonInputs, item: int) -> frozenset[str]:
    question, group = case.problem.question, case.problem.members[item]
    names = [question.workloads[table].table.name for table in group]
    return frozenset.intersection(*(frozenset(question.constraints.layouts_of(name)) for name in names))


def _one_device(case: ReasonInputs, item: int) -> str:
    return "there is one device" if case.problem.topology.world == 1 and len(case.options(item)) == 1 else ""


def _too_large(case: ReasonInputs, item: int) -> str:
    whole = case.whole(item)
    if whole is None or whole == case.taken(item):
        return ""
    need, limit = float(case.totals.bytes_OM[whole, 0]) * case.problem.topology.world, float(case.problem.limit_M[0])
    if need <= limit:
        return ""
    return f"larger than a device ({quantity.of_bytes(need)} of {quantity.of_bytes(limit)})"


def _limited(case: ReasonInputs, item: int) -> str:
    problem, taken = case.problem, case.taken(item)
    if len(_layouts(case, item)) == 1:
        return "the only layout that it may have"
    rule = int(problem.rule_I[item])
    if rule < 0:
        return ""
    allowed = np.flatnonzero(problem.allowed_RU[rule, : problem.topology.world]).tolist()
    units = {int(unit) for unit in case.searched.placement.unit_N[_span(problem, taken)]}
    if {rank for unit in units for rank in problem.ranks_of(unit)} != set(allowed):
        return ""
    return f"it may only be on rank{'s' * (len(allowed) > 1)} {quantity.of_ranks(allowed)}"


def _span(problem: PlacementProblem, option: int) -> slice:
    pieces = problem.pieces_of(option)
    return slice(pieces.start, pieces.stop)


def _improved(case: ReasonInputs, item: int) -> str:
    other = case.best_other(item)
    if other is None or case.others.change_O[other] > -CLEARLY_s * case.searched.cost:
        return ""
    return f"what the search had reached: {case.words(other)} would take less, so search longer"


def _lowered(case: ReasonInputs, item: int) -> str:
    kind = case.problem.kind_of(case.taken(item))
    if kind.tier == "device":
        return ""
    on_device = [o for o in case.options(item) if case.problem.kind_of(o).tier == "device"]
    if not any(case.fits(o) for o in on_device):
        return f"no room is left on devices, so rows live on the {kind.tier}"
    return f"asked for seldom enough: rows on the {kind.tier} leave devices to tables that gain more"


def _copied(case: ReasonInputs, item: int) -> str:
    taken, whole = case.taken(item), case.whole(item)
    if not case.problem.kind_of(taken).layout.is_copied:
        return ""
    if whole is not None:
        moved = float(case.totals.links_O[taken]) / max(float(case.totals.links_O[whole]), NONE)
        if moved < 1:
            return f"small and asked for everywhere: a copy moves {moved:.1%} of what an exchange would"
    return f"small and asked for everywhere: copies spread its lookups over {case.problem.topology.world} ranks"


def _small(case: ReasonInputs, item: int) -> str:
    taken, share = case.taken(item), case.share(case.taken(item))
    if taken != case.whole(item) or share > SMALL:
        return ""
    tried = "" if len(case.options(item)) > 1 else ", so cuts are not tried"
    return f"small: {share:.1%} of what a rank should bear{tried}"


def _whole(case: ReasonInputs, item: int) -> str:
    taken, share = case.taken(item), case.share(case.taken(item))
    if taken != case.whole(item):
        return ""
    part = f"fits on one rank: {share:.0%} of what a rank should bear"
    if len(case.options(item)) == 1:
        may_be = [layout_named(name) for name in _layouts(case, item)]
        columns = any(layout.cuts_columns for layout in may_be) and all(
            layout.is_whole or layout.cuts_columns for layout in may_be
        )
        return part + (", and too few columns to be cut" if columns else ", and no other layout is possible")
    other = case.best_other(item)
    if other is None:
        return part
    more = float(case.work_O[other]) / max(float(case.work_O[taken]), NONE)
    sent = float(case.totals.links_O[other]) / max(float(case.totals.links_O[taken]), NONE)
    if sent > max(more, CLEARLY):
        return f"{part}, and the next best way would send {sent:.1f}x as much"
    if more > CLEARLY:
        return f"{part}, and the next best way is {more:.1f}x the work"
    return part


def _cut(case: ReasonInputs, item: int) -> str:
    """Why it is not whole; where that was no option, why it is not the best other."""
    whole, other = case.whole(item), case.best_other(item)
    if whole is None:
        return "the only way that fits" if other is None else "the least of the layouts that it may have"
    share = case.operators_share(whole)
    if share > 1:
        return f"whole, it would be {share:.1f}x what a rank should bear"
    if not case.fits(whole):
        over = quantity.of_bytes(float(case.others.over_O[whole]))
        return f"whole, it does not fit beside the others: {over} over on rank {case.others.rank_O[whole]}"
    sent = float(case.totals.link_O[whole]) / case.due_link_s
    if sent > 1:
        return f"whole, its rank would send {sent:.1f}x what a rank should"
    change = float(case.others.change_O[whole])
    if change <= CLEARLY_s * case.searched.cost:
        return "no worse than whole, as the others are placed"
    return "it evens out the ranks" + ("" if other == whole else f": whole, {quantity.of_change(change)}")
