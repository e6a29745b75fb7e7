"""NeuroShard: a beam over halvings of columns, with greedy placement on a grid of bounds inside (`_c/neuroshard.c`).

No rank exceeds its memory, and the result is the cheapest placement evaluated. Rows are never cut, tables
never replicated, pins ignored, and a table above 1.5 times a rank's even share is not placed. It gives no bound.
`neuroshard-grid` is the inner placement alone, of whole tables.
"""

from collections.abc import Callable

import numpy as np

from rowwise.planning.planner.methods.dreamshard import whole_pieces
from rowwise.planning.planner.native import MethodResult, NativeProblem
from rowwise.planning.planner.problem import Index, PlacementProblem

BEAM, CANDIDATES, DEPTH, GRID = 3, 10, 10, 11  # as published


def pieces_by_halvings(problem: PlacementProblem) -> Index:
    """For each item and L, a piece of the option that cuts columns into 2**L equal parts; -1 without such an option."""
    levels = 1 + max(kind.parts.bit_length() for kind in problem.kinds)
    piece_IL = np.full((len(problem.members), levels), -1, dtype=np.int32)
    for option, item in enumerate(problem.item_of_O):
        kind = problem.kind_of(option)
        resident = kind.unit_kind == "rank" and not kind.layout.cuts_rows and kind.tier == "device"
        first, last = problem.pieces_of(option)[0], problem.pieces_of(option)[-1]  # the smallest and the largest
        alike = np.array_equal(problem.pieces.load_NK[first], problem.pieces.load_NK[last])
        if resident and alike and kind.parts & (kind.parts - 1) == 0:
            piece_IL[item, kind.parts.bit_length() - 1] = problem.option_begin[option]
    return piece_IL


def beam_search(depth: int) -> Callable[[PlacementProblem, int], MethodResult]:
    """The method with at most `depth` halvings."""

    def place(problem: PlacementProblem, seed: int) -> MethodResult:
        whole_pieces(problem)
        return NativeProblem(problem).neuroshard(pieces_by_halvings(problem), BEAM, CANDIDATES, depth, GRID)

    return place
