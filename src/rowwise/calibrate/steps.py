"""Measures steps of tables on this machine's ranks by given plans: the truth that forecasts are compared with.

Lookup, exchange, backward and update with the runtime of training, ids drawn by access statistics, other memory read
between steps. The same processes measure all plans in turns (A B C A B C), and a step takes as long as its slowest
rank. Not measured: dense layers. All plans have to fit into this machine's memory together.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.calibrate.ids import draw_batch
from rowwise.calibrate.kernels import flush_bytes, low_quantile
from rowwise.comm.interface import Comm
from rowwise.comm.spawn import run_processes
from rowwise.errors import SpecError
from rowwise.perf.access import Workload
from rowwise.perf.host_memory import free_bytes
from rowwise.perf.memory import FLOAT_bytes
from rowwise.plan import Plan
from rowwise.shard.embeddings import ShardedEmbeddings
from rowwise.shard.rehearse import held_bytes
from rowwise.spec import FLOATS, Topology, Wire

BATCHES = 3
SEED = 7
GRADIENT = 1e-3
LIMIT_s = 600.0
SPARE = 0.7  # share of free memory that plans may take


GradientCache = dict[torch.Size, Tensor]  # gradients by shape


class StepTimes(NamedTuple):
    """Seconds of a step: of the slowest rank, and by stage of each rank."""

    seconds: float  # low quantile over rounds
    rounds_s: tuple[float, ...]  # slowest rank of each round
    stages_s: dict[str, tuple[float, ...]]

    @property
    def noise(self) -> float:
        """Relative spread of the faster half of the rounds."""
        half = np.sort(np.array(self.rounds_s))[: max(2, len(self.rounds_s) // 2)]
        return float((half[-1] - half[0]) / half[0])


class StepMeasurement(NamedTuple):
    """Plans to measure, and how."""

    workloads: tuple[Workload, ...]
    plans: tuple[Plan, ...]
    batch: int  # samples of a step, of all ranks
    rounds: int = 15
    wire: Wire = FLOATS


def measure_plans(order: StepMeasurement, *, shared_memory: bool = True) -> list[StepTimes]:
    """Steps by each plan on processes of this machine, one thread each."""
    _check_plans(order, spare_bytes())
    world = order.plans[0].world
    topology = Topology(devices=world)
    of_ranks = run_processes(
        topology, measure_steps_on_rank, order, shared_memory=shared_memory, threads=1, limit_s=LIMIT_s
    )
    return [_merge_ranks([of_rank[index] for of_rank in of_ranks]) for index in range(len(order.plans))]


def _check_plans(order: StepMeasurement, spare: int) -> None:
    tables = {w.table.name: w.table for w in order.workloads}
    need = 0
    for plan in order.plans:
        plan.validate(list(tables.values()))
        if plan.world != order.plans[0].world:
            raise SpecError(f"plans for {plan.world} and {order.plans[0].world} ranks: want plans for the same ranks")
        need += sum(held_bytes(list(tables.values()), plan, rank).total() for rank in range(plan.world))
    if need > spare * SPARE:
        got = f"{len(order.plans)} plans of {len(tables)} tables take {need / 1e9:.1f} GB of rows and optimizer state"
        want = f"want at most {SPARE:.0%} of the {spare / 1e9:.1f} GB that this machine has left: fewer plans or rows"
        raise SpecError(f"{got}: {want}")


def spare_bytes() -> int:
    """Free memory of the machine; half of all memory if the system does not say."""
    free = free_bytes()
    return free if free is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def measure_steps_on_rank(comm: Comm, order: StepMeasurement) -> list[tuple[list[float], dict[str, float]]]:
    """For each plan: seconds of each round on this rank, and by stage. Called by all ranks."""
    rng = np.random.default_rng((SEED, comm.rank))
    local = order.batch // len(comm.ranks)
    batches = [draw_batch(order.workloads, local, rng) for _ in range(BATCHES)]
    other = torch.ones(flush_bytes(torch.device("cpu")) // FLOAT_bytes)
    rounds: list[list[float]] = [[] for _ in order.plans]
    stages: list[dict[str, list[float]]] = [defaultdict(list) for _ in order.plans]
    tables = [w.table for w in order.workloads]
    modules = [ShardedEmbeddings(tables, plan, comm, wire=order.wire) for plan in order.plans]
    kept: GradientCache = {}
    for number in range(-BATCHES, order.rounds):
        for index, module in enumerate(modules):
            clock = _Clock()
            module.phase = clock
            other.sum()
            comm.all_reduce(torch.zeros(1), "meeting").wait()
            taken = _step(module, batches[number % BATCHES], clock, kept)
            if number >= 0:
                rounds[index].append(taken)
                for name, seconds in clock.seconds.items():
                    stages[index][name].append(seconds)
    return [(r, {name: low_quantile(s) for name, s in by.items()}) for r, by in zip(rounds, stages, strict=True)]


def _step(module: ShardedEmbeddings, batch: Jagged, clock: "_Clock", kept: GradientCache) -> float:
    begin = time.perf_counter()
    vectors = module(batch)
    outs: list[Tensor] = [vectors.matrix_BS, *vectors.sequences.values()]
    for out in outs:
        if out.shape not in kept:  # allocated in warm-up rounds only, as a model's gradients exist already
            kept[out.shape] = torch.full_like(out, GRADIENT)
    with clock("backward"):
        torch.autograd.backward(outs, [kept[out.shape] for out in outs])
    with clock("update"):
        module.update()
    return time.perf_counter() - begin


@final
class _Clock:
    """Seconds by phase; seconds of a nested phase count for it alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._charge()
        self._inside.append(name)
        yield
        self._charge()
        self._inside.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now


def _merge_ranks(of_ranks: Sequence[tuple[list[float], dict[str, float]]]) -> StepTimes:
    rounds = tuple(max(taken) for taken in zip(*(rounds for rounds, _ in of_ranks), strict=True))
    names = of_ranks[0][1]
    return StepTimes(low_quantile(rounds), rounds, {name: tuple(by[name] for _, by in of_ranks) for name in names})
