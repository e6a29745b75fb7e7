"""What a published method found: pieces of tables on ranks."""

from typing import NamedTuple

import numpy as np

from rowwise.planner.native import NativeProblem
from rowwise.planner.problem import NO_UNIT, Index, PlacementProblem


class MethodResult(NamedTuple):
    """Pieces on ranks, and what they cost: nothing if something fits nowhere."""

    piece_S: Index
    rank_S: Index
    cost: float | None


def result_of(problem: PlacementProblem, unit_N: Index | None) -> MethodResult:
    if unit_N is None:
        return MethodResult(np.zeros(0, np.int32), np.zeros(0, np.int32), None)
    pieces = np.flatnonzero(unit_N != NO_UNIT).astype(np.int32)
    cost, over = NativeProblem(problem).cost(unit_N)
    return MethodResult(pieces, unit_N[pieces], None if over > 0 else cost)
