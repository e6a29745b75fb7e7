"""`Router`: sends each id to the rank that holds its row, in two all-to-alls: a header per rank, then all ids.

`start` returns once the first has begun, so a later batch can be routed while this one is computed. The ids for a rank
are one message (`pack.py`). Each rank checks its own batch before anything is sent. Batches whose samples share bags
take `bag_sets.py` on the way.

[Note: Malformed batches] A rank with an invalid batch reports it in an exchange that all ranks enter anyway, and all
raise ([Note: Rank status] in `parallel/comm/status.py`). In a lookup that is the exchange of headers: for errors found
here, while ids are mapped (`MappedEmbeddings`), or before the `Jagged` exists. In a loop over batches it is the
`StepHeader` before a step (`train/step_header.py`), which also carries the batch size.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, RowwiseError
from rowwise.parallel.comm.chain import CollectiveChain, CollectiveSteps
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import RankStatus, raise_if_any_failed
from rowwise.parallel.shard.bag_sets import SharedBatchPacker
from rowwise.parallel.shard.pack import PackedBatch, Packer, RoutedBatch
from rowwise.parallel.shard.routes import Routes
from rowwise.tables.batch import Jagged, KeyedJagged
from rowwise.tables.ops.check import check_features
from rowwise.tables.ops.tiles import per_id_weights_require_grad
from rowwise.tables.ops.unknown import UnknownIds
from rowwise.tables.spec import Pooling

DIGEST_bits = 32


@final
class Router:
    """Sends the ids of a batch to the ranks that hold their rows."""

    def __init__(self, routes: Routes, comm: Comm) -> None:
        self._routes, self._comm = routes, comm
        self._unknown: list[UnknownIds] = []  # unknown ids of the batch being packed
        self._packer = Packer(routes, comm.rank, self._unknown)
        self._shared_packer = SharedBatchPacker(routes, comm.rank, self._unknown)
        self._weighted_W = self._packer.weighted_W
        self._device = torch.device("cpu")  # device of the last batch, from which a rank without a batch sends
        self._features = tuple(feature for table in routes.tables for feature in table.feature_names)
        sequences = [table for table in routes.tables if table.pooling is Pooling.SEQUENCE]
        self._sequences = tuple(feature for table in sequences for feature in table.feature_names)

    def start(self, sparse: Jagged | KeyedJagged) -> CollectiveChain[RoutedBatch]:
        """Start to send a batch's ids to the ranks that hold their rows, and to receive ids whose rows this rank holds.

        An error of any rank's batch is raised by the `finish` of all ranks.
        """
        return CollectiveChain(self._steps(sparse))

    def start_failed(self, error: RowwiseError) -> CollectiveChain[RoutedBatch]:
        """Collective replacement for `start` on a rank that has no batch: the `finish` of all ranks raises."""
        return CollectiveChain(self._fail(error))

    def _fail(self, error: RowwiseError) -> CollectiveSteps[RoutedBatch]:
        yield from self._exchange_headers(None, error)
        raise error

    def _steps(self, sparse: Jagged | KeyedJagged) -> CollectiveSteps[RoutedBatch]:
        error: RowwiseError | None = None
        packed: PackedBatch | None = None
        self._unknown.clear()
        try:
            packed = self._pack(self._to_jagged(sparse))
        except RowwiseError as caught:  # raised after the headers, for which the other ranks already wait
            error = caught
        unknown = tuple(self._unknown)
        headers_W = yield from self._exchange_headers(packed, error)
        assert packed is not None
        # All ranks see the same headers, so all of them take the same branch below without another exchange.
        if len({header.trains_weights for header in headers_W}) > 1:
            raise BatchError("per-id weights require gradients on some ranks only", "the same on all ranks")
        if len({header.digest for header in headers_W}) > 1:
            return (yield from self._steps(packed.batch.expanded()))
        recv_sizes = [header.words for header in headers_W]
        received = yield self._comm.all_to_all(packed.words, packed.sizes_W, recv_sizes, "ids")
        routed = replace(self._unpack(packed, received.split(recv_sizes), headers_W), unknown=unknown)
        if not packed.trains_weights:
            return routed
        return replace(routed, weights=_ReceivedWeightsFunction.apply(packed.batch.weights_N, self, routed))

    def return_weight_gradients(self, routed: RoutedBatch, grad_N: Tensor) -> Tensor:
        """The gradients of this rank's per-id weights, summed over the ranks that were sent each of them."""
        (bag_set,) = routed.bag_sets  # batches whose weights learn are expanded first
        sent = bag_set.sent
        assert sent.positions_N is not None
        slices, world = range(self._packer.num_slices), len(bag_set.ids_WS)
        ids_WS = bag_set.ids_WS if self._weighted_W[self._comm.rank] else ((0,) * len(slices),) * world
        # The received batch is slice-major, with the ranks in order inside each slice; a message to a rank holds its
        # slices one after the other. So block (slice k, rank w) is number k * world + w here, and w-major when sent.
        blocks = grad_N.split([ids[k] for k in slices for ids in ids_WS])
        by_rank = [blocks[k * world + w] for w in range(world) for k in slices]
        send_sizes = [sum(ids) for ids in ids_WS]
        recv_sizes = [sum(n) if w else 0 for n, w in zip(sent.counts_W, self._weighted_W, strict=True)]
        flat = torch.cat(by_rank) if by_rank else grad_N.new_empty(0)
        received = self._comm.all_to_all(flat, send_sizes, recv_sizes, "gradients").wait()
        counts_W = torch.tensor([sum(n) for n in sent.counts_W])
        sent_to = torch.tensor(self._weighted_W).repeat_interleave(counts_W)
        gradient = received.new_zeros(len(sent.jagged.values_N))
        return gradient.index_add_(0, sent.positions_N[sent_to], received)

    def _trains_weights(self, jagged: Jagged) -> bool:
        return per_id_weights_require_grad(jagged) and any(self._weighted_W)

    def _to_jagged(self, sparse: Jagged | KeyedJagged) -> Jagged:
        """The batch as a contiguous `Jagged`, expanded if its weights get gradients."""
        jagged = Jagged.from_keyed(sparse)
        self._device = jagged.values_N.device
        # The weight of a shared bag has a gradient of its own for each sample, so such bags are not sent once.
        return (jagged.expanded() if self._trains_weights(jagged) else jagged).contiguous()

    def _pack(self, batch: Jagged) -> PackedBatch:
        jagged = batch.expand_features(self._sequences)  # sequences are not shared: `distinct.py` removes their repeats
        check_features(jagged.all_features, self._features)
        shared = jagged.shared
        shared_features = () if shared is None else tuple(f for f in self._features if f in shared.jagged.features)
        if shared is not None and shared_features:
            return self._shared_packer.pack(batch, jagged, shared, shared_features)
        trains_weights = self._trains_weights(batch)
        sent = self._packer.pack(jagged.expanded(), trains_weights=trains_weights)
        return PackedBatch(batch, sent.jagged, (sent,), sent.words, sent.sizes_W, trains_weights)

    def _exchange_headers(
        self, packed: PackedBatch | None, error: RowwiseError | None
    ) -> "CollectiveSteps[list[_BatchHeader]]":
        """The headers of all ranks; raises on all ranks if any rank has no batch."""
        world, header = self._routes.world, _BatchHeader()
        if packed is not None:
            status, names = RankStatus(packed.jagged.batch_size), packed.shared_features
            digest = (zlib.crc32("\n".join(names).encode()) or 1) if names else 0
            distinct = packed.sent[1].jagged.batch_size if names else 0
            header = _BatchHeader(status, 0, packed.trains_weights, digest, distinct)
        words_W = [0] * world if packed is None else packed.sizes_W
        numbers = [header._replace(words=words).pack() for words in words_W]
        flat = torch.tensor(numbers, dtype=torch.int64).flatten().to(self._device)
        received = yield self._comm.all_to_all(flat, [3] * world, [3] * world, "counts")
        headers_W = [_BatchHeader.unpack(*numbers) for numbers in received.view(world, 3).tolist()]
        raise_if_any_failed(self._comm, [header.status for header in headers_W], error, during="ids of a batch")
        return headers_W

    def _unpack(
        self, packed: PackedBatch, messages_W: Sequence[Tensor], headers_W: "Sequence[_BatchHeader]"
    ) -> RoutedBatch:
        """The messages of all ranks as a batch of all their samples."""
        samples_W = tuple(header.status.count for header in headers_W)
        if packed.shared_features:
            distinct_W = tuple(header.distinct for header in headers_W)
            return self._shared_packer.unpack(packed, messages_W, samples_W, distinct_W)
        bag_set = self._packer.unpack(packed.sent[0], messages_W, samples_W)
        return RoutedBatch(jagged=packed.jagged, received=bag_set.received, bag_sets=(bag_set,))


