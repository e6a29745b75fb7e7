"""Ids to the ranks that hold their rows: one exchange of a few counts, then one of everything.

What goes to a rank is one message (see `pack.py`). Input is checked here, where it came from, before anything is sent.

[Note: Malformed batches] A rank that cannot use its batch tells the others in an exchange that they enter anyway, and
all raise (see [Note: rank status] in `comm/status.py`). In a lookup that is the exchange of headers, whether the fault
is noticed here, while ids are mapped (`MappedEmbeddings`) or before there is a batch of ours at all. In a loop over
batches it is the `StepHeader` before a step (`train/step_header.py`), which also says how wide the batch is.

[Note: Halves] Where samples share bags, a batch is two: own features of B samples, and shared ones of U distinct
samples. Both are in the one message to a rank, which ends with how many samples each distinct one is. Their vectors
travel as those of two batches (`Routed.halves`) and are spread at the end; gradients go back for all samples, as those
of the expanded batch, which holders make of the two. All ranks have to share the same features; where they do not, all
expand their batches and start again.
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
from rowwise.ops.tiles import learns
from rowwise.shard.pack import Asked, Packer
from rowwise.shard.routes import Routes
from rowwise.spec import Pooling

DIGEST_bits = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A batch after its ids have travelled; where samples share bags, `asked` is of own features, but for its batch."""

    asked: Asked
    samples_W: tuple[int, ...]  # of each rank; this rank looks up for all of them, in this order
    ids_WS: tuple[tuple[int, ...], ...]  # of each rank in each slice of this one; nothing, if nobody asks for it
    received: Jagged | None  # the slices of this rank; None: it holds no piece of any table
    weights: Tensor | None = None  # those received, where they learn: part of the graph on every rank
    common: tuple[str, ...] = ()  # features of which samples share bags
    halves: "tuple[Routed, Routed] | None" = None  # see [Note: Halves]


class _BatchHeader(NamedTuple):
    """What a rank tells another of its batch before it sends the ids."""

    status: RankStatus = RankStatus(failed=1)  # the count is of samples
    words: int = 0  # that follow
    learns: bool = False
    digest: int = 0  # of the names of shared features; 0: there are none
    distinct: int = 0

    def pack(self) -> list[int]:
        """As three numbers."""
        return [self.status.pack(), self.words, self.learns | self.digest << 1 | self.distinct << (1 + DIGEST_bits)]

    @classmethod
    def unpack(cls, status: int, words: int, more: int) -> "_BatchHeader":
        """From the same."""
        digest, distinct = more >> 1 & ((1 << DIGEST_bits) - 1), more >> (1 + DIGEST_bits)
        return cls(RankStatus.unpack(status), words, bool(more & 1), digest, distinct)


