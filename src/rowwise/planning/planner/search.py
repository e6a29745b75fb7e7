"""Searches for a plan: several start placements, the best of them improved by simulated annealing.

[Note: Search] The bound gives the least that the busiest rank bears: z seconds of operators, m of links. Starts are

- greedy: items are cut as little as keeps every piece under z and m, and placed in falling order of their largest
  share, each where the largest share of a rank stays smallest;
- NeuroShard's greedy: in falling order of operators, for several limits on links;
- DreamShard's policy, where tables are few and may stay whole;
- the options of the bound's relaxation, where layouts trade work for memory;
- with rows below the device: the options of relaxations whose pieces are at most a share of what a rank bears. Small
  pieces take more work in sum and leave fewer gaps; which share is best depends on the tables;
- where none of these fits: small pieces that fill all tiers of memory alike, packed by their bytes.

All are compared by the same cost. The best few are annealed shortly, and the best of those longer. Effort is a number
of moves, so a plan is a function of request, seed and effort; a limit in seconds can only end the search earlier,
which the result reports. Runs of annealing share the processors.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rowwise.base.processor import usable_processors
from rowwise.planning.perf.access import Floats
from rowwise.planning.planner.bound import Bound, OptionTotals, linear_bound, relaxed_options, threshold_bound
from rowwise.planning.planner.methods.dreamshard import policy_start as learned_start
from rowwise.planning.planner.native import AnnealingEffort, Candidate, NativeProblem
from rowwise.planning.planner.problem import NO_UNIT, Index, Placement, PlacementProblem, argmin_options

MOVES_A_SECOND = 1_000_000  # moves that stand for a second of effort
LINK_SLACKS = (1.0, 1.1, 1.25, 1.5, 2.0)  # limits on a rank's link seconds in starts, as multiples of the mean
FILL, SMALL_PIECE, NEAR = 0.95, 0.05, 1.3  # shares of a rank's memory; totals up to this multiple of the least tie
SPLIT_SCALES = (1.0, 0.7, 1.4)  # limits on a piece in starts, as multiples of the bound
# Largest pieces of starts as shares of the bound and of memory, and the share of memory that the relaxation may fill.
GRAINS = (
    (1.0, 1.0, 1.0), (0.6, 0.6, 0.95), (0.4, 0.4, 0.95), (0.4, 0.4, 0.9), (0.28, 0.4, 0.95), (0.2, 0.4, 0.9),
    (0.2, 0.2, 0.95), (0.14, 0.2, 0.9), (0.1, 0.1, 0.95),
)  # fmt: skip
OVER_PRICE = 2.0  # relative cost of bytes over memory, as a share of it, in starts
FINALISTS = 8  # starts that are annealed
MIN_TIME_LIMIT_s, LONG_s = 2.0, 20.0  # see `time_limit_s`
TIME_LIMIT_FACTOR = 4.0
FINALISTS_SHARE = 0.8  # of the effort, for all finalists; the rest goes to the best of them
TIERED_SHARE = 0.5  # the same with rows below the device; the rest goes to the best two
TINY = 1e-12
SAME_COST = 1e-6  # relative difference of costs below which placements count as the same


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best placement, its bound, and the effort spent."""

    placement: Placement
    cost: float  # seconds
    over: float  # bytes over the memory limits, as a share of them; 0 if it fits
    bound: Bound
    moves: int
    seconds: float
    out_of_time: bool

    @property
    def gap(self) -> float:
        """Relative distance from the bound; infinite if nothing is proven."""
        return self.cost / self.bound.cost - 1 if np.isfinite(self.bound.cost) and self.bound.cost > 0 else np.inf


def search(problem: PlacementProblem, *, seconds: float = 1.0, seed: int = 0, prove: bool = True) -> SearchResult:
    """The best placement, within `time_limit_s`. Without `prove`, only the fast bound is made."""
    return search_best(problem, 1, seconds=seconds, seed=seed, prove=prove)[0]


