"""Ids to the ranks that hold their rows: one exchange of a few counts, then one of everything.

What goes to a rank is one message (see `pack.py`). Input is checked here, where it came from, before anything is sent.

[Note: Malformed batches] A rank that cannot use its batch tells the others in an exchange that they enter anyway, and
all raise (see [Note: rank status] in `comm/status.py`). In a lookup that is the exchange of headers, whether the fault
is noticed here, while ids are mapped (`MappedEmbeddings`) or before there is a batch of ours at all. In a loop over
batches it is the `StepHeader` before a step (`train/step_header.py`), which also says how wide the batch is.

[Note: Streams] A batch is one stream, or two where samples share bags: own features of B samples, and shared ones of U
distinct samples. Ids of all streams are in the one message to a rank, which ends with how many samples each distinct
one is. Their vectors travel as those of two batches and are spread at the end; gradients go back for all samples, as
those of the expanded batch, which holders make of the two. All ranks have to share the same features; where they do
not, all expand their batches and start again.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from rowwise.batch import Jagged, KeyedJagged, Shared
from rowwise.comm.seam import Comm
from rowwise.comm.status import RankStatus, raise_if_any_failed
from rowwise.errors import BatchError, IdError, RowwiseError
from rowwise.ops.tiles import per_id_weights_require_grad
from rowwise.shard.pack import Packer, SentBatch
from rowwise.shard.routes import Routes
from rowwise.spec import Pooling

DIGEST_bits = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The routed ids of some features. See [Note: Streams]."""

    sent: SentBatch
    samples_W: tuple[int, ...]  # of each rank; this rank looks up for all of them, in this order
    ids_WS: tuple[tuple[int, ...], ...]  # of each rank in each slice of this one; nothing, if nobody asks for it
    received: Jagged | None  # the slices of this rank; None: it holds no piece of any table


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedBatch:
    """A batch after its ids have travelled."""

    jagged: Jagged  # of this rank, with ids that stand for unknown ones, where a table has such
    received: Jagged | None  # of all streams, as one batch in which samples share bags
    streams: tuple[Stream, ...]
    common: tuple[str, ...] = ()  # features of the second stream
    weights: Tensor | None = None  # those received, where they learn: part of the graph on every rank

    @property
    def samples_W(self) -> tuple[int, ...]:
        return self.streams[0].samples_W


class _BatchHeader(NamedTuple):
    """Counts that a rank sends ahead of its ids."""

    status: RankStatus = RankStatus(failed=1)  # the count is of samples
    words: int = 0  # that follow
    learns: bool = False
    digest: int = 0  # of the names of shared features; 0: there are none
    distinct: int = 0

    def pack(self) -> list[int]:
        return [self.status.pack(), self.words, self.learns | self.digest << 1 | self.distinct << (1 + DIGEST_bits)]

    @classmethod
    def unpack(cls, status: int, words: int, more: int) -> "_BatchHeader":
        digest, distinct = more >> 1 & ((1 << DIGEST_bits) - 1), more >> (1 + DIGEST_bits)
        return cls(RankStatus.unpack(status), words, bool(more & 1), digest, distinct)


class _PackedBatch(NamedTuple):
    """A batch that is ready to go."""

    given: Jagged
    jagged: Jagged  # with ids that stand for unknown ones, where a table has such
    common: tuple[str, ...]
    sent: tuple[SentBatch, ...]  # by stream
    words: Tensor
    sizes_W: tuple[int, ...]
    learns: bool  # whether per-id weights get a gradient


