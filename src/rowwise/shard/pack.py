"""Packs the ids of a batch into one message per destination rank, and unpacks the messages that arrive.

A message is 32-bit words: the bag lengths of each slice, then all ids, then all per-id weights if the rank holds a
weighted table. Each stream of a batch is packed by itself ([Note: Streams] in `ids.py`). Ids take two words each in
messages to a rank that holds a piece of a table with 2**31 rows or more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.errors import BatchError
from rowwise.ops import check
from rowwise.ops.jagged import bucketize, row_bounds
from rowwise.ops.tiles import check_weights
from rowwise.ops.unknown import count_unknown
from rowwise.shard.distinct import DistinctIds, deduplicate_sequences, repeatable_features
from rowwise.shard.routes import ExchangePath, FeatureSlice, Routes
from rowwise.spec import Pooling

WIDE_ROWS = 1 << 31
NO_LIMIT = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBatch:
    """Ids sent to each rank, and the positions that scatter the returned vectors back into the batch."""

    jagged: Jagged  # the batch as sent; unknown ids replaced by a table's last row where it allows that
    words: Tensor  # the messages to all ranks, in rank order
    sizes_W: tuple[int, ...]  # words in the message to each rank
    counts_W: tuple[tuple[int, ...], ...]  # ids sent to each rank, by slice
    spans: Mapping[str, tuple[int, int]]  # begin and end of each feature's ids in the batch
    places_N: Tensor | None  # position in the batch of each id sent; None: no exchange needs it
    repeats: Mapping[str, DistinctIds]  # by sequence feature, where repeated ids were sent once

    @property
    def by_rank(self) -> Sequence[Tensor]:
        return self.words.split(list(self.sizes_W))


@final
class Packer:
    """Packs and unpacks the messages of one stream; `unknown_ids` counts ids outside their table, by feature."""

    def __init__(self, routes: Routes, rank: int, unknown_ids: dict[str, int]) -> None:
        self._routes, self._me = routes, rank
        self._unknown_ids = unknown_ids
        tables = routes.tables
        self._features = tuple(feature for table in tables for feature in table.feature_names)
        self._wide_W = [any(tables[s.table].rows >= WIDE_ROWS for s in slices) for slices in routes.slices_W]
        weighted = {i for i, table in enumerate(tables) if table.pooling is Pooling.WEIGHTED}
        self.weighted_W = [any(s.table in weighted for s in slices) for slices in routes.slices_W]
        # The slices for all ranks, in rank order. Ids of copied tables stay here, and are packed as one message more
        # that is never sent: packing is also the check that every id has a row.
        kept = [FeatureSlice(f, tables.index(table), 0, True) for table in routes.copied for f in table.feature_names]
        self._packed_slices = [*(s for slices in routes.slices_W for s in slices), *kept]
        self._firsts_W1 = [0, *accumulate(len(slices) for slices in routes.slices_W)]
        ranks = range(routes.world)
        self._needs_places = any(
            routes.per_id_pieces(w, path) for w in ranks for path in (ExchangePath.ALL_TO_ALL, ExchangePath.PER_ID)
        )
        # Not with weighted tables: a batch without repeats has fewer ids, and its weights would no longer match them.
        self._sequences = [] if weighted or routes.world == 1 else repeatable_features(routes.exchanged_tables)
        self._ranges = max((len(cuts) - 1 for cuts in routes.cuts.values()), default=1)
        cut = {p.table for groups in routes.groups_W for g in groups for p in g.pieces if p.width < tables[p.table].dim}
        self._plan_dependent = [tables[k].name for k in sorted(cut & weighted) if routes.elastic]
        sizes_W = [len(slices) for slices in routes.slices_W]
        messages = [*zip(sizes_W, self._wide_W, self.weighted_W, strict=True), (len(kept), False, False)]
        self._messages_WC = torch.tensor(messages, dtype=torch.int64)
        self._slices: dict[tuple[str, ...], Tensor] = {}  # by the order of a batch's features
        self._bounds: dict[tuple[str, ...], Tensor] = {}

    @property
    def num_slices(self) -> int:
        """The number of slices that this rank receives."""
        return len(self._routes.slices_W[self._me])

    def pack(self, jagged: Jagged, trains_weights: bool = False) -> SentBatch:
        """The messages to all ranks; raises for an id outside its table. `trains_weights`: weights get a gradient."""
        if not self._features:
            return self._empty_message(jagged)
        check_weights(self._routes.tables, jagged)
        if self._plan_dependent and trains_weights:
            raise BatchError(
                f"per-id weights of {', '.join(self._plan_dependent)} require gradients, which are sums over columns; "
                f"the columns are on several ranks, so the bits of these sums depend on the plan. For elastic results "
                f"want a plan that keeps all columns of such tables on one rank"
            )
        jagged, repeats = deduplicate_sequences(jagged, self._sequences)
        values, lengths, places = jagged.values_N, jagged.lengths_FB, None
        needs_places = self._needs_places or trains_weights
        weights = None if jagged.weights_N is None else jagged.weights_N.detach().float().contiguous()
        # Ids by row range first, so that a slice is a run of bags. Without row-cut tables it is one already.
        if self._ranges > 1:
            buckets = bucketize(replace(jagged, weights_N=weights), self._bounds_for(jagged))
            values, lengths, weights = buckets.values_N, buckets.lengths_WFB, buckets.weights_N
            places = buckets.positions_N
        batch, slices_PC = jagged.batch_size, self._slices_for(jagged)
        slices_PC = slices_PC * torch.tensor([batch, 1])
        words, starts_W1, counts_P = torch.ops.rowwise.pack_ids(
            values, lengths, weights, slices_PC, self._messages_WC, batch
        )
        if needs_places:
            # The order of the words sent, applied to positions instead of ids: the same runs of bags are taken.
            places = torch.arange(len(values), device=values.device) if places is None else places
            runs = [(0, first, batch) for first, _ in slices_PC[: self._firsts_W1[-1]].tolist()]
            runs_RC = torch.tensor(runs, dtype=torch.int64).view(-1, 3)
            places = torch.ops.rowwise.take([places], [lengths], [], runs_RC)[0]
        counts, starts_W1 = counts_P.tolist(), starts_W1[:-1]  # the last message, of copied tables, is not sent
        return SentBatch(
            jagged=jagged,
            words=words[: int(starts_W1[-1])],
            sizes_W=tuple(starts_W1.diff().tolist()),
            counts_W=tuple(tuple(counts[first:last]) for first, last in pairwise(self._firsts_W1)),
            spans=_feature_spans(jagged) if needs_places else {},
            places_N=places if needs_places else None,
            repeats=repeats,
        )

    def _empty_message(self, jagged: Jagged) -> SentBatch:
        """The messages of a stream that no table has a feature of."""
        world = self._routes.world
        none = jagged.values_N.new_empty(0, dtype=torch.int32)
        nothing: dict[str, DistinctIds] = {}
        return SentBatch(
            jagged=jagged,
            words=none,
            sizes_W=(0,) * world,
            counts_W=((),) * world,
            spans={},
            places_N=None,
            repeats=nothing,
        )

    def message_words(self, message: Tensor, samples: int) -> int:
        """Words of this stream at the start of a message, which holds the bags of `samples` samples."""
        bags = self.num_slices * samples
        return bags + int(message[:bags].sum()) * self._words_per_id

    def unpack(self, messages_W: Sequence[Tensor], samples_W: Sequence[int]) -> tuple[Jagged | None, list[Tensor]]:
        """The ids of all ranks as one batch of all their samples, and the bag lengths that each rank sent."""
        slices = self._routes.slices_W[self._me]
        if not slices:
            return None, []
        wide, weighted = self._wide_W[self._me], self.weighted_W[self._me]
        values: list[Tensor] = []
        lengths: list[Tensor] = []
        weights: list[Tensor] = []
        for message, samples in zip(messages_W, samples_W, strict=True):
            n = (len(message) - len(slices) * samples) // self._words_per_id
            bags, ids, more = message.split([len(slices) * samples, n * (1 + wide), n * weighted])
            lengths.append(bags)
            # Cloned: a 64-bit view has to begin at a multiple of eight bytes, and ids in a message need not.
            values.append(ids.clone().view(torch.int64) if wide else ids)
            weights.append(more.view(torch.float32))
        # Feature-major: all samples of the first slice, rank after rank, then of the second.
        runs = [(w, k * n, n) for k in range(len(slices)) for w, n in enumerate(samples_W)]
        runs_RC = torch.tensor(runs, dtype=torch.int64)
        taken, bags, moved, _ = torch.ops.rowwise.take(values, lengths, weights if weighted else [], runs_RC)
        names = tuple(s.name for s in slices)
        jagged = Jagged(features=names, values_N=taken, lengths_FB=bags, weights_N=moved if weighted else None)
        return jagged, lengths

    @property
    def _words_per_id(self) -> int:
        return 1 + self._wide_W[self._me] + self.weighted_W[self._me]

    def map_unknown_ids(self, jagged: Jagged) -> Jagged:
        """The batch with unknown ids replaced where their table allows it; raises an `IdError` where it does not."""
        check.check_lengths(jagged)
        tables = {feature: table for table in self._routes.tables for feature in table.feature_names}
        limits = [(k, tables[f].rows if f in tables else NO_LIMIT) for k, f in enumerate(jagged.features)]
        values = jagged.values_N.to(torch.int64, copy=True)  # a copy of the caller's; int64, as a last row may need it
        for number, positions in check.find_out_of_range(jagged, limits):
            feature = jagged.features[number]
            table = tables.get(feature)
            if table is None:  # no table of ours: any id is allowed, but bucketize wants it inside a range
                values[positions] = 0
                continue
            if table.unknown == "raise":
                raise check.unknown_id_error(table, feature, jagged, positions)
            values[positions] = table.rows - 1
            count_unknown(self._unknown_ids, table, feature, len(positions))
        return replace(jagged, values_N=values)

    def _bounds_for(self, jagged: Jagged) -> Tensor:
        """Row ranges of all features of a batch; a feature without a table has one range of all ids."""
        known = self._bounds.get(jagged.features)
        if known is None:
            most = self._ranges + 1
            cuts = {f: self._routes.cuts.get(f, (0, NO_LIMIT)) for f in jagged.features}
            # Features with fewer ranges get empty ones at the end: the kernel wants as many for each.
            padded = {f: [*c, *[c[-1]] * (most - len(c))] for f, c in cuts.items()}
            known = self._bounds[jagged.features] = row_bounds(jagged.features, padded)
        return known

    def _slices_for(self, jagged: Jagged) -> Tensor:
        """One row per packed slice: (index of its run of bags, rows in its range, which bound its ids)."""
        known = self._slices.get(jagged.features)
        if known is None:
            at, total = {f: i for i, f in enumerate(jagged.features)}, len(jagged.features)
            rows = [
                self._routes.cuts[s.feature][s.range + 1] - self._routes.cuts[s.feature][s.range]
                for s in self._packed_slices
            ]
            firsts = [s.range * total + at[s.feature] for s in self._packed_slices]
            known = torch.tensor(list(zip(firsts, rows, strict=True)), dtype=torch.int64).view(-1, 2)
            self._slices[jagged.features] = known
        return known


def _feature_spans(jagged: Jagged) -> dict[str, tuple[int, int]]:
    ends = jagged.lengths_FB.view(len(jagged.features), -1).sum(1).cumsum(0).tolist()
    return dict(zip(jagged.features, pairwise([0, *ends]), strict=True))
