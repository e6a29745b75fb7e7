"""`SoftLabels`: logits that the model had for the samples of a step before its last update, for the loss `smc`.

Step t makes those of step t + 1, without gradient and before its own update; `number` is the step that uses them. A
checkpoint after step t holds them in the order of the samples of all ranks, so that any number of ranks continues.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from torch import Tensor

from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import Checkpoint

NAME = "soft/labels"  # in a checkpoint


class SoftStep(NamedTuple):
    """The logits for samples of a step."""

    logits_NK: Tensor
    first: int  # index of their first sample among those of all ranks
    samples: int  # of all ranks
    shared: bool = False  # each rank has the logits of all, from a checkpoint


@final
class SoftLabels:
    """The logits of this rank for the running step and for the next."""

    def __init__(self) -> None:
        self._ahead: dict[int, SoftStep] = {}
        self._number = 0  # the running step
        self._logits_NK: Tensor | None = None  # of the running step
        self._taken = 0  # samples of the running step whose logits were taken

    def begin(self, number: int, samples_W: Sequence[int], rank: int, make: Callable[[], Tensor]) -> None:
        """Begin a step; `make` gives logits of the current parameters, for a step without those of the step before.

        Such steps are the first of an epoch, and the first after a resume with another batch size.
        """
        held = self._ahead.get(number)
        if held is None or held.samples != sum(samples_W):
            self._ahead.pop(number, None)
            self._logits_NK = make()
        else:
            begin = sum(samples_W[:rank]) - held.first
            self._logits_NK = held.logits_NK[begin : begin + samples_W[rank]]
        self._number, self._taken = number, 0

    def hold(self, number: int, logits_NK: Tensor, samples_W: Sequence[int], rank: int) -> None:
        """Keep the logits of this rank's samples of a later step."""
        # Those of the running step stay: a step that fails is saved and repeated.
        running = {n: step for n, step in self._ahead.items() if n == self._number}
        self._ahead = running | {number: SoftStep(logits_NK, sum(samples_W[:rank]), sum(samples_W))}

    def take(self, number: int, samples: int) -> Tensor | None:
        """The logits [B, K] of the next samples of a step; None for a step that did not begin."""
        if self._logits_NK is None or number != self._number:
            return None
        begin, self._taken = self._taken, self._taken + samples
        return self._logits_NK[begin : self._taken]

    def shards(self, number: int) -> list[LocalShard]:
        """This rank's part of the logits for a step."""
        held = self._ahead.get(number)
        if held is None or not len(held.logits_NK):
            return []
        rows = held.first, held.first + len(held.logits_NK)
        shape = held.samples, held.logits_NK.shape[1]
        return [LocalShard(name=NAME, tensor=held.logits_NK, shape=shape, rows=rows, shared=held.shared)]

    def restore(self, checkpoint: Checkpoint, number: int, device: str) -> None:
        """The logits of all ranks for a step, if the checkpoint has them."""
        self._ahead.clear()
        if NAME in checkpoint.names():
            logits_NK = checkpoint.load(NAME).to(device)
            self._ahead[number] = SoftStep(logits_NK, 0, len(logits_NK), shared=True)
