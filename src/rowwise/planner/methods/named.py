"""Published methods by name, over the costs and limits of the search: to compare with it, or to plan with (`--method`).

    random, size, dim, lookup, size-lookup     see `greedy`
    ldm                                        see `ldm`
    neuroshard-grid, neuroshard                see `neuroshard`
    dreamshard                                 see `dreamshard`

Guarantees of each are in its module. What all do not: layouts other than whole tables and columns.
"""

from collections.abc import Callable

import numpy as np

from rowwise.errors import SpecError
from rowwise.planner.methods.dreamshard import load_policy, place
from rowwise.planner.methods.greedy import by_chance, by_key, dims, ids, sizes
from rowwise.planner.methods.ldm import by_differences
from rowwise.planner.methods.neuroshard import DEPTH, by_halvings, halvings
from rowwise.planner.methods.result import MethodResult, result_of
from rowwise.planner.problem import NO_UNIT, Placement, PlacementProblem


def run_method(name: str, problem: PlacementProblem, seed: int = 0) -> MethodResult:
    if name not in METHODS:
        raise SpecError(f"method {name!r}: want {', '.join(METHODS)}")
    return METHODS[name](problem, seed)


def placement_of(problem: PlacementProblem, found: MethodResult) -> Placement | None:
    """What a method found, as a placement; none: it found nothing that fits and follows all rules.

    NeuroShard may cut a table into pieces of several sizes: all are cut into the smallest of them.
    """
    if found.cost is None:
        return None
    halving_IL = halvings(problem)
    item_S = problem.item_of_O[problem.option_of_N[found.piece_S]]
    choice_I = problem.item_begin[:-1].astype(np.int32)
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    for item in range(len(choice_I)):
        pieces, ranks = found.piece_S[item_S == item], found.rank_S[item_S == item]
        levels = [int(np.flatnonzero(halving_IL[item] == piece)[0]) for piece in pieces]
        choice_I[item] = problem.option_of_N[halving_IL[item, max(levels)]]
        times = [1 << (max(levels) - level) for level in levels]
        unit_N[list(problem.pieces_of(int(choice_I[item])))] = np.repeat(ranks, times)
        rule = int(problem.rule_I[item])
        if rule >= 0 and not problem.allowed_RU[rule, ranks].all():
            return None
    placement = Placement(choice_I, unit_N)
    return placement if problem.fits(placement) else None


def _dreamshard(problem: PlacementProblem, seed: int) -> MethodResult:
    return result_of(problem, place(problem, load_policy()))


METHODS: dict[str, Callable[[PlacementProblem, int], MethodResult]] = {
    "random": by_chance,
    "size": by_key(sizes),
    "dim": by_key(lambda problem, pieces: dims(problem)),
    "lookup": by_key(lambda problem, pieces: dims(problem) * ids(problem)),
    "size-lookup": by_key(lambda problem, pieces: sizes(problem, pieces) * ids(problem)),
    "ldm": by_differences,
    "neuroshard-grid": by_halvings(0),
    "neuroshard": by_halvings(DEPTH),
    "dreamshard": _dreamshard,
}
