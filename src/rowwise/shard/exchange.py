"""Looked-up vectors to the samples' ranks, and their gradients back, as one step of autograd.

[Note: Everyone joins] A rank that holds no tile has nothing to send forward and nothing to update, and yet the others
wait for it, forward and backward. All exchanges therefore are in one function, which every rank applies once for each
batch; its output requires a gradient by way of an anchor, so that its backward runs on every rank, and all ranks meet
the same collectives in the same order.

[Note: Groups that are used] A backward that leads to no pooled vector stages nothing for pooled tables, so that an
update leaves them and their optimizer state alone; the same holds for sequences. Of several ranks each may use others:
a group counts as used if any rank uses it. Where a module has both, a backward begins by telling the others.
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
    join_neighbours,
    pick_columns,
    spread_to_samples,
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
    """Local lookup results; in backward, their gradients."""

    # Of each stream by path: pooled vectors [G, columns], or per id the rows of all, one after the other. Gradients are
    # pooled by every path, and those of all samples at once, unless the streams' are added up.
    streams: Sequence[Mapping[ExchangePath, Tensor]]
    sequences: Tensor  # one after the other
    copies: Tensor  # [B, columns] of this rank's samples


class UsedGroups(NamedTuple):
    """The groups of tables that the losses of all ranks depend on. See [Note: Groups that are used]."""

    pooled: bool = True
    sequences: bool = True


ALL_USED = UsedGroups()


@final
class StreamExchange:
    """Pooled vectors of some features, by all paths, and the vectors of sequences."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, groups: tuple[Comm, Comm] | None = None) -> None:
        """Work out what does not depend on a batch; called by all ranks. `groups`: see `HostExchange`."""
        paths = {part.path for parts in routes.parts_W for part in parts}
        self.routes = routes
        self.pooled = PooledExchange(routes, comm, wire, ExchangePath.ALL_TO_ALL)
        self.host = HostExchange(routes, comm, wire, groups) if ExchangePath.HIERARCHICAL in paths else None
        self.sequences = PerIdExchange(routes, comm, wire, ExchangePath.ALL_TO_ALL)
        self._rows = PerIdExchange(routes, comm, wire, ExchangePath.PER_ID)
        self._sums = PooledExchange(routes, comm, wire, ExchangePath.PER_ID)  # of which only gradients travel
        # A rank with some of the rows cannot know how many ids a bag has: those tables add up, and this divides.
        self._means = [
            (feature, table in routes.added_in_order)
            for table in routes.tables
            if table.pooling is Pooling.MEAN
            for feature in table.feature_names
            if len(routes.cuts[feature]) > 2
        ]

    def place(self, stream: Stream, outputs: Mapping[ExchangePath, Tensor], came: list[Tensor]) -> Tensor:
        """All columns [B, S], but those of copies; `came`: pooled vectors from each rank."""
        jagged = stream.sent.jagged
        out_BS = empty_cached((jagged.batch_size, self.routes.width), outputs[ExchangePath.ALL_TO_ALL])
        if self.pooled.any:
            self.pooled.place(came, out_BS)
        if self.host is not None:
            self.host.forward(stream.samples_W, outputs[ExchangePath.HIERARCHICAL], out_BS)
        for feature, inverse_B1, in_order in self._inverses(jagged):
            if not in_order:
                out_BS[:, self.routes.columns[feature]] *= inverse_B1
        rows = self._rows.forward(stream, outputs[ExchangePath.PER_ID])
        for feature, pooled in self._rows.pool(stream, rows).items():
            out_BS[:, self.routes.columns[feature]] = pooled
        return out_BS

    def backward(self, jagged: Jagged, samples_W: tuple[int, ...], grad_BS: Tensor) -> dict[ExchangePath, Tensor]:
        """The gradients [G, columns] by path, on the ranks that hold the rows."""
        if self._means:
            grad_BS = grad_BS.clone()
            for feature, inverse_B1, _ in self._inverses(jagged):
                grad_BS[:, self.routes.columns[feature]] *= inverse_B1
        found = dict.fromkeys(ExchangePath, grad_BS.new_empty((sum(samples_W), 0)))
        if self.pooled.any:
            found[ExchangePath.ALL_TO_ALL] = self.pooled.backward(samples_W, grad_BS)
        if self.host is not None:
            found[ExchangePath.HIERARCHICAL] = self.host.backward(samples_W, grad_BS)
        if self._sums.any:
            found[ExchangePath.PER_ID] = self._sums.backward(samples_W, grad_BS)
        return found

    def _inverses(self, jagged: Jagged) -> Iterator[tuple[str, Tensor, bool]]:
        """For each mean over cut rows: one over the ids of each bag [B, 1]."""
        for feature, in_order in self._means:
            counts_B = jagged.lengths_of(feature)
            yield feature, (1.0 / counts_B.clamp(min=1).float()).unsqueeze(1), in_order


