"""Searching for a plan: several starts, the best of them improved by annealing.

[Note: search] The bound says how much a rank must bear at least (z operators, m links). Items are first split as little
as keeps every piece under that, and placed one by one, largest share first, where the largest share stays smallest;
also as NeuroShard's greedy does; as DreamShard's policy does, where tables are few and may be whole; and, where layouts
trade work for memory, as the bound's mixture has them. All are judged by the same cost; the best few are annealed a
little, and the best of those longer. How long is given in moves, so a plan is a function of question, seed and effort;
a limit in seconds only ever ends it earlier, and says so.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rowwise.perf.access import Floats
from rowwise.planner.bound import Bound, Totals, linear_bound, threshold_bound
from rowwise.planner.methods.dreamshard import start as learned_start
from rowwise.planner.native import AnnealingEffort, Candidate, NativeProblem
from rowwise.planner.problem import NO_UNIT, Index, Placement, PlacementProblem, least_options

MOVES_A_SECOND = 1_000_000  # what is counted on when effort is given in seconds
LOOSE = (1.0, 1.1, 1.25, 1.5, 2.0)  # multiples of the mean that a rank's link seconds may be in a start
SPLITS = (1.0, 0.7, 1.4)  # multiples of the bound that a piece may be
FINALISTS = 8  # starts that are annealed
LATE, LEAST_s = 4.0, 2.0  # time ends a search of exact effort at so many times what was asked for, or at this
FIRST = 0.8  # share of the effort that finalists have; the best of them has the rest
NONE = 1e-12
SAME = 1e-6  # share of the cost by which placements differ that are not the same


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best placement of a search, and how it ended."""

    placement: Placement
    cost: float
    over: float  # 0: it fits
    bound: Bound
    moves: int
    seconds: float
    out_of_time: bool

    @property
    def gap(self) -> float:
        """How much more than the bound it costs, as a share of the bound."""
        return self.cost / self.bound.cost - 1 if np.isfinite(self.bound.cost) and self.bound.cost > 0 else np.inf


def search(problem: PlacementProblem, *, seconds: float = 1.0, seed: int = 0, prove: bool = True) -> SearchResult:
    """The best placement found; time ends it only at several times `seconds`. Without `prove`, just the fast bound."""
    return search_best(problem, 1, seconds=seconds, seed=seed, prove=prove)[0]


def search_best(
    problem: PlacementProblem, count: int, *, seconds: float = 1.0, seed: int = 0, prove: bool = True
) -> list[SearchResult]:
    """As many placements as were found, up to `count`, the best first; no two of them cost the same."""
    begin_s = time.monotonic()
    native, bound = NativeProblem(problem), threshold_bound(problem)
    if not problem.phi.is_convex:
        bound = replace(bound, cost=np.nan, kind="")  # it says where to begin, and proves nothing
    elif prove and _is_mixed(problem) and np.isfinite(bound.cost):
        bound = linear_bound(problem, bound)
    found = best_starts(native, bound)
    end_s = begin_s + max(LATE * seconds, LEAST_s)
    made, late = 0, False
    for stage, (finalists, effort) in enumerate(_stages(found[0].placement, max(1, int(seconds * MOVES_A_SECOND)))):
        for number, one in enumerate(found[:finalists]):
            left_s = max(0.0, end_s - time.monotonic())
            asked = effort._replace(seed=(seed * 2 + stage) * 64 + number, limit_s=left_s)
            better = native.anneal(one.placement, asked)
            made, late = made + better.moves, late or better.out_of_time
            found.append(better)
        found.sort(key=_worth)
    took_s = time.monotonic() - begin_s
    return [SearchResult(f.placement, f.cost, f.over, bound, made, took_s, late) for f in _different(found, count)]


def _different(found: list[Candidate], count: int) -> list[Candidate]:
    kept = found[:1]
    for one in found[1:]:
        if len(kept) < count and one.cost > kept[-1].cost * (1 + SAME) and _worth(one)[0] <= _worth(found[0])[0]:
            kept.append(one)
    return kept


def _stages(start: Placement, moves: int) -> tuple[tuple[int, AnnealingEffort], tuple[int, AnnealingEffort]]:
    """How many placements are annealed, and how: the more pieces there are, the less each matters, the cooler."""
    pieces = int((start.unit_N != NO_UNIT).sum())
    hot = min(0.012, max(0.0005, 0.4 / pieces))
    wide = AnnealingEffort(moves=int(moves * FIRST / FINALISTS), hot=hot, cold=hot / 200, smooth=0.9)
    return (FINALISTS, wide), (1, AnnealingEffort(moves=int(moves * (1 - FIRST)), hot=hot / 4, cold=1e-6, smooth=0.8))


