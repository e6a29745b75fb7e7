"""TorchRec's train pipelines. They run our collections as they are, which are `ShardedModule`s."""

from collections.abc import Iterator
from typing import Any

from torchrec.distributed import train_pipeline
from torchrec.distributed.train_pipeline import TrainPipelineBase as TrainPipelineBase

from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.recipes.door.collection import RowwiseCollection


class TrainPipelineSparseDist(train_pipeline.TrainPipelineSparseDist[Any, Any]):
    """TorchRec's pipeline, which sends the ids of the next batch ahead."""

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """One step; returns the model's output, and raises StopIteration after the last."""
        try:
            return super().progress(dataloader_iter)
        except StopIteration:
            # Without `execute_all_batches` a batch is left on its way: its collectives are finished.
            for module in self._model.modules():
                if isinstance(module, RowwiseCollection) and isinstance(module.rowwise, ShardedEmbeddings):
                    module.rowwise.settle()
            raise
