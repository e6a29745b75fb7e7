"""Lower bounds on the cost of a step, from the costs of pieces alone.

[Note: Bounds] Let a plan cost F = z + m, with no rank's phi over z and no rank's link seconds over m. Then every piece
it uses costs at most z and m by itself and fits into a rank's memory; and as phi is convex and grows with every load,
phi(mean load of a rank) <= z, where the mean is at least that of the least work each item has among such options.
Whether (z, m) meets these conditions is decided at once; the least z + m that meets them is a bound:

- `threshold_bound` takes the least of each load over an item's options, separately: fast, and tight where all layouts
  do the same work (whole tables and columns).
- `linear_bound` lets each item mix its options, but the same mixture for all loads, links and memory at once. Needed
  where layouts trade one for another (rows, replicas, tiers).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rowwise.planning.perf.access import Floats
from rowwise.planning.planner.problem import Index, PlacementProblem, argmin_options

HALVINGS = 40
FRANK_WOLFE_STEPS = 120
PRICED_STEPS = 500  # the same if memory has a price
START_STEPS = 150  # the same for a start of the search
PRICE_RATE = 0.5  # step size of the prices of memory
GOOD_GAP = 2e-4  # relative; a bound this near the optimum of the relaxation is good enough
ROUNDS = 6  # of leaving out options that cost more than the bound
MAX_SCANNED = 10_000  # options with rows below the device; with more, the scan of m takes seconds
MIN_RAISE = 0.005  # relative; smaller steps of a bound are not tried
SLACK = 1e-7  # relative; taken off bounds that solvers or many steps compute, for rounding errors


@dataclass(frozen=True, slots=True)
class OptionTotals:
    """For each option: the largest of its pieces, and the work of all of them as a mean over ranks."""

    phi_O: Floats  # of the largest piece
    link_O: Floats  # of the largest piece
    fits_O: NDArray[np.bool_]  # whether each piece fits on an empty rank
    largest_O: Floats  # bytes of the largest piece, as a share of a tier of a rank
    load_OK: Floats  # mean over ranks
    links_O: Floats  # mean over ranks
    bytes_OM: Floats  # mean over ranks

    @classmethod
    def of(cls, problem: PlacementProblem) -> "OptionTotals":
        begin, pieces, world = problem.option_begin[:-1], problem.pieces, problem.topology.world
        share_O = problem.ranks_of_O / world
        return cls(
            phi_O=np.maximum.reduceat(problem.phi(pieces.load_NK), begin),
            link_O=np.maximum.reduceat(pieces.link_N, begin),
            fits_O=np.logical_and.reduceat((pieces.bytes_NM <= problem.limit_M).all(1), begin),
            largest_O=np.maximum.reduceat((pieces.bytes_NM / np.maximum(problem.limit_M, 1)).max(1), begin),
            load_OK=np.add.reduceat(pieces.load_NK, begin, axis=0) * share_O[:, None],
            links_O=np.add.reduceat(pieces.link_N, begin) * share_O,
            bytes_OM=np.add.reduceat(pieces.bytes_NM, begin, axis=0) * share_O[:, None],
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """A cost in seconds that no plan beats; infinite if no plan fits."""

    cost: float
    phi: float  # z: operators of the busiest rank
    link: float  # m: link seconds of the busiest rank
    kind: str  # how it was proven
    choice_I: Index | None = None  # options at the relaxation's last vertex: a start for the search


def threshold_bound(problem: PlacementProblem) -> Bound:
    """The least z + m that meets the conditions of [Note: Bounds]."""
    totals = OptionTotals.of(problem)
    begin = problem.item_begin[:-1]
    low_z, least_link = _least_each(problem, totals)
    if not np.isfinite(low_z + least_link):
        return Bound(np.inf, np.inf, np.inf, "threshold")
    if problem.has_lower_tiers and len(totals.phi_O) > MAX_SCANNED:
        return Bound(low_z + least_link, low_z, least_link, "threshold")
    candidates = np.unique(np.concatenate([[least_link], totals.link_O[totals.link_O > least_link]]))
    best = Bound(np.inf, np.inf, np.inf, "threshold")
    for group in _group_candidates(candidates, least_link):
        # For m between the group's first candidate and the next group's, every piece with link seconds up to the
        # group's last is allowed (more than m allows, so z is not too large), and m is at least the first candidate
        # and at least the mean that these pieces need. No z is below low_z.
        if group[0] + low_z >= best.cost:
            break
        z = _min_phi(problem, totals, begin, group[-1])
        m = _round_up_to_quantum(
            _least_totals(totals, begin, totals.fits_O & (totals.link_O <= group[-1]))[1], problem.pieces.link_N
        )
        if z + max(m, float(group[0])) < best.cost:
            m = float(max(m, group[0]))
            best = Bound(z + m, z, m, "threshold")
    return best


def _least_each(problem: PlacementProblem, totals: OptionTotals) -> tuple[float, float]:
    """The least z for any m, and the least m for any z."""
    begin = problem.item_begin[:-1]
    m = _round_up_to_quantum(_least_totals(totals, begin, totals.fits_O)[1], problem.pieces.link_N)
    return _min_phi(problem, totals, begin, np.inf) if np.isfinite(m) else np.inf, m


def _round_up_to_quantum(mean: float, link_N: Floats) -> float:
    """The mean rounded up to a multiple of the smallest piece, if all pieces are multiples of it (as columns are)."""
    positive = link_N[link_N > 0]
    if not len(positive) or not np.isfinite(mean):
        return mean
    times = positive / positive.min()
    if np.abs(times - np.round(times)).max() > 1e-6:
        return mean
    return float(np.ceil(mean / positive.min() * (1 - 1e-9)) * positive.min())


def _group_candidates(candidates: Floats, least: float) -> list[Floats]:
    """Candidates for m in groups, each as wide as a thousandth of the least link seconds of any plan."""
    width = max(least, 1e-12) * 1e-3
    number = np.floor((candidates - candidates[0]) / width)
    return np.split(candidates, np.flatnonzero(np.diff(number)) + 1)


def _least_totals(
    totals: OptionTotals, begin: NDArray[np.int32], ok_O: NDArray[np.bool_]
) -> tuple[Floats, float, Floats]:
    """Mean load, link seconds and bytes of a rank, with each item's minimum over options taken separately for each."""
    load = np.minimum.reduceat(np.where(ok_O[:, None], totals.load_OK, np.inf), begin, axis=0).sum(0)
    link = float(np.minimum.reduceat(np.where(ok_O, totals.links_O, np.inf), begin).sum())
    size = np.minimum.reduceat(np.where(ok_O[:, None], totals.bytes_OM, np.inf), begin, axis=0).sum(0)
    return load, link, size