def _worth(found: Candidate) -> tuple[float, float]:
    return (found.over if found.over > NONE else 0.0, found.cost)


def _is_mixed(problem: PlacementProblem) -> bool:
    """Whether options do more than cut columns, so that they trade work, links and memory."""
    used = [problem.kinds[number] for number in np.unique(problem.option_kind)]
    return any(kind.span != "rank" or kind.tier != "device" for kind in used)


def best_starts(native: NativeProblem, bound: Bound) -> list[Candidate]:
    found = []
    for placement in _starts(native, bound):
        cost, over = native.cost(placement.unit_N)
        found.append(Candidate(placement, cost, over, 0, False))
    return sorted(found, key=_worth)


def _starts(native: NativeProblem, bound: Bound) -> Iterator[Placement]:
    problem = native.problem
    totals = Totals.of(problem)
    z = bound.phi if np.isfinite(bound.phi) else float(totals.phi_O.max())
    if bound.choice_I is not None:
        yield from _placed(native, bound.choice_I, z, max(bound.link, NONE))
    m = bound.link if np.isfinite(bound.link) and bound.link > 0 else max(float(totals.link_O.max()), NONE)
    for loose in SPLITS:
        choice_I = least_split_options(problem, totals, z * loose, m * loose)
        yield from _placed(native, choice_I, z, m)
    yield from _placed(native, _least_memory(problem, totals), z, m)
    learned = learned_start(problem)
    if learned is not None:
        yield learned


def _placed(native: NativeProblem, choice_I: Index, z: float, m: float) -> Iterator[Placement]:
    problem = native.problem
    pieces = _pieces_of(problem, choice_I)
    load_N = problem.phi(problem.pieces.load_NK) - problem.phi.constant
    share_N = np.maximum(load_N / max(z - problem.phi.constant, NONE), problem.pieces.link_N / m)
    share_N = np.maximum(share_N, (problem.pieces.bytes_NM / np.maximum(problem.limit_M, 1)).max(1))
    by_share = pieces[np.argsort(-share_N[pieces], kind="stable")]
    scale = [z, m, *np.maximum(problem.limit_M, 1)]
    unit_N = native.greedy(by_share, scale=scale)
    if unit_N is not None:
        yield Placement(choice_I, unit_N)
    by_load = pieces[np.argsort(-load_N[pieces], kind="stable")]
    ranks_N = problem.ranks_of_O[problem.option_of_N]
    mean = float((problem.pieces.link_N * ranks_N)[pieces].sum()) / problem.topology.world
    for loose in LOOSE:
        unit_N = native.greedy(by_load, link_limit=mean * loose * (1 + 1e-12))
        if unit_N is not None:
            yield Placement(choice_I, unit_N)


def _pieces_of(problem: PlacementProblem, choice_I: Index) -> np.ndarray:
    return np.concatenate([np.array(problem.pieces_of(int(option))) for option in choice_I])


def least_split_options(problem: PlacementProblem, totals: Totals, z: float, m: float) -> Index:
    """Of each item: the option with the least work whose pieces are under z, m and memory; if none, the smallest."""
    ok_O = totals.fits_O & (totals.phi_O <= z * (1 + 1e-9)) & (totals.link_O <= m * (1 + 1e-9))
    work_O = problem.phi(totals.load_OK) + totals.links_O + _memory_price(problem, totals, z)
    size_O = totals.phi_O / z + totals.link_O / m + np.where(totals.fits_O, 0.0, 1e6)
    return least_options(problem, np.where(ok_O, work_O, 1e3 + size_O))


def _memory_price(problem: PlacementProblem, totals: Totals, z: float) -> Floats:
    """What memory is worth: nothing while there is plenty, up to as much as operators where it is short."""
    begin = problem.item_begin[:-1]
    fits = np.where(totals.fits_O[:, None], totals.bytes_OM, np.inf)
    wanted_M = np.minimum.reduceat(fits[:, :1], begin, axis=0).sum(0)
    first = np.minimum.reduceat(np.where(np.isfinite(fits), fits, 0), begin, axis=0)
    fill = float(wanted_M[0]) / max(problem.limit_M[0], 1.0) if np.isfinite(wanted_M[0]) and len(first) else 1.0
    return totals.bytes_OM[:, 0] / max(problem.limit_M[0], 1.0) * z * min(fill, 1.0) ** 4


def _least_memory(problem: PlacementProblem, totals: Totals) -> Index:
    """Of each item: the option that takes least memory, of those the one whose largest piece is smallest."""
    share_O = (totals.bytes_OM / np.maximum(problem.limit_M, 1)).sum(1)
    largest_O = totals.phi_O / max(float(totals.phi_O.max()), NONE)
    return least_options(problem, np.where(totals.fits_O, share_O + 1e-3 * largest_O, 1e6 + share_O))
