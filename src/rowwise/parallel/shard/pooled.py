"""Exchange path `all_to_all`: pooled vectors to the ranks of the samples in one all-to-all, and gradients back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from rowwise.parallel.comm.codec import gradient_scale, scale_groups_of
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.shard.pack import BagSet
from rowwise.parallel.shard.routes import ColumnSegment, ExchangePath, Routes
from rowwise.parallel.shard.vectors import Block, ExpectedBlock, PendingBlocks, WireCodecs
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.spec import Wire

WIDTH, SEGMENT_FIELDS = 3, 5  # of a segment, as the operator `place` reads it


@final
class PooledExchange:
    """All-to-all of pooled vectors: each rank sends its columns for the samples of every rank."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, path: ExchangePath) -> None:
        self._me = comm.rank
        self._forward_codecs, self._backward_codecs = (
            WireCodecs.of(comm, wire, backward=backward) for backward in (False, True)
        )
        pieces_W = [routes.pooled_pieces(w, path) for w in range(routes.world)]
        segments_W = [routes.column_segments(w, pieces) for w, pieces in enumerate(pieces_W)]
        # Range 0 covers every column once and overwrites the uninitialised output; later ranges are added, in row order
        # whichever rank holds them, so that the sum does not depend on where the ranges are.
        self._segments = segments_to_output(
            sorted((x for segments in segments_W for x in segments), key=lambda x: x.range)
        )
        self._picks_W = [segments_from_output(segments) for segments in segments_W]
        widths_W = [[piece.width for piece, _ in pieces] for pieces in pieces_W]
        self._widths_W, self._scales_W = list(map(sum, widths_W)), list(map(scale_groups_of, widths_W))
        self.any = any(self._widths_W)  # alike on all ranks, so either all of them enter the exchange or none

    @staticmethod
    def send(bag_sets: "Sequence[tuple[PooledExchange, BagSet, Tensor]]") -> PendingBlocks:
        """Send this rank's lookups of all bag sets in one all-to-all; a rank's blocks are bag set after bag set."""
        send_W = zip(
            *(exchange._outgoing(bag_set, vectors_GS) for exchange, bag_set, vectors_GS in bag_sets), strict=True
        )
        expected_W = zip(*(exchange._expected(bag_set) for exchange, bag_set, _ in bag_sets), strict=True)
        return bag_sets[0][0]._forward_codecs.exchange_blocks(
            list(send_W), list(expected_W), "pooled", bag_sets[0][2].device
        )

    def write_output(self, blocks: list[Tensor], out_BS: Tensor) -> None:
        """Write the blocks of all ranks into their output columns."""
        place_columns(blocks, self._segments, out_BS)

    def _outgoing(self, bag_set: BagSet, vectors_GS: Tensor) -> list[Block]:
        return [Block(block, self._scales_W[self._me]) for block in vectors_GS.split(bag_set.samples_W)]

    def _expected(self, bag_set: BagSet) -> list[ExpectedBlock]:
        batch = bag_set.sent.jagged.batch_size
        return [ExpectedBlock((batch, d), scales) for d, scales in zip(self._widths_W, self._scales_W, strict=True)]

    def start_backward(self, samples_W: tuple[int, ...], grad_BS: Tensor) -> "PendingGradients":
        """Start to send the gradients of pooled vectors to the ranks that looked them up."""
        width, scales = self._widths_W[self._me], self._scales_W[self._me]
        grad_GS = empty_cached((sum(samples_W), width), grad_BS)  # filled below, the rows of each rank by its block
        rows_W = grad_GS.split(samples_W)
        send_W = [
            [] if w == self._me else [Block(pick_columns(grad_BS, segments), self._scales_W[w])]
            for w, segments in enumerate(self._picks_W)
        ]
        expected_W = [[ExpectedBlock((samples, width), scales)] for samples in samples_W]
        loss_scale = gradient_scale(len(grad_GS))
        pending = self._backward_codecs.exchange_blocks(send_W, expected_W, "gradients", grad_BS.device, loss_scale)
        # This rank's own columns are copied while the others travel, straight into the result: no block, no codec.
        torch.ops.rowwise.place([grad_BS], self._picks_W[self._me], rows_W[self._me])
        return PendingGradients(pending, grad_GS, rows_W, self._me)


@final
@dataclass(frozen=True, slots=True)
class PendingGradients:
    """Gradients of pooled vectors on their way between ranks."""

    blocks: PendingBlocks
    grad_GS: Tensor  # has this rank's own
    rows_W: Sequence[Tensor]  # its rows of each rank
    rank: int

    def wait(self) -> Tensor:
        """The gradients [G, S] of this rank's pooled vectors, of the samples of all ranks."""
        for w, blocks in enumerate(self.blocks.wait()):
            if w != self.rank:
                self.rows_W[w].copy_(blocks[0])
        return self.grad_GS


def place_columns(blocks: list[Tensor], segments_RC: Tensor, out_BS: Tensor) -> None:
    """Copy or add columns of blocks [B, columns] to the output, segment by segment (`segments_to_output`)."""
    # The operator is defined in `tables/ops/reference/exchange.py`.
    torch.ops.rowwise.place([block.contiguous() for block in blocks], segments_RC, out_BS)


def pick_columns(grad_BS: Tensor, segments_RC: Tensor) -> Tensor:
    """The columns of the output that are one rank's, in the order of its block (`segments_from_output`)."""
    width = int(segments_RC[:, WIDTH].sum())
    out = empty_cached((len(grad_BS), width), grad_BS)
    torch.ops.rowwise.place([grad_BS], segments_RC, out)
    return out


def segments_to_output(segments: list[ColumnSegment]) -> Tensor:
    """A row per segment for the operator `place`: block, first column in it, first output column, width, add or not."""
    rows = [(segment.rank, segment.source, segment.target, segment.width, segment.range > 0) for segment in segments]
    return torch.tensor(rows, dtype=torch.int64).view(-1, SEGMENT_FIELDS)


def segments_from_output(segments: list[ColumnSegment]) -> Tensor:
    """The segments of one rank reversed: from output columns to the columns of its block."""
    rows = [(0, segment.target, segment.source, segment.width, 0) for segment in segments]
    return torch.tensor(rows, dtype=torch.int64).view(-1, SEGMENT_FIELDS)
