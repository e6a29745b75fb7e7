"""Exchange path `all_to_all`: pooled vectors to the ranks of the samples in one all-to-all, and gradients back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from rowwise.parallel.comm.codec import gradient_scale, scale_groups_of
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.shard.pack import BagSet
from rowwise.parallel.shard.routes import ExchangePath, RankPiece, Routes
from rowwise.parallel.shard.vectors import Block, ExpectedBlock, PendingBlocks, WireCodecs
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.spec import Wire

SEGMENT_FIELDS = 5  # of the operator `place`: block, first column in it, first output column, width, whether to add


@final
class BlockColumns:
    """Where the columns of the blocks that ranks, or hosts, send are in the output [B, S]."""

    def __init__(self, routes: Routes, pieces_W: Sequence[Sequence[tuple[RankPiece, str]]]) -> None:
        self.segments_W = [routes.column_segments(w, pieces) for w, pieces in enumerate(pieces_W)]
        widths_W = [[piece.width for piece, _ in pieces] for pieces in pieces_W]
        self.widths_W, self.scales_W = list(map(sum, widths_W)), list(map(scale_groups_of, widths_W))
        # Range 0 covers every column once and overwrites the uninitialised output; later ranges are added, in row order
        # whichever rank holds them, so that the sum does not depend on the placement.
        ordered = sorted((x for segments in self.segments_W for x in segments), key=lambda x: x.range)
        self._to_output = _segments_tensor([(x.rank, x.source, x.target, x.width, x.range > 0) for x in ordered])
        self._to_block_W = [
            _segments_tensor([(0, x.target, x.source, x.width, False) for x in segments])
            for segments in self.segments_W
        ]

    def expected(self, samples: int) -> list[ExpectedBlock]:
        """The block that each rank sends for a batch of `samples`."""
        return [ExpectedBlock((samples, d), scales) for d, scales in zip(self.widths_W, self.scales_W, strict=True)]

    def write_output(self, blocks: Sequence[Tensor], out_BS: Tensor) -> None:
        """Write the blocks of all ranks into their output columns."""
        # The operator is defined in `tables/ops/reference/exchange.py`.
        torch.ops.rowwise.place([block.contiguous() for block in blocks], self._to_output, out_BS)

    def write_block(self, rank: int, grad_BS: Tensor, block: Tensor) -> None:
        """Write one rank's output columns in the order of its block."""
        torch.ops.rowwise.place([grad_BS], self._to_block_W[rank], block)

    def pick(self, rank: int, grad_BS: Tensor) -> Block:
        """One rank's output columns as a block."""
        block = empty_cached((len(grad_BS), self.widths_W[rank]), grad_BS)
        self.write_block(rank, grad_BS, block)
        return Block(block, self.scales_W[rank])


def _segments_tensor(segments: list[tuple[int, int, int, int, bool]]) -> Tensor:
    return torch.tensor(segments, dtype=torch.int64).view(-1, SEGMENT_FIELDS)


@final
class PooledExchange:
    """All-to-all of pooled vectors: each rank sends its columns for the samples of every rank."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, path: ExchangePath) -> None:
        self._me = comm.rank
        self._forward_codecs, self._backward_codecs = (
            WireCodecs.of(comm, wire, backward=backward) for backward in (False, True)
        )
        self.columns = BlockColumns(routes, [routes.pooled_pieces(w, path) for w in range(routes.world)])
        self.any = any(self.columns.widths_W)  # alike on all ranks, so either all of them enter the exchange or none

    @staticmethod
    def send(bag_sets: "Sequence[tuple[PooledExchange, BagSet, Tensor]]") -> PendingBlocks:
        """Send this rank's lookups of all bag sets in one all-to-all; a rank's blocks are bag set after bag set."""
        sent: list[list[Block]] = []
        expected: list[list[ExpectedBlock]] = []
        for exchange, bag_set, vectors_GS in bag_sets:
            scales = exchange.columns.scales_W[exchange._me]
            sent.append([Block(block, scales) for block in vectors_GS.split(bag_set.samples_W)])
            expected.append(exchange.columns.expected(bag_set.sent.jagged.batch_size))
        send_W, expected_W = list(zip(*sent, strict=True)), list(zip(*expected, strict=True))
        first, _, vectors_GS = bag_sets[0]
        return first._forward_codecs.exchange_blocks(send_W, expected_W, "pooled", vectors_GS.device)

    def start_backward(self, samples_W: tuple[int, ...], grad_BS: Tensor) -> "PendingGradients":
        """Start to send the gradients of pooled vectors to the ranks that looked them up."""
        columns = self.columns
        width, scales = columns.widths_W[self._me], columns.scales_W[self._me]
        grad_GS = empty_cached((sum(samples_W), width), grad_BS)  # filled below, the rows of each rank by its block
        rows_W = grad_GS.split(samples_W)
        send_W = [[] if w == self._me else [columns.pick(w, grad_BS)] for w in range(len(samples_W))]
        expected_W = [[ExpectedBlock((samples, width), scales)] for samples in samples_W]
        loss_scale = gradient_scale(len(grad_GS))
        pending = self._backward_codecs.exchange_blocks(send_W, expected_W, "gradients", grad_BS.device, loss_scale)
        # This rank's own columns are copied while the others travel, straight into the result: no block, no codec.
        columns.write_block(self._me, grad_BS, rows_W[self._me])
        return PendingGradients(pending, grad_GS, rows_W, self._me)


@final
@dataclass(frozen=True, slots=True)
class PendingGradients:
    """Gradients of pooled vectors in flight between ranks."""

    blocks: PendingBlocks
    grad_GS: Tensor  # this rank's own rows are already written
    rows_W: Sequence[Tensor]  # its views, by rank of the samples
    rank: int

    def wait(self) -> Tensor:
        """The gradients [G, S] of this rank's pooled vectors, of the samples of all ranks."""
        for w, blocks in enumerate(self.blocks.wait()):
            if w != self.rank:
                self.rows_W[w].copy_(blocks[0])
        return self.grad_GS
