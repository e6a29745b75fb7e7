"""Applies staged gradients at the end of the backward that computed them, as TorchRec's fused optimizers do.

Gradients are means over ranks, as DistributedDataParallel makes those of dense parameters.
"""

from collections.abc import Iterable
from typing import final

from torch import Tensor
from torch.autograd import Variable

from rowwise.parallel.shard.embeddings import AnyEmbeddings, ShardedEmbeddings


@final
class UpdatesAfterBackward:
    """Calls `embeddings.update` once after each backward that reaches one of the watched outputs."""

    def __init__(self, embeddings: AnyEmbeddings) -> None:
        self._embeddings, self._queued = embeddings, False
        if isinstance(embeddings, ShardedEmbeddings):
            embeddings.mean_over_ranks = True

    def prepare(self) -> None:
        """Called before a lookup: drop the gradients of a backward that has failed on its way."""
        if self._queued:
            self._queued = False
            self._embeddings.discard()

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Update after backwards through these outputs of a lookup."""
        for output in outputs:
            if output.requires_grad:
                output.register_hook(self._reached)

    def _reached(self, _: Tensor) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._update)

    def _update(self) -> None:
        self._queued = False
        if isinstance(self._embeddings, ShardedEmbeddings):
            self._embeddings.settle()  # a pipeline that ends here leaves no collective pending
        self._embeddings.update()
