"""NeuroShard: a beam over halvings of columns, with greedy placement on a grid of bounds inside (`_c/neuroshard.c`).

Guarantees: no rank is over its memory, and what it returns is the cheapest of all that it looked at. Does not: cut
rows, copy tables, look at pinned tables, place a table that takes half as much again as a rank's share, or say how far
from the best it is. `neuroshard-grid` is the inner placement alone, of whole tables.
"""

from collections.abc import Callable

import numpy as np

from rowwise.planner.methods.dreamshard import whole_pieces
from rowwise.planner.methods.result import MethodResult
from rowwise.planner.native import NativeProblem
from rowwise.planner.problem import Index, PlacementProblem

BEAM, CANDIDATES, DEPTH, GRID = 3, 10, 10, 11  # as published


def halvings(problem: PlacementProblem) -> Index:
    """Of each item and number of halvings: a piece of the option that cuts columns into so many alike, or -1."""
    levels = 1 + max(kind.parts.bit_length() for kind in problem.kinds)
    found_IL = np.full((len(problem.members), levels), -1, dtype=np.int32)
    for option, item in enumerate(problem.item_of_O):
        kind = problem.kind_of(option)
        resident = kind.span == "rank" and not kind.layout.cuts_rows and kind.tier == "device"
        first, last = problem.pieces_of(option)[0], problem.pieces_of(option)[-1]  # the smallest and the largest
        alike = np.array_equal(problem.pieces.load_NK[first], problem.pieces.load_NK[last])
        if resident and alike and kind.parts & (kind.parts - 1) == 0:
            found_IL[item, kind.parts.bit_length() - 1] = problem.option_begin[option]
    return found_IL


def by_halvings(depth: int) -> Callable[[PlacementProblem, int], MethodResult]:
    def place(problem: PlacementProblem, seed: int) -> MethodResult:
        whole_pieces(problem)
        return MethodResult(*NativeProblem(problem).neuroshard(halvings(problem), BEAM, CANDIDATES, depth, GRID))

    return place