@final
class Router:
    """Sends ids as the routes say."""

    def __init__(self, routes: Routes, comm: Comm) -> None:
        """Work out what does not depend on a batch."""
        self._routes, self._comm, self._me = routes, comm, comm.rank
        self.unknown_ids: dict[str, int] = {}
        self._packers: dict[tuple[str, ...], tuple[Packer, ...]] = {}  # of each stream, by the features that are shared
        self._weighted_W = self._packers_for(())[0].weighted_W
        self._device = torch.device("cpu")  # of the last batch
        self._features = tuple(feature for table in routes.tables for feature in table.feature_names)
        sequences = [table for table in routes.tables if table.pooling is Pooling.SEQUENCE]
        self._sequences = tuple(feature for table in sequences for feature in table.feature_names)

    def route(self, sparse: Jagged | KeyedJagged) -> RoutedBatch:
        """Send a batch's ids to the ranks that hold their rows; receive the ids whose rows this rank holds."""
        error: RowwiseError | None = None
        packed: _PackedBatch | None = None
        unknown_ids = dict(self.unknown_ids)
        try:
            packed = self._pack(self._checked(sparse))
        except RowwiseError as caught:  # see [Note: Malformed batches]
            error = caught
        headers_W = self._exchange_headers(packed, error)
        assert packed is not None
        if len({header.learns for header in headers_W}) > 1:
            raise BatchError("per-id weights need a gradient on some ranks and not on others: want the same on all")
        if len({header.digest for header in headers_W}) > 1:
            self.unknown_ids.clear()  # what was counted is counted again
            self.unknown_ids.update(unknown_ids)
            return self.route(packed.given.expanded())
        receives_W = [header.words for header in headers_W]
        came = self._comm.all_to_all(packed.words, packed.sizes_W, receives_W, "ids").wait()
        routed = self._routed(packed, came.split(receives_W), headers_W)
        if not packed.learns:
            return routed
        return replace(routed, weights=_Weights.apply(packed.given.weights_N, self, routed))

    def abort(self, error: RowwiseError) -> NoReturn:
        """Instead of `route`, where there is no batch: raises on all ranks."""
        self._exchange_headers(None, error)
        raise error

    def returned(self, routed: RoutedBatch, grad_N: Tensor) -> Tensor:
        """The gradients of this rank's per-id weights, of those that ranks were sent."""
        me, (stream,) = self._me, routed.streams  # a weight of a shared bag has a gradient for each sample
        sent = stream.sent
        assert sent.places_N is not None
        slices = range(len(self._routes.slices_W[me]))
        ids_WS = stream.ids_WS if self._weighted_W[me] else tuple((0,) * len(slices) for _ in stream.ids_WS)
        # It is slice by slice, rank after rank in each; what goes to a rank is slice by slice.
        blocks = grad_N.split([ids[k] for k in slices for ids in ids_WS])
        world = len(ids_WS)
        back = [blocks[k * world + w] for w in range(world) for k in slices]
        sizes_W = [sum(ids) for ids in ids_WS]
        receives_W = [sum(n) if w else 0 for n, w in zip(sent.counts_W, self._weighted_W, strict=True)]
        flat = torch.cat(back) if back else grad_N.new_empty(0)
        came = self._comm.all_to_all(flat, sizes_W, receives_W, "gradients").wait()
        counts_W = torch.tensor([sum(n) for n in sent.counts_W])
        sent_to = torch.tensor(self._weighted_W).repeat_interleave(counts_W)
        gradient = came.new_zeros(len(sent.jagged.values_N))
        return gradient.index_add_(0, sent.places_N[sent_to], came)

    def _exchange_headers(self, packed: _PackedBatch | None, error: RowwiseError | None) -> list[_BatchHeader]:
        """Those of all ranks; raises on all if one has no batch."""
        world, mine = self._routes.world, _BatchHeader()
        if packed is not None:
            common = packed.common
            digest = (zlib.crc32("\n".join(common).encode()) or 1) if common else 0
            distinct = packed.sent[1].jagged.batch_size if common else 0
            mine = _BatchHeader(RankStatus(packed.jagged.batch_size), 0, packed.learns, digest, distinct)
        words_W = [0] * world if packed is None else packed.sizes_W
        rows = [mine._replace(words=words).pack() for words in words_W]
        header = torch.tensor(rows, dtype=torch.int64).flatten().to(self._device)
        came = self._comm.all_to_all(header, [3] * world, [3] * world, "counts").wait().view(world, 3).tolist()
        headers_W = [_BatchHeader.unpack(*numbers) for numbers in came]
        raise_if_any_failed(self._comm, [header.status for header in headers_W], error, during="ids of a batch")
        return headers_W

    def _learns(self, jagged: Jagged) -> bool:
        """Whether per-id weights get a gradient."""
        return per_id_weights_require_grad(jagged) and any(self._weighted_W)

    def _checked(self, sparse: Jagged | KeyedJagged) -> Jagged:
        """The batch as one of ours, its tensors in one piece."""
        jagged = Jagged.from_keyed(sparse)
        self._device = jagged.values_N.device
        # A weight of a shared bag has a gradient for each sample.
        return (jagged.expanded() if self._learns(jagged) else jagged).contiguous()

    def _pack(self, given: Jagged) -> _PackedBatch:
        """The messages to all ranks."""
        learns = self._learns(given)
        jagged = given.owning(self._sequences)  # whose repeats are taken care of, see `distinct.py`
        missing = set(self._features) - set(jagged.all_features)
        if missing:
            raise BatchError(f"the batch lacks {', '.join(sorted(missing))}; it holds {', '.join(jagged.all_features)}")
        shared = jagged.shared
        common = () if shared is None else tuple(f for f in self._features if f in shared.jagged.features)
        if shared is None or not common:
            (packer,) = self._packers_for(())
            sent = _pack_known(packer, jagged.expanded(), learns=learns)
            return _PackedBatch(given, sent.jagged, (), (sent,), sent.words, sent.sizes_W, learns)
        shared.check()
        packers, inverse_B = self._packers_for(common), shared.inverse_B
        streams = replace(jagged, shared=None) if jagged.features else jagged, shared.jagged
        try:
            own, distinct = (packer.pack(stream) for packer, stream in zip(packers, streams, strict=True))
        except (RuntimeError, IdError):
            # What was wrong is told of samples, and so counted: now each sample is a distinct one.
            streams, inverse_B = (streams[0], shared.expanded()), torch.arange(len(inverse_B), device=inverse_B.device)
            own, distinct = (_pack_known(packer, stream) for packer, stream in zip(packers, streams, strict=True))
        copies_U = inverse_B.bincount(minlength=distinct.jagged.batch_size).to(torch.int32)
        parts_W = [
            [mine, theirs, copies_U if len(theirs) else copies_U[:0]]
            for mine, theirs in zip(own.by_rank, distinct.by_rank, strict=True)
        ]
        words, sizes_W = torch.cat([x for parts in parts_W for x in parts]), [sum(map(len, x)) for x in parts_W]
        whole = _join_streams(own.jagged, distinct.jagged, inverse_B)
        return _PackedBatch(given, whole, common, (own, distinct), words, tuple(sizes_W), learns)

    def _packers_for(self, common: tuple[str, ...]) -> tuple[Packer, ...]:
        if common not in self._packers:
            streams = self._routes.streams(common)
            self._packers[common] = tuple(Packer(routes, self._me, self.unknown_ids) for routes in streams)
        return self._packers[common]

    def _routed(
        self, packed: _PackedBatch, messages_W: Sequence[Tensor], headers_W: Sequence[_BatchHeader]
    ) -> RoutedBatch:
        packers, left_W, streams = self._packers_for(packed.common), list(messages_W), list[Stream]()
        for k, (packer, sent) in enumerate(zip(packers, packed.sent, strict=True)):
            samples_W = tuple(header.distinct if k else header.status.count for header in headers_W)
            runs_W = left_W
            if packed.common:  # more follows
                ends_W = [packer.words(left, n) for left, n in zip(left_W, samples_W, strict=True)]
                runs_W = [left[:end] for left, end in zip(left_W, ends_W, strict=True)]
                left_W = [left[end:] for left, end in zip(left_W, ends_W, strict=True)]
            streams.append(_unpacked(packer, sent, runs_W, samples_W))
        received, distinct = streams[0].received, streams[-1].received
        if packed.common and distinct is not None:
            copies_U = torch.cat(left_W)
            numbers_U = torch.arange(len(copies_U), device=copies_U.device)
            inverse_B = numbers_U.repeat_interleave(copies_U, output_size=sum(streams[0].samples_W))
            received = _join_streams(received, distinct, inverse_B)
        return RoutedBatch(jagged=packed.jagged, received=received, streams=tuple(streams), common=packed.common)


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
        return router.returned(routed, grad_outputs[0]).to(routed.jagged.weights_N.dtype), None, None


