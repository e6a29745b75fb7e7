"""Exchange path `per_id`: one vector per id, for sequences and for bags that the rank of the samples pools.

Pooling there makes elastic sums the same bits for any way of cutting rows: the owners of the rows send them unpooled,
and the kernel that pools an uncut table pools them in the order of the ids. It costs a vector per id, not per bag.
"""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from rowwise.parallel.comm.codec import gradient_scale
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.shard.pack import BagSet
from rowwise.parallel.shard.routes import ExchangePath, PerIdPiece, Routes
from rowwise.parallel.shard.vectors import Block, ExpectedBlock, WireCodecs, concat_blocks
from rowwise.tables.ops.layout import MODES, FeatureDescriptor
from rowwise.tables.spec import Wire


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
        self._tables = {f: t for t in routes.tables for f in t.feature_names if f in features}
        self.any = bool(features)

    def forward(self, bag_set: BagSet, flat: Tensor) -> dict[str, Tensor]:
        """The vectors [N, D] of each feature of this rank's batch; `flat`: rows it looked up, piece after piece."""
        # Decided by the pieces of all ranks: all of them enter the exchange, or none.
        if not self.any:
            return {}
        send_W = [[Block(block) for block in blocks] for blocks in self._blocks_by_rank(bag_set, flat)]
        expected_W = self._expected_blocks(bag_set)
        received_W = self._forward_codecs.exchange_blocks(send_W, expected_W, "rows", flat.device).wait()
        return self._assemble(bag_set, received_W)

    def backward(self, bag_set: BagSet, grads: dict[str, Tensor]) -> Tensor:
        """The gradients of the rows that this rank looked up, piece after piece."""
        device = bag_set.sent.jagged.values_N.device
        if not self.any:
            return torch.empty(0, device=device)
        send_W: list[list[Block]] = []
        for pieces in self._pieces_W:
            columns = [slice(piece.first, piece.first + piece.width) for piece in pieces]
            picked = [grads[p.feature][self._positions(bag_set, p), c] for p, c in zip(pieces, columns, strict=True)]
            send_W.append([Block(vectors) for vectors in picked])
        pieces = self._pieces_W[self._me]
        expected_W = [[ExpectedBlock((ids[p.slice], p.width)) for p in pieces] for ids in bag_set.ids_WS]
        loss_scale = gradient_scale(sum(bag_set.samples_W))
        received_W = self._backward_codecs.exchange_blocks(send_W, expected_W, "gradients", device, loss_scale).wait()
        # Each rank's blocks are in the order of the pieces. Transposed to piece after piece, and the ranks in order
        # within each piece: the order in which the forward looked them up.
        return concat_blocks([blocks[k].reshape(-1) for k in range(len(pieces)) for blocks in received_W], device)

    def pool(self, bag_set: BagSet, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The bags [B, D] of rows that arrived one by one, pooled by the kernel that pools an uncut table."""
        jagged, batch = bag_set.sent.jagged, bag_set.sent.jagged.batch_size
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        pooled: dict[str, Tensor] = {}
        for feature, rows_ND in rows.items():
            source, table = jagged.features.index(feature), self._tables[feature]
            if not len(rows_ND):  # an arena without rows has no memory for the kernel to point at
                pooled[feature] = rows_ND.new_zeros(batch, table.dim)
                continue
            begin = bag_set.sent.id_ranges[feature][0]
            # The rows that arrived are a table of their own, in which id n of the feature is row n. Ids of other
            # features get rows outside of it, which the kernel never reads: it walks this feature's bags only.
            row_of_id_N = torch.arange(-begin, len(jagged.values_N) - begin, device=rows_ND.device)
            descriptor = FeatureDescriptor(source, 0, 0, len(rows_ND), table.dim, 0, MODES[table.pooling], 0, 0)
            weights = None if jagged.weights_N is None else jagged.weights_N.detach().float()
            arena = rows_ND.contiguous().view(torch.uint8).flatten()
            features_FC = torch.tensor([descriptor], dtype=torch.int64)
            args = arena, features_FC, row_of_id_N, offsets, weights, batch, table.dim
            pooled[feature] = torch.ops.rowwise.pool(*args)
        return pooled

    def _blocks_by_rank(self, bag_set: BagSet, flat: Tensor) -> Iterator[list[Tensor]]:
        """This rank's lookups, cut into the blocks for the rank of each sample."""
        pieces = self._pieces_W[self._me]
        shapes = [(ids[p.slice], p.width) for p in pieces for ids in bag_set.ids_WS]
        # The lookup's order: piece after piece, and in each the ids of rank 0, 1, ... So rank w has every world-th.
        blocks = flat.split([n * d for n, d in shapes]) if shapes else ()
        world = self._routes.world
        for source in range(world):
            yield [blocks[k].view(shapes[k]) for k in range(source, len(shapes), world)]

    def _expected_blocks(self, bag_set: BagSet) -> list[list[ExpectedBlock]]:
        counts_W = bag_set.sent.counts_W
        return [[ExpectedBlock((counts_W[p.rank][p.slice], p.width)) for p in pieces] for pieces in self._pieces_W]

    def _assemble(self, bag_set: BagSet, received_W: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """The vectors of each feature from all blocks: columns side by side, rows in the order of the batch's ids."""
        vectors: dict[str, Tensor] = {}
        for pieces, blocks in zip(self._pieces_W, received_W, strict=True):
            for piece, block in zip(pieces, blocks, strict=True):
                feature, dim = piece.feature, self._tables[piece.feature].dim
                if piece.width == dim and self._routes.slices_W[piece.rank][piece.slice].all_rows:
                    vectors[feature] = block  # neither rows nor columns are cut
                    continue
                if feature not in vectors:
                    begin, end = bag_set.sent.id_ranges[feature]
                    vectors[feature] = block.new_empty((end - begin, dim))
                columns = slice(piece.first, piece.first + piece.width)
                vectors[feature][self._positions(bag_set, piece), columns] = block
        return vectors

    def _positions(self, bag_set: BagSet, piece: PerIdPiece) -> Tensor | slice:
        """Positions of a slice's ids among the ids of their feature in this rank's batch."""
        if self._routes.slices_W[piece.rank][piece.slice].all_rows:
            return slice(None)
        sent = bag_set.sent
        assert sent.positions_N is not None
        before = sum(map(sum, sent.counts_W[: piece.rank])) + sum(sent.counts_W[piece.rank][: piece.slice])
        count = sent.counts_W[piece.rank][piece.slice]
        return sent.positions_N[before : before + count] - sent.id_ranges[piece.feature][0]
