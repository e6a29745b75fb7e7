"""Sends looked-up vectors to the ranks of the samples, and their gradients back, as one autograd function.

[Note: Everyone joins] A rank that holds no tile has nothing to send and nothing to update, but the other ranks still
wait for it in every collective, forward and backward. So all exchanges of a batch are in one autograd function, which
every rank applies once per batch. Its output requires a gradient through an anchor, so its backward runs on every rank,
and all ranks meet the same collectives in the same order.

[Note: Vectors in flight] Both directions begin early and end late. `start_exchange` begins to send the vectors, and the
function that it returns waits for them: what a model computes between the two overlaps with the transfer. The backward
begins to send gradients, and the module waits for them when it needs them, after the rest of the backward. It waits at
once where autograd needs the result: for sequences, and for per-id weights that are trained.

[Note: Unused outputs] If no rank's loss depends on the pooled output, pooled tables are not updated: their rows and
optimizer state stay. The same holds for sequences. If a module has both kinds, a backward begins with an all-gather of
two flags.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.shard.bag_sets import split_bag_sets
from rowwise.parallel.shard.hosts import HostExchange
from rowwise.parallel.shard.pack import BagSet, RoutedBatch
from rowwise.parallel.shard.perid import PerIdExchange
from rowwise.parallel.shard.pooled import PendingGradients, PooledExchange
from rowwise.parallel.shard.returns import ReturnedGradients, SentGradients
from rowwise.parallel.shard.routes import ExchangePath, Routes
from rowwise.parallel.shard.vectors import PendingBlocks
from rowwise.tables.batch import Jagged
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.ops.shared import (
    FeatureColumns,
    FeatureVectors,
    merge_neighbours,
    merge_vectors,
    select_columns,
    sum_over_samples,
)
from rowwise.tables.spec import Pooling, Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOutputs:
    """Local lookup results by exchange path."""

    # One entry per bag set, by path: pooled vectors [G, columns] of the samples of all ranks; for `per_id` the rows of
    # all ids, flat.
    bag_sets: Sequence[Mapping[ExchangePath, Tensor]]
    sequences: Tensor  # flat rows, feature after feature
    replicated: Tensor  # [B, columns] of replicated tables, of this rank's samples only


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorGradients:
    """Gradients of local lookup results, sent by the ranks of the samples."""

    # By path: [G, columns], on the `per_id` path as well, as its bags have one gradient each too. One entry holds all
    # features, except with `merge_shared`. Empty if no loss depends on the pooled output.
    bag_sets: Sequence[Mapping[ExchangePath, Tensor]]
    sequences: Tensor  # flat, feature after feature


class UsedKinds(NamedTuple):
    """The kinds of outputs that the losses depend on. See [Note: Unused outputs]."""

    pooled: bool = True
    sequences: bool = True


ALL_USED = UsedKinds()


@final
class BagSetExchange:
    """Exchanges the vectors of one bag set: pooled vectors by all paths, and rows of sequences."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, process_groups: tuple[Comm, Comm] | None = None) -> None:
        """Collective, as `HostExchange` may split `comm`; `process_groups`: as of `HostExchange`."""
        paths = {group.path for groups in routes.groups_W for group in groups}
        self.routes = routes
        self.pooled = PooledExchange(routes, comm, wire, ExchangePath.ALL_TO_ALL)
        self.host = HostExchange(routes, comm, wire, process_groups) if ExchangePath.HIERARCHICAL in paths else None
        self.sequences = PerIdExchange(routes, comm, wire, ExchangePath.ALL_TO_ALL)
        self._per_id = PerIdExchange(routes, comm, wire, ExchangePath.PER_ID)
        # Bags of the `per_id` path arrive as rows but have one gradient each, which travels like a pooled vector's.
        self._per_id_gradients = PooledExchange(routes, comm, wire, ExchangePath.PER_ID)
        # An owner of some of a table's rows does not know how many ids a bag has elsewhere. So owners of row-cut MEAN
        # tables return sums, and the rank of the samples divides.
        self._means = [
            (feature, table in routes.per_id_tables)
            for table in routes.tables
            if table.pooling is Pooling.MEAN
            for feature in table.feature_names
            if len(routes.cuts[feature]) > 2
        ]

    def output(self, bag_set: BagSet, outputs: Mapping[ExchangePath, Tensor], received_W: list[Tensor]) -> Tensor:
        """The columns [B, S] of the bag set, without those of replicated tables, from pooled vectors of each rank."""
        jagged = bag_set.sent.jagged
        out_BS = empty_cached((jagged.batch_size, self.routes.width), outputs[ExchangePath.ALL_TO_ALL])
        if self.pooled.any:
            self.pooled.write_output(received_W, out_BS)
        if self.host is not None:
            self.host.forward(bag_set.samples_W, outputs[ExchangePath.HIERARCHICAL], out_BS)
        # Means of the `per_id` path are divided by the pooling kernel, in `_per_id.pool` below.
        for feature, inverse_B1, pooled_here in self._inverse_counts(jagged):
            if not pooled_here:
                out_BS[:, self.routes.columns[feature]] *= inverse_B1
        rows = self._per_id.forward(bag_set, outputs[ExchangePath.PER_ID])
        for feature, pooled in self._per_id.pool(bag_set, rows).items():
            out_BS[:, self.routes.columns[feature]] = pooled
        return out_BS

    def start_backward(
        self, jagged: Jagged, samples_W: tuple[int, ...], grad_BS: Tensor
    ) -> Callable[[], dict[ExchangePath, Tensor]]:
        """Start to send the gradients of this rank's samples.

        The returned function gives those [G, columns] of this rank's pieces by path, of the samples of all ranks.
        """
        # Owners of rows pooled sums, so the rank of the samples divides, in backward too: on the `per_id` path as well,
        # whose rows are updated by the gradient of a sum.
        if self._means:
            grad_BS = grad_BS.clone()
            for feature, inverse_B1, _ in self._inverse_counts(jagged):
                grad_BS[:, self.routes.columns[feature]] *= inverse_B1
        pending = self.pooled.start_backward(samples_W, grad_BS) if self.pooled.any else None
        return partial(self._finish_backward, samples_W, grad_BS, pending)

    def _finish_backward(
        self, samples_W: tuple[int, ...], grad_BS: Tensor, pending: PendingGradients | None
    ) -> dict[ExchangePath, Tensor]:
        grads = dict.fromkeys(ExchangePath, grad_BS.new_empty((sum(samples_W), 0)))
        if pending is not None:
            grads[ExchangePath.ALL_TO_ALL] = pending.wait()
        if self.host is not None:
            grads[ExchangePath.HIERARCHICAL] = self.host.backward(samples_W, grad_BS)
        if self._per_id_gradients.any:
            grads[ExchangePath.PER_ID] = self._per_id_gradients.start_backward(samples_W, grad_BS).wait()
        return grads

    def _inverse_counts(self, jagged: Jagged) -> Iterator[tuple[str, Tensor, bool]]:
        """(feature, 1 / ids of each bag [B, 1], whether this rank pools its bags) for each mean over cut rows."""
        for feature, pooled_here in self._means:
            counts_B = jagged.lengths_of(feature)
            yield feature, (1.0 / counts_B.clamp(min=1).float()).unsqueeze(1), pooled_here


