"""`Router`: sends each id to the rank that holds its row, in two all-to-alls: three numbers per rank, then all ids.

The ids for a rank are one message (`pack.py`). Each rank checks its own batch before anything is sent.

[Note: Malformed batches] A rank that cannot use its batch says so in an exchange that all ranks enter anyway, and all
ranks raise ([Note: rank status] in `comm/status.py`). In a lookup that is the exchange of headers: for errors found
here, while ids are mapped (`MappedEmbeddings`), or before there is a `Jagged` at all. In a loop over batches it is the
`StepHeader` before a step (`train/step_header.py`), which also carries the batch size.

[Note: Streams] A batch is one stream, or two where samples share bags: own features with a bag for each of B samples,
and shared features with a bag for each of U distinct samples. One message per rank holds the ids of both streams, and
ends with the number of samples of each distinct sample. Vectors travel stream by stream and are expanded to samples by
the requesting rank. Gradients travel for all samples, as those of the expanded batch; the ranks that hold rows expand
the ids to match. All ranks must share the same features; if they do not, all expand their batches and route again.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from rowwise.batch import Jagged, KeyedJagged, SharedBags
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
    """Some features of a batch after their ids were exchanged. See [Note: Streams]."""

    sent: SentBatch
    samples_W: tuple[int, ...]  # samples of each rank; this rank looks up for all of them, in this order
    ids_WS: tuple[tuple[int, ...], ...]  # ids that each rank sent for each slice of this rank; 0 where none needs it
    received: Jagged | None  # ids of this rank's slices, of all ranks' samples; None: it holds no piece of any table


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedBatch:
    """A batch after its ids were exchanged."""

    jagged: Jagged  # this rank's batch, unknown ids replaced
    received: Jagged | None  # the streams' received ids as one batch in which samples share bags
    streams: tuple[Stream, ...]
    common: tuple[str, ...] = ()  # features of the second stream
    weights: Tensor | None = None  # received per-id weights if they require gradients: in the graph on every rank

    @property
    def samples_W(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return self.streams[0].samples_W


class _BatchHeader(NamedTuple):
    """Sent to each rank before the ids, as three int64."""

    status: RankStatus = RankStatus(failed=1)  # its count: samples of the batch
    words: int = 0  # length of the message of ids that follows
    trains_weights: bool = False
    digest: int = 0  # CRC-32 of the names of shared features; 0: none are shared
    distinct: int = 0  # distinct samples, where features are shared

    def pack(self) -> list[int]:
        return [
            self.status.pack(),
            self.words,
            self.trains_weights | self.digest << 1 | self.distinct << (1 + DIGEST_bits),
        ]

    @classmethod
    def unpack(cls, status: int, words: int, more: int) -> "_BatchHeader":
        digest, distinct = more >> 1 & ((1 << DIGEST_bits) - 1), more >> (1 + DIGEST_bits)
        return cls(RankStatus.unpack(status), words, bool(more & 1), digest, distinct)


class _PackedBatch(NamedTuple):
    """A batch packed into one message per rank."""

    given: Jagged
    jagged: Jagged  # unknown ids replaced
    common: tuple[str, ...]  # features of the second stream
    sent: tuple[SentBatch, ...]  # by stream
    words: Tensor  # the messages in rank order
    sizes_W: tuple[int, ...]
    trains_weights: bool  # whether per-id weights get a gradient


@final
class Router:
    """Sends the ids of a batch to the ranks that hold their rows."""

    def __init__(self, routes: Routes, comm: Comm) -> None:
        self._routes, self._comm, self._me = routes, comm, comm.rank
        self.unknown_ids: dict[str, int] = {}
        self._packers: dict[tuple[str, ...], tuple[Packer, ...]] = {}  # one per stream, by the shared features
        self._weighted_W = self._packers_for(())[0].weighted_W
        self._device = torch.device("cpu")  # of the last batch: a rank without a batch sends its header from there
        self._features = tuple(feature for table in routes.tables for feature in table.feature_names)
        sequences = [table for table in routes.tables if table.pooling is Pooling.SEQUENCE]
        self._sequences = tuple(feature for table in sequences for feature in table.feature_names)

    def route(self, sparse: Jagged | KeyedJagged) -> RoutedBatch:
        """Send a batch's ids to the ranks that hold their rows; receive the ids whose rows this rank holds."""
        error: RowwiseError | None = None
        packed: _PackedBatch | None = None
        unknown_ids = dict(self.unknown_ids)
        try:
            packed = self._pack(self._to_jagged(sparse))
        except RowwiseError as caught:  # raised after the headers: the other ranks are already waiting for ours
            error = caught
        headers_W = self._exchange_headers(packed, error)
        assert packed is not None
        # All ranks see the same headers, so all of them take the same branch below without another exchange.
        if len({header.trains_weights for header in headers_W}) > 1:
            raise BatchError("per-id weights require gradients on some ranks only: want the same on all ranks")
        if len({header.digest for header in headers_W}) > 1:
            # Packing has counted unknown ids, and packing the expanded batch counts them again.
            self.unknown_ids.clear()
            self.unknown_ids.update(unknown_ids)
            return self.route(packed.given.expanded())
        receives_W = [header.words for header in headers_W]
        came = self._comm.all_to_all(packed.words, packed.sizes_W, receives_W, "ids").wait()
        routed = self._unpack(packed, came.split(receives_W), headers_W)
        if not packed.trains_weights:
            return routed
        return replace(routed, weights=_ReceivedWeightsFunction.apply(packed.given.weights_N, self, routed))

    def abort(self, error: RowwiseError) -> NoReturn:
        """Collective replacement for `route` on a rank that has no batch: raises on all ranks."""
        self._exchange_headers(None, error)
        raise error

    def return_weight_gradients(self, routed: RoutedBatch, grad_N: Tensor) -> Tensor:
        """The gradients of this rank's per-id weights, summed over the ranks that were sent each of them."""
        me, (stream,) = self._me, routed.streams  # one stream: batches whose weights learn are expanded first
        sent = stream.sent
        assert sent.places_N is not None
        slices = range(len(self._routes.slices_W[me]))
        ids_WS = stream.ids_WS if self._weighted_W[me] else tuple((0,) * len(slices) for _ in stream.ids_WS)
        # The received batch is slice-major, with the ranks in order inside each slice; a message to a rank holds its
        # slices one after the other. So block (slice k, rank w) is number k * world + w here, and w-major when sent.
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
        """The headers of all ranks; raises on all ranks if one has no batch."""
        world, mine = self._routes.world, _BatchHeader()
        if packed is not None:
            common = packed.common
            digest = (zlib.crc32("\n".join(common).encode()) or 1) if common else 0
            distinct = packed.sent[1].jagged.batch_size if common else 0
            mine = _BatchHeader(RankStatus(packed.jagged.batch_size), 0, packed.trains_weights, digest, distinct)
        words_W = [0] * world if packed is None else packed.sizes_W
        rows = [mine._replace(words=words).pack() for words in words_W]
        header = torch.tensor(rows, dtype=torch.int64).flatten().to(self._device)
        came = self._comm.all_to_all(header, [3] * world, [3] * world, "counts").wait().view(world, 3).tolist()
        headers_W = [_BatchHeader.unpack(*numbers) for numbers in came]
        raise_if_any_failed(self._comm, [header.status for header in headers_W], error, during="ids of a batch")
        return headers_W

    def _trains_weights(self, jagged: Jagged) -> bool:
        return per_id_weights_require_grad(jagged) and any(self._weighted_W)

    def _to_jagged(self, sparse: Jagged | KeyedJagged) -> Jagged:
        """The batch as a contiguous `Jagged`, expanded if its weights get gradients."""
        jagged = Jagged.from_keyed(sparse)
        self._device = jagged.values_N.device
        # The weight of a shared bag has a gradient of its own for each sample, so such bags are not sent once.
        return (jagged.expanded() if self._trains_weights(jagged) else jagged).contiguous()

    def _pack(self, given: Jagged) -> _PackedBatch:
        trains_weights = self._trains_weights(given)
        jagged = given.expand_features(self._sequences)  # sequences are not shared: `distinct.py` removes their repeats
        missing = set(self._features) - set(jagged.all_features)
        if missing:
            raise BatchError(f"the batch lacks {', '.join(sorted(missing))}; it holds {', '.join(jagged.all_features)}")
        shared = jagged.shared
        common = () if shared is None else tuple(f for f in self._features if f in shared.jagged.features)
        if shared is None or not common:
            (packer,) = self._packers_for(())
            sent = _pack_or_map_unknown(packer, jagged.expanded(), trains_weights=trains_weights)
            return _PackedBatch(given, sent.jagged, (), (sent,), sent.words, sent.sizes_W, trains_weights)
        shared.check()
        packers, inverse_B = self._packers_for(common), shared.inverse_B
        streams = replace(jagged, shared=None) if jagged.features else jagged, shared.jagged
        try:
            own, distinct = (packer.pack(stream) for packer, stream in zip(packers, streams, strict=True))
        except (RuntimeError, IdError):
            # An error names a sample of this batch, and unknown ids are counted per sample: make each sample distinct.
            streams, inverse_B = (streams[0], shared.expanded()), torch.arange(len(inverse_B), device=inverse_B.device)
            own, distinct = (
                _pack_or_map_unknown(packer, stream) for packer, stream in zip(packers, streams, strict=True)
            )
        copies_U = inverse_B.bincount(minlength=distinct.jagged.batch_size).to(torch.int32)
        # A rank without a piece of the shared tables gets no counts either: its message has no second stream to expand.
        messages_W = [
            [own_words, shared_words, copies_U if len(shared_words) else copies_U[:0]]
            for own_words, shared_words in zip(own.by_rank, distinct.by_rank, strict=True)
        ]
        words, sizes_W = torch.cat([x for parts in messages_W for x in parts]), [sum(map(len, x)) for x in messages_W]
        whole = _join_streams(own.jagged, distinct.jagged, inverse_B)
        return _PackedBatch(given, whole, common, (own, distinct), words, tuple(sizes_W), trains_weights)

    def _packers_for(self, common: tuple[str, ...]) -> tuple[Packer, ...]:
        if common not in self._packers:
            streams = self._routes.split_streams(common)
            self._packers[common] = tuple(Packer(routes, self._me, self.unknown_ids) for routes in streams)
        return self._packers[common]

    def _unpack(
        self, packed: _PackedBatch, messages_W: Sequence[Tensor], headers_W: Sequence[_BatchHeader]
    ) -> RoutedBatch:
        """The messages of all ranks as a batch of all their samples."""
        packers, rest_W, streams = self._packers_for(packed.common), list(messages_W), list[Stream]()
        for k, (packer, sent) in enumerate(zip(packers, packed.sent, strict=True)):
            samples_W = tuple(header.distinct if k else header.status.count for header in headers_W)
            words_W = rest_W
            if packed.common:  # a second stream or the counts follow, so this one ends where its lengths say
                ends_W = [packer.message_words(rest, n) for rest, n in zip(rest_W, samples_W, strict=True)]
                words_W = [rest[:end] for rest, end in zip(rest_W, ends_W, strict=True)]
                rest_W = [rest[end:] for rest, end in zip(rest_W, ends_W, strict=True)]
            streams.append(_unpack_stream(packer, sent, words_W, samples_W))
        received, distinct = streams[0].received, streams[-1].received
        if packed.common and distinct is not None:
            # What is left of each message: samples per distinct sample. Distinct samples of all ranks follow each
            # other in rank order, as samples do, so one repeat_interleave maps every sample to its distinct one.
            copies_U = torch.cat(rest_W)
            numbers_U = torch.arange(len(copies_U), device=copies_U.device)
            inverse_B = numbers_U.repeat_interleave(copies_U, output_size=sum(streams[0].samples_W))
            received = _join_streams(received, distinct, inverse_B)
        return RoutedBatch(jagged=packed.jagged, received=received, streams=tuple(streams), common=packed.common)


