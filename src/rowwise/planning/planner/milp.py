"""Certificates: a mixed-integer program whose bound no plan beats, and whose solution may be a better plan.

The program chooses an option for each item, and how many of its pieces go to each unit. It is exact but for phi, which
tangents replace from below: phi is convex, so no tangent is above it. What the solver (HiGHS) has proven when its time
is up is therefore a bound, tighter than those that look at the mean of all ranks. See [Note: Bounds].

Importing the solver takes half a second. Known limit: with many ranks, nothing is proven in reasonable time beyond the
other bounds.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Floats
from rowwise.planning.planner.bound import SLACK, Bound
from rowwise.planning.planner.native import AnnealingEffort, NativeProblem
from rowwise.planning.planner.problem import NO_UNIT, Index, Placement, PlacementProblem
from rowwise.planning.planner.search import SearchResult

GOOD_GAP = 1e-3  # relative; below it, certifying stops
# The solver may ignore plans that cost more than this times the best known; with a tighter cutoff it finds none.
CUTOFF_FACTOR = 1.03
TANGENT_RUNS, TANGENT_MOVES = 6, 100_000  # placements where tangents touch phi, and moves to find each


@dataclass(frozen=True, slots=True)
class MilpSolution:
    """The solver's plan, if it found one, and its bound."""

    placement: Placement | None
    bound: float  # -inf if nothing was proven


def certify(problem: PlacementProblem, searched: SearchResult, seconds: float) -> SearchResult:
    """A better bound, and perhaps a better placement, after about `seconds`."""
    if not problem.phi.is_convex:
        raise SpecError(
            f"{problem.request.model.name} is not convex, so no bound can be proven",
            "a cost model without negative weights, or no --certify",
        )
    if searched.gap <= GOOD_GAP / 10:
        return searched
    begin_s = time.monotonic()
    best = searched
    points = _tangent_points(problem, searched)
    # Each round adds tangents at the solver's own solution, where the last program underestimated phi.
    for _ in range(4):
        left_s = seconds - (time.monotonic() - begin_s)
        if left_s < 0.5 or best.gap <= GOOD_GAP:
            break
        solved = _Program(problem, np.concatenate(points)).solve(left_s, best.cost * CUTOFF_FACTOR)
        # Rounding may lift the solver's bound above the optimum; no bound exceeds the cost of a known plan.
        proven = min(solved.bound * (1 - SLACK), best.cost)
        if proven > best.bound.cost:
            best = replace(best, bound=Bound(proven, best.bound.phi, best.bound.link, "mixed-integer"))
        if solved.placement is None:
            break
        cost = problem.cost(solved.placement)
        points.append(problem.sums(solved.placement).load_NK)
        if cost < best.cost and problem.fits(solved.placement):
            best = replace(best, placement=solved.placement, cost=cost)
        # The solution costs no more than the solver's bound: tangents are tight there, and more rounds prove no more.
        elif cost <= solved.bound * (1 + GOOD_GAP):
            break
    return best


def _tangent_points(problem: PlacementProblem, searched: SearchResult) -> list[Floats]:
    """Loads of ranks in good placements: where tangents should touch phi."""
    native = NativeProblem(problem)
    annealed = [
        native.anneal(searched.placement, AnnealingEffort(moves=TANGENT_MOVES, seed=1 + n, hot=0.01))
        for n in range(TANGENT_RUNS)
    ]
    return [problem.sums(placement).load_NK for placement in (searched.placement, *(c.placement for c in annealed))]


@dataclass(frozen=True, slots=True)
class _PieceClass:
    """Interchangeable pieces of an option, of equal loads and bytes: the program only counts them."""

    item: int
    option: int
    pieces: tuple[int, ...]
    units: tuple[int, ...]  # where they may go


