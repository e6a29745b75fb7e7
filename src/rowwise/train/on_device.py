"""A step on a GPU: the host launches it without waiting for the device.

The thread that makes a batch checks its ids and puts it into pinned memory; a stream of its own copies the batch while
an earlier step computes. Loss and norm come back by a copy that is read when the next step has been launched. A loss
or a gradient that is not finite changes no dense weight and none of the rows that it reaches; the kernels' fault words
(`tables/ops/faults.py`) raise it a step later.

With several ranks the loss is summed on the devices, so all ranks decide alike; a kernel fault ends its rank, and then
the others. The ids of sharded tables stay on the host, which routes them. With virtual shards, or lossy sums, the host
reads loss and norm in each step, as on the CPU.
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
    """Loss and norm that the host knows."""

    loss: float
    gradient_norm: float

    def read(self) -> tuple[float, float]:
        return self.loss, self.gradient_norm


@final
class LateNumbers:
    """Loss and norm that the device computes; `read` waits for them."""

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
    """Copies batches to a device while it computes; a no-op on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._started: deque[tuple[Batch, torch.cuda.Event, list[Tensor]]] = deque()

    def start(self, batch: Batch, prepare: Callable[[Batch, Move], None] | None = None, *, ids: bool = True) -> Batch:
        """Start to copy a batch; the copy is valid after `wait_for`. Without `ids`, its ids stay on the host.

        `prepare` gets the copy, and a function that copies further tensors for the same step.
        """
        moved: list[Tensor] = []

        def move(x: Tensor) -> Tensor:
            # Torch keeps the pinned memory until the copy is over, then uses it for another batch.
            moved.append(copy_to(x, self._device))
            return moved[-1]

        with torch.cuda.stream(self._stream):  # a no-op for None
            copied = batch.map_tensors(move, ids=ids)
            if prepare is not None:
                prepare(copied, move)
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
            self._started.append((copied, event, moved))
        return copied

    def wait_for(self, batches: Collection[Batch]) -> None:
        """Make the current stream, not the host, wait for the copies of these batches and of earlier batches."""
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
    """The batch on the model's device. Ids for a GPU are checked first: its kernels cannot name the feature.

    The ids of sharded tables stay on the host.
    """
    if torch.device(device).type == "cpu":
        return batch if batch.dense_BF.device.type == "cpu" else batch.to(device)
    modules = list(model.modules())
    if any(isinstance(module, ShardedEmbeddings) for module in modules):
        return batch.to(device, ids=False)
    mapped = {module.stored for module in modules if isinstance(module, IdTables)}
    direct = [module for module in modules if isinstance(module, AnyEmbeddings) and module not in mapped]
    return check_on_host(direct, batch).to(device)


def check_on_host(modules: Collection[AnyEmbeddings], batch: Batch) -> Batch:
    """The batch without shared bags, and with unknown ids replaced where their table allows it.

    Raises an `IdError` for other unknown ids.
    """
    expanded = batch.sparse.expanded()
    checked = _check_ids(modules, expanded)
    return batch if checked is batch.sparse else replace(batch, sparse=checked)


def _check_ids(modules: Collection[AnyEmbeddings], jagged: Jagged) -> Jagged:
    unknown_ids: list[tuple[AnyEmbeddings, list[UnknownIds]]] = []
    for module in modules:
        tables = {name: t for t in module.tables for name in t.feature_names if name in jagged.features}
        jagged, unknown = map_unknown(jagged, tables)
        unknown_ids.append((module, unknown))
    for module, unknown in unknown_ids:
        count_unknown(module.unknown_ids, unknown)
    return jagged


def prepare_device(device: torch.device) -> None:
    """Let torch choose deterministic kernels where it has them; some operators of metrics have none."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling would cost a kernel for every tensor that is allocated.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def clip_and_mask(
    loss: Tensor, parameters: Sequence[Tensor], optimizer: Optimizer | None, clip: float | None
) -> LateNumbers:
    """Clip the gradients, and keep values that are not finite out of the dense weights; never waits for the device."""
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
