"""LDM: the largest differencing method of Karmarkar and Karp, on what each table takes alone.

Partial partitions whose spread is largest are joined, heavy ranks of one to light ranks of the other. Guarantees: a
spread of those sums that shrinks fast with the number of tables. Does not: look at memory or at pinned tables (a
placement that breaks either is none), cut a table, or know that tables together take another time than each alone.
"""

import heapq

import numpy as np

from rowwise.planner.methods.dreamshard import whole_pieces
from rowwise.planner.methods.result import MethodResult, result_of
from rowwise.planner.problem import NO_UNIT, PlacementProblem


def by_differences(problem: PlacementProblem, seed: int) -> MethodResult:
    pieces, world = whole_pieces(problem), problem.topology.world
    load = problem.phi(problem.pieces.load_NK[pieces]) - problem.phi.constant + problem.pieces.link_N[pieces]
    # A partition is the sum and the pieces of each rank, heaviest first; the one with the largest spread comes first.
    heap = [
        (-float(size), number, [(float(size), [int(piece)])] + [(0.0, [])] * (world - 1))
        for number, (size, piece) in enumerate(zip(load, pieces, strict=True))
    ]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, two = heapq.heappop(heap)
        joined = [(a + b, p + q) for (a, p), (b, q) in zip(one, reversed(two), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    for rank, (_, held) in enumerate(heap[0][2]):
        unit_N[held] = rank
    return result_of(problem, unit_N)