@final
class EmbeddingExchange:
    """Exchanges the vectors of a module's batches, and their gradients."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire) -> None:
        kinds = {table.pooling is Pooling.SEQUENCE for table in routes.tables}
        self.has_sequences, self._both = True in kinds, len(kinds) == 2
        self.sends_exact_gradients = wire.has_exact("backward")
        self.merge_shared = False  # whether gradients of a shared bag are summed before they are sent
        self._routes, self._comm, self._wire = routes, comm, wire
        self._all_features = BagSetExchange(routes, comm, wire)
        # By shared features, one exchange per bag set.
        self._exchanges: dict[tuple[str, ...], tuple[BagSetExchange, ...]] = {(): (self._all_features,)}
        replicated = [table for table in routes.replicated if table.pooling is not Pooling.SEQUENCE]
        self._replicated = {feature: routes.columns[feature] for table in replicated for feature in table.feature_names}

    def start(self, routed: RoutedBatch, outputs: LookupOutputs) -> PendingBlocks | None:
        """Start to send the pooled vectors that travel in one all-to-all; `finish` sends the others."""
        # All bag sets in one all-to-all; one without pooled vectors adds empty blocks. All ranks decide alike.
        if not self._all_features.pooled.any:
            return None
        steps = zip(self._exchanges_for(routed.shared_features), routed.bag_sets, outputs.bag_sets, strict=True)
        sent = [(exchange.pooled, bag_set, local[ExchangePath.ALL_TO_ALL]) for exchange, bag_set, local in steps]
        return PooledExchange.send(sent)

    def finish(
        self, routed: RoutedBatch, outputs: LookupOutputs, pending: PendingBlocks | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled features of this rank's batch [B, S], and the rows of its sequences by feature."""
        exchanges = self._exchanges_for(routed.shared_features)
        steps = list(zip(exchanges, routed.bag_sets, outputs.bag_sets, strict=True))
        received_W = list[list[Tensor]]() if pending is None else pending.wait()
        parts: list[FeatureVectors] = []
        for k, (exchange, bag_set, local) in enumerate(steps):
            vectors_BS = exchange.output(bag_set, local, [blocks[k] for blocks in received_W])
            parts.append(FeatureVectors(vectors_BS, self._columns_of(exchange.routes)))
        out_BS = merge_vectors(parts, routed.jagged.shared)
        at = 0
        for columns in self._replicated.values():
            width = columns.stop - columns.start
            out_BS[:, columns] = outputs.replicated[:, at : at + width]
            at += width
        own = routed.bag_sets[0]
        sequences = exchanges[0].sequences.forward(own, outputs.sequences)
        for feature, repeats in own.sent.repeats.items():
            sequences[feature] = repeats.expand(sequences[feature])
        return out_BS, sequences

    def used_by_any(self, used: UsedKinds) -> UsedKinds:
        """The kinds of outputs that any rank uses; collective."""
        if not self._both or len(self._comm.ranks) == 1:
            return used
        flags_W2 = self._comm.all_gather(torch.tensor(used), [2] * len(self._comm.ranks), "status").wait().view(-1, 2)
        return UsedKinds(*flags_W2.any(0).tolist())

    def start_backward(
        self, routed: RoutedBatch, grad_BS: Tensor, grads: dict[str, Tensor], used: UsedKinds = ALL_USED
    ) -> "Callable[[], VectorGradients]":
        """Start to send the gradients of this rank's samples; none of an unused kind.

        The returned function gives the gradients of this rank's lookups, sent by the ranks of the samples.
        """
        receive = self._start_pooled(routed, grad_BS) if used.pooled else []
        return partial(self._finish_backward, routed, receive, grads if used.sequences else None)

    def _finish_backward(
        self,
        routed: RoutedBatch,
        receive: Sequence[Callable[[], Mapping[ExchangePath, Tensor]]],
        grads: dict[str, Tensor] | None,
    ) -> "VectorGradients":
        own = routed.bag_sets[0]
        bag_sets, sequences = [one() for one in receive], own.sent.jagged.values_N.new_empty(0, dtype=torch.float32)
        if grads is not None:
            repeats = own.sent.repeats
            merged = {f: repeats[f].merge(grad) if f in repeats else grad for f, grad in grads.items()}
            sequences = self._exchanges_for(routed.shared_features)[0].sequences.backward(own, merged)
        return VectorGradients(bag_sets=bag_sets, sequences=sequences)

    def replicated_columns(self, grad_BS: Tensor) -> Tensor:
        """The gradients [B, columns] of replicated tables, which do not travel."""
        return torch.cat([grad_BS[:, columns] for columns in self._replicated.values()] or [grad_BS[:, :0]], 1)

    def _start_pooled(
        self, routed: RoutedBatch, grad_BS: Tensor
    ) -> Sequence[Callable[[], Mapping[ExchangePath, Tensor]]]:
        shared = routed.jagged.shared
        if not self.merge_shared or not routed.shared_features or shared is None:
            return [self._all_features.start_backward(routed.jagged, routed.samples_W, grad_BS)]
        # One gradient per distinct bag travels, for each bag set by itself: [Note: Merged bags] in
        # `tables/ops/shared.py`.
        exchanges = self._exchanges_for(routed.shared_features)
        own_BS, shared_BS = (select_columns(grad_BS, self._columns_of(exchange.routes)) for exchange in exchanges)
        steps = zip(exchanges, routed.bag_sets, (own_BS, sum_over_samples(shared_BS, shared)), strict=True)
        return [exchange.start_backward(x.sent.jagged, x.samples_W, grad) for exchange, x, grad in steps]

    def _exchanges_for(self, shared_features: tuple[str, ...]) -> tuple[BagSetExchange, ...]:
        if shared_features not in self._exchanges:
            # Splitting a communicator is a collective of its own; which features are shared changes with the batch,
            # so new bag sets reuse the process groups that were split at the start.
            process_groups = None if self._all_features.host is None else self._all_features.host.process_groups
            routes = split_bag_sets(self._routes, shared_features)
            exchanges = (BagSetExchange(one, self._comm, self._wire, process_groups) for one in routes)
            self._exchanges[shared_features] = tuple(exchanges)
        return self._exchanges[shared_features]

    def _columns_of(self, routes: Routes) -> tuple[FeatureColumns, ...]:
        """The output columns of a bag set's columns."""
        pairs = ((columns, self._routes.columns[feature]) for feature, columns in routes.columns.items())
        return merge_neighbours([FeatureColumns(own.start, to.start, own.stop - own.start) for own, to in pairs])


