"""A step on a GPU: the host launches it without waiting for the device.

The thread that makes a batch checks its ids and puts it into pinned memory; a stream of its own copies the batch while
an earlier step computes. Loss and norm come back by a copy that is read when the next step has been launched. A loss
or a gradient that is not finite changes no dense weight and none of the rows that it reaches; the kernels' fault words
(`tables/ops/faults.py`) raise it a step later.

With several ranks the loss is added up on the devices, so all ranks judge alike; an error of a kernel ends its rank,
and then the others. The ids of sharded tables stay on the host, which routes them. With virtual shards, or sums that
are not exact, the host reads these numbers in each step, as on the CPU.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowwise.parallel.shard.embeddings import AnyEmbeddings, ShardedEmbeddings
from rowwise.tables.batch import Batch, Jagged
from rowwise.tables.ids.make import IdTables
from rowwise.tables.ops.faults import FaultWord
from rowwise.tables.ops.pinned import copy_to
from rowwise.tables.ops.unknown import UnknownIds, count_unknown, map_unknown


class StepNumbers(Protocol):
    """The loss of a step, and the norm of its dense gradients before clipping."""

    def read(self) -> tuple[float, float]: ...


class KnownNumbers(NamedTuple):
    """Numbers that the host has."""

    loss: float
    gradient_norm: float

    def read(self) -> tuple[float, float]:
        return self.loss, self.gradient_norm


@final
class LateNumbers:
    """Numbers that the device computes; `read` waits for them."""

    def __init__(self, loss: Tensor, gradient_norm: Tensor) -> None:
        numbers = torch.stack([loss.double(), gradient_norm.double()])
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(2, dtype=torch.float64, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._numbers = numbers

    def read(self) -> tuple[float, float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, norm = self._numbers.tolist()
        return loss, norm


Move = Callable[[Tensor], Tensor]  # to a device


@final
class DeviceCopies:
    """Copies batches to a device while it computes; on the CPU a batch stays where it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._started: deque[tuple[Batch, torch.cuda.Event, list[Tensor]]] = deque()

    def start(self, batch: Batch, prepare: Callable[[Batch, Move], None] | None = None, *, ids: bool = True) -> Batch:
        """The batch on the device, where its numbers are after `wait_for`; without `ids`, those stay on the host.

        `prepare` gets it, and a function that copies further tensors for the same step.
        """
        moved: list[Tensor] = []

        def move(x: Tensor) -> Tensor:
            # Torch keeps the pinned memory until the copy is over, then uses it for another batch.
            moved.append(copy_to(x, self._device))
            return moved[-1]

        with torch.cuda.stream(self._stream):  # of None: nothing
            copied = batch.map_tensors(move, ids=ids)
            if prepare is not None:
                prepare(copied, move)
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
            self._started.append((copied, event, moved))
        return copied

    def wait_for(self, batches: Collection[Batch]) -> None:
        """Let the current stream, not the host, wait until these batches, and those begun before them, are copied."""
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self._device)
        wanted = [any(copied is batch for batch in batches) for copied, _, _ in self._started]
        while any(wanted):
            wanted.pop(0)
            _, event, moved = self._started.popleft()
            stream.wait_event(event)
            for x in moved:
                x.record_stream(stream)


def to_device(batch: Batch, model: nn.Module, device: torch.device | str) -> Batch:
    """The batch where the model is; on a GPU its ids are checked before it is copied, as kernels know no names.

    The ids of sharded tables stay where they are.
    """
    if torch.device(device).type == "cpu":
        return batch if batch.dense_BF.device.type == "cpu" else batch.to(device)
    if any(isinstance(one, ShardedEmbeddings) for one in model.modules()):
        return batch.to(device, ids=False)
    mapped = {one.stored for one in model.modules() if isinstance(one, IdTables)}
    direct = [one for one in model.modules() if isinstance(one, AnyEmbeddings) and one not in mapped]
    return check_on_host(direct, batch).to(device)


def check_on_host(modules: Collection[AnyEmbeddings], batch: Batch) -> Batch:
    """The batch without shared bags, and with unknown ids replaced where their table allows it.

    Raises an `IdError` for the others.
    """
    expanded = batch.sparse.expanded()
    checked = _check_ids(modules, expanded)
    return batch if checked is batch.sparse else replace(batch, sparse=checked)


def _check_ids(modules: Collection[AnyEmbeddings], jagged: Jagged) -> Jagged:
    found: list[tuple[AnyEmbeddings, list[UnknownIds]]] = []
    for module in modules:
        tables = {name: t for t in module.tables for name in t.feature_names if name in jagged.features}
        jagged, unknown = map_unknown(jagged, tables)
        found.append((module, unknown))
    for module, unknown in found:
        count_unknown(module.unknown_ids, unknown)
    return jagged


def prepare_device(device: torch.device) -> None:
    """Let torch choose deterministic kernels where it has them; those of metrics may lack one."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # It would fill the memory of every kernel.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def judge(loss: Tensor, parameters: Sequence[Tensor], optimizer: Optimizer | None, clip: float | None) -> LateNumbers:
    """Clip the gradients, and keep a loss or gradients that are not finite from the dense weights; never waits."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros_like(loss)
    bad = ~(loss.isfinite() & norm.isfinite())
    if clip is not None and gradients:
        torch._foreach_mul_(gradients, (clip / norm).clamp(max=1.0))
    if optimizer is not None and optimizer.defaults.get("fused"):
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # what a GradScaler sets
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    else:
        for gradient in gradients:
            gradient.masked_fill_(bad, 0)
    FaultWord.of(loss.device).set_bad_gradient(bad)
    return LateNumbers(loss, norm)
