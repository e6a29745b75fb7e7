"""DreamShard's policy over cut columns: a beam over halvings like NeuroShard's, where the policy places the pieces.

Pieces are halved while one is larger than a rank's memory, or predicted to take longer than an even rank. Then each
set of the beam is tried with one more halving, of one of the pieces with most bytes or most predicted seconds. The
policy places all sets of a level at once, and the cost network rates the placements: no cost model is called. The
result is the best set of any level. With more than `MAX_ITEMS` items there is no beam, as it would take minutes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowwise.planning.planner.methods.dreamshard import (
    FULL,
    MAX_ITEMS,
    PieceVectors,
    Policy,
    excess_memory,
    play,
    whole_pieces,
)
from rowwise.planning.planner.methods.neuroshard import BEAM, DEPTH, pieces_by_halvings
from rowwise.planning.planner.native import MethodResult
from rowwise.planning.planner.problem import Pieces, PlacementProblem

CANDIDATES = 5  # by bytes, and by seconds
Ints = NDArray[np.int64]


class PlacedSets(NamedTuple):
    """Sets of pieces (an item and its halvings) with their ranks, the best set first."""

    item_ES: Ints
    level_ES: Ints
    rank_ES: Ints
    over_E: NDArray[np.float64]  # memory that is exceeded
    seconds_E: NDArray[np.float64]  # predicted

    @property
    def rating(self) -> tuple[float, float]:
        return float(self.over_E[0]), float(self.seconds_E[0])


def place_with_cuts(problem: PlacementProblem, policy: Policy) -> MethodResult:
    """The best placement of the beam. Raises `SpecError` where a table may not be whole."""
    whole_pieces(problem)
    piece_IL = pieces_by_halvings(problem)
    vectors = PieceVectors.of(problem, policy, piece_IL)
    may_halve_IL = np.pad(piece_IL[:, 1:] >= 0, ((0, 0), (0, 1)))
    best = beam = _place(policy, vectors, *_halve_large(vectors, may_halve_IL))
    for _ in range(DEPTH if len(piece_IL) <= MAX_ITEMS else 0):
        sets = _halve_each(beam, vectors, may_halve_IL)
        if sets is None:
            break
        beam = _place(policy, vectors, *sets)
        if beam.rating < best.rating:
            best = beam
    if best.rating[0] > 0:
        return MethodResult.of(problem, None)
    return _result(problem, piece_IL[best.item_ES[0], best.level_ES[0]], best.rank_ES[0])


def _place(policy: Policy, vectors: PieceVectors, item_ES: Ints, level_ES: Ints) -> PlacedSets:
    """The best of these sets, as placed by the policy."""
    deck, order_ES = vectors.deck(item_ES, level_ES)
    rank_ES = play(policy, deck)
    here_EUS = (rank_ES[:, None] == np.arange(deck.allowed_EIU.shape[-1])[:, None]).astype(float)
    cost_EUC = policy.costs(here_EUS @ deck.loads_EIH) * vectors.factor_C
    seconds_E = (cost_EUC[..., 0] + cost_EUC[..., 2]).max(1) + cost_EUC[..., 1].max(1)
    over_E = excess_memory(deck, rank_ES)
    kept = np.lexsort((seconds_E, over_E))[:BEAM]
    placed_item_ES, placed_level_ES = (np.take_along_axis(x_ES, order_ES, axis=1) for x_ES in (item_ES, level_ES))
    return PlacedSets(placed_item_ES[kept], placed_level_ES[kept], rank_ES[kept], over_E[kept], seconds_E[kept])


def _halve_large(vectors: PieceVectors, may_halve_IL: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Halve pieces until every large one is indivisible; one set of pieces."""
    item_S, world = np.arange(len(may_halve_IL)), vectors.allowed_IU.shape[1]
    level_S = np.zeros_like(item_S)
    while True:
        seconds_S = vectors.single_ILC[item_S, level_S].sum(1)
        large_S = (vectors.share_ILM[item_S, level_S].max(1) > FULL) | (seconds_S > seconds_S.sum() / world)
        halved = np.flatnonzero(large_S & may_halve_IL[item_S, level_S])
        if not len(halved):
            return item_S[None], level_S[None]
        level_S[halved] += 1
        item_S, level_S = (np.concatenate([index_S, index_S[halved]]) for index_S in (item_S, level_S))


def _halve_each(beam: PlacedSets, vectors: PieceVectors, may_halve_IL: NDArray[np.bool_]) -> tuple[Ints, Ints] | None:
    """Each set of the beam with one more halving, in all ways that are tried; None without any."""
    items: list[Ints] = []
    levels: list[Ints] = []
    for item_S, level_S in zip(beam.item_ES, beam.level_ES, strict=True):
        can_S = np.flatnonzero(may_halve_IL[item_S, level_S])
        tried: dict[int, None] = {}  # in order, without repeats
        for key_ILX in (vectors.share_ILM, vectors.single_ILC):
            key_S = key_ILX[item_S, level_S].sum(1)[can_S]
            tried |= dict.fromkeys(can_S[np.argsort(-key_S, kind="stable")[:CANDIDATES]].tolist())
        for place in tried:
            halved_S = np.append(level_S, level_S[place] + 1)
            halved_S[place] += 1
            items.append(np.append(item_S, item_S[place]))
            levels.append(halved_S)
    return (np.stack(items), np.stack(levels)) if items else None


def _result(problem: PlacementProblem, piece_S: NDArray[np.int32], rank_S: Ints) -> MethodResult:
    """Pieces on ranks with their cost by the cost model."""
    totals: list[NDArray[np.float64]] = []
    for array_S in problem.pieces.take(piece_S.astype(np.int64)):
        totals.append(np.zeros((problem.topology.world, *array_S.shape[1:])))
        np.add.at(totals[-1], rank_S, array_S)
    sums = Pieces(*totals)
    cost = float(problem.phi(sums.load_NK).max() + sums.link_N.max())
    fits = bool((sums.bytes_NM <= problem.limit_M).all())
    return MethodResult(piece_S, rank_S.astype(np.int32), cost if fits else None)