def search_best(
    problem: PlacementProblem, count: int, *, seconds: float = 1.0, seed: int = 0, prove: bool = True
) -> list[SearchResult]:
    """Up to `count` placements, the best first; no two of them cost the same."""
    begin_s = time.monotonic()
    native, bound = NativeProblem(problem), threshold_bound(problem)
    if not problem.phi.is_convex:
        bound = replace(bound, cost=np.nan, kind="")  # still a good scale for starts, but no proof
    elif prove and _trades_resources(problem) and np.isfinite(bound.cost):
        bound = linear_bound(problem, bound)
    candidates = best_starts(native, bound)
    end_s, tiered = begin_s + time_limit_s(seconds), problem.has_lower_tiers
    left_s = max(end_s - time.monotonic(), 0.0)
    moves, out_of_time = 0, False
    stages = _annealing_stages(candidates[0].placement, max(1, int(seconds * MOVES_A_SECOND)), tiered)
    for number, (finalists, share, effort) in enumerate(stages):
        # Each run has a seed of its own, so that finalists with equal placements take different walks.
        starts = candidates[:finalists]
        efforts = [effort._replace(seed=(seed * 2 + number) * 64 + k) for k in range(len(starts))]
        # Where moves are slow, each run has its share of the time.
        run_s = left_s * share / -(-len(starts) // usable_processors()) if tiered else np.inf

        def anneal(start: Candidate, effort: AnnealingEffort, run_s: float = run_s) -> Candidate:
            limit_s = max(min(run_s, end_s - time.monotonic()), 0.0)
            return native.anneal(start.placement, effort._replace(limit_s=limit_s, timed=tiered))

        with ThreadPoolExecutor(usable_processors()) as pool:
            better = list(pool.map(anneal, starts, efforts))
        moves += sum(c.moves for c in better)
        out_of_time = out_of_time or any(c.out_of_time for c in better)
        candidates = sorted(candidates + better, key=_search_key)
    took_s = time.monotonic() - begin_s
    return [
        SearchResult(c.placement, c.cost, c.over, bound, moves, took_s, out_of_time)
        for c in _distinct_costs(candidates, count)
    ]


def time_limit_s(seconds: float) -> float:
    """Time for slow moves, up to `LONG_s`; longer budgets are the limit themselves."""
    return max(MIN_TIME_LIMIT_s, min(TIME_LIMIT_FACTOR * seconds, LONG_s), seconds)


def _distinct_costs(candidates: list[Candidate], count: int) -> list[Candidate]:
    kept = candidates[:1]
    for candidate in candidates[1:]:
        if (
            len(kept) < count
            and candidate.cost > kept[-1].cost * (1 + SAME_COST)
            and _search_key(candidate)[0] <= _search_key(candidates[0])[0]
        ):
            kept.append(candidate)
    return kept


class _Stage(NamedTuple):
    """Runs of annealing from the best placements known."""

    finalists: int
    share: float  # of the effort and of the time
    effort: AnnealingEffort


def _annealing_stages(start: Placement, moves: int, tiered: bool) -> tuple[_Stage, _Stage]:
    """With more pieces each matters less, so annealing starts cooler."""
    pieces = int((start.unit_N != NO_UNIT).sum())
    hot = min(0.012, max(0.0005, 0.4 / pieces))
    share, best = (TIERED_SHARE, 2) if tiered else (FINALISTS_SHARE, 1)
    short = AnnealingEffort(moves=int(moves * share / FINALISTS), hot=hot, cold=hot / 200, smooth=0.9)
    long = AnnealingEffort(moves=int(moves * (1 - share) / best), hot=hot / (2 if tiered else 4), cold=1e-6, smooth=0.8)
    return _Stage(FINALISTS, share, short), _Stage(best, 1 - share, long)


def _search_key(candidate: Candidate) -> tuple[float, float]:
    return (candidate.over if candidate.over > TINY else 0.0, candidate.cost)


def _trades_resources(problem: PlacementProblem) -> bool:
    """Whether options do more than cut columns, so that they trade work, links and memory against each other."""
    used = [problem.kinds[number] for number in np.unique(problem.option_kind)]
    return any(kind.unit_kind != "rank" or kind.tier != "device" for kind in used)


def best_starts(native: NativeProblem, bound: Bound) -> list[Candidate]:
    """All start placements, the cheapest first."""
    totals = OptionTotals.of(native.problem)
    candidates = [native.candidate(placement) for placement in _start_placements(native, totals, bound)]
    if all(candidate.over > TINY for candidate in candidates):
        candidates += [native.candidate(placement) for placement in _packed_placements(native, totals)]
    if not native.problem.has_lower_tiers:
        return sorted(candidates, key=_search_key)
    return sorted([*candidates, *_grained_starts(native, totals, bound)], key=lambda c: _start_key(native, c))


def _start_key(native: NativeProblem, start: Candidate) -> float:
    """The cost with a price on bytes over memory, which annealing moves elsewhere."""
    return start.cost * (1 + OVER_PRICE * start.over / native.problem.topology.world)


def _grained_starts(native: NativeProblem, totals: OptionTotals, bound: Bound) -> Iterator[Candidate]:
    """The best start for each of `GRAINS`, unless its pieces take more work in sum than a start that is known."""
    problem, least = native.problem, np.inf
    if not np.isfinite(bound.cost):
        return
    work_O = np.maximum(totals.phi_O - problem.phi.constant, totals.link_O) / bound.cost
    last_I: Index | None = None
    for share, memory_share, fill in GRAINS:
        size_O = np.maximum(work_O / share, totals.largest_O / memory_share)
        min_I = np.minimum.reduceat(size_O, problem.item_begin[:-1])  # where all are larger, the smallest
        ok_O = totals.fits_O & (size_O <= np.maximum(min_I, 1.0)[problem.item_of_O])
        choice_I, cost, link = relaxed_options(problem, totals, ok_O, fill)
        if not cost < least or (last_I is not None and (choice_I == last_I).all()):
            continue
        last_I, z, m = choice_I, max(cost - link, 0.1 * cost), max(link, TINY)
        starts = [native.candidate(p) for p in _greedy_placements(native, choice_I, z, m, LINK_SLACKS[1:2])]
        if starts:
            best = min(starts, key=lambda c: _start_key(native, c))
            least = min(least, _start_key(native, best))
            yield best


def _start_placements(native: NativeProblem, totals: OptionTotals, bound: Bound) -> Iterator[Placement]:
    problem = native.problem
    z = bound.phi if np.isfinite(bound.phi) else float(totals.phi_O.max())
    if bound.choice_I is not None:
        yield from _greedy_placements(native, bound.choice_I, z, max(bound.link, TINY))
    m = bound.link if np.isfinite(bound.link) and bound.link > 0 else max(float(totals.link_O.max()), TINY)
    for scale in SPLIT_SCALES:
        choice_I = min_split_options(problem, totals, z * scale, m * scale)
        yield from _greedy_placements(native, choice_I, z, m)
    yield from _greedy_placements(native, _min_memory_options(problem, totals), z, m)
    learned = learned_start(problem)
    if learned is not None:
        yield learned


def _greedy_placements(
    native: NativeProblem, choice_I: Index, z: float, m: float, slacks: tuple[float, ...] = LINK_SLACKS
) -> Iterator[Placement]:
    problem = native.problem
    pieces = _pieces_of(problem, choice_I)
    taken, limit_M = problem.pieces.take(pieces), np.maximum(problem.limit_M, 1)
    load_P = problem.phi(taken.load_NK) - problem.phi.constant
    share_P = np.maximum(load_P / max(z - problem.phi.constant, TINY), taken.link_N / m)
    share_P = np.maximum(share_P, (taken.bytes_NM / limit_M).max(1))
    yield from _try_greedy(native, choice_I, pieces, share_P, scale=[z, m, *limit_M])
    # As NeuroShard: balance operators alone, under a limit on links that is relaxed step by step.
    ranks_P = problem.ranks_of_O[problem.option_of_N[pieces]]
    mean = float((taken.link_N * ranks_P).sum()) / problem.topology.world
    for slack in slacks:
        yield from _try_greedy(native, choice_I, pieces, load_P, link_limit=mean * slack * (1 + 1e-12))


def _try_greedy(
    native: NativeProblem, choice_I: Index, pieces: np.ndarray, key_P: Floats, **limits: Any
) -> Iterator[Placement]:
    """Greedy placement of the options' pieces in falling order of a key; nothing if a piece fits nowhere."""
    unit_N = native.greedy(pieces[np.argsort(-key_P, kind="stable")], **limits)
    if unit_N is not None:
        yield Placement(choice_I, unit_N)


def _packed_placements(native: NativeProblem, totals: OptionTotals) -> Iterator[Placement]:
    """A placement packed by bytes alone, whatever its cost."""
    problem = native.problem
    choice_I, limit_M = _filling_options(problem, totals), np.maximum(problem.limit_M, 1)
    pieces, unlimited = _pieces_of(problem, choice_I), np.finfo(float).max
    share_P = (problem.pieces.bytes_NM[pieces] / limit_M).max(1)
    return _try_greedy(native, choice_I, pieces, share_P, scale=[unlimited, unlimited, *limit_M])


def _filling_options(problem: PlacementProblem, totals: OptionTotals) -> Index:
    """Options chosen largest item first: small pieces that leave the most free space in the fullest tier."""
    limit_M = np.maximum(problem.limit_M, 1.0)
    share_OM = totals.bytes_OM / limit_M  # of all memory of a tier
    starts_O = np.array([problem.pieces_of(option).start for option in range(len(share_OM))])
    largest_O = np.maximum.reduceat((problem.pieces.bytes_NM / limit_M).max(1), starts_O)
    left_M = np.where(problem.limit_M > 0, FILL, 0.0)
    choice_I = np.zeros(len(problem.members), dtype=np.int32)
    min_I = np.minimum.reduceat(share_OM.sum(1), problem.item_begin[:-1])
    for item in np.argsort(-min_I, kind="stable").tolist():
        options = np.array(problem.options_of(item))
        # Options that fit a rank, then small pieces, then those within free memory, then small ones.
        options = _prefer(options, totals.fits_O[options])
        options = _prefer(options, largest_O[options] <= SMALL_PIECE)
        options = _prefer(options, np.all(share_OM[options] <= left_M, axis=1))
        size = share_OM[options].sum(1)
        options = options[size <= NEAR * size.min()]
        choice_I[item] = options[(left_M - share_OM[options]).min(1).argmax()]
        left_M = left_M - share_OM[choice_I[item]]
    return choice_I


def _prefer(options: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The masked options, or all if the mask is empty."""
    return options[mask] if mask.any() else options


def _pieces_of(problem: PlacementProblem, choice_I: Index) -> np.ndarray:
    return np.concatenate([np.array(problem.pieces_of(int(option))) for option in choice_I])


def min_split_options(problem: PlacementProblem, totals: OptionTotals, z: float, m: float) -> Index:
    """For each item the cheapest option whose pieces take at most z (work) and m (links) and fit; else the smallest."""
    ok_O = totals.fits_O & (totals.phi_O <= z * (1 + 1e-9)) & (totals.link_O <= m * (1 + 1e-9))
    work_O = problem.phi(totals.load_OK) + totals.links_O + _memory_price_O(problem, totals, z)
    # Options over a limit come after all others, smallest first; options that fit on no rank come last.
    size_O = totals.phi_O / z + totals.link_O / m + np.where(totals.fits_O, 0.0, 1e6)
    return argmin_options(problem, np.where(ok_O, work_O, 1e3 + size_O))


def _memory_price_O(problem: PlacementProblem, totals: OptionTotals, z: float) -> Floats:
    """Price of an option's device memory in seconds: near 0 while memory is plentiful, z when it is full."""
    begin = problem.item_begin[:-1]
    fits_O1 = np.where(totals.fits_O[:, None], totals.bytes_OM[:, :1], np.inf)
    min_bytes = float(np.minimum.reduceat(fits_O1, begin, axis=0).sum(0)[0])
    fill = min_bytes / max(problem.limit_M[0], 1.0)
    return totals.bytes_OM[:, 0] / max(problem.limit_M[0], 1.0) * z * min(fill, 1.0) ** 4


def _min_memory_options(problem: PlacementProblem, totals: OptionTotals) -> Index:
    """For each item the option with least memory; ties go to the smallest largest piece."""
    share_O = (totals.bytes_OM / np.maximum(problem.limit_M, 1)).sum(1)
    largest_O = totals.phi_O / max(float(totals.phi_O.max()), TINY)
    return argmin_options(problem, np.where(totals.fits_O, share_O + 1e-3 * largest_O, 1e6 + share_O))
