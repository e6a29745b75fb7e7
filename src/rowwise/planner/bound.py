"""What no plan can beat: lower bounds on the cost of a step, from the costs of pieces alone.

[Note: bounds] Let a plan cost F = z + m, with no rank's phi over z and no rank's link seconds over m. Then every piece
it uses costs at most z and m by itself and fits into a rank's memory; and as phi is convex and grows with every load,
phi(mean load of a rank) <= z, where the mean is at least that of the least work each item has among such options.
Which (z, m) meet these conditions is decided at once; the least z + m that does is a bound:

- `threshold_bound` takes the least of each load over an item's options, separately: fast, and tight where all layouts
  do the same work (whole tables and columns).
- `linear_bound` lets each item mix its options, but the same mixture for all loads, links and memory at once. Needed
  where layouts trade one for another (rows, copies, tiers).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rowwise.perf.access import Floats
from rowwise.planner.problem import Index, PlacementProblem, least_options

HALVINGS = 40
STEPS = 120  # towards the best mixture
MORE_STEPS = 500  # where memory has a price
PRICE = 0.5  # how fast memory gets dear
ENOUGH = 2e-4  # nearer than this share is no better
ROUNDS = 6  # of leaving options out
SLACK = 1e-7  # a bound gives this share away, for what solvers round


@dataclass(frozen=True, slots=True)
class Totals:
    """For each option: its largest piece, and its total work as a mean over ranks."""

    phi_O: Floats
    link_O: Floats
    fits_O: NDArray[np.bool_]
    load_OK: Floats
    links_O: Floats
    bytes_OM: Floats

    @classmethod
    def of(cls, problem: PlacementProblem) -> "Totals":
        begin, pieces, world = problem.option_begin[:-1], problem.pieces, problem.topology.world
        share_O = problem.ranks_of_O / world
        return cls(
            phi_O=np.maximum.reduceat(problem.phi(pieces.load_NK), begin),
            link_O=np.maximum.reduceat(pieces.link_N, begin),
            fits_O=np.logical_and.reduceat((pieces.bytes_NM <= problem.limit_M).all(1), begin),
            load_OK=np.add.reduceat(pieces.load_NK, begin, axis=0) * share_O[:, None],
            links_O=np.add.reduceat(pieces.link_N, begin) * share_O,
            bytes_OM=np.add.reduceat(pieces.bytes_NM, begin, axis=0) * share_O[:, None],
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """A cost that no plan beats: the largest rank's operators and links, seconds; infinite if nothing can fit."""

    cost: float
    phi: float
    link: float
    kind: str
    choice_I: Index | None = None  # the options that a bound's mixture has most of


def threshold_bound(problem: PlacementProblem) -> Bound:
    """The least z + m that could be met. See [Note: bounds]."""
    totals = Totals.of(problem)
    begin = problem.item_begin[:-1]
    least_link = _rounded_up(_least(totals, begin, totals.fits_O)[1], problem.pieces.link_N)
    if not np.isfinite(least_link):
        return Bound(np.inf, np.inf, np.inf, "threshold")
    candidates = np.unique(np.concatenate([[least_link], totals.link_O[totals.link_O > least_link]]))
    best = Bound(np.inf, np.inf, np.inf, "threshold")
    low_z = _phi_needed(problem, totals, begin, np.inf)  # with links of no account
    for group in _coarse(candidates, least_link):
        # With m from the group's first to where the next begins, pieces up to its last are allowed, and at least its
        # first is paid, or the mean of what these pieces need.
        if group[0] + low_z >= best.cost:
            break
        z = _phi_needed(problem, totals, begin, group[-1])
        m = _rounded_up(_least(totals, begin, totals.fits_O & (totals.link_O <= group[-1]))[1], problem.pieces.link_N)
        if z + max(m, float(group[0])) < best.cost:
            m = float(max(m, group[0]))
            best = Bound(z + m, z, m, "threshold")
    return best


def _rounded_up(mean: float, link_N: Floats) -> float:
    """The least that the busiest rank can have, if all pieces are multiples of one number (as whole columns are)."""
    some = link_N[link_N > 0]
    if not len(some) or not np.isfinite(mean):
        return mean
    times = some / some.min()
    if np.abs(times - np.round(times)).max() > 1e-6:
        return mean
    return float(np.ceil(mean / some.min() * (1 - 1e-9)) * some.min())


def _coarse(candidates: Floats, least: float) -> list[Floats]:
    """Candidates for m in runs: each is about a thousandth of the least that any plan pays."""
    width = max(least, 1e-12) * 1e-3
    number = np.floor((candidates - candidates[0]) / width)
    return np.split(candidates, np.flatnonzero(np.diff(number)) + 1)


def _least(totals: Totals, begin: NDArray[np.int32], ok_O: NDArray[np.bool_]) -> tuple[Floats, float, Floats]:
    """Mean load, link seconds and bytes of a rank if each item had the least of each."""
    load = np.minimum.reduceat(np.where(ok_O[:, None], totals.load_OK, np.inf), begin, axis=0).sum(0)
    link = float(np.minimum.reduceat(np.where(ok_O, totals.links_O, np.inf), begin).sum())
    size = np.minimum.reduceat(np.where(ok_O[:, None], totals.bytes_OM, np.inf), begin, axis=0).sum(0)
    return load, link, size


