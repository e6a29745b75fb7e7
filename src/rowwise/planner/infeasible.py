"""Why nothing fits, and what would make it fit: the error that a planner raises, with numbers that were checked.

Known limits: ways out that change more than two things at once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rowwise import quantity
from rowwise.errors import SpecError
from rowwise.plan import TIERS
from rowwise.planner.bound import Totals, threshold_bound
from rowwise.planner.fixes import MORE_DEVICES, Fix, all_fixes
from rowwise.planner.native import AnnealingEffort, NativeProblem
from rowwise.planner.options import make_problem
from rowwise.planner.problem import PlacementProblem, PlanRequest
from rowwise.planner.search import NONE, SearchResult, best_starts

MOST_FIXES = 4
MOST_NAMES = 4
MOVES, MOVES_AN_ITEM = 50_000, 50  # of a search that only wants to know whether there is a plan


class InfeasibleError(SpecError):
    """Tables that do not fit, in any way that is allowed."""


def explain_infeasible(problem: PlacementProblem, searched: SearchResult) -> InfeasibleError:
    """What is short and by how much, and what to change, the most effective first."""
    fixes = find_fixes(problem)
    named = fixes[:MOST_FIXES] + [fix for fix in fixes[MOST_FIXES:] if fix.rank >= MORE_DEVICES]
    ways = [fix.words() for fix in named] or ["want fewer or smaller tables, or more memory"]
    unused = problem.question.unused
    without = f" without rows on the {' or the '.join(unused)}" if unused else ""
    words = "; ".join([*ways, "`rowwise compress` has ids share rows"])
    return InfeasibleError(f"no plan fits{without}: {_cause(problem, searched)}; {words}")


def find_fixes(problem: PlacementProblem) -> list[Fix]:
    """Changes that help: first those that suffice, the least costly first, then those that save most."""
    needed = least_bytes(problem)
    found = [_checked(problem, fix, needed) for fix in all_fixes(problem.question, needed, has_plan)]
    useful = [fix for fix in found if fix.enough or fix.saved_bytes >= 1]
    return sorted(useful, key=lambda fix: (not fix.enough, fix.rank if fix.enough else 0, -fix.saved_bytes))


def _checked(problem: PlacementProblem, fix: Fix, needed: float) -> Fix:
    """With what it saves, and whether it is enough."""
    try:
        changed = make_problem(fix.question)
    except SpecError:  # the change leaves a table without a layout
        return fix
    if fix.table is not None:
        before, after = (_alone_bytes(one, fix.table) for one in (problem, changed))
        less = f" ({quantity.of_bytes(after)} on a device, not {quantity.of_bytes(before)})" if after < before else ""
        return replace(fix, change=fix.change + less)
    return replace(fix, saved_bytes=needed - least_bytes(changed), enough=fix.enough or _has_plan(changed))


def _alone_bytes(problem: PlacementProblem, table: str) -> float:
    """The least that a table's largest piece can take."""
    names = [w.table.name for w in problem.question.workloads]
    item = next(item for item, group in enumerate(problem.members) if names.index(table) in group)
    return _least_alone(problem, item)[0]


def has_plan(question: PlanRequest) -> bool:
    """Whether a quick search finds a plan that fits."""
    try:
        return _has_plan(make_problem(question))
    except SpecError:
        return False


def _has_plan(problem: PlacementProblem) -> bool:
    if _alone(problem) or _together(problem):
        return False
    native = NativeProblem(problem)
    start = best_starts(native, threshold_bound(problem))[0]
    moves = MOVES + MOVES_AN_ITEM * len(problem.members)
    return start.over <= NONE or native.anneal(start.placement, AnnealingEffort(moves=moves)).over <= NONE


def least_bytes(problem: PlacementProblem) -> float:
    """Of all ranks and tiers, if each item took as little as it can."""
    totals = Totals.of(problem)
    least_I = np.minimum.reduceat(totals.bytes_OM.sum(1), problem.item_begin[:-1])
    return float(least_I.sum()) * problem.topology.world


def _cause(problem: PlacementProblem, searched: SearchResult) -> str:
    return _alone(problem) or _together(problem) or _packing(problem, searched)


