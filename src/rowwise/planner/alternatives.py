"""What each option that was not taken would cost, all other tables staying where they are.

[Note: alternatives] An item is taken out, and another of its options put in piece by piece, the largest first. Each
piece goes to the unit where the step then takes least; of equals, where that unit itself has least to do. A unit that
lacks memory is taken only if all do. For an option of one piece that is the best there is, for others it is greedy.

Known limits: what the other tables would do if they could move as well.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowwise.perf.access import Floats
from rowwise.planner.layouts import SPANS
from rowwise.planner.problem import NO_UNIT, Index, Pieces, Placement, PlacementProblem

NUMBERS = 1 << 20  # loads of an array that is worked on at once
EQUAL = 1 + 1e-12  # costs this near are equal


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The change that each option would make to a placement. Options in use change nothing."""

    change_O: Floats  # seconds of a step; infinite if the ranks allowed cannot hold its pieces at all
    over_O: Floats  # bytes over the limit, of the rank and tier where it is most; 0: it fits
    rank_O: Index  # that rank
    tier_O: Index
    unit_N: Index  # where its pieces would go


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Loads of ranks, for several options side by side: A options, U units of D ranks."""

    load_AUDK: Floats
    link_AUD: Floats
    bytes_AUDM: Floats
    phi_AUD: Floats


def alternatives(problem: PlacementProblem, placement: Placement) -> Alternatives:
    options = len(problem.option_kind)
    sums, cost = problem.sums(placement), problem.cost(placement)
    made = Alternatives(
        np.zeros(options), np.zeros(options), np.zeros(options, np.int32), np.zeros(options, np.int32),
        placement.unit_N.copy(),
    )  # fmt: skip
    order_N = np.lexsort((-problem.phi(problem.pieces.load_NK), problem.option_of_N))
    taken_O = np.zeros(options, dtype=bool)
    taken_O[placement.choice_I] = True
    parts_O = np.diff(problem.option_begin)
    size = max(1, NUMBERS // (problem.topology.world * problem.phi.width))
    for span in range(len(SPANS)):
        index = np.flatnonzero((problem.span_O == span) & ~taken_O)
        index = index[np.argsort(-parts_O[index], kind="stable")]  # so those that still have pieces come first
        for begin in range(0, len(index), size):
            option_A = index[begin : begin + size]
            ranks = _without(problem, placement, sums, option_A, SPANS[span])
            piece_AP = _pieces(problem, option_A, order_N)
            made.unit_N[piece_AP[piece_AP >= 0]] = _put(problem, ranks, option_A, piece_AP)[piece_AP >= 0]
            _note(problem, made, ranks, option_A)
    made.change_O[~taken_O] -= cost
    return made


def _pieces(problem: PlacementProblem, option_A: NDArray[np.int64], order_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pieces of each option, the largest first; -1 where it has no more."""
    begin_A, end_A = problem.option_begin[option_A], problem.option_begin[option_A + 1]
    at_AP = begin_A[:, None] + np.arange(int((end_A - begin_A).max()))
    return np.where(at_AP < end_A[:, None], order_N[np.minimum(at_AP, len(order_N) - 1)], -1)


