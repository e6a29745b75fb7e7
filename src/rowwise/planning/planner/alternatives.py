"""Costs of the options that a plan did not take, with all other tables where they are.

[Note: Alternatives] An item is taken out, and another of its options is placed piece by piece, the largest first. Each
piece goes to the unit where the step then takes least; of equal ones, where that unit itself has least to do. A unit
that lacks memory is taken only if all do. For an option of one piece this is optimal, for others it is greedy.

Many options are computed at once, as arrays.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowwise.planning.perf.access import Floats
from rowwise.planning.planner.layouts import UNIT_KINDS
from rowwise.planning.planner.problem import NO_UNIT, Index, Pieces, Placement, PlacementProblem

CHUNK_LOADS = 1 << 20  # numbers in the largest array
TIE = 1 + 1e-12  # costs whose ratio is within this are equal


@dataclass(frozen=True, slots=True)
class Alternatives:
    """For each option, the change if it were taken; 0 for options that were taken."""

    change_O: Floats  # seconds of a step; infinite if its pieces may be on no unit
    over_O: Floats  # largest overflow of a rank and tier in bytes; 0 if it fits
    rank_O: Index  # the rank of the largest overflow
    tier_O: Index  # its tier
    unit_N: Index  # where its pieces would go


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Loads of ranks for A options side by side, grouped as U units of D ranks."""

    load_AUDK: Floats
    link_AUD: Floats
    bytes_AUDM: Floats
    phi_AUD: Floats


