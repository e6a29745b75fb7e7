"""Published methods by name, with the costs and limits of the search: for comparison, or for `rowwise plan --method`.

    random, size, dim, lookup, size-lookup     see `greedy`
    ldm                                        see `ldm`
    neuroshard-grid, neuroshard                see `neuroshard`
    dreamshard                                 see `dreamshard_cuts`
    recshard                                   see `recshard`

All place whole tables, or parts of columns; all but `recshard` in device memory only.
"""

from collections.abc import Callable

import numpy as np

from rowwise.base.errors import SpecError
from rowwise.planning.planner.methods.dreamshard import load_policy
from rowwise.planning.planner.methods.dreamshard_cuts import place_with_cuts
from rowwise.planning.planner.methods.greedy import best_of_random, greedy_by, item_bytes, item_dims, item_ids
from rowwise.planning.planner.methods.ldm import largest_differencing
from rowwise.planning.planner.methods.neuroshard import DEPTH, beam_search, pieces_by_halvings
from rowwise.planning.planner.methods.recshard import RECSHARD, split_by_frequency
from rowwise.planning.planner.native import MethodResult
from rowwise.planning.planner.problem import NO_UNIT, Placement, PlacementProblem


def run_method(name: str, problem: PlacementProblem, seed: int = 0) -> MethodResult:
    if name not in METHODS:
        raise SpecError(f"method {name!r}", ", ".join(METHODS))
    return METHODS[name](problem, seed)


def placement_of(problem: PlacementProblem, result: MethodResult) -> Placement | None:
    """The method's result as a placement; None if it does not fit or breaks a constraint.

    NeuroShard and DreamShard may cut a table into pieces of several sizes: all are cut into the smallest of them.
    """
    if result.cost is None:
        return None
    halving_IL, item_of_O = pieces_by_halvings(problem), problem.item_of_O
    item_S = item_of_O[problem.option_of_N[result.piece_S]]
    choice_I = problem.item_begin[:-1].astype(np.int32)
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    for item in range(len(choice_I)):
        pieces, ranks = result.piece_S[item_S == item], result.rank_S[item_S == item]
        if len(pieces) == 1:  # the whole item, in any tier
            choice_I[item], unit_N[pieces] = problem.option_of_N[pieces[0]], ranks
            continue
        levels = [int(np.flatnonzero(halving_IL[item] == piece)[0]) for piece in pieces]
        choice_I[item] = problem.option_of_N[halving_IL[item, max(levels)]]
        times = [1 << (max(levels) - level) for level in levels]
        unit_N[problem.pieces_of(int(choice_I[item]))] = np.repeat(ranks, times)
    on_units = zip(item_S, result.rank_S, strict=True)
    if not all(problem.allowed_units(int(item))[rank] for item, rank in on_units):
        return None
    placement = Placement(choice_I, unit_N)
    return placement if problem.fits(placement) else None


def _dreamshard(problem: PlacementProblem, seed: int) -> MethodResult:
    return place_with_cuts(problem, load_policy())


LEARNED_COSTS = ("neuroshard-grid", "neuroshard", "dreamshard")  # published with networks as their cost models
METHODS: dict[str, Callable[[PlacementProblem, int], MethodResult]] = {
    "random": best_of_random,
    "size": greedy_by(item_bytes),
    "dim": greedy_by(lambda problem, pieces: item_dims(problem)),
    "lookup": greedy_by(lambda problem, pieces: item_dims(problem) * item_ids(problem)),
    "size-lookup": greedy_by(lambda problem, pieces: item_bytes(problem, pieces) * item_ids(problem)),
    "ldm": largest_differencing,
    "neuroshard-grid": beam_search(0),
    "neuroshard": beam_search(DEPTH),
    "dreamshard": _dreamshard,
    RECSHARD: split_by_frequency,
}
