"""Exchange path `per_id`: one vector per id, for sequences and for bags that the requesting rank pools.

Pooling at the requester is what makes elastic sums the same bits for any way of cutting rows: unpooled rows travel, and
the kernel that pools an uncut table pools them here, in the order of the ids. It costs traffic: a vector per id instead
of one per bag.
"""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from rowwise.comm.codec import gradient_scale
from rowwise.comm.seam import Comm
from rowwise.ops.layout import MODES, FeatureRow
from rowwise.shard.ids import Stream
from rowwise.shard.routes import ExchangePath, Routes, SequencePiece
from rowwise.shard.vectors import PeerBlocks, WireCodecs, concat_blocks
from rowwise.spec import Wire


@final
class PerIdExchange:
    """All-to-all of per-id vectors: each rank sends the rows of the ids that it was sent."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, path: ExchangePath) -> None:
        self._routes, self._me = routes, comm.rank
        self._pieces_W = [routes.per_id_pieces(w, path) for w in range(routes.world)]
        self._forward_codecs, self._backward_codecs = (
            WireCodecs.of(comm, wire, backward=backward) for backward in (False, True)
        )
        features = {piece.feature for pieces in self._pieces_W for piece in pieces}
        self._dims = {f: t.dim for t in routes.tables for f in t.feature_names if f in features}
        self._tables = {f: t for t in routes.tables for f in t.feature_names if f in features}
        self.any = bool(features)

    def forward(self, stream: Stream, flat: Tensor) -> dict[str, Tensor]:
        """The vectors [N, D] of each feature of this rank's batch; `flat`: rows it looked up, piece after piece."""
        # Decided by the pieces of all ranks, so either every rank enters the exchange or none does.
        if not self.any:
            return {}
        out = [PeerBlocks.of(blocks) for blocks in self._blocks_by_rank(stream, flat)]
        received = self._forward_codecs.exchange_blocks(out, self._expected_blocks(stream), "rows").wait()
        return self._assemble(stream, received)

    def backward(self, stream: Stream, grads: dict[str, Tensor]) -> Tensor:
        """The gradients of the rows that this rank looked up, piece after piece."""
        if not self.any:
            return torch.empty(0)
        out_W: list[PeerBlocks] = []
        for pieces in self._pieces_W:
            columns = [slice(piece.first, piece.first + piece.width) for piece in pieces]
            picked = [grads[p.feature][self._places(stream, p), c] for p, c in zip(pieces, columns, strict=True)]
            out_W.append(PeerBlocks.of(picked))
        pieces = self._pieces_W[self._me]
        back = [PeerBlocks([(ids[p.slice], p.width) for p in pieces]) for ids in stream.ids_WS]
        received = self._backward_codecs.exchange_blocks(
            out_W, back, "gradients", gradient_scale(sum(stream.samples_W))
        ).wait()
        # Each rank's blocks are in the order of the pieces. Transposed to piece after piece, and the ranks in order
        # within each piece: the order in which the forward looked them up.
        flat = [blocks[k].reshape(-1) for k in range(len(pieces)) for blocks in received]
        return concat_blocks(flat) if flat else torch.empty(0)

    def pool(self, stream: Stream, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The bags [B, D] of rows that arrived one by one, pooled by the kernel that pools an uncut table."""
        jagged, batch = stream.sent.jagged, stream.sent.jagged.batch_size
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        pooled: dict[str, Tensor] = {}
        for feature, rows_ND in rows.items():
            source, table = jagged.features.index(feature), self._tables[feature]
            if not len(rows_ND):  # an arena without rows has no memory for the kernel to point at
                pooled[feature] = rows_ND.new_zeros(batch, table.dim)
                continue
            begin = stream.sent.spans[feature][0]
            # The rows that arrived are a table of their own, in which id n of the feature is row n. Ids of other
            # features get rows outside of it, which the kernel never reads: it walks this feature's bags only.
            row_of_id_N = torch.arange(-begin, len(jagged.values_N) - begin, device=rows_ND.device)
            row = FeatureRow(source, 0, 0, len(rows_ND), table.dim, 0, MODES[table.pooling], 0, 0)
            weights = None if jagged.weights_N is None else jagged.weights_N.detach().float()
            arena = rows_ND.contiguous().view(torch.uint8).flatten()
            features_FC = torch.tensor([row], dtype=torch.int64)
            pooled[feature] = torch.ops.rowwise.pool(
                arena, features_FC, row_of_id_N, offsets, weights, batch, table.dim
            )
        return pooled

    def _blocks_by_rank(self, stream: Stream, flat: Tensor) -> Iterator[list[Tensor]]:
        """This rank's lookups, cut into the blocks for each requesting rank."""
        pieces = self._pieces_W[self._me]
        shapes = [(ids[p.slice], p.width) for p in pieces for ids in stream.ids_WS]
        # The lookup's order: piece after piece, and in each the ids of rank 0, 1, ... So rank w has every world-th.
        blocks = flat.split([n * d for n, d in shapes]) if shapes else ()
        world = self._routes.world
        for source in range(world):
            mine = range(source, len(shapes), world)
            yield [blocks[k].view(shapes[k]) for k in mine]

    def _expected_blocks(self, stream: Stream) -> list[PeerBlocks]:
        counts_W = stream.sent.counts_W
        return [PeerBlocks([(counts_W[p.rank][p.slice], p.width) for p in pieces]) for pieces in self._pieces_W]

    def _assemble(self, stream: Stream, received: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """The vectors of each feature from all blocks: columns side by side, rows in the order of the batch's ids."""
        found: dict[str, Tensor] = {}
        for pieces, blocks in zip(self._pieces_W, received, strict=True):
            for piece, block in zip(pieces, blocks, strict=True):
                feature, dim = piece.feature, self._dims[piece.feature]
                whole = self._routes.slices_W[piece.rank][piece.slice].whole
                if whole and piece.width == dim:  # neither rows nor columns are cut: the block is the result
                    found[feature] = block
                    continue
                if feature not in found:
                    begin, end = stream.sent.spans[feature]
                    found[feature] = block.new_empty((end - begin, dim))
                columns = slice(piece.first, piece.first + piece.width)
                found[feature][self._places(stream, piece), columns] = block
        return found

    def _places(self, stream: Stream, piece: SequencePiece) -> Tensor | slice:
        """Positions of a slice's ids among the ids of their feature in this rank's batch."""
        if self._routes.slices_W[piece.rank][piece.slice].whole:
            return slice(None)
        sent = stream.sent
        assert sent.places_N is not None
        before = sum(map(sum, sent.counts_W[: piece.rank])) + sum(sent.counts_W[piece.rank][: piece.slice])
        count = sent.counts_W[piece.rank][piece.slice]
        return sent.places_N[before : before + count] - sent.spans[piece.feature][0]