def _without(
    problem: PlacementProblem, placement: Placement, sums: Pieces, option_A: NDArray[np.int64], span: str
) -> _Ranks:
    """What ranks have when each option's item is taken out."""
    topology = problem.topology
    item_I, at_A = np.unique(problem.item_of_O[option_A], return_inverse=True)
    load = np.repeat(sums.load_NK[None], len(item_I), axis=0)
    link = np.repeat(sums.link_N[None], len(item_I), axis=0)
    size = np.repeat(sums.bytes_NM[None], len(item_I), axis=0)
    for row, item in enumerate(item_I):
        for piece in problem.pieces_of(int(placement.choice_I[item])):
            ranks = problem.ranks_of(int(placement.unit_N[piece]))
            at = slice(ranks.start, ranks.stop)
            load[row, at] -= problem.pieces.load_NK[piece]
            link[row, at] -= problem.pieces.link_N[piece]
            size[row, at] -= problem.pieces.bytes_NM[piece]
    load = np.maximum(load, 0)  # what is left of nothing may be a hair below it
    phi = problem.phi(load)
    deep = {"rank": 1, "host": topology.devices, "all": topology.world}[span]
    shape = (len(option_A), topology.world // deep, deep)
    return _Ranks(
        load[at_A].reshape(*shape, load.shape[-1]),
        np.maximum(link, 0)[at_A].reshape(shape),
        size[at_A].reshape(*shape, size.shape[-1]),
        phi[at_A].reshape(shape),
    )


def _put(problem: PlacementProblem, ranks: _Ranks, option_A: NDArray[np.int64], piece_AP: NDArray[np.int64]) -> Index:
    """Puts all pieces, changing `ranks`; the unit of each."""
    unit_AP = np.full(piece_AP.shape, NO_UNIT, dtype=np.int32)
    first, allowed_AU = _allowed(problem, option_A)
    tried_AUD = np.empty_like(ranks.phi_AUD)  # what each rank would take with the piece
    all_A = np.arange(len(option_A))
    for step in range(piece_AP.shape[1]):
        live = all_A[: int((piece_AP[:, step] >= 0).sum())]
        piece_A = piece_AP[live, step]
        again_A = _same(problem, piece_A, piece_AP[live, step - 1]) if step else np.zeros(len(live), dtype=bool)
        # After an equal piece only the rank that got it is another than it was.
        old, new = live[again_A], live[~again_A]
        unit = unit_AP[old, step - 1] - first
        load_K = problem.pieces.load_NK[piece_A][:, None, :]
        tried_AUD[old, unit] = problem.phi(ranks.load_AUDK[old, unit] + load_K[again_A])
        tried_AUD[new] = problem.phi(ranks.load_AUDK[new] + load_K[~again_A][:, None])
        unit = _best(problem, ranks, piece_A, tried_AUD[live], allowed_AU[live])
        ranks.load_AUDK[live, unit] += load_K
        ranks.link_AUD[live, unit] += problem.pieces.link_N[piece_A][:, None]
        ranks.bytes_AUDM[live, unit] += problem.pieces.bytes_NM[piece_A][:, None]
        ranks.phi_AUD[live, unit] = tried_AUD[live, unit]
        unit_AP[live, step] = unit + first
    ranks.phi_AUD[~allowed_AU.any(1)] = np.inf
    return unit_AP


def _allowed(problem: PlacementProblem, option_A: NDArray[np.int64]) -> tuple[int, NDArray[np.bool_]]:
    """The number of the first unit of the options' span, and which of its units each may use."""
    topology = problem.topology
    first, count = (
        (0, topology.world), (topology.world, topology.hosts), (topology.world + topology.hosts, 1),
    )[int(problem.span_O[option_A[0]])]  # fmt: skip
    rule_A = problem.rule_I[problem.item_of_O[option_A]]
    allowed_AU = np.ones((len(option_A), count), dtype=bool)
    if len(problem.allowed_RU):
        rows_AU = problem.allowed_RU[rule_A, first : first + count] > 0
        allowed_AU = np.where(rule_A[:, None] >= 0, rows_AU, allowed_AU)
    return first, allowed_AU


def _same(problem: PlacementProblem, one_A: NDArray[np.int64], other_A: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (problem.pieces.load_NK[one_A] == problem.pieces.load_NK[other_A]).all(1)


def _best(
    problem: PlacementProblem,
    ranks: _Ranks,
    piece_A: NDArray[np.int64],
    tried_AUD: Floats,
    allowed_AU: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """The unit for each option's piece: the least over memory, then the least step, then the least of its own."""
    live = len(piece_A)
    link_A, bytes_A = problem.pieces.link_N[piece_A], problem.pieces.bytes_NM[piece_A]
    link_AU = ranks.link_AUD[:live].max(2) + link_A[:, None]
    over_AUDM = ranks.bytes_AUDM[:live] + (bytes_A[:, None, None] - problem.limit_M)
    over_AU = np.where(allowed_AU, np.maximum(over_AUDM, 0).sum((2, 3)), np.inf)
    ok_AU = over_AU <= over_AU.min(1, keepdims=True)
    phi_AU = tried_AUD.max(2)
    top_A, link_top_A = ranks.phi_AUD[:live].max((1, 2)), ranks.link_AUD[:live].max((1, 2))
    cost_AU = np.maximum(phi_AU, top_A[:, None]) + np.maximum(link_AU, link_top_A[:, None])
    cost_AU = np.where(ok_AU, cost_AU, np.inf)
    ok_AU = cost_AU <= cost_AU.min(1, keepdims=True) * EQUAL
    return np.where(ok_AU, phi_AU + link_AU, np.inf).argmin(1)


def _note(problem: PlacementProblem, made: Alternatives, ranks: _Ranks, option_A: NDArray[np.int64]) -> None:
    """Writes down what the options cost, and where they do not fit."""
    count = len(option_A)
    made.change_O[option_A] = ranks.phi_AUD.max((1, 2)) + ranks.link_AUD.max((1, 2))
    over_AX = (ranks.bytes_AUDM - problem.limit_M).reshape(count, -1)
    worst_A = over_AX.argmax(1)
    made.over_O[option_A] = np.maximum(over_AX[np.arange(count), worst_A], 0)
    made.rank_O[option_A], made.tier_O[option_A] = np.divmod(worst_A, len(problem.limit_M))