def _alone(problem: PlacementProblem) -> str:
    """Tables none of whose options fit even on empty ranks."""
    totals = Totals.of(problem)
    none_I = ~np.logical_or.reduceat(totals.fits_O, problem.item_begin[:-1])
    if not none_I.any():
        return ""
    items = sorted(np.flatnonzero(none_I).tolist(), key=lambda item: -_least_alone(problem, item)[0])
    size, tier = _least_alone(problem, items[0])
    more = f" ({len(items) - 1} more tables do not fit either)" if len(items) > 1 else ""
    limit = quantity.of_bytes(float(problem.limit_M[tier]))
    where = {"device": "a device", "host": "a device's part of host memory", "disk": "a device's part of the disks"}
    return (
        f"table {problem.name_of(items[0])!r} takes at least {quantity.of_bytes(size)} of {where[TIERS[tier]]}"
        f" in any layout allowed, which has {limit}{more}"
    )


def _least_alone(problem: PlacementProblem, item: int) -> tuple[float, int]:
    """The least bytes that an item's largest piece can have, and of which tier."""
    found: list[tuple[float, float, int]] = []
    for option in range(int(problem.item_begin[item]), int(problem.item_begin[item + 1])):
        pieces = problem.pieces_of(option)
        size_M = problem.pieces.bytes_NM[pieces.start : pieces.stop].max(0)
        over_M = size_M / np.maximum(problem.limit_M, 1)
        tier = int(over_M.argmax())
        found.append((float(over_M[tier]), float(size_M[tier]), tier))
    _, size, tier = min(found)
    return size, tier


def _together(problem: PlacementProblem) -> str:
    """Tables that are too large in sum, whatever is done with them."""
    totals, world = Totals.of(problem), problem.topology.world
    fits_OM = np.where(totals.fits_O[:, None], totals.bytes_OM, np.inf) * world
    begin, room_M = problem.item_begin[:-1], problem.limit_M * world
    what = "tables" + " and what a step needs beside them" * problem.question.buffers
    total, room = float(np.minimum.reduceat(fits_OM.sum(1), begin).sum()), float(room_M.sum())
    if total > room:
        lower = " and ".join(words for words, size in zip(("host memory", "disks"), room_M[1:], strict=True) if size)
        return _short(what, total, _devices(world) + (f" with {lower}" if lower else ""), room)
    for tier, least in enumerate(np.minimum.reduceat(fits_OM, begin, axis=0).sum(0)):
        if least > room_M[tier]:
            return _short(f"{what} of {TIERS[tier]} memory", float(least), _devices(world), float(room_M[tier]))
    return _limited(problem)


def _short(what: str, need: float, who: str, room: float) -> str:
    over = quantity.of_bytes(need - room)
    has = "has" if who == "1 device" else "have"
    return f"{what} take {quantity.of_bytes(need)}, {who} {has} {quantity.of_bytes(room)}, {over} too much"


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


def _limited(problem: PlacementProblem) -> str:
    """Tables that may only be on some ranks, and are too large for those."""
    totals, world = Totals.of(problem), problem.topology.world
    each_O = np.where(totals.fits_O, totals.bytes_OM.sum(1), np.inf) * world
    least_I = np.minimum.reduceat(each_O, problem.item_begin[:-1])
    allowed_RW = problem.allowed_RU[:, :world] > 0
    for allowed_W in allowed_RW:
        inside_R = ~(allowed_RW & ~allowed_W).any(1)
        inside = [item for item, rule in enumerate(problem.rule_I) if rule >= 0 and inside_R[rule]]
        ranks = np.flatnonzero(allowed_W).tolist()
        room = float(problem.limit_M.sum()) * len(ranks)
        if least_I[inside].sum() > room:
            names = [problem.name_of(item) for item in sorted(inside, key=lambda item: -least_I[item])]
            where = f"rank{'s' * (len(ranks) > 1)} {quantity.of_ranks(ranks)}"
            what = f"tables that may only be on {where} ({_listed(names)})"
            return _short(what, float(least_I[inside].sum()), _devices(len(ranks)), room)
    return ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(repr(name) for name in names[:MOST_NAMES]) + more


def _packing(problem: PlacementProblem, searched: SearchResult) -> str:
    """All bounds allow it, but no placement was found."""
    room = float(problem.limit_M.sum()) * problem.topology.world
    fill = least_bytes(problem) / room if room else np.inf
    over_WM = problem.over_bytes(searched.placement)
    rank, tier = (int(at) for at in np.unravel_index(over_WM.argmax(), over_WM.shape))
    size = quantity.of_bytes(float(over_WM[rank, tier]))
    where = f"the {TIERS[tier]} memory of rank {rank}"
    return f"tables would fill {fill:.0%} of all memory, but the best packing found is {size} over on {where}"