def compute_alternatives(problem: PlacementProblem, placement: Placement) -> Alternatives:
    """The change of cost for each option, by the method of [Note: Alternatives]."""
    options = len(problem.option_kind)
    sums, cost = problem.sums(placement), problem.cost(placement)
    result = Alternatives(
        np.zeros(options), np.zeros(options), np.zeros(options, np.int32), np.zeros(options, np.int32),
        placement.unit_N.copy(),
    )  # fmt: skip
    order_N = np.lexsort((-problem.phi(problem.pieces.load_NK), problem.option_of_N))
    taken_O = np.zeros(options, dtype=bool)
    taken_O[placement.choice_I] = True
    parts_O = np.diff(problem.option_begin)
    size = max(1, CHUNK_LOADS // (problem.topology.world * problem.phi.width))
    for unit_kind in range(len(UNIT_KINDS)):
        index = np.flatnonzero((problem.unit_kind_O == unit_kind) & ~taken_O)
        index = index[np.argsort(-parts_O[index], kind="stable")]  # options that still have pieces stay in front
        for begin in range(0, len(index), size):
            option_A = index[begin : begin + size]
            ranks = _ranks_without_item(problem, placement, sums, option_A)
            piece_AP = _pieces_largest_first(problem, option_A, order_N)
            result.unit_N[piece_AP[piece_AP >= 0]] = _place_pieces(problem, ranks, option_A, piece_AP)[piece_AP >= 0]
            _record_costs(problem, result, ranks, option_A)
    result.change_O[~taken_O] -= cost
    return result


def _pieces_largest_first(
    problem: PlacementProblem, option_A: NDArray[np.int64], order_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The pieces of each option, the largest first; -1 where it has no more."""
    begin_A, end_A = problem.option_begin[option_A], problem.option_begin[option_A + 1]
    index_AP = begin_A[:, None] + np.arange(int((end_A - begin_A).max()))
    return np.where(index_AP < end_A[:, None], order_N[np.minimum(index_AP, len(order_N) - 1)], -1)


def _ranks_without_item(
    problem: PlacementProblem, placement: Placement, sums: Pieces, option_A: NDArray[np.int64]
) -> _Ranks:
    """Loads of ranks without the item of each option."""
    topology = problem.topology
    item_I, index_A = np.unique(problem.item_of_O[option_A], return_inverse=True)
    load = np.repeat(sums.load_NK[None], len(item_I), axis=0)
    link = np.repeat(sums.link_N[None], len(item_I), axis=0)
    size = np.repeat(sums.bytes_NM[None], len(item_I), axis=0)
    for row, item in enumerate(item_I):
        for piece in problem.pieces_of(int(placement.choice_I[item])):
            ranks = problem.ranks_of(int(placement.unit_N[piece]))
            load[row, ranks.start : ranks.stop] -= problem.pieces.load_NK[piece]
            link[row, ranks.start : ranks.stop] -= problem.pieces.link_N[piece]
            size[row, ranks.start : ranks.stop] -= problem.pieces.bytes_NM[piece]
    load = np.maximum(load, 0)  # differences of equal sums may be slightly negative
    phi = problem.phi(load)
    unit_ranks = problem.kind_of(int(option_A[0])).layout.unit_ranks(topology)
    shape = (len(option_A), topology.world // unit_ranks, unit_ranks)
    return _Ranks(
        load[index_A].reshape(*shape, load.shape[-1]),
        np.maximum(link, 0)[index_A].reshape(shape),
        size[index_A].reshape(*shape, size.shape[-1]),
        phi[index_A].reshape(shape),
    )


def _place_pieces(
    problem: PlacementProblem, ranks: _Ranks, option_A: NDArray[np.int64], piece_AP: NDArray[np.int64]
) -> Index:
    """Places all pieces, updating `ranks`; returns the unit of each."""
    unit_AP = np.full(piece_AP.shape, NO_UNIT, dtype=np.int32)
    units = problem.kind_of(int(option_A[0])).layout.units(problem.topology)
    first, last = units.start, units.stop
    items = problem.item_of_O[option_A].tolist()
    allowed_AU = np.array([problem.allowed_units(item)[first:last] for item in items])
    with_piece_AUD = np.empty_like(ranks.phi_AUD)  # phi of each rank with the piece on its unit
    all_A = np.arange(len(option_A))
    for step in range(piece_AP.shape[1]):
        active = all_A[: int((piece_AP[:, step] >= 0).sum())]
        piece_A = piece_AP[active, step]
        equal_A = (
            _loads_equal(problem, piece_A, piece_AP[active, step - 1]) if step else np.zeros(len(active), dtype=bool)
        )
        # If the last piece was equal, only the unit that got it needs a new phi.
        old, new = active[equal_A], active[~equal_A]
        unit = unit_AP[old, step - 1] - first
        load_K = problem.pieces.load_NK[piece_A][:, None, :]
        with_piece_AUD[old, unit] = problem.phi(ranks.load_AUDK[old, unit] + load_K[equal_A])
        with_piece_AUD[new] = problem.phi(ranks.load_AUDK[new] + load_K[~equal_A][:, None])
        unit = _best_unit(problem, ranks, piece_A, with_piece_AUD[active], allowed_AU[active])
        ranks.load_AUDK[active, unit] += load_K
        ranks.link_AUD[active, unit] += problem.pieces.link_N[piece_A][:, None]
        ranks.bytes_AUDM[active, unit] += problem.pieces.bytes_NM[piece_A][:, None]
        ranks.phi_AUD[active, unit] = with_piece_AUD[active, unit]
        unit_AP[active, step] = unit + first
    ranks.phi_AUD[~allowed_AU.any(1)] = np.inf
    return unit_AP


def _loads_equal(problem: PlacementProblem, a_A: NDArray[np.int64], b_A: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether pieces add equal loads."""
    return (problem.pieces.load_NK[a_A] == problem.pieces.load_NK[b_A]).all(1)


def _best_unit(
    problem: PlacementProblem,
    ranks: _Ranks,
    piece_A: NDArray[np.int64],
    with_piece_AUD: Floats,
    allowed_AU: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """The unit for each option's piece: the least overflow, then the fastest step, then the least own load."""
    active = len(piece_A)
    link_A, bytes_A = problem.pieces.link_N[piece_A], problem.pieces.bytes_NM[piece_A]
    link_AU = ranks.link_AUD[:active].max(2) + link_A[:, None]
    over_AUDM = ranks.bytes_AUDM[:active] + (bytes_A[:, None, None] - problem.limit_M)
    over_AU = np.where(allowed_AU, np.maximum(over_AUDM, 0).sum((2, 3)), np.inf)
    ok_AU = over_AU <= over_AU.min(1, keepdims=True)
    phi_AU = with_piece_AUD.max(2)
    top_A, link_top_A = ranks.phi_AUD[:active].max((1, 2)), ranks.link_AUD[:active].max((1, 2))
    cost_AU = np.maximum(phi_AU, top_A[:, None]) + np.maximum(link_AU, link_top_A[:, None])
    cost_AU = np.where(ok_AU, cost_AU, np.inf)
    ok_AU = cost_AU <= cost_AU.min(1, keepdims=True) * TIE
    return np.where(ok_AU, phi_AU + link_AU, np.inf).argmin(1)


def _record_costs(problem: PlacementProblem, result: Alternatives, ranks: _Ranks, option_A: NDArray[np.int64]) -> None:
    """Stores the options' costs, and the rank and tier of their largest overflow."""
    count = len(option_A)
    result.change_O[option_A] = ranks.phi_AUD.max((1, 2)) + ranks.link_AUD.max((1, 2))
    over_AX = (ranks.bytes_AUDM - problem.limit_M).reshape(count, -1)
    worst_A = over_AX.argmax(1)
    result.over_O[option_A] = np.maximum(over_AX[np.arange(count), worst_A], 0)
    result.rank_O[option_A], result.tier_O[option_A] = np.divmod(worst_A, len(problem.limit_M))