# Stages the gradients of this rank's pieces; returns the gradient of received per-id weights, if they are trained.
StageVectorGradients = Callable[[RoutedBatch, VectorGradients], Tensor | None]
Phase = Callable[[str], AbstractContextManager[None]]  # with "route", "prefetch", "lookup", "exchange" or "return"


def no_timing(_phase: str) -> AbstractContextManager[None]:
    """The `Phase` of a run that measures nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLookup:
    """This rank's lookups for a batch, and the callbacks for their gradients."""

    routed: RoutedBatch
    outputs: LookupOutputs
    replicated_sequences: Mapping[str, Tensor]  # sequences of replicated tables, which are not exchanged
    stage: StageVectorGradients
    returns: ReturnedGradients
    phase: Phase = no_timing


ReceiveVectors = Callable[[], tuple[Tensor, dict[str, Tensor]]]  # pooled features, and rows of sequences by feature


def start_exchange(exchange: EmbeddingExchange, lookup: BatchLookup, anchor: Tensor) -> ReceiveVectors:
    """Start to send looked-up vectors. The returned function receives this rank's; differentiable, call it once.

    See [Note: Everyone joins] and [Note: Vectors in flight].
    """
    with lookup.phase("exchange"):
        pending = exchange.start(lookup.routed, lookup.outputs)
    return partial(_receive_vectors, exchange, lookup, anchor, pending, torch.is_grad_enabled())


