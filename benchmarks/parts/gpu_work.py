"""What `gpu.py` measures on a device: timers, tables and batches, and the limits of the machine."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parts.batches import tables_of
from parts.ops_work import Work, ids_for
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.layout import TableGroup, make_group
from rowwise.tables.ops.operators import gpu_operators
from rowwise.tables.ops.update import next_step
from rowwise.tables.row_optimizers import RowOptimizer
from rowwise.tables.spec import RowType

KERNELS = gpu_operators()
SECTOR_BYTES = 64  # of optimizer state, read and written
WARM, REPEATS = 3, 20


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """The 20 % quantile of single runs; of a GPU by events behind other work, so without what the host takes."""
    for _ in range(min(WARM, repeats)):
        run()
    if device.type == "cuda":
        return sorted(_gpu_times(run, repeats))[repeats // 5]
    return host_milliseconds(run, device, repeats)


def _gpu_times(run: Callable[[], object], repeats: int) -> list[float]:
    other = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    run()
    products = 1 + int((time.perf_counter() - started_s) / 1e-3)  # each takes 2.5 ms or more: the host is ahead
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(products):
            other @ other
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def host_milliseconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """What the host takes to launch a run: the 20 % quantile."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - started_s) * 1e3)
    return sorted(times)[repeats // 5]


def limits(device: torch.device, megabytes: int) -> dict[str, float]:
    """Bytes a second of copies on the device and between host and device, of gathers of rows, and products a second."""
    floats = megabytes << 18
    a, b = (torch.ones(floats, device=device) for _ in range(2))
    host = torch.ones(floats // 8, pin_memory=device.type == "cuda")
    rows = a.view(-1, 64)
    at = torch.randint(0, len(rows), (len(rows) // 2,), device=device)
    gathered = torch.empty(len(at), 64, device=device)
    x = torch.ones(1024 if device.type == "cpu" else 8192, 1024 if device.type == "cpu" else 8192, device=device)

    def rate(run: Callable[[], object], amount: float) -> float:
        return amount / (milliseconds(run, device, 5) / 1e3)

    return {
        "copy_Bps": rate(lambda: a.copy_(b), 8 * floats),
        "gather_Bps": rate(lambda: torch.index_select(rows, 0, at, out=gathered), 2 * gathered.numel() * 4),
        "from_host_Bps": rate(lambda: a[: len(host)].copy_(host, non_blocking=True), host.numel() * 4),
        "to_host_Bps": rate(lambda: host.copy_(a[: len(host)], non_blocking=True), host.numel() * 4),
        "flops": rate(lambda: x @ x, 2 * len(x) ** 3),
    }


class WorkBatch(NamedTuple):
    """Ids and gradients of a batch on a device."""

    values: Tensor
    offsets: Tensor
    grad: Tensor

    @classmethod
    def make(cls, rows: list[int], work: Work, device: torch.device) -> Self:
        offsets = torch.arange(len(rows) * work.batch + 1) * work.pooling
        return cls(*(x.to(device) for x in (ids_for(rows, work, 1), offsets, work.grad(len(rows)))))


def kernel_times(run: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Milliseconds of each kernel in a run, by name; the profiler's."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times = {event.key[:80]: event.self_device_time_total / 1e3 / repeats for event in seen.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Tables:
    """Tables of one shape on a device, and a batch for them."""

    arena: Arena
    group: TableGroup
    features: Tensor
    values: Tensor
    offsets: Tensor
    grad: Tensor
    work: Work

    @classmethod
    def make(cls, rows: list[int], work: Work, optimizer: RowOptimizer, device: torch.device) -> "Tables":
        """Random rows; of a GPU's tables only the times matter, so they are filled there."""
        tables = tables_of(rows, work.dim, optimizer=optimizer, row_type=RowType(work.row_type))
        arena = Arena.allocate(tables, device)
        if device.type == "cpu" or work.row_type != "fp32":
            arena.fill(0)
        else:
            arena.rows.view(torch.float32).uniform_(-0.01, 0.01)
        group = make_group(arena.pieces, arena.offsets)
        return cls(arena, group, group.features_FC, *WorkBatch.make(rows, work, device), work)

    def with_work(self, work: Work) -> "Tables":
        """The same tables with another batch."""
        rows, device = [piece.table.rows for piece in self.arena.pieces], self.values.device
        return Tables(self.arena, self.group, self.features, *WorkBatch.make(rows, work, device), work)

    def copied_to(self, device: torch.device) -> "Tables":
        """Copies of the tables, and the batch, on a device."""
        arena = dataclasses.replace(
            self.arena,
            rows=self.arena.rows.to(device, copy=True),
            state=self.arena.state.to(device, copy=True),
            steps_T=self.arena.steps_T.clone(),
        )
        batch = (x.to(device) for x in (self.values, self.offsets, self.grad))
        return Tables(arena, self.group, self.features, *batch, self.work)

    def lookup(self, operators: dict[str, Callable[..., Tensor]] = KERNELS) -> Tensor:
        return operators["pool"](
            self.arena.rows, self.features, self.values, self.offsets, None, self.work.batch, self.group.columns
        )

    def update(self, operators: dict[str, Callable[..., None]] = KERNELS) -> None:
        hyper, keys = next_step(self.arena, self.group)
        operators["update"](
            self.arena.rows, self.arena.state, self.group.tables_TC, hyper, keys, self.features, self.values,
            self.offsets, None, self.grad, self.work.batch, False, None,
        )  # fmt: skip

    def lookup_bytes(self) -> int:
        """Rows of all ids, ids, offsets and the output."""
        ids = self.values.numel()
        return ids * (self._row_bytes + 8) + self.offsets.numel() * 8 + self.grad.numel() * 4

    def update_bytes(self) -> int:
        """The gradient of each id, and each distinct row and its state read and written."""
        bags = torch.arange(len(self.group.tables), device=self.values.device).repeat_interleave(
            self.work.batch * self.work.pooling
        )
        distinct = (self.values + (bags << 40)).unique().numel()
        state = 2 * max(SECTOR_BYTES // 2, self.arena.state.numel() * 4 // max(1, self._rows))
        return self.values.numel() * self.work.dim * 4 + distinct * (2 * self._row_bytes + state)

    @property
    def _row_bytes(self) -> int:
        return self.group.tables[0].row_bytes

    @property
    def _rows(self) -> int:
        return sum(table.rows for table in self.group.tables)
