"""`BatchInFlight`: a batch from its lookup to its staged gradients; it sends vectors, and their gradients back.

[Note: Everyone joins] A rank that holds no tile has nothing to send and nothing to update, but the other ranks still
wait for it in every collective, forward and backward. So all exchanges of vectors are in one autograd function, which
every rank applies once per batch (trained per-id weights have another, in `ids.py`). Its output requires a gradient
through an anchor, so its backward runs on every rank, and all ranks meet the same collectives in the same order.

[Note: Vectors in flight] Both directions begin early and end late. `send` begins to send the vectors, and `receive`
waits for them: what a model computes between the two overlaps with the transfer. The backward begins to send gradients,
and the module waits for them as late as possible (`stage`): before the next backward sends, or when an update needs
them. It waits at once where autograd needs the result: for sequences, and for per-id weights that are trained.

[Note: Unused outputs] If no rank's loss depends on the pooled output, pooled tables are not updated: their rows and
optimizer state stay. The same holds for sequences. If a module has both kinds, a backward begins with an all-gather of
two flags.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.shard.bag_sets import split_bag_sets
from rowwise.parallel.shard.hosts import HostExchange
from rowwise.parallel.shard.pack import BagSet, RoutedBatch
from rowwise.parallel.shard.perid import PerIdExchange
from rowwise.parallel.shard.pooled import PendingGradients, PooledExchange
from rowwise.parallel.shard.routes import ExchangePath, PieceGroup, Routes
from rowwise.parallel.shard.sent import SentGradients
from rowwise.parallel.shard.vectors import PendingBlocks
from rowwise.tables.batch import Jagged
from rowwise.tables.embedding import LookedUp
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.ops.shared import (
    FeatureColumns,
    FeatureVectors,
    merge_neighbours,
    merge_vectors,
    select_columns,
    sum_over_samples,
)
from rowwise.tables.ops.tiles import Tiles
from rowwise.tables.spec import Pooling, Wire

Phase = Callable[[str], AbstractContextManager[None]]  # of "route", "prefetch", "lookup", "exchange" or "return"


def no_timing(_phase: str) -> AbstractContextManager[None]:
    """The `Phase` of a run that measures nothing."""
    return nullcontext()


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
        # Bags of the `per_id` path arrive as rows, but return one gradient each, like pooled vectors.
        self.per_id_gradients = PooledExchange(routes, comm, wire, ExchangePath.PER_ID)
        # Owners of row-cut MEAN tables return sums, and the rank of the samples divides: only it knows a bag's number
        # of ids.
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
            self.pooled.columns.write_output(received_W, out_BS)
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

    def start_backward(self, jagged: Jagged, samples_W: tuple[int, ...], grad_BS: Tensor) -> "ReturningBagSet":
        """Start to send the gradients of this rank's samples."""
        # Owners of rows pooled sums, so the rank of the samples divides, in backward too: on the `per_id` path as well,
        # whose rows are updated by the gradient of a sum.
        if self._means:
            grad_BS = grad_BS.clone()
            for feature, inverse_B1, _ in self._inverse_counts(jagged):
                grad_BS[:, self.routes.columns[feature]] *= inverse_B1
        pending = self.pooled.start_backward(samples_W, grad_BS) if self.pooled.any else None
        return ReturningBagSet(self, samples_W, grad_BS, pending)

    def _inverse_counts(self, jagged: Jagged) -> Iterator[tuple[str, Tensor, bool]]:
        """(feature, 1 / ids of each bag [B, 1], whether this rank pools its bags) for each mean over cut rows."""
        for feature, pooled_here in self._means:
            counts_B = jagged.lengths_of(feature)
            yield feature, (1.0 / counts_B.clamp(min=1).float()).unsqueeze(1), pooled_here