def _pack_known(packer: Packer, jagged: Jagged, *, learns: bool = False) -> SentBatch:
    try:
        return packer.pack(jagged, learns)
    except (RuntimeError, IdError):  # the rare case pays: find what was wrong, and go on if tables allow it
        return packer.pack(packer.known(jagged), learns)


def _unpacked(packer: Packer, sent: SentBatch, messages_W: Sequence[Tensor], samples_W: tuple[int, ...]) -> Stream:
    """What came, as one batch; how many ids of each rank, if those who asked get a vector for each."""
    received, lengths_W = packer.unpack(messages_W, samples_W)
    ids_WS = ((0,) * packer.slices,) * len(samples_W)
    if received is not None and sent.places_N is not None:
        ids_WS = tuple(tuple(bags.view(packer.slices, -1).sum(1).tolist()) for bags in lengths_W)
    return Stream(sent=sent, samples_W=samples_W, ids_WS=ids_WS, received=received)


def _join_streams(own: Jagged | None, common: Jagged, inverse_B: Tensor) -> Jagged:
    """One batch of own and shared features; who needs no weights has ones, where the other has some."""
    values_N, lengths_FB, weights_N = common.values_N[:0], common.lengths_FB[:0], None
    if own is not None and own.features:
        values_N, lengths_FB, weights_N = own.values_N, own.lengths_FB, own.weights_N
    if weights_N is None and common.weights_N is not None:
        weights_N = torch.ones(len(values_N), device=values_N.device)
    elif weights_N is not None and common.weights_N is None:
        common = replace(common, weights_N=torch.ones(len(common.values_N), device=values_N.device))
    return Jagged(
        features=own.features if own is not None else (),
        values_N=values_N,
        lengths_FB=lengths_FB,
        weights_N=weights_N,
        shared=Shared(jagged=common, inverse_B=inverse_B),
    )
