"""RecShard: the hottest rows of each table in device memory, its other rows in a lower tier, whole tables on ranks.

As published, a mixed-integer program cuts each table at a point of its curve of cumulated lookups and assigns tables
to devices, so that the slowest device takes the least time. Here the cuts follow from marginal gains, which is exact
but for the last step: each table starts with the fewest rows on the device, and the step along the convex curves of
all tables that saves the most seconds a byte is taken until memory is full. That is done for all ranks together; then
tables go, the slowest first, to the rank with the least seconds that has memory; then it is done again for each rank,
and exchanges of tables with the slowest rank balance them. Seconds are those of a table alone.

A lower tier needs `PlanRequest.tiers` with it; without one, tables are placed whole. On disks the hot rows are pinned
(`pin_hottest`). Not here: rows that no lookup reads still have an index, and on a device they have memory.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rowwise.parallel.plan import Plan, Tile
from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.planner.native import MethodResult
from rowwise.planning.planner.problem import NO_UNIT, PlacementProblem, PlanRequest
from rowwise.tables.store.policy import WAYS

RECSHARD = "recshard"
CUTS = (0.0, *np.geomspace(1e-5, 1.0, 51)[:-1].tolist())  # candidate shares of rows on the device
MAX_EXCHANGES = 100  # that balance ranks
TRIES = 24  # exchanges that are tried before ranks count as balanced
MIN_GAIN = 1e-4  # of the seconds of the slowest rank, for an exchange


class SplitCurve(NamedTuple):
    """The cuts of a table that are worth their device bytes, the fewest bytes first: each saves seconds."""

    pieces_P: NDArray[np.int64]
    bytes_P: Floats  # on the device
    seconds_P: Floats
    steps: tuple[tuple[float, int, int], ...]  # along the convex hull: minus seconds a byte, point before and after

    @classmethod
    def of(cls, pieces_P: NDArray[np.int64], bytes_P: Floats, seconds_P: Floats) -> "SplitCurve":
        order_P = np.lexsort((seconds_P, bytes_P))
        before_P = np.concatenate([[np.inf], np.minimum.accumulate(seconds_P[order_P])[:-1]])
        order_P = order_P[seconds_P[order_P] < before_P]
        sizes, seconds = bytes_P[order_P], seconds_P[order_P]
        steps, point = list[tuple[float, int, int]](), 0
        while point + 1 < len(sizes):
            slope_P = (seconds[point + 1 :] - seconds[point]) / (sizes[point + 1 :] - sizes[point])
            after = point + 1 + int(slope_P.argmin())
            steps.append((float(slope_P[after - point - 1]), point, after))
            point = after
        return cls(pieces_P[order_P], sizes, seconds, tuple(steps))


def split_by_frequency(problem: PlacementProblem, seed: int) -> MethodResult:
    curves, world = _split_curves(problem), problem.topology.world
    limit = float(problem.limit_M[0])
    points = None if curves is None else fill_memory(curves, range(len(curves)), limit * world)
    if curves is None or points is None:
        return MethodResult.of(problem, None)
    size_I = np.array([curve.bytes_P[point] for curve, point in zip(curves, points.values(), strict=True)])
    seconds_I = np.array([curve.seconds_P[point] for curve, point in zip(curves, points.values(), strict=True)])
    # The slowest first balances ranks; the largest first packs tight memory.
    orders = (np.argsort(-key_I, kind="stable").tolist() for key_I in (seconds_I, size_I))
    assigned = [ranks for order in orders if (ranks := _assign(problem, curves, points, order))]
    if not assigned:
        return MethodResult.of(problem, None)
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    for rank in min(assigned, key=lambda ranks: max(rank.seconds for rank in ranks)):
        for item, point in rank.points.items():
            unit_N[curves[item].pieces_P[point]] = rank.number
    return MethodResult.of(problem, unit_N)


def fill_memory(curves: Sequence[SplitCurve], items: Iterable[int], limit: float) -> dict[int, int] | None:
    """The point of each item's curve, by marginal gain; None if the fewest bytes exceed the limit."""
    points = dict.fromkeys(items, 0)
    left = limit - sum(float(curves[item].bytes_P[0]) for item in points)
    if left < 0:
        return None
    steps = ((slope, item, before, after) for item in points for slope, before, after in curves[item].steps)
    for _, item, before, after in sorted(steps):
        size = float(curves[item].bytes_P[after] - curves[item].bytes_P[before])
        if points[item] == before and size <= left:
            points[item], left = after, left - size
    # The last step of each curve may be too large: a point between its ends fits.
    for item in sorted(points, key=lambda item: -curves[item].seconds_P[points[item]]):
        curve, point = curves[item], points[item]
        widest = int(np.searchsorted(curve.bytes_P, curve.bytes_P[point] + left, side="right")) - 1
        points[item], left = widest, left - float(curve.bytes_P[widest] - curve.bytes_P[point])
    return points


