"""Re-plans for new statistics: changes the plan in force only where a change repays its migration.

The search starts from the plan in force at a low temperature. A byte that moves costs its seconds on a link, spread
over `steps`: the new plan has to repay its move within them. If more than the allowed share of bytes would
move, the search is repeated with a higher price of bytes. Where the gain is negligible, the plan in force is kept,
with its cost under the new statistics.

A new plan takes effect when a run resumes with it. Not supported: links with different prices (a byte costs the same
wherever it goes), and changes of the number of ranks.
"""

import time
from dataclasses import dataclass

from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import Plan
from rowwise.planning.planner.bound import threshold_bound
from rowwise.planning.planner.current_placement import CurrentPlacement, moved_bytes, placement_of_plan
from rowwise.planning.planner.infeasible import check_feasible
from rowwise.planning.planner.native import AnnealingEffort, Candidate, NativeProblem
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import SECONDS as MAKE_SECONDS
from rowwise.planning.planner.pipeline import PlanResult, forecast
from rowwise.planning.planner.problem import PlanRequest
from rowwise.planning.planner.search import TINY, SearchResult, search, time_limit_s

SECONDS = 0.05
STEPS = 5_000.0
MAX_MOVED = 0.15
MOVES_A_SECOND = 600_000
PASSES = 3
START_HEAT = 1e-4  # the plan in force is near a good one; more heat moves tables for nothing
PRICE_FACTOR = 4.0  # on the price of bytes, after a pass that moves too many
MIN_GAIN = 0.002  # of a step's seconds; below it, the plan in force is kept


@dataclass(frozen=True, slots=True)
class ReplanResult:
    """The new plan, and its migration."""

    planned: PlanResult
    moved_bytes: int  # that move to another rank
    moved_share: float  # of the bytes that the old plan stores
    old_cost: float  # seconds of a step if nothing moved; see `recut`
    new_cost: float
    old_fits: bool
    changed: bool  # whether any tile differs from the old plan
    recut: tuple[str, ...]  # tables that match no layout; for these `old_cost` is that of the nearest layout


def replan(
    request: PlanRequest,
    old: Plan,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    steps: float = STEPS,
    most_moved: float = MAX_MOVED,
) -> ReplanResult:
    """The plan in force, changed where that repays its migration within `steps`; the same for the same arguments.

    If the old plan fits, the new one costs at most as much and moves at most `most_moved` of the bytes. If not, the new
    one moves as few bytes as the search finds possible. Only the fast bound is computed.
    """
    _check_arguments(request, old, steps, most_moved)
    current = placement_of_plan(make_problem(request), old)
    ready_s = time.monotonic()
    local = _ReplanSearch(current, steps, most_moved)
    local.run(seconds, seed)
    problem, best = current.problem, local.best()
    bound = threshold_bound(problem)
    searched = SearchResult(
        best.placement, best.cost, best.over, bound, local.moves, time.monotonic() - ready_s, local.out_of_time
    )
    if searched.over:  # no plan near the old one fits
        searched = search(problem, seconds=max(seconds, MAKE_SECONDS), seed=seed)
        check_feasible(problem, searched)
    tables = [w.table for w in request.workloads]
    plan = structs.replace(
        _keep_approximate(problem.plan(searched.placement), old), forecast=forecast(problem, searched)
    )
    plan.validate(tables)
    moved = moved_bytes(old, plan, tables)
    return ReplanResult(
        planned=PlanResult(plan, problem, searched),
        moved_bytes=moved,
        moved_share=moved / max(current.stored_bytes, 1.0),
        old_cost=local.start.cost,
        new_cost=searched.cost,
        old_fits=not local.start.over,
        changed=set(plan.tiles) != set(old.tiles),
        recut=current.recut,
    )


class _ReplanSearch:
    """Passes of annealing from the plan in force, and their results."""

    def __init__(self, current: CurrentPlacement, steps: float, most_moved: float) -> None:
        hardware = current.problem.request.machine.hardware
        link = hardware.slowest_link(current.problem.topology)
        self._byte_s = link.seconds_a_byte("all_to_all")
        self._price = self._byte_s / steps
        self._max_bytes = most_moved * current.stored_bytes
        self._current = current
        self._native = NativeProblem(current.problem, current.homes)
        self.start = self._native.candidate(current.start)
        self._candidates = [self.start]
        self.moves, self.out_of_time = 0, False

    def run(self, seconds: float, seed: int) -> None:
        end_s = time.monotonic() + time_limit_s(seconds)
        price, start, hot = self._price, self.start, START_HEAT
        for number in range(PASSES):
            effort = AnnealingEffort(
                moves=max(1, int(seconds * MOVES_A_SECOND / PASSES)), seed=seed * PASSES + number, hot=hot,
                limit_s=max(0.0, end_s - time.monotonic()), bytes_price=price,
            )  # fmt: skip
            candidate = self._native.anneal(start.placement, effort)
            self._candidates.append(candidate)
            self.moves, self.out_of_time = self.moves + candidate.moves, self.out_of_time or candidate.out_of_time
            # A result that moves too much is no start for the next pass: bytes get dearer and the start stays.
            if self._moved(candidate) > self._max_bytes:
                # With many `steps` the price is near 0, and so is a multiple of it.
                price = max(PRICE_FACTOR * price, self._byte_s / STEPS)
            else:
                start, hot = candidate, hot / 2

    def best(self) -> Candidate:
        """The cheapest result, migration included, that fits and moves few enough bytes; else the least over memory."""
        fits = [candidate for candidate in self._candidates if candidate.over <= TINY]
        if not fits:
            return min(self._candidates, key=lambda candidate: candidate.over)
        # Keeping the plan is always allowed, though tables that have to be recut may count as moved.
        allowed = [
            candidate for candidate in fits if self._moved(candidate) <= self._max_bytes or candidate is self.start
        ]
        if not allowed:
            return min(fits, key=self._moved)
        best = min(allowed, key=self._value)
        gains = self._value(self.start) - self._value(best)
        keeps = any(candidate is self.start for candidate in allowed)
        return self.start if keeps and gains < MIN_GAIN * self.start.cost else best

    def _moved(self, candidate: Candidate) -> float:
        return self._current.moved_bytes(candidate.placement)

    def _value(self, candidate: Candidate) -> float:
        return candidate.cost + self._price * self._moved(candidate)


def _check_arguments(request: PlanRequest, old: Plan, steps: float, most_moved: float) -> None:
    world = request.machine.topology.world
    if old.world != world:
        raise SpecError(
            f"the plan in force is for {old.world} ranks, the machine has {world}",
            f"{old.world} ranks, or a new plan and a resume from a checkpoint",
        )
    if any(tile.pinned_rows for tile in old.tiles):
        raise SpecError("the plan in force pins rows", "a new plan by --method recshard, from new access statistics")
    if not steps > 0 or not 0 <= most_moved <= 1:
        raise SpecError(f"steps={steps}, most_moved={most_moved}", "more than 0 steps, and a share between 0 and 1")
    names = {tile.table for tile in old.tiles}
    known = [w.table for w in request.workloads if w.table.name in names]
    common = {table.name for table in known}
    # Tables may be added or removed, but those of both plans have to be the same.
    Plan(world=world, tiles=tuple(tile for tile in old.tiles if tile.table in common)).validate(known)


def _keep_approximate(plan: Plan, old: Plan) -> Plan:
    """Keeps `approximate` for tables whose columns are still cut."""
    kept = [name for name in old.approximate if len({tile.cols for tile in plan.tiles_of(name)}) > 1]
    return structs.replace(plan, approximate=tuple(kept))
