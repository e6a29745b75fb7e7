"""Packs the ids of a batch into one message per destination rank, and unpacks the messages that arrive.

A message is 32-bit words: the bag lengths of each slice, then all ids, then all per-id weights if the rank holds a
weighted table. Ids take two words each in messages to a rank that holds a piece of a table with 2**31 rows or more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, IdError
from rowwise.parallel.shard.distinct import DistinctIds, deduplicate_sequences, repeatable_features
from rowwise.parallel.shard.routes import ExchangePath, FeatureSlice, Routes
from rowwise.tables.batch import Jagged
from rowwise.tables.ops import check
from rowwise.tables.ops.jagged import bucketize, row_bounds
from rowwise.tables.ops.pinned import copy_to
from rowwise.tables.ops.tiles import check_weights
from rowwise.tables.ops.unknown import UnknownIds, map_unknown
from rowwise.tables.spec import Pooling

WIDE_ROWS = 1 << 31
NO_LIMIT = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBatch:
    """Ids sent to each rank, and the positions that scatter the returned vectors back into the batch."""

    jagged: Jagged  # the batch as sent; unknown ids replaced by a table's last row where it allows that
    words: Tensor  # the messages to all ranks, in rank order
    sizes_W: tuple[int, ...]  # words in the message to each rank
    counts_W: tuple[tuple[int, ...], ...]  # ids sent to each rank, by slice
    id_ranges: Mapping[str, tuple[int, int]]  # begin and end of each feature's ids in the batch
    positions_N: Tensor | None  # position in the batch of each id sent; None if no exchange needs it
    repeats: Mapping[str, DistinctIds]  # distinct ids by sequence feature, where repeats are sent once

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "SentBatch":
        """Apply `change` to each tensor that the exchange of vectors needs; not to the messages, which were sent."""
        return replace(
            self,
            jagged=self.jagged.map_tensors(change),
            positions_N=None if self.positions_N is None else change(self.positions_N),
            repeats={feature: ids.map_tensors(change) for feature, ids in self.repeats.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BagSet:
    """A batch, or a subset of its features, after the exchange of ids. See [Note: Bag sets] in `bag_sets.py`."""

    sent: SentBatch
    samples_W: tuple[int, ...]  # samples of each rank; this rank looks up for all of them, in this order
    ids_WS: tuple[tuple[int, ...], ...]  # ids that each rank sent for each slice of this rank; zeros if unused
    received: Jagged | None  # ids of this rank's slices, of all ranks' samples; None if it holds no piece

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "BagSet":
        received = self.received and self.received.map_tensors(change)
        return replace(self, sent=self.sent.map_tensors(change), received=received)


class PackedBatch(NamedTuple):
    """A batch packed into one message per rank."""

    batch: Jagged  # before unknown ids are replaced
    jagged: Jagged  # unknown ids replaced
    sent: tuple[SentBatch, ...]  # by bag set
    words: Tensor  # the messages in rank order
    sizes_W: Sequence[int]
    trains_weights: bool = False  # whether per-id weights get a gradient
    shared_features: tuple[str, ...] = ()  # features of the second bag set


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedBatch:
    """A batch after its ids were exchanged."""

    jagged: Jagged  # this rank's batch, unknown ids replaced
    received: Jagged | None  # the received ids of all bag sets as one batch, in which samples share bags
    bag_sets: tuple[BagSet, ...]
    shared_features: tuple[str, ...] = ()  # features of the second bag set
    weights: Tensor | None = None  # received per-id weights if they require gradients: in the graph on every rank
    unknown: tuple[UnknownIds, ...] = ()  # unknown ids of this rank's batch

    @property
    def samples_W(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return self.bag_sets[0].samples_W

    def to(self, device: torch.device) -> "RoutedBatch":
        """The batch on the device of the rows; it is routed where its ids are, on a GPU's host as a rule."""
        if self.jagged.values_N.device.type == device.type:
            return self

        copied: dict[int, Tensor] = {}  # by id: without shared bags, the batch and its bag set share tensors

        def change(x: Tensor) -> Tensor:
            if id(x) not in copied:
                copied[id(x)] = copy_to(x, device)
            return copied[id(x)]

        return replace(
            self,
            jagged=self.jagged.map_tensors(change),
            received=self.received and self.received.map_tensors(change),
            bag_sets=tuple(bag_set.map_tensors(change) for bag_set in self.bag_sets),
            weights=None if self.weights is None else self.weights.to(device),
        )


