"""Ids to the ranks that hold their rows: one exchange of a few counts, then one of everything.

What goes to a rank is one message of 32-bit words: how many ids each bag holds, the ids, and their weights where they
are needed. Input is checked here, where it came from, before anything is sent: a rank that refuses its batch says so
in the exchange of counts, so that no other rank waits for it. Gives up: ids of tables of 2**31 rows and more travel in
64 bits, as do all ids to a rank that holds a piece of such a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, final

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.comm.agree import agree
from rowwise.comm.seam import Comm
from rowwise.errors import BatchError, IdError, RowwiseError
from rowwise.ops import check
from rowwise.ops.jagged import bucketize, row_bounds
from rowwise.ops.tiles import check_weights
from rowwise.ops.unknown import count_unknown
from rowwise.shard.distinct import Repeats, can_repeat, without_repeats
from rowwise.shard.routes import Routes, Slice
from rowwise.spec import Pooling

WIDE = 1 << 31
ANY = torch.iinfo(torch.int64).max
Unpacked = tuple[Jagged, list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What became of this rank's batch: enough to put the vectors that come back where they belong."""

    jagged: Jagged  # with ids that stand for unknown ones, where a table has such
    words: Tensor  # what is sent, rank after rank
    sizes_W: tuple[int, ...]  # words for each rank
    counts_W: tuple[tuple[int, ...], ...]  # of the ids in each slice that a rank was sent
    spans: Mapping[str, tuple[int, int]]  # where the ids of each feature begin and end in the batch
    places_N: Tensor | None  # where each id that was sent stands in the batch; None: nobody asks for it
    repeats: Mapping[str, Repeats]  # of sequences whose ids were sent once


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A batch after its ids have travelled."""

    asked: Asked
    samples_W: tuple[int, ...]  # of each rank; this rank looks up for all of them, in this order
    ids_WS: tuple[tuple[int, ...], ...]  # of each rank in each slice of this one; nothing, if nobody asks for it
    received: Jagged | None  # the slices of this rank; None: it holds no piece of any table
    weights: Tensor | None = None  # those received, where they learn: part of the graph on every rank


@final
class Router:
    """Sends ids as the routes say."""

    def __init__(self, routes: Routes, comm: Comm) -> None:
        """Work out what does not depend on a batch."""
        self._routes, self._comm, self._me = routes, comm, comm.rank
        self.unknown_ids: dict[str, int] = {}
        tables = routes.tables
        self._features = tuple(feature for table in tables for feature in table.feature_names)
        self._wide_W = [any(tables[s.table].rows >= WIDE for s in slices) for slices in routes.slices_W]
        weighted = {i for i, table in enumerate(tables) if table.pooling is Pooling.WEIGHTED}
        self._weighted_W = [any(s.table in weighted for s in slices) for slices in routes.slices_W]
        # To all ranks, one after the other; what stays here, for copies, is packed too, as ids are checked by it.
        kept = [Slice(f, tables.index(table), 0, True) for table in routes.copied for f in table.feature_names]
        self._packs = [*(s for slices in routes.slices_W for s in slices), *kept]
        self._firsts_W1 = [0, *accumulate(len(slices) for slices in routes.slices_W)]
        ranks = range(routes.world)
        self._needs_places = any(routes.sequences(w, way) for w in ranks for way in ("flat", "rows"))
        # Weights, which a shorter batch would have to leave out, take precedence.
        self._sequences = [] if weighted or routes.world == 1 else can_repeat(routes.exchanged)
        self._ranges = max((len(cuts) - 1 for cuts in routes.cuts.values()), default=1)
        cut = {h.table for parts in routes.parts_W for p in parts for h in p.held if h.width < tables[h.table].dim}
        self._inexact = [tables[k].name for k in sorted(cut & weighted) if routes.elastic]
        sizes_W = [len(slices) for slices in routes.slices_W]
        messages = [*zip(sizes_W, self._wide_W, self._weighted_W, strict=True), (len(kept), False, False)]
        self._messages_W3 = torch.tensor(messages, dtype=torch.int64)
        self._slices: dict[tuple[str, ...], Tensor] = {}  # by the order of a batch's features
        self._bounds: dict[tuple[str, ...], Tensor] = {}

    def route(self, jagged: Jagged) -> Routed:
        """Send a batch's ids to whoever holds their rows, and take the ids of which this rank does."""
        trouble: RowwiseError | None = None
        try:
            asked = self._pack(jagged.contiguous())
        except RowwiseError as error:
            # Every rank has to learn of it, or they wait for this one for ever.
            trouble, asked = error, None
        samples_W, ids_W, learned_W = self._headers(jagged, asked)
        if len(set(learned_W)) > 1 and min(samples_W) >= 0:
            trouble = BatchError("per-id weights need a gradient on some ranks and not on others: want the same on all")
        if min(samples_W) < 0 or trouble is not None:
            agree(self._comm, trouble, "ids of a batch")
        assert asked is not None
        mine = self._firsts_W1[self._me + 1] - self._firsts_W1[self._me]
        words = 1 + self._wide_W[self._me] + self._weighted_W[self._me]
        receives_W = [mine * b + n * words for b, n in zip(samples_W, ids_W, strict=True)]
        came = self._comm.all_to_all(asked.words, asked.sizes_W, receives_W, "ids").wait()
        received, ids_WS = None, ((0,) * mine,) * self._routes.world
        if mine:
            received, lengths = self._unpack(came.split(receives_W), samples_W, ids_W)
            if asked.places_N is not None:
                ids_WS = tuple(tuple(bags.view(mine, -1).sum(1).tolist()) for bags in lengths)
        routed = Routed(asked=asked, samples_W=tuple(samples_W), ids_WS=ids_WS, received=received)
        if not self._learns(jagged):
            return routed
        weights = _Weights.apply(jagged.weights_N, self, routed)
        if received is not None and received.weights_N is not None:
            received = replace(received, weights_N=weights)
        return replace(routed, received=received, weights=weights)

    def returned(self, routed: Routed, grad_N: Tensor) -> Tensor:
        """The gradients of this rank's per-id weights, of those that ranks were sent."""
        me, asked = self._me, routed.asked
        assert asked.places_N is not None
        slices = range(len(self._routes.slices_W[me]))
        ids_WS = routed.ids_WS if self._weighted_W[me] else tuple((0,) * len(slices) for _ in routed.ids_WS)
        # It is slice by slice, rank after rank in each; what goes to a rank is slice by slice.
        blocks = grad_N.split([ids[k] for k in slices for ids in ids_WS])
        world = len(ids_WS)
        back = [blocks[k * world + w] for w in range(world) for k in slices]
        sizes_W = [sum(ids) for ids in ids_WS]
        receives_W = [sum(n) if w else 0 for n, w in zip(asked.counts_W, self._weighted_W, strict=True)]
        flat = torch.cat(back) if back else grad_N.new_empty(0)
        came = self._comm.all_to_all(flat, sizes_W, receives_W, "gradients").wait()
        sent_to = torch.tensor(self._weighted_W).repeat_interleave(torch.tensor([sum(n) for n in asked.counts_W]))
        gradient = came.new_zeros(len(asked.jagged.values_N))
        return gradient.index_add_(0, asked.places_N[sent_to], came)

    def _headers(self, jagged: Jagged, asked: Asked | None) -> tuple[list[int], list[int], list[int]]:
        """Samples of each rank, negative if it refuses its batch; how many ids come from there; if weights learn."""
        world = self._routes.world
        # A refused batch has samples that nobody wants; -1 is no number of samples.
        samples = -1 if asked is None else jagged.batch_size
        ids_W = [0] * world if asked is None else [sum(counts) for counts in asked.counts_W]
        rows = [[samples, n, self._learns(jagged)] for n in ids_W]
        header = torch.tensor(rows, dtype=torch.int64).flatten().to(jagged.values_N.device)
        came = self._comm.all_to_all(header, [3] * world, [3] * world, "counts").wait().tolist()
        return came[0::3], came[1::3], came[2::3]

    def _learns(self, jagged: Jagged) -> bool:
        """Whether per-id weights get a gradient."""
        weights = jagged.weights_N
        return torch.is_grad_enabled() and weights is not None and weights.requires_grad and any(self._weighted_W)

    def _pack(self, jagged: Jagged) -> Asked:
        """The messages to all ranks."""
        missing = set(self._features) - set(jagged.features)
        if missing:
            raise BatchError(f"the batch lacks {', '.join(sorted(missing))}; it holds {', '.join(jagged.features)}")
        check_weights(self._routes.tables, jagged)
        if self._inexact and self._learns(jagged):
            raise BatchError(
                f"per-id weights of {', '.join(self._inexact)} learn, and their columns are on several ranks: the "
                f"gradient of a weight adds up over columns, in an order of the plan. With elastic results, want such "
                f"tables with all columns on one rank"
            )
        try:
            return self._packed(jagged)
        except (RuntimeError, IdError):  # the rare case pays: find what was wrong, and go on if tables allow it
            return self._packed(self._known(jagged))

    def _packed(self, jagged: Jagged) -> Asked:
        jagged, repeats = without_repeats(jagged, self._sequences)
        values, lengths, places = jagged.values_N, jagged.lengths_FB, None
        needs_places = self._needs_places or self._learns(jagged)
        weights = None if jagged.weights_N is None else jagged.weights_N.detach().float().contiguous()
        if self._ranges > 1:
            buckets = bucketize(replace(jagged, weights_N=weights), self._bounds_for(jagged))
            values, lengths, weights = buckets.values_N, buckets.lengths_WFB, buckets.weights_N
            places = buckets.positions_N
        batch, slices_P2 = jagged.batch_size, self._slices_for(jagged)
        slices_P2 = slices_P2 * torch.tensor([batch, 1])
        words, starts_W1, counts_P = torch.ops.rowwise.pack_ids(
            values, lengths, weights, slices_P2, self._messages_W3, batch
        )
        if needs_places:
            places = torch.arange(len(values), device=values.device) if places is None else places
            runs = [(0, first, batch) for first, _ in slices_P2[: self._firsts_W1[-1]].tolist()]
            runs_P3 = torch.tensor(runs, dtype=torch.int64).view(-1, 3)
            places = torch.ops.rowwise.take([places], [lengths], [], runs_P3)[0]
        counts, starts_W1 = counts_P.tolist(), starts_W1[:-1]
        return Asked(
            jagged=jagged,
            words=words[: int(starts_W1[-1])],
            sizes_W=tuple(starts_W1.diff().tolist()),
            counts_W=tuple(tuple(counts[first:last]) for first, last in pairwise(self._firsts_W1)),
            spans=_spans(jagged) if needs_places else {},
            places_N=places if needs_places else None,
            repeats=repeats,
        )

    def _unpack(self, messages_W: Sequence[Tensor], samples_W: Sequence[int], ids_W: Sequence[int]) -> Unpacked:
        """The ids of all ranks as one batch of all their samples, and how many each bag of each rank has."""
        slices = self._routes.slices_W[self._me]
        wide, weighted = self._wide_W[self._me], self._weighted_W[self._me]
        values: list[Tensor] = []
        lengths: list[Tensor] = []
        weights: list[Tensor] = []
        for message, samples, n in zip(messages_W, samples_W, ids_W, strict=True):
            bags, ids, more = message.split([len(slices) * samples, n * (1 + wide), n * weighted])
            lengths.append(bags)
            # A view would have to begin on eight bytes, which a message of words need not do.
            values.append(ids.clone().view(torch.int64) if wide else ids)
            weights.append(more.view(torch.float32))
        # Feature-major: all samples of the first slice, rank after rank, then of the second.
        ranks = range(self._routes.world)
        runs = [(w, k * samples_W[w], samples_W[w]) for k in range(len(slices)) for w in ranks]
        runs_P3 = torch.tensor(runs, dtype=torch.int64)
        taken, bags, moved, _ = torch.ops.rowwise.take(values, lengths, weights if weighted else [], runs_P3)
        names = tuple(s.name for s in slices)
        jagged = Jagged(features=names, values_N=taken, lengths_FB=bags, weights_N=moved if weighted else None)
        return jagged, lengths

    def _known(self, jagged: Jagged) -> Jagged:
        """The batch with ids that all have a row, where the tables allow it; else an error with names."""
        check.check_lengths(jagged)
        tables = {feature: table for table in self._routes.tables for feature in table.feature_names}
        limits = [(k, tables[f].rows if f in tables else ANY) for k, f in enumerate(jagged.features)]
        values = jagged.values_N.to(torch.int64, copy=True)  # the caller's stay; wide, as a last row may be far out
        for number, positions in check.outside(jagged, limits):
            feature = jagged.features[number]
            table = tables.get(feature)
            if table is None:  # ids that no table knows may be anything, and yet have to be in a range
                values[positions] = 0
                continue
            if table.unknown == "raise":
                raise check.unknown_id(table, feature, jagged, positions)
            values[positions] = table.rows - 1
            count_unknown(self.unknown_ids, table, feature, len(positions))
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


class _Weights(torch.autograd.Function):
    """The weights that came with this rank's ids (maybe none), as a function of those of all ranks."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, _weights, router, routed = args
        ctx.kept = router, routed
        received = None if routed.received is None else routed.received.weights_N
        return torch.empty(0) if received is None else received.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        router, routed = ctx.kept
        return router.returned(routed, grad_outputs[0]).to(routed.asked.jagged.weights_N.dtype), None, None


def _spans(jagged: Jagged) -> dict[str, tuple[int, int]]:
    ends = jagged.lengths_FB.view(len(jagged.features), -1).sum(1).cumsum(0).tolist()
    return dict(zip(jagged.features, pairwise([0, *ends]), strict=True))
