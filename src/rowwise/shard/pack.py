"""Messages of ids: what one rank tells all others of its batch, and what it hears from them.

A message is made of 32-bit words: how many ids each bag holds, the ids, and their weights where they are needed. Each
stream of a batch is packed by itself (see [Note: Streams] in `ids.py`). Known limits: ids of tables of 2**31 rows and
more are of 64 bits, as are all ids in a message to a rank that holds a piece of such a table.
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
from rowwise.shard.distinct import DistinctIds, can_repeat, distinct_ids
from rowwise.shard.routes import ExchangePath, FeatureSlice, Routes
from rowwise.spec import Pooling

WIDE = 1 << 31
ANY = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBatch:
    """Ids sent to each rank, and the indices that scatter returned vectors back to where they belong."""

    jagged: Jagged  # with ids that stand for unknown ones, where a table has such
    words: Tensor  # what is sent, rank after rank
    sizes_W: tuple[int, ...]  # words for each rank
    counts_W: tuple[tuple[int, ...], ...]  # of the ids in each slice that a rank was sent
    spans: Mapping[str, tuple[int, int]]  # where the ids of each feature begin and end in the batch
    places_N: Tensor | None  # where each id that was sent stands in the batch; None: nobody asks for it
    repeats: Mapping[str, DistinctIds]  # of sequences whose ids were sent once

    @property
    def by_rank(self) -> Sequence[Tensor]:
        """The message to each."""
        return self.words.split(list(self.sizes_W))


@final
class Packer:
    """Messages of ids, as the routes say."""

    def __init__(self, routes: Routes, rank: int, unknown_ids: dict[str, int]) -> None:
        """Work out what does not depend on a batch. Ids that are outside their table are counted in `unknown_ids`."""
        self._routes, self._me = routes, rank
        self._unknown_ids = unknown_ids
        tables = routes.tables
        self._features = tuple(feature for table in tables for feature in table.feature_names)
        self._wide_W = [any(tables[s.table].rows >= WIDE for s in slices) for slices in routes.slices_W]
        weighted = {i for i, table in enumerate(tables) if table.pooling is Pooling.WEIGHTED}
        self.weighted_W = [any(s.table in weighted for s in slices) for slices in routes.slices_W]
        # To all ranks, one after the other; what stays here, for copies, is packed too, as ids are checked by it.
        kept = [FeatureSlice(f, tables.index(table), 0, True) for table in routes.copied for f in table.feature_names]
        self._packs = [*(s for slices in routes.slices_W for s in slices), *kept]
        self._firsts_W1 = [0, *accumulate(len(slices) for slices in routes.slices_W)]
        ranks = range(routes.world)
        self._needs_places = any(
            routes.sequences(w, path) for w in ranks for path in (ExchangePath.ALL_TO_ALL, ExchangePath.PER_ID)
        )
        # Weights, which a shorter batch would have to leave out, take precedence.
        self._sequences = [] if weighted or routes.world == 1 else can_repeat(routes.exchanged)
        self._ranges = max((len(cuts) - 1 for cuts in routes.cuts.values()), default=1)
        cut = {h.table for parts in routes.parts_W for p in parts for h in p.held if h.width < tables[h.table].dim}
        self._inexact = [tables[k].name for k in sorted(cut & weighted) if routes.elastic]
        sizes_W = [len(slices) for slices in routes.slices_W]
        messages = [*zip(sizes_W, self._wide_W, self.weighted_W, strict=True), (len(kept), False, False)]
        self._messages_W3 = torch.tensor(messages, dtype=torch.int64)
        self._slices: dict[tuple[str, ...], Tensor] = {}  # by the order of a batch's features
        self._bounds: dict[tuple[str, ...], Tensor] = {}

    @property
    def slices(self) -> int:
        """How many of them this rank is sent."""
        return len(self._routes.slices_W[self._me])

    def pack(self, jagged: Jagged, learns: bool = False) -> SentBatch:
        """The messages to all ranks; raises if an id has no row. `learns`: the weights get a gradient."""
        if not self._features:
            return self._nothing(jagged)
        check_weights(self._routes.tables, jagged)
        if self._inexact and learns:
            raise BatchError(
                f"per-id weights of {', '.join(self._inexact)} learn, and their columns are on several ranks: the "
                f"gradient of a weight adds up over columns, in an order of the plan. With elastic results, want such "
                f"tables with all columns on one rank"
            )
        jagged, repeats = distinct_ids(jagged, self._sequences)
        values, lengths, places = jagged.values_N, jagged.lengths_FB, None
        needs_places = self._needs_places or learns
        weights = None if jagged.weights_N is None else jagged.weights_N.detach().float().contiguous()
        if self._ranges > 1:
            buckets = bucketize(replace(jagged, weights_N=weights), self._bounds_for(jagged))
            values, lengths, weights = buckets.values_N, buckets.lengths_WFB, buckets.weights_N
            places = buckets.positions_N
        batch, slices_PC = jagged.batch_size, self._slices_for(jagged)
        slices_PC = slices_PC * torch.tensor([batch, 1])
        words, starts_W1, counts_P = torch.ops.rowwise.pack_ids(
            values, lengths, weights, slices_PC, self._messages_W3, batch
        )
        if needs_places:
            places = torch.arange(len(values), device=values.device) if places is None else places
            runs = [(0, first, batch) for first, _ in slices_PC[: self._firsts_W1[-1]].tolist()]
            runs_PC = torch.tensor(runs, dtype=torch.int64).view(-1, 3)
            places = torch.ops.rowwise.take([places], [lengths], [], runs_PC)[0]
        counts, starts_W1 = counts_P.tolist(), starts_W1[:-1]
        return SentBatch(
            jagged=jagged,
            words=words[: int(starts_W1[-1])],
            sizes_W=tuple(starts_W1.diff().tolist()),
            counts_W=tuple(tuple(counts[first:last]) for first, last in pairwise(self._firsts_W1)),
            spans=_spans(jagged) if needs_places else {},
            places_N=places if needs_places else None,
            repeats=repeats,
        )

    def _nothing(self, jagged: Jagged) -> SentBatch:
        """Where no table has features of a batch."""
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

    def words(self, message: Tensor, samples: int) -> int:
        """How many words of a message are the ids of so many samples, with which it begins."""
        bags = self.slices * samples
        return bags + int(message[:bags].sum()) * self._words_per_id

    def unpack(self, messages_W: Sequence[Tensor], samples_W: Sequence[int]) -> tuple[Jagged | None, list[Tensor]]:
        """The ids of all ranks as one batch of all their samples, and how many each bag of each rank has."""
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
            # A view would have to begin on eight bytes, which a message of words need not do.
            values.append(ids.clone().view(torch.int64) if wide else ids)
            weights.append(more.view(torch.float32))
        # Feature-major: all samples of the first slice, rank after rank, then of the second.
        runs = [(w, k * n, n) for k in range(len(slices)) for w, n in enumerate(samples_W)]
        runs_PC = torch.tensor(runs, dtype=torch.int64)
        taken, bags, moved, _ = torch.ops.rowwise.take(values, lengths, weights if weighted else [], runs_PC)
        names = tuple(s.name for s in slices)
        jagged = Jagged(features=names, values_N=taken, lengths_FB=bags, weights_N=moved if weighted else None)
        return jagged, lengths

    @property
    def _words_per_id(self) -> int:
        return 1 + self._wide_W[self._me] + self.weighted_W[self._me]

    def known(self, jagged: Jagged) -> Jagged:
        """The batch with ids that all have a row, where the tables allow it; else an error with names."""
        check.check_lengths(jagged)
        tables = {feature: table for table in self._routes.tables for feature in table.feature_names}
        limits = [(k, tables[f].rows if f in tables else ANY) for k, f in enumerate(jagged.features)]
        values = jagged.values_N.to(torch.int64, copy=True)  # the caller's stay; wide, as a last row may be far out
        for number, positions in check.ids_outside(jagged, limits):
            feature = jagged.features[number]
            table = tables.get(feature)
            if table is None:  # ids that no table knows may be anything, and yet have to be in a range
                values[positions] = 0
                continue
            if table.unknown == "raise":
                raise check.unknown_id(table, feature, jagged, positions)
            values[positions] = table.rows - 1
            count_unknown(self._unknown_ids, table, feature, len(positions))
        return replace(jagged, values_N=values)

    def _bounds_for(self, jagged: Jagged) -> Tensor:
        """Row ranges of all features of a batch; one that no table knows has one."""
        known = self._bounds.get(jagged.features)
        if known is None:
            most = self._ranges + 1
            cuts = {f: self._routes.cuts.get(f, (0, ANY)) for f in jagged.features}
            padded = {f: [*c, *[c[-1]] * (most - len(c))] for f, c in cuts.items()}
            known = self._bounds[jagged.features] = row_bounds(jagged.features, padded)
        return known

    def _slices_for(self, jagged: Jagged) -> Tensor:
        """The slices that are packed: which run of bags each is, and the rows that its ids have to be in."""
        known = self._slices.get(jagged.features)
        if known is None:
            at, total = {f: i for i, f in enumerate(jagged.features)}, len(jagged.features)
            rows = [
                self._routes.cuts[s.feature][s.range + 1] - self._routes.cuts[s.feature][s.range] for s in self._packs
            ]
            firsts = [s.range * total + at[s.feature] for s in self._packs]
            known = torch.tensor(list(zip(firsts, rows, strict=True)), dtype=torch.int64).view(-1, 2)
            self._slices[jagged.features] = known
        return known


def _spans(jagged: Jagged) -> dict[str, tuple[int, int]]:
    ends = jagged.lengths_FB.view(len(jagged.features), -1).sum(1).cumsum(0).tolist()
    return dict(zip(jagged.features, pairwise([0, *ends]), strict=True))
