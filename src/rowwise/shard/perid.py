"""A vector for each id: sequences, and bags that the requesting rank pools, in the order of their ids.

The second is what makes a sum come out the same for any way of cutting rows: the vectors travel as they are, and the
kernel that pools an uncut table pools them here. Known limits: traffic, as many vectors as there are ids.
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
from rowwise.shard.vectors import PeerBlocks, WireCodecs, joined
from rowwise.spec import Wire


@final
class PerIdExchange:
    """The vectors that every rank makes for a path, and where they belong."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, path: ExchangePath) -> None:
        """Work out what does not depend on a batch."""
        self._routes, self._me = routes, comm.rank
        self._pieces_W = [routes.sequences(w, path) for w in range(routes.world)]
        self._there, self._back = (WireCodecs.of(comm, wire, backward=backward) for backward in (False, True))
        asked = {piece.feature for pieces in self._pieces_W for piece in pieces}
        self._dims = {f: t.dim for t in routes.tables for f in t.feature_names if f in asked}
        self._tables = {f: t for t in routes.tables for f in t.feature_names if f in asked}
        self.any = bool(asked)

    def forward(self, stream: Stream, flat: Tensor) -> dict[str, Tensor]:
        """The vectors [N, D] of each feature of this rank's batch; `flat` holds what it looked up, piece by piece."""
        if not self.any:
            return {}
        out = [PeerBlocks.of(blocks) for blocks in self._by_source(stream, flat)]
        came = self._there.exchange_blocks(out, self._shapes(stream), "rows").wait()
        return self._put(stream, came)

    def backward(self, stream: Stream, grads: dict[str, Tensor]) -> Tensor:
        """The gradients of what this rank looked up, piece by piece."""
        if not self.any:
            return torch.empty(0)
        out_W: list[PeerBlocks] = []
        for pieces in self._pieces_W:
            columns = [slice(piece.first, piece.first + piece.width) for piece in pieces]
            picked = [grads[p.feature][self._places(stream, p), c] for p, c in zip(pieces, columns, strict=True)]
            out_W.append(PeerBlocks.of(picked))
        pieces = self._pieces_W[self._me]
        back = [PeerBlocks([(ids[p.slice], p.width) for p in pieces]) for ids in stream.ids_WS]
        came = self._back.exchange_blocks(out_W, back, "gradients", gradient_scale(sum(stream.samples_W))).wait()
        # Piece by piece again, and in each rank after rank.
        flat = [blocks[k].reshape(-1) for k in range(len(pieces)) for blocks in came]
        return joined(flat) if flat else torch.empty(0)

    def pool(self, stream: Stream, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The bags [B, D] of rows that came one by one, added up as the kernel adds up those of an uncut table."""
        jagged, batch = stream.sent.jagged, stream.sent.jagged.batch_size
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        pooled: dict[str, Tensor] = {}
        for feature, rows_ND in rows.items():
            source, table = jagged.features.index(feature), self._tables[feature]
            if not len(rows_ND):
                pooled[feature] = rows_ND.new_zeros(batch, table.dim)
                continue
            begin = stream.sent.spans[feature][0]
            # Each id is looked up at its own place among the rows.
            places = torch.arange(-begin, len(jagged.values_N) - begin, device=rows_ND.device)
            row = FeatureRow(source, 0, 0, len(rows_ND), table.dim, 0, MODES[table.pooling], 0, 0)
            weights = None if jagged.weights_N is None else jagged.weights_N.detach().float()
            arena = rows_ND.contiguous().view(torch.uint8).flatten()
            features_FC = torch.tensor([row], dtype=torch.int64)
            pooled[feature] = torch.ops.rowwise.pool(arena, features_FC, places, offsets, weights, batch, table.dim)
        return pooled

    def _by_source(self, stream: Stream, flat: Tensor) -> Iterator[list[Tensor]]:
        """What this rank looked up, for each rank that asked."""
        pieces = self._pieces_W[self._me]
        shapes = [(ids[p.slice], p.width) for p in pieces for ids in stream.ids_WS]
        blocks = flat.split([n * d for n, d in shapes]) if shapes else ()
        world = self._routes.world
        for source in range(world):
            mine = range(source, len(shapes), world)
            yield [blocks[k].view(shapes[k]) for k in mine]

    def _shapes(self, stream: Stream) -> list[PeerBlocks]:
        counts_W = stream.sent.counts_W
        return [PeerBlocks([(counts_W[p.rank][p.slice], p.width) for p in pieces]) for pieces in self._pieces_W]

    def _put(self, stream: Stream, came: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """The vectors of each feature: columns side by side, ids where they stood."""
        found: dict[str, Tensor] = {}
        for pieces, blocks in zip(self._pieces_W, came, strict=True):
            for piece, block in zip(pieces, blocks, strict=True):
                feature, dim = piece.feature, self._dims[piece.feature]
                whole = self._routes.slices_W[piece.rank][piece.slice].whole
                if whole and piece.width == dim:
                    found[feature] = block
                    continue
                if feature not in found:
                    begin, end = stream.sent.spans[feature]
                    found[feature] = block.new_empty((end - begin, dim))
                columns = slice(piece.first, piece.first + piece.width)
                found[feature][self._places(stream, piece), columns] = block
        return found

    def _places(self, stream: Stream, piece: SequencePiece) -> Tensor | slice:
        """Where the ids of a slice that a rank was sent stand among those of their feature."""
        if self._routes.slices_W[piece.rank][piece.slice].whole:
            return slice(None)
        sent = stream.sent
        assert sent.places_N is not None
        before = sum(map(sum, sent.counts_W[: piece.rank])) + sum(sent.counts_W[piece.rank][: piece.slice])
        count = sent.counts_W[piece.rank][piece.slice]
        return sent.places_N[before : before + count] - sent.spans[piece.feature][0]
