"""Tasks to train on, drawn from pools of tables, and their costs by a cost model.

A pool is a plan request with many tables; a task is some of its tables on its ranks. In half of the tasks, some of the
tables that take most memory or time are cut into halves of their columns, as inference cuts them: half a table is the
pool's table with the same rows and ids, and half as many columns. All costs come from the loads that `make_problem`
computes for whole tables, so any cost model works. Not supported: constraints, more than one tier of memory; inference
respects both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Floats, Workload
from rowwise.planning.planner.methods.dreamshard import split_costs, table_features, whole_pieces
from rowwise.planning.planner.methods.neuroshard import CANDIDATES, DEPTH
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.problem import PlacementProblem, PlanRequest

Ints = NDArray[np.int64]
FILLS = (0.3, 0.95)  # shares of all memory that tables take, where memory is short
ROOMY = 0.3  # share of the tasks with more memory than any placement needs
LARGEST = 1.02  # least memory of a rank, in bytes of the task's largest table
CUT = 0.5  # share of the groups of tasks with tables that are cut
NO_HALF = -1


@dataclass(frozen=True, slots=True)
class Pool:
    """Tables on ranks, as arrays over tables."""

    problem: PlacementProblem
    world: int
    features_TF: Floats
    load_TK: Floats
    link_T: Floats
    bytes_T: Floats
    single_TC: Floats  # seconds forward, on links and backward of each table by itself
    half_T: Ints  # the table that half of the columns make, or NO_HALF

    @classmethod
    def of(cls, request: PlanRequest) -> "Pool":
        problem = make_problem(request)
        if any(len(group) > 1 for group in problem.members):
            raise SpecError("together: a pool to train on has tables that stay together: expected none")
        pieces = problem.pieces.take(whole_pieces(problem))
        return cls(
            problem=problem,
            world=problem.topology.world,
            features_TF=table_features(request),
            load_TK=pieces.load_NK,
            link_T=pieces.link_N,
            bytes_T=pieces.bytes_NM[:, 0],
            single_TC=split_costs(problem, pieces.load_NK, pieces.link_N),
            half_T=_find_halves(request.workloads),
        )


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks with equally many tables each, of one pool."""

    pool: Pool
    index_EI: Ints
    limit_E: Floats  # bytes of a rank

    @property
    def count(self) -> int:
        return len(self.index_EI)

    def of(self, order_EI: Ints) -> "Tasks":
        return Tasks(self.pool, np.take_along_axis(self.index_EI, order_EI, axis=1), self.limit_E)

    def repeated(self, times: int) -> "Tasks":
        return Tasks(self.pool, np.repeat(self.index_EI, times, axis=0), np.repeat(self.limit_E, times))


def _find_halves(workloads: Sequence[Workload]) -> Ints:
    def key(workload: Workload, dim: int) -> Workload:
        return structs.replace(workload, table=structs.replace(workload.table, name="any", dim=dim))

    known = {key(w, w.table.dim): index for index, w in enumerate(workloads)}
    halves = (key(w, w.table.dim // 2) if w.table.dim % 2 == 0 else None for w in workloads)
    return np.array([NO_HALF if half is None else known.get(half, NO_HALF) for half in halves])


def draw(pool: Pool, rng: np.random.Generator, count: int, tables: int) -> Tasks:
    """Tasks of different tables each, some of them cut; some short of memory."""
    most = min(tables, len(pool.link_T))
    cuts = int(rng.integers(1, min(DEPTH, most - 1), endpoint=True)) if most > 1 and rng.random() < CUT else 0
    index_EI = np.stack([rng.choice(len(pool.link_T), most - cuts, replace=False) for _ in range(count)])
    for _ in range(cuts):
        index_EI = _cut_some(pool, rng, index_EI)
    bytes_EI = pool.bytes_T[index_EI]
    fill_E = rng.uniform(*FILLS, count)
    limit_E = np.maximum(bytes_EI.sum(1) / pool.world / fill_E, bytes_EI.max(1) * LARGEST)
    return Tasks(pool, index_EI, np.where(rng.random(count) < ROOMY, bytes_EI.sum(1), limit_E))


def _cut_some(pool: Pool, rng: np.random.Generator, index_EI: Ints) -> Ints:
    """One table of each task cut into halves: one of those with most bytes, or most seconds.

    Where none has a half, a table of the pool joins the task instead.
    """
    key_T = pool.bytes_T if rng.random() < CUT else pool.single_TC.sum(1)
    key_EI = np.where(pool.half_T[index_EI] == NO_HALF, -1.0, key_T[index_EI])
    task_E, among = np.arange(len(index_EI)), min(CANDIDATES, index_EI.shape[1])
    place_E = np.argsort(-key_EI, axis=1)[task_E, rng.integers(among, size=len(index_EI))]
    half_E = pool.half_T[index_EI[task_E, place_E]]
    cut_EI, has_half_E = index_EI.copy(), half_E != NO_HALF
    cut_EI[task_E[has_half_E], place_E[has_half_E]] = half_E[has_half_E]
    added_E = np.where(has_half_E, half_E, rng.integers(len(pool.half_T), size=len(half_E)))
    return np.concatenate([cut_EI, added_E[:, None]], axis=1)


@dataclass(frozen=True, slots=True)
class CostedPlacements:
    """Placements, and their seconds by the cost model."""

    tasks: Tasks
    unit_EI: Ints
    cost_EUC: Floats
    overall_E: Floats  # without the constant


def judge(tasks: Tasks, unit_EI: Ints) -> CostedPlacements:
    pool = tasks.pool
    here_EUI = (unit_EI[:, None] == np.arange(pool.world)[:, None]).astype(float)
    load_EUK = here_EUI @ pool.load_TK[tasks.index_EI]
    link_EU = (here_EUI @ pool.link_T[tasks.index_EI][..., None])[..., 0]
    cost_EUC = split_costs(pool.problem, load_EUK, link_EU)
    overall_E = (cost_EUC[..., 0] + cost_EUC[..., 2]).max(1) + link_EU.max(1)
    return CostedPlacements(tasks, unit_EI, cost_EUC, overall_E)


def scatter(tasks: Tasks, rng: np.random.Generator) -> Ints:
    """A random rank for each table; some placements are more even than others."""
    weight_EU = rng.gamma(rng.uniform(0.5, 8.0, tasks.count)[:, None], size=(tasks.count, tasks.pool.world)) + 1e-9
    ends_EU = np.cumsum(weight_EU / weight_EU.sum(1, keepdims=True), axis=1)
    drawn_EI = rng.random(tasks.index_EI.shape)
    return np.minimum((drawn_EI[..., None] > ends_EU[:, None]).sum(-1), tasks.pool.world - 1)


def scatter_some(pools: Sequence[Pool], rng: np.random.Generator, count: int, most: int) -> CostedPlacements:
    """Placements at random of as many tasks, of few tables or of many."""
    few = rng.random() < 0.5
    tasks = draw(pools[int(rng.integers(len(pools)))], rng, count, int(rng.integers(1, 13 if few else most + 1)))
    return judge(tasks, scatter(tasks, rng))
