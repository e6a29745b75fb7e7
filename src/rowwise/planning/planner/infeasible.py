"""Explains why no plan fits and what would make one fit, with numbers that were checked.

Each fix is a changed request that is planned again, quickly; only fixes with a plan are reported to suffice. Not
tried: changes of more than two things at once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rowwise.base import quantity
from rowwise.base.errors import SpecError
from rowwise.parallel.plan import TIERS
from rowwise.planning.planner.bound import OptionTotals, threshold_bound
from rowwise.planning.planner.fixes import MORE_DEVICES, Fix, all_fixes
from rowwise.planning.planner.native import AnnealingEffort, NativeProblem
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.problem import PlacementProblem, PlanRequest
from rowwise.planning.planner.search import TINY, SearchResult, best_starts

MAX_FIXES = 4
MAX_NAMES = 4
MOVES, MOVES_AN_ITEM = 50_000, 50  # of a search that only decides whether any plan fits


class InfeasibleError(SpecError):
    """No plan fits memory under the constraints."""


def check_feasible(problem: PlacementProblem, searched: SearchResult) -> None:
    """Raise if the best placement does not fit; the error has the cause, then fixes, the best first."""
    if not searched.over:
        return
    fixes = useful_fixes(problem)
    named = fixes[:MAX_FIXES] + [fix for fix in fixes[MAX_FIXES:] if fix.rank >= MORE_DEVICES]
    ways = [fix.words() for fix in named] or ["take fewer or smaller tables, or more memory"]
    unused = problem.request.unused
    without = f" without rows on the {' or the '.join(unused)}" if unused else ""
    hint = "; ".join([*ways, "`rowwise compress` has ids share rows"])
    raise InfeasibleError(f"no plan fits{without}: {_cause(problem, searched)}", hint=hint)


def useful_fixes(problem: PlacementProblem) -> list[Fix]:
    """Useful fixes: sufficient ones in order of their loss, then others in order of bytes saved."""
    needed = min_bytes(problem)
    checked = [_check_fix(problem, fix, needed) for fix in all_fixes(problem.request, needed, has_plan)]
    useful = [fix for fix in checked if fix.enough or fix.saved_bytes >= 1]
    return sorted(useful, key=lambda fix: (not fix.enough, fix.rank if fix.enough else 0, -fix.saved_bytes))


def _check_fix(problem: PlacementProblem, fix: Fix, needed: float) -> Fix:
    """The fix with the bytes that it saves, and whether it suffices."""
    try:
        changed = make_problem(fix.request)
    except SpecError:  # the change leaves a table without a layout
        return fix
    if fix.table is not None:
        before, after = (_table_bytes(version, fix.table) for version in (problem, changed))
        less = (
            f" ({quantity.format_bytes(after)} on a device, not {quantity.format_bytes(before)})"
            if after < before
            else ""
        )
        return replace(fix, change=fix.change + less)
    return replace(fix, saved_bytes=needed - min_bytes(changed), enough=fix.enough or _search_fits(changed))


def _table_bytes(problem: PlacementProblem, table: str) -> float:
    """The least bytes of a table's largest piece."""
    names = [w.table.name for w in problem.request.workloads]
    item = next(item for item, group in enumerate(problem.members) if names.index(table) in group)
    return _min_piece_bytes(problem, item)[0]


def has_plan(request: PlanRequest) -> bool:
    """Whether a quick search finds a plan that fits."""
    try:
        return _search_fits(make_problem(request))
    except SpecError:
        return False


def add_needed_tiers(request: PlanRequest) -> PlanRequest:
    """The request with the machine's lower tiers as far as the sizes of its tables need them."""
    option = request
    for option in (request, *request.lower_tiers()):
        if not _too_large(make_problem(option)):
            break
    return option


def _too_large(problem: PlacementProblem) -> bool:
    """Whether sizes alone rule all plans out."""
    return bool(_too_large_alone(problem) or _too_large_in_sum(problem))


def _search_fits(problem: PlacementProblem) -> bool:
    if _too_large(problem):
        return False
    native = NativeProblem(problem)
    start = best_starts(native, threshold_bound(problem))[0]
    moves = MOVES + MOVES_AN_ITEM * len(problem.members)
    return start.over <= TINY or native.anneal(start.placement, AnnealingEffort(moves=moves)).over <= TINY


def min_bytes(problem: PlacementProblem) -> float:
    """Bytes over all ranks and tiers, with the smallest option of each item."""
    totals = OptionTotals.of(problem)
    min_I = np.minimum.reduceat(totals.bytes_OM.sum(1), problem.item_begin[:-1])
    return float(min_I.sum()) * problem.topology.world


def _cause(problem: PlacementProblem, searched: SearchResult) -> str:
    return _too_large_alone(problem) or _too_large_in_sum(problem) or _no_packing(problem, searched)