def _receive_vectors(
    exchange: EmbeddingExchange, lookup: BatchLookup, anchor: Tensor, pending: PendingBlocks | None, gradients: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    replicated = lookup.replicated_sequences
    with torch.set_grad_enabled(gradients):
        if not gradients:
            with lookup.phase("exchange"):
                out_BS, sequences = exchange.finish(lookup.routed, lookup.outputs, pending)
            return out_BS, sequences | dict(replicated)
        names: list[str] = []
        weights = lookup.routed.weights
        # Either makes the output require a gradient. Weights take the anchor's place on every rank, even one that
        # received none, as their own backward is an exchange that all ranks join.
        anchor_or_weights = anchor if weights is None else weights
        inputs = lookup.outputs.replicated, lookup.outputs.sequences, *replicated.values()
        call = exchange, lookup, pending, names
        out_BS, *rows = _ExchangeFunction.apply(anchor, anchor_or_weights, call, *inputs)
        return out_BS, dict(zip(names, rows, strict=True))


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        ctx, _anchor, anchor_or_weights, (exchange, lookup, pending, names), _pooled, _sequences, *replicated = args
        # A gradient of None says that no loss depends on an output ([Note: Unused outputs]); zeros would hide it.
        ctx.set_materialize_grads(False)
        with lookup.phase("exchange"):
            out_BS, sequences = exchange.finish(lookup.routed, lookup.outputs, pending)
        # Views, as a function may not return its inputs themselves.
        views = dict(zip(lookup.replicated_sequences, (x.view_as(x) for x in replicated), strict=True))
        outputs = {"": out_BS} | sequences | views
        names += list(outputs)[1:]  # an autograd function returns tensors only: names go back through this list
        # Not the lookup itself, which would keep its outputs alive until the backward.
        ctx.call = exchange, lookup.routed, lookup.stage, lookup.returns, lookup.phase, anchor_or_weights
        ctx.names, ctx.replicated = list(names), len(replicated)
        ctx.shapes = [x.shape for x in outputs.values()]
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        exchange, routed, stage, returns, phase, anchor_or_weights = ctx.call
        with phase("return"):
            returns.receive()
            # Before any gradient, and on every rank: which exchanges follow has to be the same everywhere.
            used = UsedKinds(grad_outputs[0] is not None, any(x is not None for x in grad_outputs[1:]))
            used = exchange.used_by_any(used)
            filled = zip(grad_outputs, ctx.shapes, strict=True)
            grad_BS, *grads = (anchor_or_weights.new_zeros(s) if x is None else x.contiguous() for x, s in filled)
            by_feature = dict(zip(ctx.names, grads, strict=True))
            exchanged = {name: by_feature[name] for name in ctx.names[: len(grads) - ctx.replicated]}
            receive = exchange.start_backward(routed, grad_BS, exchanged, used)
        sent = SentGradients(routed.jagged, grad_BS if used.pooled else None, by_feature if used.sequences else None)
        # Never None: the backward of the weights is an exchange, which has to run on this rank too.
        weight_grad, sequences = torch.zeros_like(anchor_or_weights), None
        if exchange.has_sequences or routed.weights is not None or not used.pooled:
            returns.add(sent, None)
            with phase("return"):
                received = receive()
            sequences = received.sequences
            staged = stage(routed, received) if used.pooled else None
            weight_grad = weight_grad if staged is None else staged
        else:
            returns.add(sent, partial(_stage_received, phase, stage, routed, receive))
        replicated = exchange.replicated_columns(grad_BS) if used.pooled else None
        rows = (sequences, *grads[len(exchanged) :]) if used.sequences else (None,) * (1 + ctx.replicated)
        return None, weight_grad, None, replicated, *rows


def _stage_received(
    phase: Phase, stage: StageVectorGradients, routed: RoutedBatch, receive: Callable[[], VectorGradients]
) -> None:
    with phase("return"):
        received = receive()
    stage(routed, received)