def _min_phi(problem: PlacementProblem, totals: OptionTotals, begin: NDArray[np.int32], m: float) -> float:
    """The least z that meets the conditions if link seconds are at most m; infinite if none does."""
    ok_O = totals.fits_O & (totals.link_O <= m)

    def feasible(z: float) -> bool:
        load, _, size = _least_totals(totals, begin, ok_O & (totals.phi_O <= z))
        if not np.isfinite(load).all() or (size > problem.limit_M).any():
            return False
        return bool(problem.phi(load) <= z)

    # More z allows more options, whose least loads are smaller, so the condition on the mean holds from some z on.
    # Above the largest single piece nothing more is allowed: if the condition fails there, it fails for every z.
    load = _least_totals(totals, begin, ok_O)[0]
    if not np.isfinite(load).all():
        return np.inf
    high = max(float(totals.phi_O[ok_O].max()), float(problem.phi(load)))
    if not feasible(high):
        return np.inf
    low = float(problem.phi(load))
    if feasible(low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return low


def linear_bound(problem: PlacementProblem, floor: Bound) -> Bound:
    """Like `threshold_bound`, with one mixture of options for each item; never below `floor`. See [Note: Mixtures]."""
    totals = OptionTotals.of(problem)
    alone_O = totals.phi_O + totals.link_O  # every plan that uses the option costs at least this
    mixture = _Mixture(problem, totals)
    low, cost = floor.cost, np.inf
    # A plan of cost F uses no option with a piece that alone costs more than F. So after a bound F is proven, those
    # options can be left out, and the bound without them counts up to the least cost of an option left out.
    for _ in range(ROUNDS):
        value = mixture.bound(totals.fits_O & (alone_O <= cost))
        left_out_O = alone_O[alone_O > cost * (1 + SLACK)]
        ceiling = float(left_out_O.min()) if len(left_out_O) else np.inf
        if min(value, ceiling) <= low * (1 + GOOD_GAP):
            break
        low = cost = min(value, ceiling)
        if not np.isfinite(low):
            return Bound(np.inf, np.inf, np.inf, "linear")
    choice_I, link = mixture.choice_I, mixture.link
    if problem.has_lower_tiers:
        z, m = _least_each(problem, totals)
        alone_O = np.maximum(totals.phi_O, z) + np.maximum(totals.link_O, m)
        low = _raise_bound(low, lambda cost: mixture.bound(totals.fits_O & (alone_O <= cost)))
    if low <= floor.cost:
        return replace(floor, choice_I=choice_I)
    return Bound(low, max(low - link, 0.0), link, "linear", choice_I)


def _raise_bound(proven: float, bound_below: Callable[[float], float]) -> float:
    """The largest cost, nearly, that bounds itself: no mixture of the options that alone cost at most that costs less.

    A plan costs at least C, or uses only options that alone cost at most C and costs at least `bound_below(C)`.
    """
    step, failed = 2 * MIN_RAISE, np.inf
    while step >= MIN_RAISE:
        cost = proven * (1 + step)
        value = bound_below(cost) if cost < failed else 0.0
        step = step * 2 if value >= cost else step / 2
        failed = failed if value >= cost else min(failed, cost)
        proven = max(proven, min(value, cost))
    return proven


def relaxed_options(
    problem: PlacementProblem, totals: OptionTotals, ok_O: NDArray[np.bool_], fill: float
) -> tuple[Index, float, float]:
    """Options that a mixture of the allowed ones takes where they may `fill` memory, with its cost and link seconds."""
    mixture = _Mixture(problem, totals)
    mixture.limits_M = mixture.limits_M * fill
    cost = mixture.bound(ok_O, START_STEPS)
    return mixture.choice_I, cost, mixture.link


class _Mixture:
    """[Note: Mixtures] min over mixtures y of phi(load of y) + links of y, where memory of y is within its limits.

    All are means over ranks and linear in y. At any point with load P, and for any prices of memory, each item takes
    the option that is cheapest at the slopes of phi in P. The sum of these, plus the constants of tangent and limits,
    is a lower bound. The point moves towards these options as far as that lowers its cost (Frank-Wolfe). Prices
    (Lagrange multipliers) rise for tiers that overflow. The best bound of all steps counts, converged or not.
    """

    def __init__(self, problem: PlacementProblem, totals: OptionTotals) -> None:
        self.problem, self.totals = problem, totals
        self.scale_M = np.maximum(problem.limit_M, 1.0)
        shares_OM = totals.bytes_OM / self.scale_M
        self.rows_OX = np.concatenate([totals.load_OK, totals.links_O[:, None], shares_OM], axis=1)
        self.limits_M = problem.limit_M / self.scale_M  # 1; 0 for an absent tier
        self.link = 0.0
        self.choice_I: Index = problem.item_begin[:-1]
        self.price_M = np.zeros(len(self.scale_M))

    def bound(self, ok_O: NDArray[np.bool_], steps: int = PRICED_STEPS) -> float:
        """The best bound over all steps; infinite if an item has no allowed option."""
        if not np.logical_or.reduceat(ok_O, self.problem.item_begin[:-1]).all():
            return np.inf
        width, best = self.problem.phi.width, -np.inf
        point = self._vertex(ok_O, np.concatenate([self._slope(None), [1.0], self.price_M]))
        for number in range(steps):
            if number >= FRANK_WOLFE_STEPS and not self.price_M.any():
                break
            slope_K = self._slope(point[:width])
            vertex = self._vertex(ok_O, np.concatenate([slope_K, [1.0], self.price_M]))
            # Convexity: phi(y) >= tangent at the point, for every mixture y, and the vertex minimises the tangent.
            tangent = float(self.problem.phi(point[:width]) + slope_K @ (vertex[:width] - point[:width]))
            value = tangent + float(vertex[width] + self.price_M @ (vertex[width + 1 :] - self.limits_M))
            best = max(best, value)
            step, least = self._line_search(point, vertex)
            point = point + step * (vertex - point)
            over_M = point[width + 1 :] - self.limits_M
            # Subgradient ascent on the prices, with falling steps; a price may fall again but not below 0.
            raised_M = abs(least) * PRICE_RATE / (number + 2) ** 0.5 * np.clip(over_M, -1, 1)
            self.price_M = np.maximum(self.price_M + raised_M, 0.0)
            if least - value <= GOOD_GAP * abs(least) and not (over_M > GOOD_GAP).any():
                break
        self.link = float(point[width])
        return best * (1 - SLACK)

    def _slope(self, load_K: Floats | None) -> Floats:
        return self.problem.phi.gradient(np.ones(self.problem.phi.width) if load_K is None else load_K)

    def _vertex(self, ok_O: NDArray[np.bool_], price_X: Floats) -> Floats:
        """Totals of the options that items take at these prices, one option each."""
        self.choice_I = argmin_options(self.problem, np.where(ok_O, self.rows_OX @ price_X, np.inf))
        return self.rows_OX[self.choice_I].sum(0)

    def _line_search(self, point: Floats, vertex: Floats) -> tuple[float, float]:
        """Step from point to vertex with the least priced cost, and that cost; three rounds of a grid of 17."""
        width, low, high = self.problem.phi.width, 0.0, 1.0
        for _ in range(3):
            step_S = np.linspace(low, high, 17)
            trial_SX = point + step_S[:, None] * (vertex - point)
            memory_S = (trial_SX[:, width + 1 :] - self.limits_M) @ self.price_M
            value_S = self.problem.phi(trial_SX[:, :width]) + trial_SX[:, width] + memory_S
            best = int(np.argmin(value_S))
            low, high = float(step_S[max(best - 1, 0)]), float(step_S[min(best + 1, 16)])
        return float(step_S[best]), float(value_S[best])
