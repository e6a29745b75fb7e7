"""A plan for new statistics that is near the one in force: what changes has to be worth what it takes to move it.

[Note: re-planning] The search starts from the plan in force and is hardly heated. A byte that moves costs as much as
it takes on a link, spread over `steps`: the new plan has to pay for its move within so many steps. What would move
more than the share that is allowed is tried again with dearer bytes. A plan that gains next to nothing is not worth
the disturbance: then the one in force is kept, with what it costs now.

A new plan takes effect when a run resumes with it. Known limits: links that are free while others are not (a byte
costs the same wherever it goes), and any change of the number of ranks.
"""

import time
from dataclasses import dataclass

from msgspec import structs

from rowwise.errors import SpecError
from rowwise.plan import Plan
from rowwise.planner.bound import threshold_bound
from rowwise.planner.current_placement import CurrentPlacement, current_placement, moved_bytes
from rowwise.planner.make import SECONDS as MAKE_SECONDS
from rowwise.planner.make import PlanResult, forecast
from rowwise.planner.native import AnnealingEffort, Candidate, NativeProblem
from rowwise.planner.options import make_problem
from rowwise.planner.problem import PlacementProblem, PlanRequest
from rowwise.planner.search import LATE, NONE, LEAST_s, SearchResult, search

SECONDS = 0.05
STEPS = 5_000.0
MOST_MOVED = 0.15
MOVES_A_SECOND = 600_000
PASSES = 3
HOT = 1e-4  # a plan in force is near a good one, and heat moves tables for nothing
DEARER = 4.0
WORTH = 0.002  # of a step: gaining less changes nothing


@dataclass(frozen=True, slots=True)
class ReplanResult:
    """A new plan, and what it takes to get there."""

    planned: PlanResult
    moved_bytes: int  # that go to another rank
    moved_share: float  # of the bytes that the old plan stores
    old_cost: float  # seconds of a step if nothing moved; see `recut`
    new_cost: float
    old_fits: bool
    changed: bool  # whether any tile is elsewhere than in the old plan
    recut: tuple[str, ...]  # tables cut in no way that we know: `old_cost` is for the nearest cut that we do know


def replan(
    question: PlanRequest,
    old: Plan,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    steps: float = STEPS,
    most_moved: float = MOST_MOVED,
) -> ReplanResult:
    """The plan in force, changed where that pays for itself within `steps`; the same for the same arguments.

    It costs at most what keeping the old plan would, and moves at most a share `most_moved` of the bytes, both as far
    as the old plan fits; where it does not, it moves as little as was found. The bound is the fast one.
    """
    _check(question, old, steps, most_moved)
    standing = current_placement(make_problem(question), old)
    ready_s = time.monotonic()
    walk = _Walk(standing, steps, most_moved)
    walk.go(seconds, seed)
    problem, found = standing.problem, walk.best()
    bound = threshold_bound(problem)
    searched = SearchResult(
        found.placement, found.cost, found.over, bound, walk.moves, time.monotonic() - ready_s, walk.out_of_time
    )
    if searched.over:
        searched = _from_nothing(problem, seconds, seed)
    tables = [w.table for w in question.workloads]
    plan = structs.replace(_as_before(problem.plan(searched.placement), old), forecast=forecast(problem, searched))
    plan.validate(tables)
    moved = moved_bytes(old, plan, tables)
    return ReplanResult(
        planned=PlanResult(plan, problem, searched),
        moved_bytes=moved,
        moved_share=moved / max(standing.stored_bytes, 1.0),
        old_cost=walk.start.cost,
        new_cost=searched.cost,
        old_fits=not walk.start.over,
        changed=set(plan.tiles) != set(old.tiles),
        recut=standing.recut,
    )


class _Walk:
    """Passes of annealing from the plan in force, and what they found."""

    def __init__(self, standing: CurrentPlacement, steps: float, most_moved: float) -> None:
        hardware = standing.problem.question.machine.hardware
        link = hardware.network if standing.problem.topology.hosts > 1 else hardware.host
        self._byte_s = link.seconds_a_byte("all_to_all")
        self._price = self._byte_s / steps
        self._most_bytes = most_moved * standing.stored_bytes
        self._standing = standing
        self._native = NativeProblem(standing.problem, standing.homes)
        cost, over = self._native.cost(standing.start.unit_N)
        self.start = Candidate(standing.start, cost, over, 0, False)
        self._found = [self.start]
        self.moves, self.out_of_time = 0, False

    def go(self, seconds: float, seed: int) -> None:
        """Search for about so long."""
        end_s = time.monotonic() + max(LATE * seconds, LEAST_s)
        price, start, hot = self._price, self.start, HOT
        for number in range(PASSES):
            effort = AnnealingEffort(
                moves=max(1, int(seconds * MOVES_A_SECOND / PASSES)), seed=seed * PASSES + number, hot=hot,
                limit_s=max(0.0, end_s - time.monotonic()), bytes_price=price,
            )  # fmt: skip
            found = self._native.anneal(start.placement, effort)
            self._found.append(found)
            self.moves, self.out_of_time = self.moves + found.moves, self.out_of_time or found.out_of_time
            if self._moved(found) > self._most_bytes:
                price = max(DEARER * price, self._byte_s / STEPS)
            else:
                start, hot = found, hot / 2

    def best(self) -> Candidate:
        """The cheapest with its move, of those that move few enough bytes; if none fits, the least over."""
        fits = [found for found in self._found if found.over <= NONE]
        if not fits:
            return min(self._found, key=lambda found: found.over)
        few = [found for found in fits if self._moved(found) <= self._most_bytes or found is self.start]
        if not few:
            return min(fits, key=self._moved)
        best = min(few, key=self._value)
        gains = self._value(self.start) - self._value(best)
        return self.start if self.start in few and gains < WORTH * self.start.cost else best

    def _moved(self, found: Candidate) -> float:
        return self._standing.moved_bytes(found.placement)

    def _value(self, found: Candidate) -> float:
        return found.cost + self._price * self._moved(found)


def _check(question: PlanRequest, old: Plan, steps: float, most_moved: float) -> None:
    world = question.machine.topology.world
    if old.world != world:
        want = f"want {old.world} of them, or a new plan that resumes from a checkpoint"
        raise SpecError(f"the plan in force is for {old.world} ranks, the question for {world}: {want}")
    if not steps > 0 or not 0 <= most_moved <= 1:
        want = "want more than 0 steps, and a share between 0 and 1"
        raise SpecError(f"steps={steps}, most_moved={most_moved}: {want}")
    names = {tile.table for tile in old.tiles}
    known = [w.table for w in question.workloads if w.table.name in names]
    mine = {table.name for table in known}
    # Tables may come and go, but those in both have to be the same ones.
    Plan(world=world, tiles=tuple(tile for tile in old.tiles if tile.table in mine)).validate(known)


def _from_nothing(problem: PlacementProblem, seconds: float, seed: int) -> SearchResult:
    """Where no plan near the old one fits."""
    searched = search(problem, seconds=max(seconds, MAKE_SECONDS), seed=seed)
    if searched.over:
        from rowwise.planner.infeasible import explain_infeasible

        raise explain_infeasible(problem, searched)
    return searched


def _as_before(plan: Plan, old: Plan) -> Plan:
    """Approximate tables stay so, as long as their columns are cut."""
    kept = [name for name in old.approximate if len({tile.cols for tile in plan.tiles_of(name)}) > 1]
    return structs.replace(plan, approximate=tuple(kept))