class ReturningBagSet(NamedTuple):
    """Gradients of one bag set, in flight to the ranks of the rows."""

    exchange: BagSetExchange
    samples_W: tuple[int, ...]
    grad_BS: Tensor
    pooled: PendingGradients | None

    def wait(self) -> dict[ExchangePath, Tensor]:
        """The gradients [G, columns] of this rank's pieces by path, of the samples of all ranks.

        On the `per_id` path as well, as its bags have one gradient each too.
        """
        exchange, samples_W, grad_BS, pooled = self
        grads = dict.fromkeys(ExchangePath, grad_BS.new_empty((sum(samples_W), 0)))
        if pooled is not None:
            grads[ExchangePath.ALL_TO_ALL] = pooled.wait()
        if exchange.host is not None:
            grads[ExchangePath.HIERARCHICAL] = exchange.host.backward(samples_W, grad_BS)
        if exchange.per_id_gradients.any:
            grads[ExchangePath.PER_ID] = exchange.per_id_gradients.start_backward(samples_W, grad_BS).wait()
        return grads


class UsedKinds(NamedTuple):
    """The kinds of outputs that the losses depend on. See [Note: Unused outputs]."""

    pooled: bool
    sequences: bool


@final
class EmbeddingExchange:
    """State shared by the batches of a module: pieces of tables, exchanges, and gradients since the last update.

    Args:
        routes: of all ranks.
        comm: the communicator of all ranks.
        wire: the types in which vectors and gradients travel.
        groups: this rank's pieces.
        replicated: tables that every rank holds.
    """

    def __init__(
        self,
        routes: Routes,
        comm: Comm,
        wire: Wire,
        groups: Sequence[tuple[PieceGroup, Tiles]],
        replicated: Tiles | None,
    ) -> None:
        """Collective, as `BagSetExchange` is."""
        kinds = {table.pooling is Pooling.SEQUENCE for table in routes.tables}
        self.has_sequences, self._has_both_kinds = True in kinds, len(kinds) == 2
        self.sends_exact_gradients = wire.has_exact("backward")
        self.merge_shared = False  # whether gradients of a shared bag are summed before they are sent
        self._routes, self._comm, self._wire = routes, comm, wire
        self.groups, self.replicated = groups, replicated
        self.all_features = BagSetExchange(routes, comm, wire)
        # By shared features, one exchange per bag set.
        self._exchanges: dict[tuple[str, ...], tuple[BagSetExchange, ...]] = {(): (self.all_features,)}
        pooled = [table for table in routes.replicated if table.pooling is not Pooling.SEQUENCE]
        self.replicated_columns = [routes.columns[feature] for table in pooled for feature in table.feature_names]
        self.sent: list[SentGradients] = []  # one per backward since the last update, alike on all ranks
        self.returning: BatchInFlight | None = None  # the batch whose gradients are in flight

    def receive_gradients(self) -> None:
        """Wait for the gradients in flight, and stage them; collective."""
        returning, self.returning = self.returning, None
        if returning is not None:
            returning.stage()

    def used_by_any(self, used: UsedKinds) -> UsedKinds:
        """The kinds of outputs that any rank uses; collective."""
        if not self._has_both_kinds or len(self._comm.ranks) == 1:
            return used
        flags_W2 = self._comm.all_gather(torch.tensor(used), [2] * len(self._comm.ranks), "status").wait().view(-1, 2)
        return UsedKinds(*flags_W2.any(0).tolist())

    def exchanges_for(self, shared_features: tuple[str, ...]) -> tuple[BagSetExchange, ...]:
        """The exchange of each bag set of a batch with these shared features, made at their first use."""
        if shared_features not in self._exchanges:
            # Splitting a communicator is a collective of its own, and shared features change with the batch: new bag
            # sets reuse the process groups of the constructor.
            process_groups = None if self.all_features.host is None else self.all_features.host.process_groups
            routes = split_bag_sets(self._routes, shared_features)
            exchanges = (BagSetExchange(split, self._comm, self._wire, process_groups) for split in routes)
            self._exchanges[shared_features] = tuple(exchanges)
        return self._exchanges[shared_features]

    def columns_of(self, exchange: BagSetExchange) -> tuple[FeatureColumns, ...]:
        """Maps a bag set's columns to columns of the output."""
        pairs = ((columns, self._routes.columns[feature]) for feature, columns in exchange.routes.columns.items())
        return merge_neighbours([FeatureColumns(a.start, b.start, a.stop - a.start) for a, b in pairs])