class _ReceivedWeightsFunction(torch.autograd.Function):
    """The received per-id weights, as a function of the weights of all ranks: its backward returns the gradients."""

    # Even a rank that received none needs a node in its graph, as all ranks have to join the backward's exchange.
    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, _weights, router, routed = args
        ctx.kept = router, routed
        received = None if routed.received is None else routed.received.weights_N
        return torch.empty(0) if received is None else received.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        router, routed = ctx.kept
        return router.return_weight_gradients(routed, grad_outputs[0]).to(routed.jagged.weights_N.dtype), None, None


def _pack_or_map_unknown(packer: Packer, jagged: Jagged, *, trains_weights: bool = False) -> SentBatch:
    try:
        return packer.pack(jagged, trains_weights)
    except (RuntimeError, IdError):  # only a bad batch pays for the search: raise with names, or map unknown ids
        return packer.pack(packer.map_unknown_ids(jagged), trains_weights)


def _unpack_stream(packer: Packer, sent: SentBatch, messages_W: Sequence[Tensor], samples_W: tuple[int, ...]) -> Stream:
    received, lengths_W = packer.unpack(messages_W, samples_W)
    ids_WS = ((0,) * packer.num_slices,) * len(samples_W)
    if received is not None and sent.places_N is not None:  # per-id vectors go back: how many to each rank
        ids_WS = tuple(tuple(bags.view(packer.num_slices, -1).sum(1).tolist()) for bags in lengths_W)
    return Stream(sent=sent, samples_W=samples_W, ids_WS=ids_WS, received=received)


def _join_streams(own: Jagged | None, common: Jagged, inverse_B: Tensor) -> Jagged:
    """One batch of own and shared features; if only one of the two has weights, the other gets ones."""
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
        shared=SharedBags(jagged=common, inverse_B=inverse_B),
    )
