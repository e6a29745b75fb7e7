"""Sends looked-up vectors to the ranks that asked for them, and their gradients back, as one autograd function.

[Note: Everyone joins] A rank that holds no tile has nothing to send and nothing to update, but the other ranks still
wait for it in every collective, forward and backward. So all exchanges of a batch are in one autograd function, which
every rank applies once per batch. Its output requires a gradient through an anchor, so its backward runs on every rank,
and all ranks meet the same collectives in the same order.

[Note: Groups that are used] A backward that reaches no pooled vector stages nothing for pooled tables, so an update
leaves their rows and optimizer state alone; the same holds for sequences. Losses may differ between ranks: a group
counts as used if any rank uses it. If a module has both groups, a backward begins with an all-gather of two flags.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.comm.seam import Comm
from rowwise.ops.output_cache import empty_cached
from rowwise.ops.shared import (
    FeatureColumns,
    FeatureVectors,
    merge_neighbours,
    merge_vectors,
    select_columns,
    sum_over_samples,
)
from rowwise.shard.hosts import HostExchange
from rowwise.shard.ids import RoutedBatch, Stream
from rowwise.shard.perid import PerIdExchange
from rowwise.shard.pooled import PooledExchange
from rowwise.shard.routes import ExchangePath, Routes
from rowwise.spec import Pooling, Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOutputs:
    """Local lookup results by exchange path; in backward, their gradients."""

    # One entry per stream, by path: pooled vectors [G, columns] of the samples of all ranks; for `per_id` the rows of
    # all ids, flat. In backward every path has pooled gradients [G, columns], as even bags that the requester pools
    # send one gradient per bag; and one entry holds all features, except with `merge_shared`.
    streams: Sequence[Mapping[ExchangePath, Tensor]]
    sequences: Tensor  # flat rows, feature after feature
    copies: Tensor  # [B, columns] of copied tables, of this rank's samples only


class UsedGroups(NamedTuple):
    """The groups of tables that the losses depend on. See [Note: Groups that are used]."""

    pooled: bool = True
    sequences: bool = True


ALL_USED = UsedGroups()


@final
class StreamExchange:
    """Exchanges the vectors of one stream: pooled vectors by all paths, and rows of sequences."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, groups: tuple[Comm, Comm] | None = None) -> None:
        """Collective, as `HostExchange` may split `comm`; `groups`: see there."""
        paths = {group.path for groups in routes.groups_W for group in groups}
        self.routes = routes
        self.pooled = PooledExchange(routes, comm, wire, ExchangePath.ALL_TO_ALL)
        self.host = HostExchange(routes, comm, wire, groups) if ExchangePath.HIERARCHICAL in paths else None
        self.sequences = PerIdExchange(routes, comm, wire, ExchangePath.ALL_TO_ALL)
        self._per_id = PerIdExchange(routes, comm, wire, ExchangePath.PER_ID)
        # Bags of the `per_id` path arrive as rows but have one gradient each, which travels like a pooled vector's.
        self._per_id_gradients = PooledExchange(routes, comm, wire, ExchangePath.PER_ID)
        # A rank with some of a table's rows does not know how many ids a bag has elsewhere. So holders of row-cut MEAN
        # tables return sums, and the requesting rank divides.
        self._means = [
            (feature, table in routes.tables_pooled_by_requester)
            for table in routes.tables
            if table.pooling is Pooling.MEAN
            for feature in table.feature_names
            if len(routes.cuts[feature]) > 2
        ]

    def output(self, stream: Stream, outputs: Mapping[ExchangePath, Tensor], received: list[Tensor]) -> Tensor:
        """The columns [B, S] of the stream, without those of copies; `received`: pooled vectors from each rank."""
        jagged = stream.sent.jagged
        out_BS = empty_cached((jagged.batch_size, self.routes.width), outputs[ExchangePath.ALL_TO_ALL])
        if self.pooled.any:
            self.pooled.write_output(received, out_BS)
        if self.host is not None:
            self.host.forward(stream.samples_W, outputs[ExchangePath.HIERARCHICAL], out_BS)
        # Means of the `per_id` path are divided by the pooling kernel, in `_per_id.pool` below.
        for feature, inverse_B1, pooled_here in self._inverse_counts(jagged):
            if not pooled_here:
                out_BS[:, self.routes.columns[feature]] *= inverse_B1
        rows = self._per_id.forward(stream, outputs[ExchangePath.PER_ID])
        for feature, pooled in self._per_id.pool(stream, rows).items():
            out_BS[:, self.routes.columns[feature]] = pooled
        return out_BS

    def backward(self, jagged: Jagged, samples_W: tuple[int, ...], grad_BS: Tensor) -> dict[ExchangePath, Tensor]:
        """The gradients [G, columns] of this rank's pieces by path, of the samples of all ranks."""
        # Holders pooled sums, so a mean's division belongs to this side, in backward too: on the `per_id` path as well,
        # whose rows are updated by the gradient of a sum.
        if self._means:
            grad_BS = grad_BS.clone()
            for feature, inverse_B1, _ in self._inverse_counts(jagged):
                grad_BS[:, self.routes.columns[feature]] *= inverse_B1
        found = dict.fromkeys(ExchangePath, grad_BS.new_empty((sum(samples_W), 0)))
        if self.pooled.any:
            found[ExchangePath.ALL_TO_ALL] = self.pooled.backward(samples_W, grad_BS)
        if self.host is not None:
            found[ExchangePath.HIERARCHICAL] = self.host.backward(samples_W, grad_BS)
        if self._per_id_gradients.any:
            found[ExchangePath.PER_ID] = self._per_id_gradients.backward(samples_W, grad_BS)
        return found

    def _inverse_counts(self, jagged: Jagged) -> Iterator[tuple[str, Tensor, bool]]:
        """(feature, 1 / ids of each bag [B, 1], whether this rank pools its bags) for each mean over cut rows."""
        for feature, pooled_here in self._means:
            counts_B = jagged.lengths_of(feature)
            yield feature, (1.0 / counts_B.clamp(min=1).float()).unsqueeze(1), pooled_here


