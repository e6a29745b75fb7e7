"""LDM: the largest differencing method of Karmarkar and Karp, on the seconds that each table takes alone.

Partial partitions whose spread is largest are joined, heavy ranks of one to light ranks of the other. The spread of
sums shrinks fast with the number of tables. Memory and pinned tables are ignored (a placement that breaks either is
discarded), tables are never cut, and tables together may take another time than the sum of each alone.
"""

import heapq

import numpy as np

from rowwise.planning.planner.methods.dreamshard import whole_pieces
from rowwise.planning.planner.native import MethodResult
from rowwise.planning.planner.problem import NO_UNIT, PlacementProblem


def largest_differencing(problem: PlacementProblem, seed: int) -> MethodResult:
    pieces, world = whole_pieces(problem), problem.topology.world
    load = problem.phi(problem.pieces.load_NK[pieces]) - problem.phi.constant + problem.pieces.link_N[pieces]
    # A partition is (seconds, pieces) of each rank, heaviest first. The heap is ordered by spread, the largest first.
    heap = [
        (-float(size), number, [(float(size), [int(piece)])] + [(0.0, [])] * (world - 1))
        for number, (size, piece) in enumerate(zip(load, pieces, strict=True))
    ]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, p + q) for (a, p), (b, q) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    for rank, (_, rank_pieces) in enumerate(heap[0][2]):
        unit_N[rank_pieces] = rank
    return MethodResult.of(problem, unit_N)
