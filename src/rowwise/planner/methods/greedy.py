"""Greedy placement: tables in falling order of a key, each on the rank with room where the sum of the key is least.

Guarantees: no rank is over its memory. Does not: cut a table, look at costs or links, or find a placement wherever
there is one. `random` takes the best of ten random placements, by their cost.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rowwise.perf.access import Floats
from rowwise.planner.methods.dreamshard import whole_pieces
from rowwise.planner.methods.result import MethodResult, result_of
from rowwise.planner.native import NativeProblem
from rowwise.planner.problem import PlacementProblem

TRIES = 10  # of `random`, the best of which counts


def by_chance(problem: PlacementProblem, seed: int) -> MethodResult:
    """The best of some random placements."""

    rng, pieces = np.random.default_rng(seed), whole_pieces(problem)
    found = []
    for _ in range(TRIES):
        # With random keys that dwarf each other, the least sum is a rank chosen at random among those with room.
        key_N = np.zeros(len(problem.pieces.link_N))
        key_N[pieces] = rng.exponential(size=len(pieces)) ** 3
        found.append(result_of(problem, NativeProblem(problem).greedy(rng.permutation(pieces), key_N=key_N)))
    return min(found, key=lambda result: np.inf if result.cost is None else result.cost)


def by_key(
    key: Callable[[PlacementProblem, NDArray[np.int64]], Floats],
) -> Callable[[PlacementProblem, int], MethodResult]:
    """By falling order of a number for each item."""

    def place(problem: PlacementProblem, seed: int) -> MethodResult:
        pieces = whole_pieces(problem)
        key_N = np.zeros(len(problem.pieces.link_N))
        key_N[pieces] = key(problem, pieces)
        order = pieces[np.argsort(-key_N[pieces], kind="stable")]
        return result_of(problem, NativeProblem(problem).greedy(order, key_N=key_N))

    return place


def dims(problem: PlacementProblem) -> Floats:
    """Columns of each item."""
    return np.array([sum(problem.question.workloads[t].table.dim for t in group) for group in problem.members], float)


def ids(problem: PlacementProblem) -> Floats:
    """Ids of a sample, of each item."""
    workloads = problem.question.workloads
    return np.array([sum(workloads[t].access.pooling for t in group) for group in problem.members], float)


def sizes(problem: PlacementProblem, pieces: NDArray[np.int64]) -> Floats:
    """Bytes of each item."""
    return problem.pieces.bytes_NM[pieces].sum(1)