@final
class EmbeddingExchange:
    """Moves vectors as the routes say."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire) -> None:
        """Work out what does not depend on a batch; called by all ranks."""
        kinds = {table.pooling is Pooling.SEQUENCE for table in routes.tables}
        self._both = len(kinds) == 2  # pooled tables and sequences
        self.merges = False  # gradients of bags that samples share, before they travel
        self._routes, self._comm, self._wire = routes, comm, wire
        self._whole = StreamExchange(routes, comm, wire)
        self._streams: dict[tuple[str, ...], tuple[StreamExchange, ...]] = {(): (self._whole,)}  # by shared features
        copied = [table for table in routes.copied if table.pooling is not Pooling.SEQUENCE]
        self._copied = {feature: routes.columns[feature] for table in copied for feature in table.feature_names}

    def forward(self, routed: RoutedBatch, outputs: LookupOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled features of this rank's batch [B, S], and the rows of its sequences."""
        moves = self._streams_for(routed.common)
        steps = list(zip(moves, routed.streams, outputs.streams, strict=True))
        came: list[list[Tensor]] = []
        if self._whole.pooled.any:
            sent = [(move.pooled, stream, found[ExchangePath.ALL_TO_ALL]) for move, stream, found in steps]
            came = PooledExchange.send(sent).wait()
        parts = [
            FeatureVectors(move.place(stream, found, [blocks[k] for blocks in came]), self._columns_of(move.routes))
            for k, (move, stream, found) in enumerate(steps)
        ]
        out_BS = spread_to_samples(parts, routed.jagged.shared)
        at = 0
        for columns in self._copied.values():
            width = columns.stop - columns.start
            out_BS[:, columns] = outputs.copies[:, at : at + width]
            at += width
        own = routed.streams[0]
        sequences = moves[0].sequences.forward(own, outputs.sequences)
        for feature, repeats in own.sent.repeats.items():
            sequences[feature] = repeats.expand(sequences[feature])
        return out_BS, sequences

    def used(self, mine: UsedGroups) -> UsedGroups:
        """What any rank uses; called by all."""
        if not self._both or len(self._comm.ranks) == 1:
            return mine
        flags_W2 = self._comm.all_gather(torch.tensor(mine), [2] * len(self._comm.ranks), "status").wait().view(-1, 2)
        return UsedGroups(*flags_W2.any(0).tolist())

    def backward(
        self, routed: RoutedBatch, grad_BS: Tensor, grads: dict[str, Tensor], used: UsedGroups = ALL_USED
    ) -> LookupOutputs:
        """Send the gradients to the ranks that looked the vectors up; nothing for a group that nobody uses."""
        own, sequences = routed.streams[0], grad_BS.new_empty(0)
        streams = self._backward_pooled(routed, grad_BS) if used.pooled else ()
        if used.sequences:
            repeats = own.sent.repeats
            merged = {f: repeats[f].merge(grad) if f in repeats else grad for f, grad in grads.items()}
            sequences = self._streams_for(routed.common)[0].sequences.backward(own, merged)
        copies = torch.cat([grad_BS[:, columns] for columns in self._copied.values()] or [grad_BS[:, :0]], 1)
        return LookupOutputs(streams=streams, sequences=sequences, copies=copies)

    def _backward_pooled(self, routed: RoutedBatch, grad_BS: Tensor) -> Sequence[Mapping[ExchangePath, Tensor]]:
        shared = routed.jagged.shared
        if not self.merges or not routed.common or shared is None:
            return [self._whole.backward(routed.jagged, routed.samples_W, grad_BS)]
        moves = self._streams_for(routed.common)  # see [Note: Merged bags]
        own_BS, common_BS = (pick_columns(grad_BS, self._columns_of(move.routes)) for move in moves)
        return [
            move.backward(stream.sent.jagged, stream.samples_W, grad)
            for move, stream, grad in zip(
                moves, routed.streams, (own_BS, sum_over_samples(common_BS, shared)), strict=True
            )
        ]

    def _streams_for(self, common: tuple[str, ...]) -> tuple[StreamExchange, ...]:
        if common not in self._streams:
            groups = None if self._whole.host is None else self._whole.host.groups
            streams = self._routes.streams(common)
            self._streams[common] = tuple(StreamExchange(one, self._comm, self._wire, groups) for one in streams)
        return self._streams[common]

    def _columns_of(self, routes: Routes) -> tuple[FeatureColumns, ...]:
        """Where the columns of a stream are among all."""
        found = ((own, self._routes.columns[feature]) for feature, own in routes.columns.items())
        return join_neighbours([FeatureColumns(own.start, whole.start, own.stop - own.start) for own, whole in found])