def pin_hottest(plan: Plan, request: PlanRequest) -> Plan:
    """The plan with pinned rows on disks: those that a cache holds beside all distinct rows of a step."""
    distinct_T = Curves.of(request.workloads, request.batch).unique_T
    distinct = {w.table.name: math.ceil(rows) for w, rows in zip(request.workloads, distinct_T, strict=True)}

    def pin(tile: Tile) -> Tile:
        pinned = tile.cache_rows - max(distinct[tile.table], WAYS)
        return structs.replace(tile, pinned_rows=pinned) if tile.tier == "disk" and pinned > 0 else tile

    return structs.replace(plan, tiles=tuple(map(pin, plan.tiles)))


def _split_curves(problem: PlacementProblem) -> list[SplitCurve] | None:
    """The curve of each item; None if an item has no option that fits an empty rank."""
    whole = np.array([kind.layout.is_whole for kind in problem.kinds])[problem.option_kind]
    load_s = problem.phi(problem.pieces.load_NK) - problem.phi.constant + problem.pieces.link_N
    curves: list[SplitCurve] = []
    for item in range(len(problem.members)):
        options = [option for option in problem.options_of(item) if whole[option]]
        pieces = problem.option_begin[options].astype(np.int64)
        pieces = pieces[(problem.pieces.bytes_NM[pieces] <= problem.limit_M).all(1)]
        if not len(pieces):
            return None
        curves.append(SplitCurve.of(pieces, problem.pieces.bytes_NM[pieces, 0], load_s[pieces]))
    return curves


def _assign(
    problem: PlacementProblem, curves: Sequence[SplitCurve], points: dict[int, int], order: Sequence[int]
) -> "list[RankTables] | None":
    """The ranks with tables placed in this order, then balanced; None if one fits nowhere."""
    ranks = [RankTables(problem, curves, number) for number in range(problem.topology.world)]
    for item in order:
        allowed_U = problem.allowed_units(item)
        for point in range(points[item], -1, -1):
            fits = [rank for rank in ranks if allowed_U[rank.number] and rank.has_room(item, point)]
            if fits:
                rank = min(fits, key=lambda rank: rank.seconds)
                ranks[rank.number] = rank.with_points({**rank.points, item: point})
                break
        else:
            return None
    return _balance([rank.refilled(rank.points) or rank for rank in ranks])


def _balance(ranks: list["RankTables"]) -> list["RankTables"]:
    """Moves tables from the slowest rank to the fastest, or swaps them, while that shortens the step."""
    for _ in range(MAX_EXCHANGES):
        slowest, fastest = (choose(ranks, key=lambda rank: rank.seconds) for choose in (max, min))
        if slowest is fastest:
            return ranks
        half = (slowest.seconds - fastest.seconds) / 2
        partners = [(-1, 0.0), *((partner, fastest.seconds_of(partner)) for partner in fastest.points)]
        exchanges = (
            (abs(slowest.seconds_of(item) - partner_s - half), item, partner)
            for item in slowest.points
            for partner, partner_s in partners
        )
        for _, item, partner in heapq.nsmallest(TRIES, exchanges):
            less = slowest.refilled([i for i in (*slowest.points, partner) if i not in (item, -1)])
            more = fastest.refilled([i for i in (*fastest.points, item) if i != partner])
            if less and more and max(less.seconds, more.seconds) < slowest.seconds * (1 - MIN_GAIN):
                ranks[slowest.number], ranks[fastest.number] = less, more
                break
        else:
            return ranks
    return ranks


@final
@dataclass(frozen=True, slots=True)
class RankTables:
    """The tables of a rank, each with the point of its curve."""

    problem: PlacementProblem
    curves: Sequence[SplitCurve]
    number: int
    points: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    bytes_M: Floats | float = 0.0

    def with_points(self, points: Mapping[int, int]) -> "RankTables":
        seconds = sum(float(self.curves[item].seconds_P[point]) for item, point in points.items())
        pieces = [self.curves[item].pieces_P[point] for item, point in points.items()]
        return replace(self, points=points, seconds=seconds, bytes_M=self.problem.pieces.bytes_NM[pieces].sum(0))

    def has_room(self, item: int, point: int) -> bool:
        size_M = self.problem.pieces.bytes_NM[self.curves[item].pieces_P[point]]
        return bool((self.bytes_M + size_M <= self.problem.limit_M).all())

    def refilled(self, items: Iterable[int]) -> "RankTables | None":
        """The rank with these tables, cut by marginal gain; None if they may not be on it, or do not fit."""
        items = list(items)
        if not all(self.problem.allowed_units(item)[self.number] for item in items):
            return None
        points = fill_memory(self.curves, items, float(self.problem.limit_M[0]))
        filled = None if points is None else self.with_points(points)
        return filled if filled is not None and (filled.bytes_M <= self.problem.limit_M).all() else None

    def seconds_of(self, item: int) -> float:
        return float(self.curves[item].seconds_P[self.points[item]])
