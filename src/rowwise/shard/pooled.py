"""Exchange path `all_to_all`: pooled vectors to the ranks of the samples in one all-to-all, and gradients back."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from rowwise.comm.codec import gradient_scale, spans_of
from rowwise.comm.seam import Comm
from rowwise.ops.output_cache import empty_cached
from rowwise.shard.ids import Stream
from rowwise.shard.routes import ColumnRun, ExchangePath, Routes
from rowwise.shard.vectors import PeerBlocks, PendingBlocks, WireCodecs
from rowwise.spec import Wire

WIDTH, RUN_COLUMNS = 3, 5  # of a row of runs for the `place` operator


@final
class PooledExchange:
    """All-to-all of pooled vectors: each rank sends its columns for the samples of every rank."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, path: ExchangePath) -> None:
        ranks = range(routes.world)
        self._me = comm.rank
        self._forward_codecs, self._backward_codecs = (
            WireCodecs.of(comm, wire, backward=backward) for backward in (False, True)
        )
        runs_W = [routes.column_runs(w, path) for w in ranks]
        # Range 0 covers every column once and overwrites the uninitialised output; later ranges are added, in row order
        # whichever rank holds them, so that the sum does not depend on where the ranges are.
        self._runs = runs_to_output(sorted((run for runs in runs_W for run in runs), key=lambda run: run.range))
        self._picks_W = [runs_from_output(runs) for runs in runs_W]
        self._widths_W = [routes.pooled_width(w, path) for w in ranks]
        self._spans_W = [spans_of([piece.width for piece, _ in routes.pooled_pieces(w, path)]) for w in ranks]
        self.any = any(self._widths_W)  # alike on all ranks, so either all of them enter the exchange or none

    @staticmethod
    def send(streams: "Sequence[tuple[PooledExchange, Stream, Tensor]]") -> PendingBlocks:
        """Send this rank's lookups of all streams in one all-to-all; a rank's blocks are stream after stream."""
        blocks = [exchange._blocks(stream, vectors_GS) for exchange, stream, vectors_GS in streams]
        out, back = (
            [first._replace(rest=tuple(rest)) for first, *rest in zip(*side, strict=True)]
            for side in zip(*blocks, strict=True)
        )
        return streams[0][0]._forward_codecs.exchange_blocks(out, back, "pooled")

    def write_output(self, blocks: list[Tensor], out_BS: Tensor) -> None:
        """Write the blocks of all ranks into their output columns."""
        place_columns(blocks, self._runs, out_BS)

    def _blocks(self, stream: Stream, vectors_GS: Tensor) -> tuple[list[PeerBlocks], list[PeerBlocks]]:
        spans, batch = self._spans_W[self._me], stream.sent.jagged.batch_size
        out = [PeerBlocks.of([block], spans) for block in vectors_GS.split(stream.samples_W)]
        return out, [PeerBlocks([(batch, d)], own) for d, own in zip(self._widths_W, self._spans_W, strict=True)]

    def backward(self, samples_W: tuple[int, ...], grad_BS: Tensor) -> Tensor:
        """The gradients [G, S] of this rank's pooled vectors, of the samples of all ranks."""
        width, spans = self._widths_W[self._me], self._spans_W[self._me]
        grad_GS = empty_cached((sum(samples_W), width), grad_BS)  # filled below, the rows of each rank by its block
        rows_W = grad_GS.split(samples_W)
        out = [
            PeerBlocks(()) if w == self._me else PeerBlocks.of([pick_columns(grad_BS, runs)], self._spans_W[w])
            for w, runs in enumerate(self._picks_W)
        ]
        back = [PeerBlocks([(samples, width)], spans) for samples in samples_W]
        incoming = self._backward_codecs.exchange_blocks(out, back, "gradients", gradient_scale(len(grad_GS)))
        # This rank's own columns are copied while the others travel, straight into the result: no block, no codec.
        torch.ops.rowwise.place([grad_BS], self._picks_W[self._me], rows_W[self._me])
        for w, blocks in enumerate(incoming.wait()):
            if w != self._me:
                rows_W[w].copy_(blocks[0])
        return grad_GS


def place_columns(blocks: list[Tensor], runs_RC: Tensor, out_BS: Tensor) -> None:
    """Copy or add columns of blocks [B, columns] to the output, run by run (`runs_to_output`)."""
    torch.ops.rowwise.place([block.contiguous() for block in blocks], runs_RC, out_BS)


def pick_columns(grad_BS: Tensor, runs_RC: Tensor) -> Tensor:
    """The columns of a matrix that a rank made, in the order of its block (`runs_from_output`)."""
    width = int(runs_RC[:, WIDTH].sum())
    out = empty_cached((len(grad_BS), width), grad_BS)
    torch.ops.rowwise.place([grad_BS], runs_RC, out)
    return out


def runs_to_output(runs: list[ColumnRun]) -> Tensor:
    """A row per run for the `place` operator: block, first column in it, first output column, width, whether to add."""
    rows = [(run.rank, run.source, run.target, run.width, run.range > 0) for run in runs]
    return torch.tensor(rows, dtype=torch.int64).view(-1, RUN_COLUMNS)


def runs_from_output(runs: list[ColumnRun]) -> Tensor:
    """The runs of one rank reversed: from output columns to the columns of its block."""
    rows = [(0, run.target, run.source, run.width, 0) for run in runs]
    return torch.tensor(rows, dtype=torch.int64).view(-1, RUN_COLUMNS)