class LookupOutputs(NamedTuple):
    """This rank's lookups of a batch, before the exchange."""

    # One entry per bag set, by path: pooled vectors [G, columns] of the samples of all ranks; for `per_id` the rows of
    # all ids, flat.
    bag_sets: Sequence[Mapping[ExchangePath, Tensor]]
    sequences: Tensor  # flat rows, feature after feature
    replicated: Tensor  # [B, columns] of replicated tables, of this rank's samples only
    replicated_sequences: Mapping[str, Tensor]  # which are not exchanged


@final
class BatchInFlight:
    """A batch of all ranks, from its lookup to its staged gradients.

    The constructor looks up this rank's pieces. `send`, then `receive` get this rank's vectors; the backward of these
    sends gradients, which `stage` receives. See [Note: Everyone joins] and [Note: Vectors in flight].
    """

    def __init__(self, exchange: EmbeddingExchange, routed: RoutedBatch, phase: Phase) -> None:
        self._exchange, self._routed, self._phase = exchange, routed, phase
        self._bag_sets = list(zip(exchange.exchanges_for(routed.shared_features), routed.bag_sets, strict=True))
        self._with_gradients = torch.is_grad_enabled()
        self._outputs: LookupOutputs | None = self._look_up()  # until the vectors are received
        self._vectors: PendingBlocks | None = None
        # Any tensor that requires a gradient. Trained weights take its place on every rank, as their backward is an
        # exchange that all ranks join.
        device = routed.jagged.values_N.device
        self._anchor = torch.empty(0, device=device, requires_grad=True) if routed.weights is None else routed.weights
        self._shapes: dict[str, torch.Size] = {}  # shapes of the outputs by feature; "" is the pooled matrix
        self._replicated: list[str] = []  # sequences of replicated tables
        self._gradients: list[ReturningBagSet] = []
        self.scale = 1.0  # of gradients of rows

    def send(self) -> None:
        """Start to send the pooled vectors that travel in one all-to-all; `receive` sends the others."""
        assert self._outputs is not None
        with self._phase("exchange"):
            # All bag sets in one all-to-all; a set without pooled vectors adds empty blocks. All ranks decide alike.
            if self._exchange.all_features.pooled.any:
                steps = zip(self._bag_sets, self._outputs.bag_sets, strict=True)
                sent = [(exchange.pooled, x, local[ExchangePath.ALL_TO_ALL]) for (exchange, x), local in steps]
                self._vectors = PooledExchange.send(sent)

    def receive(self) -> LookedUp:
        """This rank's vectors: pooled features, and rows of sequences by feature; differentiable, call it once."""
        outputs, self._outputs = self._outputs, None
        assert outputs is not None
        with torch.set_grad_enabled(self._with_gradients):
            if not self._with_gradients:
                out_BS, sequences = self._receive_vectors(outputs)
                return out_BS, sequences | dict(outputs.replicated_sequences)
            inputs = outputs.replicated, outputs.sequences, *outputs.replicated_sequences.values()
            out_BS, *rows = _ExchangeFunction.apply(self._anchor, self, outputs, *inputs)
            return out_BS, dict(zip(list(self._shapes)[1:], rows, strict=True))

    def forward(self, outputs: LookupOutputs) -> tuple[Tensor, ...]:
        """The outputs of the autograd function."""
        out_BS, sequences = self._receive_vectors(outputs)
        # Views, as a function may not return its inputs themselves.
        views = {name: rows.view_as(rows) for name, rows in outputs.replicated_sequences.items()}
        vectors = {"": out_BS} | sequences | views
        self._shapes, self._replicated = {name: x.shape for name, x in vectors.items()}, list(views)
        return tuple(vectors.values())

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Start to send the gradients of the outputs.

        Returns those of the anchor, of replicated pooled vectors, of the sequences that this rank looked up, and of the
        sequences of replicated tables.
        """
        exchange, routed = self._exchange, self._routed
        with self._phase("return"):
            exchange.receive_gradients()
            # Agreed before any gradient is sent: all ranks must enter the same exchanges.
            used = UsedKinds(grad_outputs[0] is not None, any(x is not None for x in grad_outputs[1:]))
            used = exchange.used_by_any(used)
            outputs = zip(self._shapes.items(), grad_outputs, strict=True)
            grads = {name: self._anchor.new_zeros(s) if x is None else x.contiguous() for (name, s), x in outputs}
            if self.scale != 1:
                grads = {name: x * self.scale for name, x in grads.items()}
            grad_BS = grads.pop("")
            self._gradients = self._send_pooled(grad_BS) if used.pooled else []
        pooled_BS, grads_by_feature = grad_BS if used.pooled else None, grads if used.sequences else None
        exchange.sent.append(SentGradients(routed.jagged, pooled_BS, grads_by_feature))
        weight_grad = None
        if exchange.has_sequences or routed.weights is not None:
            weight_grad = self.stage()
        else:
            exchange.returning = self
        if weight_grad is not None and self.scale != 1:
            weight_grad = weight_grad / self.scale  # they are not rows
        if weight_grad is None:  # the backward of the weights is an exchange, which must run on this rank too
            weight_grad = torch.zeros_like(self._anchor)
        replicated, rows = None, [None] * (1 + len(self._replicated))
        if used.pooled:  # gradients of replicated tables do not travel
            replicated = torch.cat([grad_BS[:, :0], *(grad_BS[:, at] for at in exchange.replicated_columns)], 1)
        if used.sequences:
            rows = [self._return_sequences(grads), *(grads[name] for name in self._replicated)]
        return weight_grad, replicated, *rows

    def stage(self) -> Tensor | None:
        """Receive the gradients of this rank's pieces, and stage them.

        Returns the gradient of received per-id weights, if they are trained.
        """
        returning, self._gradients = self._gradients, list[ReturningBagSet]()
        with self._phase("return"):
            returned = [bag_set.wait() for bag_set in returning]
        received, weight_grad = self._routed.received, None
        if received is None or not returned:
            return None
        for group, tiles in self._exchange.groups:
            if not tiles.pooled.tables:
                continue
            # One gradient matrix per path holds the columns of all groups on it, in the order of the groups: each group
            # takes its columns from the front. With `merge_shared` there is one matrix per bag set, else one in all.
            shared_features = received.all_features[len(received.features) :]
            features_by_set = (received.features, shared_features) if len(returned) > 1 else (received.all_features,)
            grads: list[Tensor] = []
            for by_path, features in zip(returned, features_by_set, strict=True):
                columns = tiles.columns_of(features)
                grads.append(by_path[group.path][:, :columns].contiguous())
                by_path[group.path] = by_path[group.path][:, columns:]
            staged = tiles.stage_pooled(received, grads, self._routed.samples_W)
            if staged.weights is not None and self._routed.weights is not None:
                term = staged.call.weight_grad(tiles.arena, staged.weights, staged.grad)
                weight_grad = term if weight_grad is None else weight_grad + term
        return weight_grad

    def _look_up(self) -> LookupOutputs:
        """Look up this rank's pieces for the samples of all ranks, and replicated tables for its own samples."""
        own, jagged, full_tables = self._routed.bag_sets[0], self._routed.jagged, self._exchange.replicated
        flat, rows = torch.empty(0, device=jagged.values_N.device), dict[str, Tensor]()
        sequences = [
            tiles.look_up_sequences(own.received, own.samples_W).flat
            for group, tiles in self._exchange.groups
            if group.path is not ExchangePath.PER_ID and own.received is not None
        ]
        replicated = flat.new_empty(jagged.batch_size, 0)
        if full_tables is not None:
            output = full_tables.look_up(jagged)
            replicated, rows = output.matrix_BS, full_tables.split(output)
        bag_sets = [self._pool(bag_set, flat) for bag_set in self._routed.bag_sets]
        return LookupOutputs(bag_sets, _concat(sequences, 0, flat), replicated, rows)

    def _pool(self, bag_set: BagSet, flat: Tensor) -> dict[ExchangePath, Tensor]:
        # Outside autograd: for shared bags and on the path `per_id`, vectors sent and gradients received differ in
        # shape.
        outputs: dict[ExchangePath, list[Tensor]] = {path: [] for path in ExchangePath}
        for group, tiles in self._exchange.groups:
            if bag_set.received is not None:
                look_up = tiles.gather if group.path is ExchangePath.PER_ID else tiles.pool
                outputs[group.path].append(look_up(bag_set.received))
        matrix = flat.new_empty(sum(bag_set.samples_W), 0)
        return {
            path: _concat(parts, 0, flat) if path is ExchangePath.PER_ID else _concat(parts, 1, matrix)
            for path, parts in outputs.items()
        }

    def _receive_vectors(self, outputs: LookupOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled features of this rank's batch [B, S], and the rows of exchanged sequences by feature."""
        with self._phase("exchange"):
            pending, self._vectors = self._vectors, None
            received_W = list[list[Tensor]]() if pending is None else pending.wait()
            parts: list[FeatureVectors] = []
            for k, (exchange, bag_set) in enumerate(self._bag_sets):
                vectors_BS = exchange.output(bag_set, outputs.bag_sets[k], [blocks[k] for blocks in received_W])
                parts.append(FeatureVectors(vectors_BS, self._exchange.columns_of(exchange)))
            out_BS = merge_vectors(parts, self._routed.jagged.shared)
            at = 0
            for columns in self._exchange.replicated_columns:
                width = columns.stop - columns.start
                out_BS[:, columns] = outputs.replicated[:, at : at + width]
                at += width
            exchange, own = self._bag_sets[0]
            sequences = exchange.sequences.forward(own, outputs.sequences)
            for feature, repeats in own.sent.repeats.items():
                sequences[feature] = repeats.expand(sequences[feature])
            return out_BS, sequences

    def _send_pooled(self, grad_BS: Tensor) -> list[ReturningBagSet]:
        shared, routed = self._routed.jagged.shared, self._routed
        if not self._exchange.merge_shared or shared is None:
            return [self._exchange.all_features.start_backward(routed.jagged, routed.samples_W, grad_BS)]
        # One gradient per distinct bag travels, for each bag set by itself: [Note: Merged bags] in
        # `tables/ops/shared.py`.
        own_BS, shared_BS = (select_columns(grad_BS, self._exchange.columns_of(ex)) for ex, _ in self._bag_sets)
        steps = zip(self._bag_sets, (own_BS, sum_over_samples(shared_BS, shared)), strict=True)
        return [exchange.start_backward(x.sent.jagged, x.samples_W, grad) for (exchange, x), grad in steps]

    def _return_sequences(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Send the gradients of sequences; returns those of the rows that this rank looked up."""
        exchange, own = self._bag_sets[0]
        merged = {feature: repeats.merge(grads[feature]) for feature, repeats in own.sent.repeats.items()}
        with self._phase("return"):
            return exchange.sequences.backward(own, {**grads, **merged})


class _ExchangeFunction(torch.autograd.Function):
    """The autograd function of a batch; its inputs are an anchor, and the lookups that have a backward of their own."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        ctx, _anchor, batch, outputs, *_inputs = args
        # A gradient of None means that no loss depends on an output ([Note: Unused outputs]); zeros would hide it.
        ctx.set_materialize_grads(False)
        ctx.batch = batch
        return batch.forward(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        weight_grad, *rest = ctx.batch.backward(grad_outputs)
        return weight_grad, None, None, *rest


def _concat(parts: Sequence[Tensor], dim: int, empty: Tensor) -> Tensor:
    """torch.cat, without a copy of a single part; `empty` if there is none."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim) if parts else empty
