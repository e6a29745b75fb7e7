"""Published ways to place tables, by name: what the search is compared with, over the same costs and limits.

    random                     each table on a random rank that has room
    size, dim, lookup,         greedy: tables in falling order of bytes, columns, ids times columns, or the product of
    size-lookup                bytes and ids, each on the rank where the sum of that is least
    ldm                        the largest differencing method (Karmarkar and Karp): partial partitions whose spread is
                               largest are joined, heavy ranks of one to light ranks of the other
    neuroshard                 NeuroShard's beam over halvings of columns, greedy placement on a grid of bounds inside
    neuroshard-grid            that greedy placement alone, of whole tables
    dreamshard                 DreamShard's policy, trained on costs that a network predicts: see `dreamshard`

Its own file because none of them is used to make plans: simple ones are among the search's own starts. Gives up:
layouts other than whole tables and columns, as the originals do.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.perf.access import Floats
from rowwise.planner.dreamshard import load_policy, place, whole_pieces
from rowwise.planner.native import Native
from rowwise.planner.problem import NO_UNIT, Index, Problem

TRIES = 10  # of the random baseline, the best of which counts
BEAM, CANDIDATES, DEPTH, GRID = 3, 10, 10, 11  # NeuroShard's published settings


class Result(NamedTuple):
    """Pieces on ranks, and what they cost: nothing if something fits nowhere."""

    piece_S: Index
    rank_S: Index
    cost: float | None


def run_baseline(name: str, problem: Problem, seed: int = 0) -> Result:
    """One of the baselines."""
    if name not in BASELINES:
        raise SpecError(f"baseline {name!r}: no such one; want one of {', '.join(BASELINES)}")
    return BASELINES[name](problem, seed)


def _result(problem: Problem, unit_N: Index | None) -> Result:
    if unit_N is None:
        return Result(np.zeros(0, np.int32), np.zeros(0, np.int32), None)
    pieces = np.flatnonzero(unit_N != NO_UNIT).astype(np.int32)
    cost, over = Native(problem).cost(unit_N)
    return Result(pieces, unit_N[pieces], None if over > 0 else cost)


def _random(problem: Problem, seed: int) -> Result:
    rng, pieces = np.random.default_rng(seed), whole_pieces(problem)
    found = []
    for _ in range(TRIES):
        # With random keys that dwarf each other, the least sum is a rank chosen at random among those with room.
        key_N = np.zeros(len(problem.pieces.link_N))
        key_N[pieces] = rng.exponential(size=len(pieces)) ** 3
        found.append(_result(problem, Native(problem).greedy(rng.permutation(pieces), key_N=key_N)))
    return min(found, key=lambda result: np.inf if result.cost is None else result.cost)


def _greedy(key: Callable[[Problem, NDArray[np.int64]], Floats]) -> Callable[[Problem, int], Result]:
    def place(problem: Problem, seed: int) -> Result:
        pieces = whole_pieces(problem)
        key_N = np.zeros(len(problem.pieces.link_N))
        key_N[pieces] = key(problem, pieces)
        order = pieces[np.argsort(-key_N[pieces], kind="stable")]
        return _result(problem, Native(problem).greedy(order, key_N=key_N))

    return place


def _dims(problem: Problem) -> Floats:
    return np.array([sum(problem.question.workloads[t].table.dim for t in group) for group in problem.members], float)


def _ids(problem: Problem) -> Floats:
    workloads = problem.question.workloads
    return np.array([sum(workloads[t].access.pooling for t in group) for group in problem.members], float)


def _sizes(problem: Problem, pieces: NDArray[np.int64]) -> Floats:
    return problem.pieces.bytes_NM[pieces].sum(1)


def _ldm(problem: Problem, seed: int) -> Result:
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
    return _result(problem, unit_N)


def halvings(problem: Problem) -> Index:
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


def _neuroshard(depth: int) -> Callable[[Problem, int], Result]:
    def place(problem: Problem, seed: int) -> Result:
        whole_pieces(problem)
        return Result(*Native(problem).neuroshard(halvings(problem), BEAM, CANDIDATES, depth, GRID))

    return place


def _dreamshard(problem: Problem, seed: int) -> Result:
    return _result(problem, place(problem, load_policy()))


BASELINES: dict[str, Callable[[Problem, int], Result]] = {
    "random": _random,
    "size": _greedy(_sizes),
    "dim": _greedy(lambda problem, pieces: _dims(problem)),
    "lookup": _greedy(lambda problem, pieces: _dims(problem) * _ids(problem)),
    "size-lookup": _greedy(lambda problem, pieces: _sizes(problem, pieces) * _ids(problem)),
    "ldm": _ldm,
    "neuroshard-grid": _neuroshard(0),
    "neuroshard": _neuroshard(DEPTH),
    "dreamshard": _dreamshard,
}
