"""The dense parameters of a recipe's model as the planner counts them."""

from torch import nn

from rowwise.perf.dense_parallel import DenseSide, DenseUnits
from rowwise.train.dense_parallel import unit_shapes
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd, Training


def dense_side_of(train: Training, model: nn.Module) -> DenseSide:
    """The dense side of a model whose dense parameters are not sharded yet."""
    units, own = unit_shapes(model)
    parallel = train.dense_parallel
    return DenseSide(
        shapes=DenseUnits(tuple(map(tuple, units)), tuple(own)),
        state_slots=_state_slots(train.optimizer),
        kind=parallel.kind,
        shards=parallel.shards,
        reshard=parallel.reshard,
        bf16=parallel.params == "bf16",
        prefetch=parallel.prefetch,
    )


def _state_slots(optimizer: DenseOptimizer) -> int:
    """Optimizer state values for each weight."""
    match optimizer:
        case DenseSgd(momentum=momentum):
            return 1 if momentum else 0
        case DenseAdagrad():
            return 1
        case DenseAdam():
            return 2