Stage = Callable[[RoutedBatch, LookupOutputs], Tensor | None]
Phase = Callable[[str], AbstractContextManager[None]]  # of a step: "route", "lookup", "exchange", "return"


def no_timing(_phase: str) -> AbstractContextManager[None]:
    """Nobody wants to know what a phase takes."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLookup:
    """The local lookup of a stream, and the function that takes its gradients."""

    routed: RoutedBatch
    outputs: LookupOutputs
    copied: Mapping[str, Tensor]  # sequences of copies, which do not travel
    stage: Stage
    phase: Phase = no_timing


def exchange(moves: EmbeddingExchange, lookup: StreamLookup, anchor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`EmbeddingExchange.forward` with a gradient, which `stage` is told of. See [Note: Everyone joins]."""
    if not torch.is_grad_enabled():
        with lookup.phase("exchange"):
            out_BS, found = moves.forward(lookup.routed, lookup.outputs)
        return out_BS, found | dict(lookup.copied)
    names: list[str] = []
    weights = lookup.routed.weights
    joins = anchor if weights is None else weights  # whose backward every rank has to run, too
    inputs = lookup.outputs.copies, lookup.outputs.sequences, *lookup.copied.values()
    out_BS, *sequences = _ExchangeFunction.apply(anchor, joins, (moves, lookup, names), *inputs)
    return out_BS, dict(zip(names, sequences, strict=True))


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        ctx, _anchor, joins, (moves, lookup, names), _copies, _sequences, *copied_sequences = args
        ctx.set_materialize_grads(False)  # see [Note: Groups that are used]
        with lookup.phase("exchange"):
            out_BS, sequences = moves.forward(lookup.routed, lookup.outputs)
        copied = dict(zip(lookup.copied, (x.view_as(x) for x in copied_sequences), strict=True))
        outputs = {"": out_BS} | sequences | copied
        names += list(outputs)[1:]
        ctx.kept = moves, lookup.routed, list(sequences), len(copied), lookup.stage, lookup.phase, joins
        ctx.shapes = [x.shape for x in outputs.values()]
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        moves, routed, names, copied, stage, phase, joins = ctx.kept
        with phase("return"):
            used = moves.used(UsedGroups(grad_outputs[0] is not None, any(x is not None for x in grad_outputs[1:])))
            given_or_0 = zip(grad_outputs, ctx.shapes, strict=True)
            grad_BS, *grads = (joins.new_zeros(s) if x is None else x.contiguous() for x, s in given_or_0)
            given = moves.backward(routed, grad_BS, dict(zip(names, grads, strict=False)), used)
        learned = stage(routed, given) if used.pooled else None
        learned = torch.zeros_like(joins) if learned is None else learned
        copies = given.copies if used.pooled else None
        sequences = (given.sequences, *grads[len(names) :]) if used.sequences else (None,) * (1 + copied)
        return None, learned, None, copies, *sequences
