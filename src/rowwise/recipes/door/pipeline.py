"""TorchRec's train pipelines, which run a model of ours as they are: its collections are `ShardedModule`s."""

from torchrec.distributed.train_pipeline import TrainPipelineBase as TrainPipelineBase
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as TrainPipelineSparseDist
