"""What steps of tables really take on this machine's ranks, by any plan: the truth that forecasts are held to.

Lookup, exchange, backward and update with the runtime that trains, ids drawn as the access statistics say, other
memory read between steps. All plans are measured in turns by the same processes (A B C A B C), and a step takes as
long as its slowest rank. Known limits: dense layers, and plans that do not all fit into this machine's memory
together.
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
from rowwise.calibrate.ids import ids_of
from rowwise.calibrate.kernels import flush_bytes, low
from rowwise.comm.seam import Comm
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
SPARE = 0.7  # of free memory that plans may take


Kept = dict[torch.Size, Tensor]  # gradients by shape


class StepTimes(NamedTuple):
    """Seconds of a step: of the slowest rank, and of each stage by rank."""

    seconds: float  # low quantile of rounds
    rounds_s: tuple[float, ...]  # each of them
    stages_s: dict[str, tuple[float, ...]]

    @property
    def noise(self) -> float:
        """How far the half of the rounds that is faster lies apart, as a share."""
        half = np.sort(np.array(self.rounds_s))[: max(2, len(self.rounds_s) // 2)]
        return float((half[-1] - half[0]) / half[0])


class StepMeasurement(NamedTuple):
    """The tables, plans and batch to measure steps of."""

    workloads: tuple[Workload, ...]
    plans: tuple[Plan, ...]
    batch: int  # samples of a step, of all ranks
    rounds: int = 15
    wire: Wire = FLOATS


def measure_plans(order: StepMeasurement, *, shared_memory: bool = True) -> list[StepTimes]:
    """A step by each plan, on real processes of this machine, one thread each."""
    _check(order, spare_bytes())
    world = order.plans[0].world
    topology = Topology(devices=world)
    found = run_processes(topology, on_rank, order, shared_memory=shared_memory, threads=1, limit_s=LIMIT_s)
    return [_joined([of_rank[index] for of_rank in found]) for index in range(len(order.plans))]


def _check(order: StepMeasurement, spare: int) -> None:
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
    """Memory that nobody uses."""
    found = free_bytes()
    return found if found is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def on_rank(comm: Comm, order: StepMeasurement) -> list[tuple[list[float], dict[str, float]]]:
    """Of each plan: seconds of each round on this rank, and by stage; called by all ranks."""
    rng = np.random.default_rng((SEED, comm.rank))
    local = order.batch // len(comm.ranks)
    batches = [ids_of(order.workloads, local, rng) for _ in range(BATCHES)]
    other = torch.ones(flush_bytes(torch.device("cpu")) // FLOAT_bytes)
    rounds: list[list[float]] = [[] for _ in order.plans]
    stages: list[dict[str, list[float]]] = [defaultdict(list) for _ in order.plans]
    tables = [w.table for w in order.workloads]
    modules = [ShardedEmbeddings(tables, plan, comm, wire=order.wire) for plan in order.plans]
    kept: Kept = {}
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
    return [(r, {name: low(s) for name, s in by.items()}) for r, by in zip(rounds, stages, strict=True)]


def _step(module: ShardedEmbeddings, batch: Jagged, clock: "_Clock", kept: Kept) -> float:
    begin = time.perf_counter()
    vectors = module(batch)
    outs: list[Tensor] = [vectors.matrix_BS, *vectors.sequences.values()]
    for out in outs:
        if out.shape not in kept:  # a model's gradients are there already; met in rounds that do not count
            kept[out.shape] = torch.full_like(out, GRADIENT)
    with clock("backward"):
        torch.autograd.backward(outs, [kept[out.shape] for out in outs])
    with clock("update"):
        module.update()
    return time.perf_counter() - begin


@final
class _Clock:
    """Seconds by phase; a phase inside another is charged to the inner one only."""

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


def _joined(of_ranks: Sequence[tuple[list[float], dict[str, float]]]) -> StepTimes:
    rounds = tuple(max(taken) for taken in zip(*(rounds for rounds, _ in of_ranks), strict=True))
    names = of_ranks[0][1]
    return StepTimes(low(rounds), rounds, {name: tuple(by[name] for _, by in of_ranks) for name in names})