def _too_large_alone(problem: PlacementProblem) -> str:
    """Tables without an option that fits even on empty ranks."""
    totals = OptionTotals.of(problem)
    unplaceable_I = ~np.logical_or.reduceat(totals.fits_O, problem.item_begin[:-1])
    if not unplaceable_I.any():
        return ""
    items = sorted(np.flatnonzero(unplaceable_I).tolist(), key=lambda item: -_min_piece_bytes(problem, item)[0])
    size, tier = _min_piece_bytes(problem, items[0])
    more = f" ({len(items) - 1} more tables do not fit either)" if len(items) > 1 else ""
    limit = quantity.format_bytes(float(problem.limit_M[tier]))
    where = {"device": "a device", "host": "a device's part of host memory", "disk": "a device's part of the disks"}
    return (
        f"table {problem.name_of(items[0])!r} takes at least {quantity.format_bytes(size)} of {where[TIERS[tier]]}"
        f" in any layout allowed, which has {limit}{more}"
    )


def _min_piece_bytes(problem: PlacementProblem, item: int) -> tuple[float, int]:
    """The least bytes that an item's largest piece can have, and the tier."""
    sizes: list[tuple[float, float, int]] = []
    for option in problem.options_of(item):
        size_M = problem.pieces.bytes_NM[problem.pieces_of(option)].max(0)
        over_M = size_M / np.maximum(problem.limit_M, 1)
        tier = int(over_M.argmax())
        sizes.append((float(over_M[tier]), float(size_M[tier]), tier))
    _, size, tier = min(sizes)
    return size, tier


def _too_large_in_sum(problem: PlacementProblem) -> str:
    """Tables whose least bytes exceed all memory."""
    totals, world = OptionTotals.of(problem), problem.topology.world
    fits_OM = np.where(totals.fits_O[:, None], totals.bytes_OM, np.inf) * world
    begin, capacity_M = problem.item_begin[:-1], problem.limit_M * world
    what = "tables" + " and the ids and vectors of a step" * problem.request.buffers
    total, capacity = float(np.minimum.reduceat(fits_OM.sum(1), begin).sum()), float(capacity_M.sum())
    if total > capacity:
        lower = " and ".join(
            words for words, size in zip(("host memory", "disks"), capacity_M[1:], strict=True) if size
        )
        return _shortfall(what, total, _devices(world) + (f" with {lower}" if lower else ""), capacity)
    for tier, least in enumerate(np.minimum.reduceat(fits_OM, begin, axis=0).sum(0)):
        if least > capacity_M[tier]:
            return _shortfall(f"{what} of {TIERS[tier]} memory", float(least), _devices(world), float(capacity_M[tier]))
    return _too_large_for_pins(problem)


def _shortfall(what: str, need: float, holder: str, limit: float) -> str:
    over = quantity.format_bytes(need - limit)
    has = "has" if holder == "1 device" else "have"
    return f"{what} take {quantity.format_bytes(need)}, {holder} {has} {quantity.format_bytes(limit)}, {over} too much"


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


def _too_large_for_pins(problem: PlacementProblem) -> str:
    """Tables that exceed the memory of the only ranks allowed."""
    totals, world = OptionTotals.of(problem), problem.topology.world
    each_O = np.where(totals.fits_O, totals.bytes_OM.sum(1), np.inf) * world
    min_I = np.minimum.reduceat(each_O, problem.item_begin[:-1])
    allowed_RW = problem.allowed_RU[:, :world] > 0
    for allowed_W in allowed_RW:
        inside_R = ~(allowed_RW & ~allowed_W).any(1)
        inside = [item for item, rule in enumerate(problem.rule_I) if rule >= 0 and inside_R[rule]]
        ranks = np.flatnonzero(allowed_W).tolist()
        capacity = float(problem.limit_M.sum()) * len(ranks)
        if min_I[inside].sum() > capacity:
            names = [problem.name_of(item) for item in sorted(inside, key=lambda item: -min_I[item])]
            where = f"rank{'s' * (len(ranks) > 1)} {quantity.format_ranks(ranks)}"
            what = f"tables that may only be on {where} ({_listed(names)})"
            return _shortfall(what, float(min_I[inside].sum()), _devices(len(ranks)), capacity)
    return ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(repr(name) for name in names[:MAX_NAMES]) + more


def _no_packing(problem: PlacementProblem, searched: SearchResult) -> str:
    """The search failed although no bound forbids a plan."""
    capacity = float(problem.limit_M.sum()) * problem.topology.world
    fill = min_bytes(problem) / capacity if capacity else np.inf
    over_WM = problem.over_bytes(searched.placement)
    rank, tier = (int(at) for at in np.unravel_index(over_WM.argmax(), over_WM.shape))
    size = quantity.format_bytes(float(over_WM[rank, tier]))
    where = f"the {TIERS[tier]} memory of rank {rank}"
    return f"tables would fill {fill:.0%} of all memory, but the best packing found is {size} over on {where}"
