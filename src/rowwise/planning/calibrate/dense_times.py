"""Measures linear layers by shape, and sums of dense gradients by size, on all ranks of this machine at once.

Ranks share memory and caches, so they measure the same point at the same time. A layer has a bias and a ReLU, as most
have, and its backward takes gradients of inputs and weights.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rowwise.base.quantity import round_digits
from rowwise.models.mlp import Linear
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.spawn import run_processes
from rowwise.planning.calibrate.kernels import low_quantile
from rowwise.planning.perf.linear_times import Grid, LinearTimes, SumTimes
from rowwise.tables.spec import Topology

FLOAT_bytes = 4
BUDGET_s = 0.03  # for each point, after a first call
MIN_CALLS, MAX_CALLS = 3, 200  # calls of each point
LIMIT_s = 300.0


class DenseGrid(NamedTuple):
    """Sizes of the layers and sums that are measured."""

    samples: tuple[int, ...] = (64, 512, 4096)
    widths: tuple[int, ...] = (16, 64, 256, 1024)  # of inputs and outputs
    sums_bytes: tuple[int, ...] = tuple(1 << power for power in (12, 15, 18, 20, 22, 24))


DEFAULT_GRID = DenseGrid()


class DenseTimes(NamedTuple):
    """The measured dense layers of a profile."""

    linears: LinearTimes
    sums: SumTimes | None  # None for one rank
    cpu_s_per_byte: float  # of the processor, of a byte sent and received


class _RankTimes(NamedTuple):
    forward_s: list[float]
    backward_s: list[float]
    sum_s: list[float]
    cpu_s_per_byte: float


def measure_dense(world: int, threads: int, *, shared_memory: bool, grid: DenseGrid = DEFAULT_GRID) -> DenseTimes:
    """Measure on `world` processes; a point takes as long as its slowest rank."""
    ranks = run_processes(
        Topology(devices=world), _measure_rank, grid, shared_memory=shared_memory, threads=threads, limit_s=LIMIT_s
    )
    samples, widths = grid.samples, grid.widths
    forward, backward = (np.max([getattr(r, name) for r in ranks], axis=0) for name in ("forward_s", "backward_s"))
    linears = LinearTimes(
        samples=samples,
        inputs=widths,
        outputs=widths,
        forward_s=_to_grid(forward, grid),
        backward_s=_to_grid(backward, grid),
    )
    if world == 1:
        return DenseTimes(linears, None, 0.0)
    seconds = tuple(np.max([r.sum_s for r in ranks], axis=0).tolist())
    sums = SumTimes(ranks=world, sizes=grid.sums_bytes, seconds=seconds)
    return DenseTimes(linears, sums, float(np.mean([r.cpu_s_per_byte for r in ranks])))


def _to_grid(seconds: np.ndarray, grid: DenseGrid) -> Grid:
    rounded = list(map(round_digits, seconds.tolist()))
    planes = np.array(rounded).reshape(len(grid.samples), len(grid.widths), -1).tolist()
    return tuple(tuple(map(tuple, plane)) for plane in planes)


def _measure_rank(comm: Comm, grid: DenseGrid) -> _RankTimes:
    """Called by all ranks."""
    shapes = product(grid.samples, grid.widths, grid.widths)
    forward, backward = map(list, zip(*(_measure_linear(comm, *shape) for shape in shapes), strict=True))
    if len(comm.ranks) == 1:
        return _RankTimes(forward, backward, [], 0.0)
    sums = [_typical_s(comm, partial(_sum, comm, torch.zeros(size // FLOAT_bytes))) for size in grid.sums_bytes]
    return _RankTimes(forward, backward, sums, _measure_cpu(comm, grid.sums_bytes[-1]))


def _sum(comm: Comm, numbers: Tensor) -> None:
    comm.all_reduce(numbers, "dense").wait()


def _measure_linear(comm: Comm, samples: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Seconds of forward and backward."""
    layer = Linear(inputs, outputs, relu=True)
    x = torch.randn(samples, inputs, requires_grad=True)
    gradient = torch.randn(samples, outputs)

    def forward_and_backward() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None  # as in a step; else gradients would accumulate
        layer(x).backward(gradient)

    forward_s = _typical_s(comm, lambda: layer(x))
    return forward_s, max(_typical_s(comm, forward_and_backward) - forward_s, forward_s / 2)


def _typical_s(comm: Comm, call: Callable[[], object]) -> float:
    """A low quantile of several calls, equally many on all ranks."""
    call()
    begin_s = perf_counter()
    call()
    count = min(max(MIN_CALLS, int(BUDGET_s / max(perf_counter() - begin_s, 1e-6))), MAX_CALLS)
    if len(comm.ranks) > 1:  # ranks that call collectives have to agree on their number
        votes = comm.all_gather(torch.tensor([count]), [1] * len(comm.ranks), "calls").wait()
        count = int(votes.min())
    taken: list[float] = []
    for _ in range(count):
        begin_s = perf_counter()
        call()
        taken.append(perf_counter() - begin_s)
    return low_quantile(taken)


def _measure_cpu(comm: Comm, size: int) -> float:
    """Seconds of the processor for a byte that is sent and one that is received, beyond those of an empty message."""
    world = len(comm.ranks)
    count = size // FLOAT_bytes // world
    splits = [0 if rank == comm.rank else count for rank in range(world)]
    taken: list[float] = []
    for number in (0, 1):
        sent, parts = torch.zeros(sum(splits) * number), [n * number for n in splits]
        comm.all_to_all(sent, parts, parts, "cpu").wait()
        begin_s = process_time()
        for _ in range(MIN_CALLS):
            comm.all_to_all(sent, parts, parts, "cpu").wait()
        taken.append((process_time() - begin_s) / MIN_CALLS)
    return max(taken[1] - taken[0], 0.0) / (2 * sum(splits) * FLOAT_bytes)
