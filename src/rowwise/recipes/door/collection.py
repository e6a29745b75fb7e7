"""`RowwiseCollection`: what replaces an EmbeddingBagCollection or EmbeddingCollection inside a model.

It is one of TorchRec's `ShardedModule`s, so TorchRec's train pipelines send its ids ahead, and DistributedDataParallel
leaves its parameters alone. These are views of the rows of an `Embeddings` or `ShardedEmbeddings`, under the names that
TorchRec gives them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.types import Awaitable, LazyAwaitable, NoWait, NullShardedModuleContext, ShardedModule
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from rowwise.base.errors import BatchError, RowwiseError, SpecError
from rowwise.parallel.shard.embeddings import AnyEmbeddings, ShardedEmbeddings
from rowwise.recipes.door.fused import RowwiseFusedOptimizer
from rowwise.recipes.door.pieces import TablePieces, find_pieces
from rowwise.recipes.door.sources import NO_OPTIMIZER, CollectionSource
from rowwise.recipes.door.updates import UpdatesAfterBackward
from rowwise.tables.batch import Jagged
from rowwise.tables.embedding import Vectors


class SentIds(Awaitable[Awaitable[Jagged | RowwiseError]]):
    """The ids of a batch on their way to the ranks of their rows, in TorchRec's two waits."""

    def __init__(self, embeddings: AnyEmbeddings, batch: Jagged | RowwiseError) -> None:
        super().__init__()
        self._embeddings, self._batch = embeddings, batch
        if not isinstance(embeddings, ShardedEmbeddings):
            return
        if isinstance(batch, RowwiseError):
            embeddings.prefetch_failed(batch)
        else:
            embeddings.prefetch(batch)

    def _wait_impl(self) -> Awaitable[Jagged | RowwiseError]:
        if isinstance(self._embeddings, ShardedEmbeddings):
            self._embeddings.advance()
        return NoWait(self._batch)


class ReceivedVectors(LazyAwaitable[KeyedTensor]):
    """Pooled vectors that are waited for at their first use."""

    def __init__(self, receive: Callable[[], KeyedTensor]) -> None:
        super().__init__()
        self._receive = receive

    def _wait_impl(self) -> KeyedTensor:
        return self._receive()


