"""All-reduces the gradients of dense parameters in buckets, while the backward is still running (as torch's DDP does).

Parameters are assigned to buckets from the last to the first, about the order in which a backward reaches them. The
all-reduce of a bucket starts once all its gradients are computed and all earlier buckets have started: the order in
which gradients arrive may differ between ranks, but all ranks must call the same collectives in one order.

Gradients are summed, not averaged: the loss is already a mean over the samples of all ranks. Not supported: sparse
gradients.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.parallel.comm.codec import codec_of
from rowwise.parallel.comm.interface import Comm, Work
from rowwise.parallel.shard.exchange import Phase, no_timing
from rowwise.tables.spec import FarType, Wire
from rowwise.train.coded import CodedSum
from rowwise.train.two_level import TwoLevelSum

# Large enough for a link to reach its bandwidth, small enough to overlap with the backward; gloo's bandwidth falls
# from 2.4 GB/s at 1 MB to 1.5 at 64 MB. Where the cores that compute also send, the size makes no difference.
BUCKET_BYTES = 4 << 20


@final
class DenseGradients:
    """Sums of gradients over all ranks: call `backward` for each part of a step's loss, then `finish`.

    Args:
        parameters: the trained parameters, in the same order on all ranks.
        comm: the communicator of the training steps.
        wire: the type in which gradients travel.
        bucket_bytes: minimum bytes of gradients per all-reduce.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comm: Comm, wire: Wire, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """A single rank has no buckets and calls no collectives."""
        self._comm = comm
        self._parameters = tuple(parameters) if len(comm.ranks) > 1 else ()
        self._buckets = _make_buckets(self._parameters, bucket_bytes)
        self._bucket_of: dict[Tensor, int] = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        self.coded = _coded_sum(comm, wire) if self._parameters else None
        self.phase: Phase = no_timing  # around all-reduces that start during a backward, for the step breakdown
        self.discard()

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Error feedback of this rank by bucket, part of a run's state; empty if sums are exact."""
        return {} if self.coded is None else self.coded.residuals

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate gradients on this rank; the last backward of a step starts the all-reduces."""
        # Hooks exist during the last backward only, so that none stays on the user's parameters.
        hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self._parameters if last]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def finish(self) -> None:
        """Replace the gradients by their sums over all ranks; a gradient that is None on all ranks stays None."""
        if not self._parameters:
            return
        self._launch(everything=True)
        present = reduce_present(self._comm, [p.grad is not None for p in self._parameters])
        if self.coded is None:
            sums = [handle.wait() for handle in self._handles]
        else:
            sums = self.coded.finish(self._handles, [sum(p.numel() for p in bucket) for bucket in self._buckets])
        # None, not zeros: an optimizer skips a parameter without a gradient, but with zeros it would decay its weights.
        ranks_with = dict(zip(self._parameters, present.wait().tolist(), strict=True))
        for bucket, total in zip(self._buckets, sums, strict=True):
            unflatten(bucket, total, [bool(ranks_with[parameter]) for parameter in bucket])
        self.discard()

    def discard(self) -> None:
        """Drop the gradients of a failed step."""
        self._handles: list[Work] = []  # of the buckets whose all-reduce has started
        self._waiting: list[set[Tensor]] = [set(bucket) for bucket in self._buckets]  # parameters without gradient yet

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        waiting = self._waiting[self._bucket_of[parameter]]
        if parameter not in waiting:
            raise SpecError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one backward, after its "
                "first was sent",
                hint="call torch.utils.checkpoint with use_reentrant=False, which gives each parameter one gradient",
            )
        waiting.remove(parameter)
        self._launch()

    def _launch(self, *, everything: bool = False) -> None:
        """Start the all-reduces of complete buckets, in order, up to the first incomplete bucket; or of all buckets."""
        while len(self._handles) < len(self._buckets):
            index = len(self._handles)
            if self._waiting[index] and not everything:
                return
            with self.phase("reduce"):
                flat = flatten(self._buckets[index])
                if self.coded is None:
                    self._handles.append(self._comm.all_reduce(flat, "dense"))
                else:
                    self._handles.append(self.coded.start(index, flat))


def _coded_sum(comm: Comm, wire: Wire) -> CodedSum | TwoLevelSum | None:
    """The sum that the wire asks for, or None for all-reduces of the transport. A collective for two-level sums."""
    if wire.far is not None and len(comm.topology.near_ranks) > 1:
        return TwoLevelSum(comm, FarType.parse(wire.far), feedback=wire.error_feedback)
    codec = codec_of(wire.dense)
    return CodedSum(comm, codec, feedback=wire.error_feedback) if codec.lossy else None


def flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """A copy of all gradients, concatenated; zeros for missing gradients."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])


def unflatten(parameters: Sequence[nn.Parameter], flat: Tensor, present: Sequence[bool]) -> None:
    """Set the parameters' gradients from their concatenation; None where `present` is False."""
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part, has_gradient in zip(parameters, parts, present, strict=True):
        if not has_gradient:
            parameter.grad = None
            continue
        # Copied, so that the gradient has the strides of its parameter: fused optimizers iterate over both at once.
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(part.view(parameter.shape))


def reduce_present(comm: Comm, present: Sequence[bool]) -> Work:
    """Start to count, for each parameter, the ranks that have its gradient."""
    return comm.all_reduce(torch.tensor(present, dtype=torch.int32), "dense")


def bucket_numbers(parameters: Sequence[nn.Parameter]) -> list[int]:
    """The number of elements of each bucket."""
    return [sum(p.numel() for p in bucket) for bucket in _make_buckets(parameters, BUCKET_BYTES)]


def _make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Buckets of one type and device, the last parameters first; a bucket is full at `bucket_bytes` or more."""
    buckets: list[list[nn.Parameter]] = []
    held_bytes, kind = 0, None
    for parameter in reversed(parameters):
        if not buckets or held_bytes >= bucket_bytes or kind != (parameter.dtype, parameter.device):
            buckets.append([])
            held_bytes, kind = 0, (parameter.dtype, parameter.device)
        buckets[-1].append(parameter)
        held_bytes += parameter.numel() * parameter.element_size()
    return buckets