@final
class EmbeddingExchange:
    """Exchanges the vectors of a module's batches, stream by stream, and their gradients."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire) -> None:
        kinds = {table.pooling is Pooling.SEQUENCE for table in routes.tables}
        self._both = len(kinds) == 2  # pooled tables and sequences
        self.merge_shared = False  # whether gradients of a shared bag are summed before they are sent
        self._routes, self._comm, self._wire = routes, comm, wire
        self._whole = StreamExchange(routes, comm, wire)
        self._exchanges: dict[tuple[str, ...], tuple[StreamExchange, ...]] = {(): (self._whole,)}  # by shared features
        copied = [table for table in routes.copied if table.pooling is not Pooling.SEQUENCE]
        self._copied = {feature: routes.columns[feature] for table in copied for feature in table.feature_names}

    def forward(self, routed: RoutedBatch, outputs: LookupOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled features of this rank's batch [B, S], and the rows of its sequences by feature."""
        exchanges = self._exchanges_for(routed.common)
        steps = list(zip(exchanges, routed.streams, outputs.streams, strict=True))
        received: list[list[Tensor]] = []
        # Both streams in one all-to-all. The condition is that of all features: it is alike on all ranks, and a stream
        # without pooled vectors just adds empty blocks.
        if self._whole.pooled.any:
            sent = [(exchange.pooled, stream, found[ExchangePath.ALL_TO_ALL]) for exchange, stream, found in steps]
            received = PooledExchange.send(sent).wait()
        parts = [
            FeatureVectors(
                exchange.output(stream, found, [blocks[k] for blocks in received]), self._columns_of(exchange.routes)
            )
            for k, (exchange, stream, found) in enumerate(steps)
        ]
        out_BS = merge_vectors(parts, routed.jagged.shared)
        at = 0
        for columns in self._copied.values():
            width = columns.stop - columns.start
            out_BS[:, columns] = outputs.copies[:, at : at + width]
            at += width
        own = routed.streams[0]
        sequences = exchanges[0].sequences.forward(own, outputs.sequences)
        for feature, repeats in own.sent.repeats.items():
            sequences[feature] = repeats.expand(sequences[feature])
        return out_BS, sequences

    def used_by_any(self, mine: UsedGroups) -> UsedGroups:
        """The groups that any rank uses; collective."""
        if not self._both or len(self._comm.ranks) == 1:
            return mine
        flags_W2 = self._comm.all_gather(torch.tensor(mine), [2] * len(self._comm.ranks), "status").wait().view(-1, 2)
        return UsedGroups(*flags_W2.any(0).tolist())

    def backward(
        self, routed: RoutedBatch, grad_BS: Tensor, grads: dict[str, Tensor], used: UsedGroups = ALL_USED
    ) -> LookupOutputs:
        """The gradients of this rank's lookups, sent by the ranks that asked for them; none of an unused group."""
        own, sequences = routed.streams[0], grad_BS.new_empty(0)
        streams = self._backward_pooled(routed, grad_BS) if used.pooled else ()
        if used.sequences:
            repeats = own.sent.repeats
            merged = {f: repeats[f].merge(grad) if f in repeats else grad for f, grad in grads.items()}
            sequences = self._exchanges_for(routed.common)[0].sequences.backward(own, merged)
        copies = torch.cat([grad_BS[:, columns] for columns in self._copied.values()] or [grad_BS[:, :0]], 1)
        return LookupOutputs(streams=streams, sequences=sequences, copies=copies)

    def _backward_pooled(self, routed: RoutedBatch, grad_BS: Tensor) -> Sequence[Mapping[ExchangePath, Tensor]]:
        shared = routed.jagged.shared
        if not self.merge_shared or not routed.common or shared is None:
            return [self._whole.backward(routed.jagged, routed.samples_W, grad_BS)]
        # [Note: Merged bags]: one gradient per distinct bag travels, so each stream goes its own way back.
        exchanges = self._exchanges_for(routed.common)
        own_BS, common_BS = (select_columns(grad_BS, self._columns_of(exchange.routes)) for exchange in exchanges)
        return [
            exchange.backward(stream.sent.jagged, stream.samples_W, grad)
            for exchange, stream, grad in zip(
                exchanges, routed.streams, (own_BS, sum_over_samples(common_BS, shared)), strict=True
            )
        ]

    def _exchanges_for(self, common: tuple[str, ...]) -> tuple[StreamExchange, ...]:
        if common not in self._exchanges:
            # Splitting a communicator is a collective of its own; which features are shared changes with the batch,
            # so new streams reuse the groups that were split at the start.
            groups = None if self._whole.host is None else self._whole.host.groups
            streams = self._routes.split_streams(common)
            self._exchanges[common] = tuple(StreamExchange(one, self._comm, self._wire, groups) for one in streams)
        return self._exchanges[common]

    def _columns_of(self, routes: Routes) -> tuple[FeatureColumns, ...]:
        """The output columns of a stream's columns."""
        found = ((own, self._routes.columns[feature]) for feature, own in routes.columns.items())
        return merge_neighbours([FeatureColumns(own.start, whole.start, own.stop - own.start) for own, whole in found])


