"""What a published method found: pieces of tables on ranks."""

from typing import NamedTuple

import numpy as np

from rowwise.planner.native import Native
from rowwise.planner.problem import NO_UNIT, Index, Problem


class Result(NamedTuple):
    """Pieces on ranks, and what they cost: nothing if something fits nowhere."""

    piece_S: Index
    rank_S: Index
    cost: float | None


def result_of(problem: Problem, unit_N: Index | None) -> Result:
    """Of a unit for each piece."""
    if unit_N is None:
        return Result(np.zeros(0, np.int32), np.zeros(0, np.int32), None)
    pieces = np.flatnonzero(unit_N != NO_UNIT).astype(np.int32)
    cost, over = Native(problem).cost(unit_N)
    return Result(pieces, unit_N[pieces], None if over > 0 else cost)
