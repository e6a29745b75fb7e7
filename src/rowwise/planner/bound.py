"""What no plan can beat: lower bounds on the cost of a step, from the costs of pieces alone.

[Note: bounds] Let a plan cost F = z + m, with no rank's phi over z and no rank's link seconds over m. Then every piece
it uses costs at most z and m by itself and fits into a rank's memory; and as phi is convex and grows with every load,
phi(mean load of a rank) <= z, where the mean is at least that of the least work each item has among such options.
Which (z, m) meet these conditions is decided at once; the least z + m that does is a bound:

- `threshold_bound` takes the least of each load over an item's options, separately: fast, and tight where all layouts
  do the same work (whole tables and columns).
- `linear_bound` lets each item mix its options, but the same mixture for all loads, links and memory at once: a linear
  program with cuts under phi. Needed where layouts trade one for another (rows, copies, tiers).

Its own file because a bound must hold whatever the search does, and is tested against every plan that is ever found.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rowwise.perf.access import Floats
from rowwise.planner.problem import Index, Problem

HALVINGS = 40
CUTS = 24  # rounds of cuts under phi
ROUNDS = 6  # of leaving options out
SLACK = 1e-7  # a bound gives this share away, for what solvers round


@dataclass(frozen=True, slots=True)
class Totals:
    """Of each option: the largest of its pieces, and all its work together, as a mean over ranks."""

    phi_O: Floats
    link_O: Floats
    fits_O: NDArray[np.bool_]
    load_OK: Floats
    links_O: Floats
    bytes_OM: Floats

    @classmethod
    def of(cls, problem: Problem) -> "Totals":
        """Of a problem's options."""
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


def threshold_bound(problem: Problem) -> Bound:
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


def _phi_needed(problem: Problem, totals: Totals, begin: NDArray[np.int32], m: float) -> float:
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


def linear_bound(problem: Problem, floor: Bound) -> Bound:
    """As `threshold_bound`, with one mixture of options for each item; never below `floor`."""
    program = _Program(problem, Totals.of(problem))
    low, cost = floor.cost, np.inf
    # Options with a piece that alone costs more than F are in no plan of cost F: without them the least may be more.
    for _ in range(ROUNDS):
        value = program.least(cost)
        if value is None:
            if not np.isfinite(cost):
                return Bound(np.inf, np.inf, np.inf, "linear")
            low = cost = program.ceiling(low)
            continue
        if value <= low * (1 + 1e-5):
            break
        low = cost = min(value, program.ceiling(max(low, floor.cost))) if np.isfinite(cost) else value
    if low <= floor.cost:
        return replace(floor, choice_I=program.choice())
    return Bound(low, max(low - program.link, 0.0), program.link, "linear", program.choice())


class _Program:
    """min z + m over mixtures y: each item's options sum to 1; z above cuts of phi, m above link seconds."""

    def __init__(self, problem: Problem, totals: Totals) -> None:
        from scipy.sparse import csr_array

        self.problem, self.totals = problem, totals
        options = len(totals.phi_O)
        items = problem.item_of_O
        ones = np.ones(options)
        self.one_of_each = csr_array((ones, (items, np.arange(options))), shape=(len(problem.members), options + 2))
        self.points: list[Floats] = []
        self.link, self.y_O = 0.0, np.zeros(options)
        self.alone_O = totals.phi_O + totals.link_O  # a plan that uses it costs at least so much

    def choice(self) -> Index:
        """Of each item: the option that it has most of."""
        begin = self.problem.item_begin
        most = [int(a + np.argmax(self.y_O[a:b])) for a, b in pairwise(begin.tolist())]
        return np.array(most, dtype=np.int32)

    def ceiling(self, cost: float) -> float:
        """The next cost at which another option becomes possible."""
        above = self.alone_O[self.alone_O > cost * (1 + 1e-9)]
        return float(above.min()) if len(above) else np.inf

    def least(self, cost: float) -> float | None:
        """The least z + m without options that alone cost more; none if items have none left."""
        ok_O = self.totals.fits_O & (self.alone_O <= cost)
        if not np.logical_or.reduceat(ok_O, self.problem.item_begin[:-1]).all():
            return None
        value = None
        if not self.points:
            begin = self.problem.item_begin[:-1]
            self.points.append(_least(self.totals, begin, self.totals.fits_O)[0])
        for _ in range(CUTS):
            solved = self._solve(ok_O)
            if solved is None:
                return None
            value, y_O, z = solved
            load = y_O @ self.totals.load_OK
            if float(self.problem.phi(load)) <= z * (1 + 1e-4):
                break
            self.points.append(load)
        return value * (1 - SLACK) if value is not None else None

    def _solve(self, ok_O: NDArray[np.bool_]) -> tuple[float, Floats, float] | None:
        from scipy.optimize import linprog

        problem, totals = self.problem, self.totals
        point_PK = np.array(self.points)
        slope_PK = problem.phi.gradient(point_PK)
        height_P = problem.phi(point_PK) - (slope_PK * point_PK).sum(1)
        cuts = np.concatenate([slope_PK @ totals.load_OK.T, np.tile([-1.0, 0.0], (len(point_PK), 1))], axis=1)
        links = np.concatenate([totals.links_O, [0.0, -1.0]])
        scale_M = np.maximum(problem.limit_M, 1.0)
        memory = np.concatenate([(totals.bytes_OM / scale_M).T, np.zeros((len(scale_M), 2))], axis=1)
        unit = max(float(problem.phi(point_PK[0])), 1e-12)  # seconds are small numbers for a solver
        above = np.vstack([cuts, links[None]]) / unit
        above[:, -2:] *= unit
        result = linprog(
            c=np.concatenate([np.zeros(len(ok_O)), [1.0, 1.0]]),
            A_ub=np.vstack([above, memory]),
            b_ub=np.concatenate([-height_P / unit, [0.0], problem.limit_M / scale_M]),
            A_eq=self.one_of_each,
            b_eq=np.ones(len(problem.members)),
            bounds=np.stack([np.zeros(len(ok_O) + 2), np.concatenate([ok_O.astype(float), [np.inf, np.inf]])], axis=1),
            method="highs",
        )
        if result.status != 0:
            return None
        self.link, self.y_O = float(result.x[-1]) * unit, result.x[:-2]
        return float(result.fun) * unit, self.y_O, float(result.x[-2]) * unit