class RowwiseCollection(ShardedModule, FusedOptimizerModule):
    """The tables of a collection on this rank.

    Args:
        source: the collection that is replaced.
        embeddings: its tables.
        env: TorchRec's environment, with the process group of tensors in the state dict.
    """

    def __init__(self, source: CollectionSource, embeddings: AnyEmbeddings, env: Any) -> None:
        super().__init__()
        self.source, self._env = source, env
        self._embeddings = (embeddings,)  # in a tuple, as its parameters have other names
        self.lookups: int | None = None  # in the current forward of the model; None outside of it
        self._updates = UpdatesAfterBackward(embeddings)
        self._outputs = tuple(name for entry in source.tables for name in entry.table.feature_names)
        self._features = tuple(name for entry in source.tables for name in entry.features)
        self._widths = [entry.table.dim for entry in source.tables for _ in entry.features]
        self._untrained = [entry.table.name for entry in source.tables if not entry.trained]
        self._prefix = "embedding_bags." if source.pooled else "embeddings."
        self.add_module(self._prefix[:-1], nn.ModuleDict({table.name: nn.Module() for table in embeddings.tables}))
        self._point_parameters()
        self._optimizer = RowwiseFusedOptimizer(
            {key: (self.get_parameter(key), pieces) for key, pieces in self._pieces().items()}, embeddings
        )
        self.register_state_dict_post_hook(_save_tables)
        self.register_load_state_dict_pre_hook(_load_tables)

    @property
    def rowwise(self) -> AnyEmbeddings:
        """The tables on this rank."""
        return self._embeddings[0]

    @property
    def fused_optimizer(self) -> RowwiseFusedOptimizer:
        return self._optimizer

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return self.source.kind

    def embedding_bag_configs(self) -> list[Any]:
        """The configs of a collection of bags."""
        return self.source.configs

    def embedding_configs(self) -> list[Any]:
        """The configs of a collection of sequences."""
        return self.source.configs

    def create_context(self) -> NullShardedModuleContext:
        return NullShardedModuleContext()

    def input_dist(self, ctx: Any, *input: Any, **kwargs: Any) -> Any:
        """Start to send the ids of a batch; `compute` gets them."""
        try:
            batch: Jagged | RowwiseError = self._read(*input, **kwargs)
        except RowwiseError as error:
            batch = error
        return KJTListSplitsAwaitable([SentIds(self.rowwise, batch)], ctx)

    def compute(self, ctx: Any, dist_input: Any) -> tuple[Jagged, Vectors]:
        batch = dist_input[0]
        if isinstance(batch, RowwiseError):
            self.rowwise.abort_forward(batch)
        if self.training and torch.is_grad_enabled():
            self._check_training()
        self._updates.prepare()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._untrained):
            return batch, self.rowwise(batch)

    def output_dist(self, ctx: Any, output: tuple[Jagged, Vectors]) -> Any:
        """A KeyedTensor, or a dict of JaggedTensors; on several ranks pooled vectors are waited for at their use."""
        batch, vectors = output
        if not self.source.pooled:
            return self._sequences(batch, vectors)
        received = ReceivedVectors(lambda: self._keyed(vectors))
        return received if isinstance(self.rowwise, ShardedEmbeddings) else received.wait()

    def _keyed(self, vectors: Vectors) -> KeyedTensor:
        self._updates.watch([vectors.matrix_BS])
        return KeyedTensor(keys=list(self._outputs), length_per_key=self._widths, values=vectors.matrix_BS)

    def _sequences(self, batch: Jagged, vectors: Vectors) -> dict[str, JaggedTensor]:
        rows = {name: vectors[name] for name in self._outputs}
        self._updates.watch(rows.values())
        ids = {name: batch.ids_of(name) for name in self._outputs} if self.source.returns_ids else {}
        return {
            name: JaggedTensor(values=values, lengths=batch.lengths_of(name), weights=ids.get(name))
            for name, values in rows.items()
        }

    def _read(self, features: Any) -> Jagged:
        """A KeyedJaggedTensor under the names of our features: one that two tables share has one for each."""
        keyed = maybe_td_to_kjt(features, None)
        names = keyed.keys()
        missing = [name for name in self._features if name not in names]
        if missing:
            got = f"{self.source.name}: the KeyedJaggedTensor lacks feature {missing[0]!r}; it has {', '.join(names)}"
            raise BatchError(got, hint="add the feature, with lengths of 0 where samples have no ids")
        if keyed.variable_stride_per_key() or keyed.inverse_indices_or_none() is not None:
            got = f"{self.source.name}: a KeyedJaggedTensor with a batch size for each feature, or inverse indices"
            raise BatchError(got, "one batch size")
        if self._outputs != self._features:
            keyed, names = keyed.permute([names.index(name) for name in self._features]), self._outputs
        weights_N = keyed.weights_or_none() if self.source.weighted else None
        return Jagged(
            features=tuple(names), values_N=keyed.values(), lengths_FB=keyed.lengths().view(-1), weights_N=weights_N
        )

    def _check_training(self) -> None:
        if self._untrained:
            raise SpecError(f"table {self._untrained[0]!r} of {self.source.name} has no optimizer", NO_OPTIMIZER)
        if self.lookups is None:
            return
        self.lookups += 1
        if self.lookups > 1:
            raise SpecError(
                f"{self.source.name} is called twice in one forward",
                "one call with the features of both, or two collections",
            )

    def _pieces(self) -> dict[str, TablePieces]:
        """The pieces of each table by the name of its parameter."""
        found = find_pieces(self.rowwise, self._env)
        return {f"{self._prefix}{pieces.table.name}.weight": pieces for pieces in found}

    def _point_parameters(self) -> None:
        """Make parameters views of this rank's rows: of its first piece of a table, or empty without one."""
        for key, pieces in self._pieces().items():
            rows = pieces.local[0].rows if pieces.local else torch.empty(0)
            holder = self.get_submodule(key.removesuffix(".weight"))
            if "weight" in holder._parameters:
                holder.weight.data = rows  # keeps the Parameter, as Module.to does
                continue
            parameter: Any = nn.Parameter(rows, requires_grad=False)
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # what in_backward_optimizer_filter reads
            holder.weight = parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RowwiseCollection":
        self.rowwise._apply(fn)
        self._point_parameters()
        return self


def _save_tables(module: RowwiseCollection, state_dict: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    for key, pieces in module._pieces().items():
        state_dict[prefix + key] = pieces.save_rows()


@torch.no_grad()
def _load_tables(module: RowwiseCollection, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key, pieces in module._pieces().items():
        if prefix + key in state_dict:
            pieces.load_rows(prefix + key, state_dict[prefix + key])
            state_dict[prefix + key] = module.get_parameter(key)  # torch then copies it to itself
