"""The result of a published method: pieces of tables on ranks."""

import numpy as np

from rowwise.planner.native import MethodResult, NativeProblem
from rowwise.planner.problem import NO_UNIT, Index, PlacementProblem


def make_result(problem: PlacementProblem, unit_N: Index | None) -> MethodResult:
    """The result for a unit of each piece; None: the method found nothing."""
    if unit_N is None:
        return MethodResult(np.zeros(0, np.int32), np.zeros(0, np.int32), None)
    pieces = np.flatnonzero(unit_N != NO_UNIT).astype(np.int32)
    cost, over = NativeProblem(problem).cost(unit_N)
    return MethodResult(pieces, unit_N[pieces], None if over > 0 else cost)
