"""Measures steps of tables by several plans on ranks of this machine: ground truth for forecasts.

A step is lookup, exchange, backward and update with the runtime of training, with ids drawn by access statistics; other
memory is read between steps. The same processes measure all plans in turns (A B C A B C). A step takes as long as its
slowest rank. Dense layers are not measured. All plans have to fit into this machine's memory together.
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

from rowwise.base.errors import SpecError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.plan import Plan
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.parallel.shard.rehearse import held_bytes
from rowwise.planning.calibrate.ids import draw_batch
from rowwise.planning.calibrate.kernels import flush_bytes, low_quantile
from rowwise.planning.perf.access import Workload
from rowwise.planning.perf.host_memory import free_bytes
from rowwise.planning.perf.memory import FLOAT_bytes
from rowwise.tables.batch import Jagged
from rowwise.tables.spec import FLOATS, Topology, Wire

BATCHES = 3
SEED = 7
GRADIENT = 1e-3
LIMIT_s = 600.0
SPARE_FRACTION = 0.7  # of free memory, which plans may take


GradientCache = dict[torch.Size, Tensor]  # gradients by shape


class StepTimes(NamedTuple):
    """Seconds of a step on the slowest rank, and of its stages on each rank."""

    seconds: float  # low quantile of the rounds
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


def measure_plans(spec: StepMeasurement, *, shared_memory: bool = True) -> list[StepTimes]:
    """Steps by each plan on processes of this machine, one thread each."""
    _check_plans(spec, spare_bytes())
    world = spec.plans[0].world
    topology = Topology(devices=world)
    by_rank = run_processes(
        topology, measure_steps_on_rank, spec, shared_memory=shared_memory, threads=1, limit_s=LIMIT_s
    )
    return [_merge_ranks([times[index] for times in by_rank]) for index in range(len(spec.plans))]


def _check_plans(spec: StepMeasurement, spare: int) -> None:
    tables = {w.table.name: w.table for w in spec.workloads}
    need = 0
    for plan in spec.plans:
        plan.validate(list(tables.values()))
        if plan.world != spec.plans[0].world:
            raise SpecError(f"plans for {plan.world} and {spec.plans[0].world} ranks", "plans for the same ranks")
        need += sum(held_bytes(list(tables.values()), plan, rank).total() for rank in range(plan.world))
    if need > spare * SPARE_FRACTION:
        raise SpecError(
            (f"{len(spec.plans)} plans of {len(tables)} tables take {need / 1e9:.1f} GB of rows and optimizer state"),
            (f"at most {SPARE_FRACTION:.0%} of the {spare / 1e9:.1f} GB that are free here"),
            hint="take fewer plans or rows",
        )


def spare_bytes() -> int:
    """Free memory of the machine; half of all memory if the system reports none."""
    free = free_bytes()
    return free if free is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def measure_steps_on_rank(comm: Comm, spec: StepMeasurement) -> list[tuple[list[float], dict[str, float]]]:
    """For each plan: seconds of each round on this rank, and by stage. Called by all ranks."""
    rng = np.random.default_rng((SEED, comm.rank))
    local = spec.batch // len(comm.ranks)
    batches = [draw_batch(spec.workloads, local, rng) for _ in range(BATCHES)]
    cache_filler = torch.ones(flush_bytes(torch.device("cpu")) // FLOAT_bytes)
    rounds: list[list[float]] = [[] for _ in spec.plans]
    stages: list[dict[str, list[float]]] = [defaultdict(list) for _ in spec.plans]
    tables = [w.table for w in spec.workloads]
    modules = [ShardedEmbeddings(tables, plan, comm, wire=spec.wire) for plan in spec.plans]
    gradients: GradientCache = {}
    for number in range(-BATCHES, spec.rounds):
        for index, module in enumerate(modules):
            clock = _Clock()
            module.phase = clock
            cache_filler.sum()
            comm.all_reduce(torch.zeros(1), "meeting").wait()
            step_s = _run_step(module, batches[number % BATCHES], clock, gradients)
            if number >= 0:
                rounds[index].append(step_s)
                for name, seconds in clock.seconds.items():
                    stages[index][name].append(seconds)
    return [(r, {name: low_quantile(s) for name, s in by.items()}) for r, by in zip(rounds, stages, strict=True)]


def _run_step(module: ShardedEmbeddings, batch: Jagged, clock: "_Clock", gradients: GradientCache) -> float:
    begin = time.perf_counter()
    vectors = module(batch)
    outputs: list[Tensor] = [vectors.matrix_BS, *vectors.sequences.values()]
    for output in outputs:
        if output.shape not in gradients:  # allocated in warm-up rounds only, as a model's gradients exist already
            gradients[output.shape] = torch.full_like(output, GRADIENT)
    with clock("backward"):
        torch.autograd.backward(outputs, [gradients[output.shape] for output in outputs])
    with clock("update"):
        module.update()
    return time.perf_counter() - begin


@final
class _Clock:
    """Seconds by phase; those of a nested phase do not count for the outer one."""

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


def _merge_ranks(by_rank: Sequence[tuple[list[float], dict[str, float]]]) -> StepTimes:
    rounds = tuple(max(step_s) for step_s in zip(*(rounds for rounds, _ in by_rank), strict=True))
    names = by_rank[0][1]
    return StepTimes(low_quantile(rounds), rounds, {name: tuple(by[name] for _, by in by_rank) for name in names})
