"""Sends looked-up vectors to the ranks of the samples, and their gradients back, as one autograd function.

[Note: Everyone joins] A rank that holds no tile has nothing to send and nothing to update, but the other ranks still
wait for it in every collective, forward and backward. So all exchanges of a batch are in one autograd function, which
every rank applies once per batch. Its output requires a gradient through an anchor, so its backward runs on every rank,
and all ranks meet the same collectives in the same order.

[Note: Unused outputs] If no rank's loss depends on the pooled output, pooled tables are not updated: their rows and
optimizer state stay. The same holds for sequences. If a module has both kinds, a backward begins with an all-gather of
two flags.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.comm.interface import Comm
from rowwise.ops.output_cache import empty_cached
from rowwise.ops.shared import (
    FeatureColumns,
    FeatureVectors,
    merge_neighbours,
    merge_vectors,
    select_columns,
    sum_over_samples,
)
from rowwise.shard.bag_sets import split_bag_sets
from rowwise.shard.hosts import HostExchange
from rowwise.shard.pack import BagSet, RoutedBatch
from rowwise.shard.perid import PerIdExchange
from rowwise.shard.pooled import PooledExchange
from rowwise.shard.routes import ExchangePath, Routes
from rowwise.spec import Pooling, Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOutputs:
    """Local lookup results by exchange path; in backward, their gradients."""

    # One entry per bag set, by path: pooled vectors [G, columns] of the samples of all ranks; for `per_id` the rows of
    # all ids, flat. In backward every path has pooled gradients [G, columns], as bags on the `per_id` path have one
    # gradient each too; and one entry holds all features, except with `merge_shared`.
    bag_sets: Sequence[Mapping[ExchangePath, Tensor]]
    sequences: Tensor  # flat rows, feature after feature
    replicated: Tensor  # [B, columns] of replicated tables, of this rank's samples only


class UsedKinds(NamedTuple):
    """The kinds of outputs that the losses depend on. See [Note: Unused outputs]."""

    pooled: bool = True
    sequences: bool = True


ALL_USED = UsedKinds()


@final
class BagSetExchange:
    """Exchanges the vectors of one bag set: pooled vectors by all paths, and rows of sequences."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, process_groups: tuple[Comm, Comm] | None = None) -> None:
        """Collective, as `HostExchange` may split `comm`; `process_groups`: see there."""
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

    def backward(self, jagged: Jagged, samples_W: tuple[int, ...], grad_BS: Tensor) -> dict[ExchangePath, Tensor]:
        """The gradients [G, columns] of this rank's pieces by path, of the samples of all ranks."""
        # Owners of rows pooled sums, so the rank of the samples divides, in backward too: on the `per_id` path as well,
        # whose rows are updated by the gradient of a sum.
        if self._means:
            grad_BS = grad_BS.clone()
            for feature, inverse_B1, _ in self._inverse_counts(jagged):
                grad_BS[:, self.routes.columns[feature]] *= inverse_B1
        grads = dict.fromkeys(ExchangePath, grad_BS.new_empty((sum(samples_W), 0)))
        if self.pooled.any:
            grads[ExchangePath.ALL_TO_ALL] = self.pooled.backward(samples_W, grad_BS)
        if self.host is not None:
            grads[ExchangePath.HIERARCHICAL] = self.host.backward(samples_W, grad_BS)
        if self._per_id_gradients.any:
            grads[ExchangePath.PER_ID] = self._per_id_gradients.backward(samples_W, grad_BS)
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
        self._both = len({table.pooling is Pooling.SEQUENCE for table in routes.tables}) == 2
        self.merge_shared = False  # whether gradients of a shared bag are summed before they are sent
        self._routes, self._comm, self._wire = routes, comm, wire
        self._all_features = BagSetExchange(routes, comm, wire)
        # By shared features, one exchange per bag set.
        self._exchanges: dict[tuple[str, ...], tuple[BagSetExchange, ...]] = {(): (self._all_features,)}
        replicated = [table for table in routes.replicated if table.pooling is not Pooling.SEQUENCE]
        self._replicated = {feature: routes.columns[feature] for table in replicated for feature in table.feature_names}

    def forward(self, routed: RoutedBatch, outputs: LookupOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled features of this rank's batch [B, S], and the rows of its sequences by feature."""
        exchanges = self._exchanges_for(routed.shared_features)
        steps = list(zip(exchanges, routed.bag_sets, outputs.bag_sets, strict=True))
        received_W: list[list[Tensor]] = []
        # All bag sets in one all-to-all; one without pooled vectors adds empty blocks. All ranks decide alike.
        if self._all_features.pooled.any:
            sent = [(exchange.pooled, bag_set, local[ExchangePath.ALL_TO_ALL]) for exchange, bag_set, local in steps]
            received_W = PooledExchange.send(sent).wait()
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

    def backward(
        self, routed: RoutedBatch, grad_BS: Tensor, grads: dict[str, Tensor], used: UsedKinds = ALL_USED
    ) -> LookupOutputs:
        """The gradients of this rank's lookups, sent by the ranks of the samples; none of an unused kind."""
        own, sequences = routed.bag_sets[0], grad_BS.new_empty(0)
        bag_sets = self._backward_pooled(routed, grad_BS) if used.pooled else ()
        if used.sequences:
            repeats = own.sent.repeats
            merged = {f: repeats[f].merge(grad) if f in repeats else grad for f, grad in grads.items()}
            sequences = self._exchanges_for(routed.shared_features)[0].sequences.backward(own, merged)
        replicated = torch.cat([grad_BS[:, columns] for columns in self._replicated.values()] or [grad_BS[:, :0]], 1)
        return LookupOutputs(bag_sets=bag_sets, sequences=sequences, replicated=replicated)

    def _backward_pooled(self, routed: RoutedBatch, grad_BS: Tensor) -> Sequence[Mapping[ExchangePath, Tensor]]:
        shared = routed.jagged.shared
        if not self.merge_shared or not routed.shared_features or shared is None:
            return [self._all_features.backward(routed.jagged, routed.samples_W, grad_BS)]
        # One gradient per distinct bag travels, for each bag set by itself: [Note: Merged bags] in `ops/shared.py`.
        exchanges = self._exchanges_for(routed.shared_features)
        own_BS, shared_BS = (select_columns(grad_BS, self._columns_of(exchange.routes)) for exchange in exchanges)
        steps = zip(exchanges, routed.bag_sets, (own_BS, sum_over_samples(shared_BS, shared)), strict=True)
        return [exchange.backward(x.sent.jagged, x.samples_W, grad) for exchange, x, grad in steps]

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
StageVectorGradients = Callable[[RoutedBatch, LookupOutputs], Tensor | None]
Phase = Callable[[str], AbstractContextManager[None]]  # entered with "route", "lookup", "exchange" or "return"


def no_timing(_phase: str) -> AbstractContextManager[None]:
    """The `Phase` of a run that measures nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLookup:
    """This rank's lookups for a batch, and the callback that stages their gradients."""

    routed: RoutedBatch
    outputs: LookupOutputs
    replicated_sequences: Mapping[str, Tensor]  # sequences of replicated tables, which are not exchanged
    stage: StageVectorGradients
    phase: Phase = no_timing


def exchange_vectors(
    exchange: EmbeddingExchange, lookup: BatchLookup, anchor: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """`EmbeddingExchange.forward`, differentiable: the backward calls `lookup.stage`. See [Note: Everyone joins]."""
    replicated = lookup.replicated_sequences
    if not torch.is_grad_enabled():
        with lookup.phase("exchange"):
            out_BS, sequences = exchange.forward(lookup.routed, lookup.outputs)
        return out_BS, sequences | dict(replicated)
    names: list[str] = []
    weights = lookup.routed.weights
    # Either makes the output require a gradient. Weights take the anchor's place on every rank, even one that received
    # none, as their own backward is an exchange that all ranks join.
    anchor_or_weights = anchor if weights is None else weights
    inputs = lookup.outputs.replicated, lookup.outputs.sequences, *replicated.values()
    out_BS, *rows = _ExchangeFunction.apply(anchor, anchor_or_weights, (exchange, lookup, names), *inputs)
    return out_BS, dict(zip(names, rows, strict=True))


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        ctx, _anchor, anchor_or_weights, (exchange, lookup, names), _pooled, _sequences, *replicated = args
        # A gradient of None says that no loss depends on an output ([Note: Unused outputs]); zeros would hide it.
        ctx.set_materialize_grads(False)
        with lookup.phase("exchange"):
            out_BS, sequences = exchange.forward(lookup.routed, lookup.outputs)
        # Views, as a function may not return its inputs themselves.
        views = dict(zip(lookup.replicated_sequences, (x.view_as(x) for x in replicated), strict=True))
        outputs = {"": out_BS} | sequences | views
        names += list(outputs)[1:]  # an autograd function returns tensors only: names go back through this list
        # Not the lookup itself, which would keep its outputs alive until the backward.
        ctx.call = exchange, lookup.routed, lookup.stage, lookup.phase, anchor_or_weights
        ctx.names, ctx.replicated = list(sequences), len(replicated)
        ctx.shapes = [x.shape for x in outputs.values()]
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        exchange, routed, stage, phase, anchor_or_weights = ctx.call
        with phase("return"):
            # First of all, and on every rank: which exchanges follow has to be the same everywhere.
            used = UsedKinds(grad_outputs[0] is not None, any(x is not None for x in grad_outputs[1:]))
            used = exchange.used_by_any(used)
            filled = zip(grad_outputs, ctx.shapes, strict=True)
            grad_BS, *grads = (anchor_or_weights.new_zeros(s) if x is None else x.contiguous() for x, s in filled)
            outputs = exchange.backward(routed, grad_BS, dict(zip(ctx.names, grads, strict=False)), used)
        weight_grad = stage(routed, outputs) if used.pooled else None
        # Never None: the backward of the weights is an exchange, which has to run on this rank too.
        weight_grad = torch.zeros_like(anchor_or_weights) if weight_grad is None else weight_grad
        replicated = outputs.replicated if used.pooled else None
        rows = (outputs.sequences, *grads[len(ctx.names) :]) if used.sequences else (None,) * (1 + ctx.replicated)
        return None, weight_grad, None, replicated, *rows