class _Packed(NamedTuple):
    """A batch that is ready to go: in one piece, or in halves."""

    given: Jagged
    jagged: Jagged  # with ids that stand for unknown ones, where a table has such
    common: tuple[str, ...]
    asked: tuple[Asked, ...]
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
        self._packer = Packer(routes, comm.rank, self.unknown_ids)
        self._halves: dict[tuple[str, ...], tuple[Packer, Packer]] = {}  # by the features that are shared
        self._device = torch.device("cpu")  # of the last batch
        self._features = tuple(feature for table in routes.tables for feature in table.feature_names)
        sequences = [table for table in routes.tables if table.pooling is Pooling.SEQUENCE]
        self._sequences = tuple(feature for table in sequences for feature in table.feature_names)

    def route(self, sparse: Jagged | KeyedJagged) -> Routed:
        """Send a batch's ids to whoever holds their rows, and take the ids of which this rank does."""
        error: RowwiseError | None = None
        packed: _Packed | None = None
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
        messages_W = came.split(receives_W)
        if packed.common:
            return self._routed_halves(packed, messages_W, headers_W)
        samples_W = tuple(header.status.count for header in headers_W)
        routed = _unpacked(self._packer, packed.asked[0], messages_W, samples_W)
        if not packed.learns:
            return routed
        weights, received = _Weights.apply(packed.given.weights_N, self, routed), routed.received
        if received is not None and received.weights_N is not None:
            received = replace(received, weights_N=weights)
        return replace(routed, received=received, weights=weights)

    def abort(self, error: RowwiseError) -> NoReturn:
        """Instead of `route`, where there is no batch: raises on all ranks."""
        self._exchange_headers(None, error)
        raise error

    def returned(self, routed: Routed, grad_N: Tensor) -> Tensor:
        """The gradients of this rank's per-id weights, of those that ranks were sent."""
        me, asked = self._me, routed.asked
        assert asked.places_N is not None
        slices = range(len(self._routes.slices_W[me]))
        ids_WS = routed.ids_WS if self._packer.weighted_W[me] else tuple((0,) * len(slices) for _ in routed.ids_WS)
        # It is slice by slice, rank after rank in each; what goes to a rank is slice by slice.
        blocks = grad_N.split([ids[k] for k in slices for ids in ids_WS])
        world = len(ids_WS)
        back = [blocks[k * world + w] for w in range(world) for k in slices]
        sizes_W = [sum(ids) for ids in ids_WS]
        receives_W = [sum(n) if w else 0 for n, w in zip(asked.counts_W, self._packer.weighted_W, strict=True)]
        flat = torch.cat(back) if back else grad_N.new_empty(0)
        came = self._comm.all_to_all(flat, sizes_W, receives_W, "gradients").wait()
        counts_W = torch.tensor([sum(n) for n in asked.counts_W])
        sent_to = torch.tensor(self._packer.weighted_W).repeat_interleave(counts_W)
        gradient = came.new_zeros(len(asked.jagged.values_N))
        return gradient.index_add_(0, asked.places_N[sent_to], came)

    def _exchange_headers(self, packed: _Packed | None, error: RowwiseError | None) -> list[_BatchHeader]:
        """Those of all ranks; raises on all if one has no batch."""
        world, mine = self._routes.world, _BatchHeader()
        if packed is not None:
            common = packed.common
            digest = (zlib.crc32("\n".join(common).encode()) or 1) if common else 0
            distinct = packed.asked[1].jagged.batch_size if common else 0
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
        return learns(jagged) and any(self._packer.weighted_W)

    def _checked(self, sparse: Jagged | KeyedJagged) -> Jagged:
        """The batch as one of ours, its tensors in one piece."""
        jagged = Jagged.from_keyed(sparse)
        self._device = jagged.values_N.device
        # A weight of a shared bag has a gradient for each sample.
        return (jagged.expanded() if self._learns(jagged) else jagged).contiguous()

    def _pack(self, given: Jagged) -> _Packed:
        """The messages to all ranks."""
        learns = self._learns(given)
        jagged = given.owning(self._sequences)  # whose repeats are taken care of, see `distinct.py`
        missing = set(self._features) - set(jagged.all_features)
        if missing:
            raise BatchError(f"the batch lacks {', '.join(sorted(missing))}; it holds {', '.join(jagged.all_features)}")
        shared = jagged.shared
        common = () if shared is None else tuple(f for f in self._features if f in shared.jagged.features)
        if shared is None or not common:
            asked = self._asked(self._packer, jagged.expanded())
            words, sizes_W = asked.words, asked.sizes_W
            return _Packed(given, asked.jagged, (), (asked,), words, sizes_W, learns)
        shared.check()
        own = replace(jagged, shared=None) if jagged.features else jagged
        packers = self._halves_for(common)
        try:
            halves = packers[0].pack(own), packers[1].pack(shared.jagged)
        except (RuntimeError, IdError):
            # What was wrong is told of samples, and so counted: now each sample is a distinct one.
            samples_B = torch.arange(jagged.batch_size, device=shared.inverse_B.device)
            shared = Shared(jagged=shared.expanded(), inverse_B=samples_B)
            halves = self._asked(packers[0], own), self._asked(packers[1], shared.jagged)
        copies_U = shared.inverse_B.bincount(minlength=shared.jagged.batch_size).to(torch.int32)
        parts_W = [
            [mine, theirs, copies_U if len(theirs) else copies_U[:0]]
            for mine, theirs in zip(halves[0].by_rank, halves[1].by_rank, strict=True)
        ]
        return _Packed(
            given=given,
            learns=learns,
            jagged=_together(halves[0].jagged, halves[1].jagged, shared.inverse_B),
            common=common,
            asked=halves,
            words=torch.cat([part for parts in parts_W for part in parts]),
            sizes_W=tuple(sum(map(len, parts)) for parts in parts_W),
        )

    def _asked(self, packer: Packer, jagged: Jagged) -> Asked:
        try:
            return packer.pack(jagged, self._learns(jagged))
        except (RuntimeError, IdError):  # the rare case pays: find what was wrong, and go on if tables allow it
            return packer.pack(packer.known(jagged), self._learns(jagged))

    def _halves_for(self, common: tuple[str, ...]) -> tuple[Packer, Packer]:
        """Of own features, and of those that are shared."""
        if common not in self._halves:
            own, shared = (Packer(half, self._me, self.unknown_ids) for half in self._routes.halves(common))
            self._halves[common] = own, shared
        return self._halves[common]

    def _routed_halves(
        self, packed: _Packed, messages_W: Sequence[Tensor], headers_W: Sequence[_BatchHeader]
    ) -> Routed:
        """What came, where samples share bags."""
        own, shared = self._halves_for(packed.common)
        samples_W, distinct_W = zip(*((header.status.count, header.distinct) for header in headers_W), strict=True)
        own_W: list[Tensor] = []
        shared_W: list[Tensor] = []
        copies_W: list[Tensor] = []
        for message, header in zip(messages_W, headers_W, strict=True):
            ends = own.words(message, header.status.count)
            rest = message[ends:]
            end = shared.words(rest, header.distinct)
            own_W.append(message[:ends])
            shared_W.append(rest[:end])
            copies_W.append(rest[end:])
        halves = (
            _unpacked(own, packed.asked[0], own_W, samples_W),
            _unpacked(shared, packed.asked[1], shared_W, distinct_W),
        )
        received, common = (half.received for half in halves)
        if common is not None:
            copies_U = torch.cat(copies_W)
            numbers_U = torch.arange(len(copies_U), device=copies_U.device)
            inverse_B = numbers_U.repeat_interleave(copies_U, output_size=sum(samples_W))
            received = _together(received, common, inverse_B)
        return Routed(
            asked=replace(packed.asked[0], jagged=packed.jagged),
            samples_W=samples_W,
            ids_WS=halves[0].ids_WS,
            received=received,
            common=packed.common,
            halves=halves,
        )


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


def _unpacked(packer: Packer, asked: Asked, messages_W: Sequence[Tensor], samples_W: tuple[int, ...]) -> Routed:
    """What came, as one batch; how many ids of each rank, if those who asked get a vector for each."""
    received, lengths_W = packer.unpack(messages_W, samples_W)
    ids_WS = ((0,) * packer.slices,) * len(samples_W)
    if received is not None and asked.places_N is not None:
        ids_WS = tuple(tuple(bags.view(packer.slices, -1).sum(1).tolist()) for bags in lengths_W)
    return Routed(asked=asked, samples_W=samples_W, ids_WS=ids_WS, received=received)


def _together(own: Jagged | None, common: Jagged, inverse_B: Tensor) -> Jagged:
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