@final
class Packer:
    """Packs and unpacks the messages of a batch; `unknown` gets the ids outside their table."""

    def __init__(self, routes: Routes, rank: int, unknown: list[UnknownIds]) -> None:
        self._routes, self._me = routes, rank
        self._unknown = unknown
        tables = routes.tables
        self._wide_W = [any(tables[s.table].rows >= WIDE_ROWS for s in slices) for slices in routes.slices_W]
        weighted = {i for i, table in enumerate(tables) if table.pooling is Pooling.WEIGHTED}
        self.weighted_W = [any(s.table in weighted for s in slices) for slices in routes.slices_W]
        # The slices for all ranks, in rank order. Ids of replicated tables are packed into an extra message that is not
        # sent, only to validate them.
        not_sent = [FeatureSlice(f, tables.index(t), 0, True) for t in routes.replicated for f in t.feature_names]
        self._packed_slices = [*(s for slices in routes.slices_W for s in slices), *not_sent]
        self._firsts_W1 = [0, *accumulate(len(slices) for slices in routes.slices_W)]
        paths = ExchangePath.ALL_TO_ALL, ExchangePath.PER_ID
        self._needs_positions = any(routes.per_id_pieces(w, path) for w in range(routes.world) for path in paths)
        # Not with weighted tables: a batch without repeats has fewer ids, and its weights would no longer match them.
        self._sequences = [] if weighted or routes.world == 1 else repeatable_features(routes.exchanged_tables)
        self._ranges = max((len(cuts) - 1 for cuts in routes.cuts.values()), default=1)
        # With elastic results their weights get no gradients, which would be sums over columns of several ranks.
        cut = {p.table for groups in routes.groups_W for g in groups for p in g.pieces if p.width < tables[p.table].dim}
        self._cut_weighted_tables = [tables[k].name for k in sorted(cut & weighted) if routes.elastic]
        sizes_W = [len(slices) for slices in routes.slices_W]
        messages = [*zip(sizes_W, self._wide_W, self.weighted_W, strict=True), (len(not_sent), False, False)]
        self._messages_WC = torch.tensor(messages, dtype=torch.int64)
        self.num_slices = sizes_W[rank]  # received by this rank
        self.words_per_id = 1 + self._wide_W[rank] + self.weighted_W[rank]  # in messages to this rank
        self._slices: dict[tuple[str, ...], Tensor] = {}  # see `_slices_for`; by the order of a batch's features
        self._bounds: dict[tuple[str, ...], Tensor] = {}

    def pack(self, jagged: Jagged, *, trains_weights: bool = False) -> SentBatch:
        """The messages to all ranks; raises for an unknown id. `trains_weights`: weights get a gradient."""
        try:
            return self.pack_valid(jagged, trains_weights)
        except (RuntimeError, IdError):  # only invalid batches pay for the search: raise with names, or map unknown ids
            return self.pack_valid(self._map_unknown_ids(jagged), trains_weights)

    def pack_valid(self, jagged: Jagged, trains_weights: bool = False) -> SentBatch:
        """`pack`, but errors are those of the operators, without names of features."""
        check_weights(self._routes.tables, jagged)
        if self._cut_weighted_tables and trains_weights:
            raise BatchError(
                f"per-id weights of {', '.join(self._cut_weighted_tables)} require gradients, which are sums over "
                f"columns; the columns are on several ranks, so the bits of these sums depend on the plan",
                "a plan that keeps all columns of such tables on one rank, for elastic results",
            )
        jagged, repeats = deduplicate_sequences(jagged, self._sequences)
        values, lengths, positions = jagged.values_N, jagged.lengths_FB, None
        needs_positions = self._needs_positions or trains_weights
        weights = None if jagged.weights_N is None else jagged.weights_N.detach().float().contiguous()
        # `bucketize` sorts ids by row range and subtracts the range's first row: a slice is one segment of bags,
        # and its ids are local to their piece. Without row-cut tables both hold already.
        if self._ranges > 1:
            buckets = bucketize(replace(jagged, weights_N=weights), self._bounds_for(jagged))
            values, lengths, weights = buckets.values_N, buckets.lengths_WFB, buckets.weights_N
            positions = buckets.positions_N
        batch, slices_PC = jagged.batch_size, self._slices_for(jagged)
        slices_PC = slices_PC * torch.tensor([batch, 1])
        # Defined in `tables/ops/reference/exchange.py`: writes all messages, and checks each id against its slice's
        # rows.
        args = values, lengths, weights, slices_PC, self._messages_WC, batch
        words, starts_W1, counts_P = torch.ops.rowwise.pack_ids(*args)
        if needs_positions:
            # The order of the words sent, applied to positions instead of ids: `take` copies the same segments of bags.
            positions = torch.arange(len(values), device=values.device) if positions is None else positions
            segments = [(0, first, batch) for first, _ in slices_PC[: self._firsts_W1[-1]].tolist()]
            segments_RC = torch.tensor(segments, dtype=torch.int64).view(-1, 3)
            positions = torch.ops.rowwise.take([positions], [lengths], [], segments_RC)[0]
        counts, starts_W1 = counts_P.tolist(), starts_W1[:-1]  # the last message, of replicated tables, is not sent
        return SentBatch(
            jagged=jagged,
            words=words[: int(starts_W1[-1])],
            sizes_W=tuple(starts_W1.diff().tolist()),
            counts_W=tuple(tuple(counts[first:last]) for first, last in pairwise(self._firsts_W1)),
            id_ranges=jagged.id_ranges() if needs_positions else {},
            positions_N=positions if needs_positions else None,
            repeats=repeats,
        )

    def unpack(self, sent: SentBatch, messages_W: Sequence[Tensor], samples_W: Sequence[int]) -> BagSet:
        """The ids of all ranks as one batch of all their samples."""
        received, lengths_W = self._join(messages_W, samples_W)
        ids_WS = ((0,) * self.num_slices,) * len(samples_W)
        if received is not None and sent.positions_N is not None:  # number of per-id vectors to return to each rank
            ids_WS = tuple(tuple(bags.view(self.num_slices, -1).sum(1).tolist()) for bags in lengths_W)
        return BagSet(sent=sent, samples_W=tuple(samples_W), ids_WS=ids_WS, received=received)

    def _join(self, messages_W: Sequence[Tensor], samples_W: Sequence[int]) -> tuple[Jagged | None, list[Tensor]]:
        """The batch of all ranks' samples, and the bag lengths that each rank sent."""
        slices = self._routes.slices_W[self._me]
        if not slices:
            return None, []
        wide, weighted = self._wide_W[self._me], self.weighted_W[self._me]
        values: list[Tensor] = []
        lengths: list[Tensor] = []
        weights: list[Tensor] = []
        for message, samples in zip(messages_W, samples_W, strict=True):
            n = (len(message) - len(slices) * samples) // self.words_per_id
            bags, ids, weight_words = message.split([len(slices) * samples, n * (1 + wide), n * weighted])
            lengths.append(bags)
            # Cloned: a 64-bit view has to begin at a multiple of eight bytes, and ids in a message need not.
            values.append(ids.clone().view(torch.int64) if wide else ids)
            weights.append(weight_words.view(torch.float32))
        # Feature-major: all samples of the first slice, rank after rank, then of the second.
        segments = [(w, k * n, n) for k in range(len(slices)) for w, n in enumerate(samples_W)]
        segments_RC = torch.tensor(segments, dtype=torch.int64)
        values_N, bags, weights_N, _ = torch.ops.rowwise.take(values, lengths, weights if weighted else [], segments_RC)
        names = tuple(s.name for s in slices)
        jagged = Jagged(features=names, values_N=values_N, lengths_FB=bags, weights_N=weights_N if weighted else None)
        return jagged, lengths

    def _map_unknown_ids(self, jagged: Jagged) -> Jagged:
        """The batch with unknown ids replaced where their table allows it; raises an `IdError` where it does not."""
        check.check_lengths(jagged)
        tables = {feature: table for table in self._routes.tables for feature in table.feature_names}
        values_N = jagged.values_N.clone()
        for feature, (begin, end) in jagged.id_ranges().items():
            if feature not in tables:  # any id is allowed, but bucketize needs it inside a range
                values_N[begin:end] = 0
        known = {feature: tables[feature] for feature in jagged.features if feature in tables}
        mapped, unknown = map_unknown(replace(jagged, values_N=values_N), known)
        self._unknown += unknown
        return mapped

    def _bounds_for(self, jagged: Jagged) -> Tensor:
        """Row ranges of all features of a batch; a feature without a table has one range of all ids."""
        bounds = self._bounds.get(jagged.features)
        if bounds is None:
            max_cuts = self._ranges + 1
            cuts = {f: self._routes.cuts.get(f, (0, NO_LIMIT)) for f in jagged.features}
            # Features with fewer ranges get empty ranges at the end: the kernel needs the same number for each.
            padded = {f: [*c, *[c[-1]] * (max_cuts - len(c))] for f, c in cuts.items()}
            bounds = self._bounds[jagged.features] = row_bounds(jagged.features, padded)
        return bounds

    def _slices_for(self, jagged: Jagged) -> Tensor:
        """One row per packed slice: (index of its segment of bags, rows in its range, which bound its ids)."""
        known = self._slices.get(jagged.features)
        if known is None:
            at, total = {f: i for i, f in enumerate(jagged.features)}, len(jagged.features)
            slices: list[tuple[int, int]] = []
            for s in self._packed_slices:
                first, last = self._routes.cuts[s.feature][s.range : s.range + 2]
                slices.append((s.range * total + at[s.feature], last - first))
            known = self._slices[jagged.features] = torch.tensor(slices, dtype=torch.int64).view(-1, 2)
        return known
