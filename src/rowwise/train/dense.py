"""The gradients of dense parameters, added over ranks while the backward is still under way.

Parameters are dealt to buckets from the last to the first, about the order in which a backward reaches them, and a
bucket sets off once all its gradients are there. Buckets set off in their order only: which gradients come first, or
not at all, may differ between ranks, and all have to call the same collectives in the same order. The group given is
used for nothing else.

Known limits: scaling (the loss is already a mean over the samples of all ranks, so sums are wanted), and sparse
gradients.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from rowwise.comm.codec import codec_of
from rowwise.comm.seam import Comm, Handle
from rowwise.errors import SpecError
from rowwise.spec import Wire
from rowwise.train.coded import CodedSum

# Enough for a link to reach its rate, and little enough to leave something to compute meanwhile; gloo's own rate falls
# from 2.4 GB/s at 1 MB to 1.5 at 64. Where the processors that compute also send, sizes make no difference.
BUCKET_BYTES = 4 << 20


@final
class DenseGradients:
    """Sums over all ranks: `backward` for each part of a step's loss, then `finish`.

    Args:
        parameters: all that are trained, in the same order on all ranks.
        comm: a group of their own.
        wire: in which type gradients travel.
        bucket_bytes: gradients that travel together.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comm: Comm, wire: Wire, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """With one rank there is nothing to do, and nothing is done."""
        self._comm = comm
        self._parameters = tuple(parameters) if len(comm.ranks) > 1 else ()
        self._buckets = _deal(self._parameters, bucket_bytes)
        self._home: dict[Tensor, int] = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        codec = codec_of(wire.dense)
        self._coded = CodedSum(comm, codec, feedback=wire.error_feedback) if codec.lossy else None
        self.discard()

    @property
    def held(self) -> dict[int, Tensor]:
        """Rounding errors that the wire holds back on this rank, by bucket; part of a run's state."""
        return {} if self._coded is None else self._coded.held

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add up gradients on this rank; in the last backward of a step they also set off."""
        # Hooks last as long as the one backward that needs them, so that none is left behind on the parameters.
        hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self._parameters if last]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def finish(self) -> None:
        """Make the gradients the sums over all ranks; one that no rank has stays None."""
        if not self._parameters:
            return
        self._launch(everything=True)
        present = reduce_present(self._comm, [p.grad is not None for p in self._parameters], self._parameters[0].device)
        if self._coded is None:
            sums = [handle.wait() for handle in self._handles]
        else:
            sums = self._coded.finish(self._handles, [sum(p.numel() for p in bucket) for bucket in self._buckets])
        # An optimizer passes over a parameter without a gradient; zeros it would take for one, and decay the weights.
        there = dict(zip(self._parameters, present.wait().tolist(), strict=True))
        for bucket, total in zip(self._buckets, sums, strict=True):
            unflatten(bucket, total, [bool(there[parameter]) for parameter in bucket])
        self.discard()

    def discard(self) -> None:
        """Forget a step that came to no end."""
        self._handles: list[Handle] = []  # of the buckets that have set off
        self._waiting: list[set[Tensor]] = [set(bucket) for bucket in self._buckets]

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        index = self._home[parameter]
        waiting = self._waiting[index]
        if parameter not in waiting:
            shape = tuple(parameter.shape)
            want = "checkpoint with use_reentrant=False, which gives each parameter one"
            raise SpecError(
                f"a parameter {shape} got a second gradient in one backward, its first is on its way: {want}"
            )
        waiting.remove(parameter)
        self._launch()

    def _launch(self, *, everything: bool = False) -> None:
        """Let the next buckets go that are full, or all."""
        while len(self._handles) < len(self._buckets):
            index = len(self._handles)
            if self._waiting[index] and not everything:
                return
            flat = flatten(self._buckets[index])
            if self._coded is None:
                self._handles.append(self._comm.all_reduce(flat, "dense"))
            else:
                self._handles.append(self._coded.start(index, flat))


def flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """A copy of all gradients, one after the other; a missing one is zeros."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])


def unflatten(parameters: Sequence[nn.Parameter], flat: Tensor, present: Sequence[bool]) -> None:
    """Make these the gradients; parameters that have none anywhere get none."""
    for parameter, part, there in zip(parameters, flat.split([p.numel() for p in parameters]), present, strict=True):
        if not there:
            parameter.grad = None
            continue
        # Copied, so that a gradient lies in memory as its parameter does: fused optimizers walk through both at once.
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(part.view(parameter.shape))


def reduce_present(comm: Comm, present: Sequence[bool], device: torch.device) -> Handle:
    """On how many ranks each gradient is there."""
    return comm.all_reduce(torch.tensor(present, dtype=torch.int32, device=device), "dense")


def _deal(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The last parameters first; a bucket is of one type and device, and full when it holds so many bytes or more."""
    buckets: list[list[nn.Parameter]] = []
    held_bytes, kind = 0, None
    for parameter in reversed(parameters):
        if not buckets or held_bytes >= bucket_bytes or kind != (parameter.dtype, parameter.device):
            buckets.append([])
            held_bytes, kind = 0, (parameter.dtype, parameter.device)
        buckets[-1].append(parameter)
        held_bytes += parameter.numel() * parameter.element_size()
    return buckets