class _BatchHeader(NamedTuple):
    """Sent to each rank before the ids, as three int64."""

    status: RankStatus = RankStatus(failed=1)  # `status.count`: samples of the batch
    words: int = 0  # length of the following message of ids
    trains_weights: bool = False
    digest: int = 0  # CRC-32 of the names of shared features; 0 if no feature is shared
    distinct: int = 0  # distinct samples, where features are shared

    def pack(self) -> list[int]:
        flags = self.trains_weights | self.digest << 1 | self.distinct << (1 + DIGEST_bits)
        return [self.status.pack(), self.words, flags]

    @classmethod
    def unpack(cls, status: int, words: int, flags: int) -> "_BatchHeader":
        digest, distinct = flags >> 1 & ((1 << DIGEST_bits) - 1), flags >> (1 + DIGEST_bits)
        return cls(RankStatus.unpack(status), words, bool(flags & 1), digest, distinct)


class _ReceivedWeightsFunction(torch.autograd.Function):
    """The received per-id weights, as a function of the weights of all ranks: its backward returns the gradients."""

    # Even a rank that received no weights needs a node in its graph, as all ranks have to join the backward's exchange.
    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, _weights, router, routed = args
        ctx.routed = router, routed
        received = None if routed.received is None else routed.received.weights_N
        return torch.empty(0) if received is None else received.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        router, routed = ctx.routed
        return router.return_weight_gradients(routed, grad_outputs[0]).to(routed.jagged.weights_N.dtype), None, None