StageVectorGradients = Callable[
    [RoutedBatch, LookupOutputs], Tensor | None
]  # returns the gradient of received per-id weights
Phase = Callable[[str], AbstractContextManager[None]]  # entered with "route", "lookup", "exchange" or "return"


def no_timing(_phase: str) -> AbstractContextManager[None]:
    """The `Phase` of a run that measures nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLookup:
    """This rank's lookups for a batch, and the callback that stages their gradients."""

    routed: RoutedBatch
    outputs: LookupOutputs
    copied: Mapping[str, Tensor]  # sequences of copied tables, which are not exchanged
    stage: StageVectorGradients
    phase: Phase = no_timing


def exchange_vectors(
    exchanges: EmbeddingExchange, lookup: StreamLookup, anchor: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """`EmbeddingExchange.forward`, differentiable: the backward calls `lookup.stage`. See [Note: Everyone joins]."""
    if not torch.is_grad_enabled():
        with lookup.phase("exchange"):
            out_BS, found = exchanges.forward(lookup.routed, lookup.outputs)
        return out_BS, found | dict(lookup.copied)
    names: list[str] = []
    weights = lookup.routed.weights
    # Either makes the output require a gradient. Weights take the anchor's place on every rank, even one that received
    # none, as their own backward is an exchange that all ranks join.
    anchor_or_weights = anchor if weights is None else weights
    inputs = lookup.outputs.copies, lookup.outputs.sequences, *lookup.copied.values()
    out_BS, *sequences = _ExchangeFunction.apply(anchor, anchor_or_weights, (exchanges, lookup, names), *inputs)
    return out_BS, dict(zip(names, sequences, strict=True))


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        ctx, _anchor, anchor_or_weights, (exchanges, lookup, names), _copies, _sequences, *copied_sequences = args
        # A gradient of None says that no loss depends on a group ([Note: Groups that are used]); zeros would hide it.
        ctx.set_materialize_grads(False)
        with lookup.phase("exchange"):
            out_BS, sequences = exchanges.forward(lookup.routed, lookup.outputs)
        # Views, as a function may not return its inputs themselves.
        copied = dict(zip(lookup.copied, (x.view_as(x) for x in copied_sequences), strict=True))
        outputs = {"": out_BS} | sequences | copied
        names += list(outputs)[1:]  # an autograd function returns tensors only: names go back through this list
        ctx.kept = exchanges, lookup.routed, list(sequences), len(copied), lookup.stage, lookup.phase, anchor_or_weights
        ctx.shapes = [x.shape for x in outputs.values()]
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        exchanges, routed, names, copied, stage, phase, anchor_or_weights = ctx.kept
        with phase("return"):
            # First of all, and on every rank: which exchanges follow has to be the same everywhere.
            used = exchanges.used_by_any(
                UsedGroups(grad_outputs[0] is not None, any(x is not None for x in grad_outputs[1:]))
            )
            filled = zip(grad_outputs, ctx.shapes, strict=True)
            grad_BS, *grads = (anchor_or_weights.new_zeros(s) if x is None else x.contiguous() for x, s in filled)
            outputs = exchanges.backward(routed, grad_BS, dict(zip(names, grads, strict=False)), used)
        weight_grad = stage(routed, outputs) if used.pooled else None
        # Never None: the backward of the weights is an exchange, which has to run on this rank too.
        weight_grad = torch.zeros_like(anchor_or_weights) if weight_grad is None else weight_grad
        copies = outputs.copies if used.pooled else None
        sequences = (outputs.sequences, *grads[len(names) :]) if used.sequences else (None,) * (1 + copied)
        return None, weight_grad, None, copies, *sequences