def _phi_needed(problem: PlacementProblem, totals: Totals, begin: NDArray[np.int32], m: float) -> float:
    """The least z that could be met with link seconds of at most m."""
    ok_O = totals.fits_O & (totals.link_O <= m)

    def possible(z: float) -> bool:
        load, _, size = _least(totals, begin, ok_O & (totals.phi_O <= z))
        if not np.isfinite(load).all() or (size > problem.limit_M).any():
            return False
        return bool(problem.phi(load) <= z)

    # Above all single pieces more z only makes the mean easier to meet, until it is met.
    load = _least(totals, begin, ok_O)[0]
    if not np.isfinite(load).all():
        return np.inf
    high = max(float(totals.phi_O[ok_O].max()), float(problem.phi(load)))
    if not possible(high):
        return np.inf
    low = float(problem.phi(load))
    if possible(low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low


def linear_bound(problem: PlacementProblem, floor: Bound) -> Bound:
    """As `threshold_bound`, with one mixture of options for each item; never below `floor`. See [Note: mixtures]."""
    totals = Totals.of(problem)
    alone_O = totals.phi_O + totals.link_O  # a plan that uses it costs at least so much
    mixture = _Mixture(problem, totals)
    low, cost = floor.cost, np.inf
    # Options with a piece that alone costs more than F are in no plan of cost F: without them the least may be more.
    for _ in range(ROUNDS):
        value = mixture.bound(totals.fits_O & (alone_O <= cost))
        above_O = alone_O[alone_O > cost * (1 + SLACK)]
        ceiling = float(above_O.min()) if len(above_O) else np.inf
        if min(value, ceiling) <= low * (1 + ENOUGH):
            break
        low = cost = min(value, ceiling)
        if not np.isfinite(low):
            return Bound(np.inf, np.inf, np.inf, "linear")
    if low <= floor.cost:
        return replace(floor, choice_I=mixture.choice_I)
    return Bound(low, max(low - mixture.link, 0.0), mixture.link, "linear", mixture.choice_I)


class _Mixture:
    """[Note: mixtures] min over mixtures y of phi(load of y) + links of y, where memory of y is within its limits.

    All are means over ranks and linear in y. At any point with load P, and for any prices of memory, items choose by
    themselves what is least at the slopes of phi in P: that sum, with what the tangent and the limits are worth, is a
    lower bound. The point moves towards what they chose, as far as it gets better (Frank and Wolfe); prices rise for
    tiers that overflow. The best bound on the way counts, however near the last point is to the optimum.
    """

    def __init__(self, problem: PlacementProblem, totals: Totals) -> None:
        self.problem, self.totals = problem, totals
        self.scale_M = np.maximum(problem.limit_M, 1.0)
        shares_OM = totals.bytes_OM / self.scale_M
        self.rows_OX = np.concatenate([totals.load_OK, totals.links_O[:, None], shares_OM], axis=1)
        self.limits_M = problem.limit_M / self.scale_M  # 1, or 0 where there is no such tier
        self.link = 0.0
        self.choice_I: Index = problem.item_begin[:-1]
        self.price_M = np.zeros(len(self.scale_M))

    def bound(self, ok_O: NDArray[np.bool_]) -> float:
        """The best bound that is met; infinite if an item has no option."""
        if not np.logical_or.reduceat(ok_O, self.problem.item_begin[:-1]).all():
            return np.inf
        width, best = self.problem.phi.width, -np.inf
        point = self._vertex(ok_O, np.concatenate([self._slope(None), [1.0], self.price_M]))
        for number in range(MORE_STEPS):
            if number >= STEPS and not self.price_M.any():
                break
            slope_K = self._slope(point[:width])
            vertex = self._vertex(ok_O, np.concatenate([slope_K, [1.0], self.price_M]))
            tangent = float(self.problem.phi(point[:width]) + slope_K @ (vertex[:width] - point[:width]))
            value = tangent + float(vertex[width] + self.price_M @ (vertex[width + 1 :] - self.limits_M))
            best = max(best, value)
            step, least = self._towards(point, vertex)
            point = point + step * (vertex - point)
            over_M = point[width + 1 :] - self.limits_M
            raised_M = abs(least) * PRICE / (number + 2) ** 0.5 * np.clip(over_M, -1, 1)
            self.price_M = np.maximum(self.price_M + raised_M, 0.0)
            if least - value <= ENOUGH * abs(least) and not (over_M > ENOUGH).any():
                break
        self.link = float(point[width])
        return best * (1 - SLACK)

    def _slope(self, load_K: Floats | None) -> Floats:
        return self.problem.phi.gradient(np.ones(self.problem.phi.width) if load_K is None else load_K)

    def _vertex(self, ok_O: NDArray[np.bool_], price_X: Floats) -> Floats:
        """What all items together choose at some prices, one option each."""
        self.choice_I = least_options(self.problem, np.where(ok_O, self.rows_OX @ price_X, np.inf))
        return self.rows_OX[self.choice_I].sum(0)

    def _towards(self, point: Floats, vertex: Floats) -> tuple[float, float]:
        """How far to go for the least, and what is least there."""
        width, low, high = self.problem.phi.width, 0.0, 1.0
        for _ in range(3):
            step_S = np.linspace(low, high, 17)
            there_SX = point + step_S[:, None] * (vertex - point)
            memory_S = (there_SX[:, width + 1 :] - self.limits_M) @ self.price_M
            value_S = self.problem.phi(there_SX[:, :width]) + there_SX[:, width] + memory_S
            best = int(np.argmin(value_S))
            low, high = float(step_S[max(best - 1, 0)]), float(step_S[min(best + 1, 16)])
        return float(step_S[best]), float(value_S[best])