class _Program:
    """min z + m. Columns of the program, in order: how many pieces of each class go to each of its units, whether each
    option is taken, z (operators of the busiest rank), m (link seconds of the busiest rank).
    """

    def __init__(self, problem: PlacementProblem, points_PK: Floats) -> None:
        self.problem, self.world, self.items = problem, problem.topology.world, len(problem.members)
        self.classes = [c for item in range(self.items) for c in _piece_classes(problem, item)]
        # Plans that differ by a permutation of ranks cost the same; the solver needs only one of them.
        self.ranks_are_symmetric = problem.topology.hosts == 1 and bool((problem.rule_I < 0).all())
        self.options = sorted({c.option for c in self.classes})
        mean_K = points_PK.mean(0, keepdims=True)
        self.points_PK = np.unique(np.concatenate([mean_K, points_PK]), axis=0)
        # Seconds of a step are near a solver's tolerances, so the program counts in units of the mean rank's.
        self.unit = max(float(problem.phi(mean_K)[0]), 1e-12)

    def solve(self, limit_s: float, cut_off: float) -> MilpSolution:
        """Solve until `limit_s`, ignoring solutions that cost more than `cut_off`."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        if not self.classes:  # no item fits on any rank
            return MilpSolution(None, -np.inf)
        begin_C = np.concatenate([[0], np.cumsum([len(c.units) for c in self.classes])])
        counts, options = int(begin_C[-1]), len(self.options)
        width = counts + options + 2
        counted = [np.full(len(c.units), float(len(c.pieces))) for c in self.classes]
        upper = np.concatenate([*counted, np.ones(options), [np.inf, np.inf]])
        result = milp(
            c=np.concatenate([np.zeros(width - 2), [1.0, 1.0]]),
            constraints=[
                LinearConstraint(*self._choice_rows(begin_C, width)),
                LinearConstraint(*self._load_rows(begin_C, width)),
                *([LinearConstraint(*self._order_rows(begin_C, width))] if self.ranks_are_symmetric else []),
                LinearConstraint((np.arange(width) >= width - 2)[None], -np.inf, cut_off / self.unit),
            ],
            integrality=np.concatenate([np.ones(counts + options), [0, 0]]),
            bounds=Bounds(np.zeros(width), upper),
            options={"time_limit": max(limit_s, 0.1), "mip_rel_gap": GOOD_GAP / 2},
        )
        bound = getattr(result, "mip_dual_bound", None)
        proven = float(bound) * self.unit if bound is not None and np.isfinite(bound) else -np.inf
        placement = self._placement(result.x, begin_C) if result.x is not None else None
        return MilpSolution(placement, proven)

    def _choice_rows(self, begin_C: NDArray[np.int64], width: int) -> tuple[Any, Floats, Floats]:
        """Each item has one option; all pieces of a class are on units if its option is taken, else none."""
        items, options = self.items, self.options
        column_of = {option: int(begin_C[-1]) + i for i, option in enumerate(options)}
        item_of_O = self.problem.item_of_O
        rows = [int(item_of_O[option]) for option in options]
        columns = [column_of[option] for option in options]
        values = [1.0] * len(options)
        for number, c in enumerate(self.classes):
            row = items + number
            rows += [row] * (len(c.units) + 1)
            columns += [*range(int(begin_C[number]), int(begin_C[number + 1])), column_of[c.option]]
            values += [1.0] * len(c.units) + [-float(len(c.pieces))]
        height = items + len(self.classes)
        matrix = _sparse(values, (rows, columns), (height, width))
        right = np.concatenate([np.ones(items), np.zeros(len(self.classes))])
        return matrix, right, right

    def _load_rows(self, begin_C: NDArray[np.int64], width: int) -> tuple[Any, Floats, Floats]:
        """For each rank: tangents of phi under z, link seconds under m, bytes under the limits."""
        problem = self.problem
        slope_PK = problem.phi.gradient(self.points_PK)
        # The tangent at P is slope . load + height; z >= each of them on each rank.
        height_P = problem.phi(self.points_PK) - (slope_PK * self.points_PK).sum(1)
        scale_M = np.maximum(problem.limit_M, 1.0)  # bytes as shares of the limit, for the solver's tolerances
        first = np.array([c.pieces[0] for c in self.classes])
        pieces = problem.pieces
        row_CL = np.concatenate(
            [pieces.load_NK[first] @ slope_PK.T / self.unit, pieces.link_N[first, None] / self.unit,
             pieces.bytes_NM[first] / scale_M], axis=1,
        )  # fmt: skip
        lines, cuts = row_CL.shape[1], len(height_P)
        rows: list[NDArray[np.int64]] = []
        columns: list[NDArray[np.int64]] = []
        values: list[Floats] = []
        # A piece on a unit adds its tangents, link seconds and bytes to the rows of each rank of the unit.
        for number, c in enumerate(self.classes):
            for i, unit in enumerate(c.units):
                for rank in problem.ranks_of(unit):
                    rows.append(rank * lines + np.arange(lines))
                    columns.append(np.full(lines, begin_C[number] + i))
                    values.append(row_CL[number])
        for rank in range(self.world):  # minus z in the rows of tangents, minus m in that of links
            rows.append(rank * lines + np.arange(cuts + 1))
            columns.append(np.array([width - 2] * cuts + [width - 1]))
            values.append(np.full(cuts + 1, -1.0))
        places = np.concatenate(rows), np.concatenate(columns)
        matrix = _sparse(np.concatenate(values), places, (lines * self.world, width))
        right = np.tile(np.concatenate([-height_P / self.unit, [0.0], problem.limit_M / scale_M]), self.world)
        return matrix, np.full(right.size, -np.inf), right

    def _order_rows(self, begin_C: NDArray[np.int64], width: int) -> tuple[Any, float, float]:
        """Ranks in falling order of link seconds. Without it, the solver spends its time on permutations of ranks."""
        link_N, ranks = self.problem.pieces.link_N / self.unit, self.world
        triples = [
            (row, begin_C[number] + i, sign * link_N[c.pieces[0]])
            for number, c in enumerate(self.classes)
            for i, unit in enumerate(c.units)
            for row, sign in ((unit, -1.0), (unit - 1, 1.0))  # row r: rank r + 1 minus rank r, at most 0
            if unit < ranks and 0 <= row < ranks - 1
        ]
        entries = np.array(triples).reshape(-1, 3)
        places = entries[:, 0].astype(int), entries[:, 1].astype(int)
        return _sparse(entries[:, 2], places, (max(ranks - 1, 1), width)), -np.inf, 0.0

    def _placement(self, x: Floats, begin_C: NDArray[np.int64]) -> Placement:
        problem = self.problem
        choice_I: Index = problem.item_begin[:-1].astype(np.int32).copy()
        unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
        for i, option in enumerate(self.options):
            if x[int(begin_C[-1]) + i] > 0.5:
                choice_I[problem.item_of_O[option]] = option
        for number, c in enumerate(self.classes):
            if choice_I[c.item] == c.option:
                # Integers up to the solver's tolerance.
                count = np.round(x[begin_C[number] : begin_C[number + 1]]).astype(int)
                unit_N[list(c.pieces)] = np.repeat(np.array(c.units), count)
        return Placement(choice_I, unit_N)


def _sparse(values: Any, places: tuple[Any, Any], shape: tuple[int, int]) -> Any:
    from scipy.sparse import coo_array

    return coo_array((values, places), shape=shape).tocsr()


def _piece_classes(problem: PlacementProblem, item: int) -> list[_PieceClass]:
    """The classes of each option of an item; none for options with a piece that fits on no rank."""
    classes: list[_PieceClass] = []
    for option in problem.options_of(item):
        units, pieces = tuple(problem.units_of(option)), problem.pieces_of(option)
        if not units or (problem.pieces.bytes_NM[pieces] > problem.limit_M).any():
            continue
        groups: dict[tuple[float, ...], list[int]] = {}
        for piece in pieces:
            key = (*problem.pieces.load_NK[piece], problem.pieces.link_N[piece], *problem.pieces.bytes_NM[piece])
            groups.setdefault(key, []).append(piece)
        classes += [_PieceClass(item, option, tuple(group), units) for group in groups.values()]
    return classes
