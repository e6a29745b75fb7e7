"""Greedy placement: tables in falling order of a key, each on the rank with room where the sum of the key is least.

No rank exceeds its memory. Tables are never cut, costs and links ignored, and a placement may be missed where one
exists. `random` is the cheapest of ten random placements.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rowwise.planning.perf.access import Floats
from rowwise.planning.planner.methods.dreamshard import whole_pieces
from rowwise.planning.planner.native import MethodResult, NativeProblem
from rowwise.planning.planner.problem import PlacementProblem

TRIES = 10  # random placements


def best_of_random(problem: PlacementProblem, seed: int) -> MethodResult:
    rng, pieces = np.random.default_rng(seed), whole_pieces(problem)
    results = []
    for _ in range(TRIES):
        # With random keys that dwarf each other, the least sum is a rank chosen at random among those with room.
        key_N = np.zeros(len(problem.pieces.link_N))
        key_N[pieces] = rng.exponential(size=len(pieces)) ** 3
        results.append(MethodResult.of(problem, NativeProblem(problem).greedy(rng.permutation(pieces), key_N=key_N)))
    return min(results, key=lambda result: np.inf if result.cost is None else result.cost)


def greedy_by(
    key: Callable[[PlacementProblem, NDArray[np.int64]], Floats],
) -> Callable[[PlacementProblem, int], MethodResult]:
    """The method that places items in falling order of a key, one number for each item."""

    def place(problem: PlacementProblem, seed: int) -> MethodResult:
        pieces = whole_pieces(problem)
        key_N = np.zeros(len(problem.pieces.link_N))
        key_N[pieces] = key(problem, pieces)
        order = pieces[np.argsort(-key_N[pieces], kind="stable")]
        return MethodResult.of(problem, NativeProblem(problem).greedy(order, key_N=key_N))

    return place


def item_dims(problem: PlacementProblem) -> Floats:
    return np.array([sum(problem.request.workloads[t].table.dim for t in group) for group in problem.members], float)


def item_ids(problem: PlacementProblem) -> Floats:
    workloads = problem.request.workloads
    return np.array([sum(workloads[t].access.pooling for t in group) for group in problem.members], float)


def item_bytes(problem: PlacementProblem, pieces: NDArray[np.int64]) -> Floats:
    return problem.pieces.bytes_NM[pieces].sum(1)
