"""Pooled vectors: from the ranks that hold rows to those of the samples, in one exchange; gradients the other way."""

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


@final
class PooledExchange:
    """The columns that every rank makes for a path, and where they belong."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, path: ExchangePath) -> None:
        """Work out what does not depend on a batch."""
        ranks = range(routes.world)
        self._me = comm.rank
        self._there, self._back = (WireCodecs.of(comm, wire, backward=backward) for backward in (False, True))
        runs_W = [routes.runs(w, path) for w in ranks]
        # The first range of rows is placed, which covers every column once; the others are added in their order.
        self._runs = as_tensor(sorted((run for runs in runs_W for run in runs), key=lambda run: run.range))
        self._picks_W = [as_picks(runs) for runs in runs_W]
        self._widths_W = [routes.pooled_width(w, path) for w in ranks]
        self._spans_W = [spans_of([held.width for held, _ in routes.pooled(w, path)]) for w in ranks]
        self.any = any(self._widths_W)

    @staticmethod
    def send(streams: "Sequence[tuple[PooledExchange, Stream, Tensor]]") -> PendingBlocks:
        """What this rank looked up for the samples of all ranks, all streams in one exchange."""
        blocks = [exchange._blocks(stream, vectors_GS) for exchange, stream, vectors_GS in streams]
        out, back = (
            [first._replace(more=tuple(more)) for first, *more in zip(*side, strict=True)]
            for side in zip(*blocks, strict=True)
        )
        return streams[0][0]._there.exchange_blocks(out, back, "pooled")

    def place(self, blocks: list[Tensor], out_BS: Tensor) -> None:
        """What each rank has sent, where it belongs."""
        place(blocks, self._runs, out_BS)

    def _blocks(self, stream: Stream, vectors_GS: Tensor) -> tuple[list[PeerBlocks], list[PeerBlocks]]:
        spans, batch = self._spans_W[self._me], stream.sent.jagged.batch_size
        out = [PeerBlocks.of([block], spans) for block in vectors_GS.split(stream.samples_W)]
        return out, [PeerBlocks([(batch, d)], own) for d, own in zip(self._widths_W, self._spans_W, strict=True)]

    def backward(self, samples_W: tuple[int, ...], grad_BS: Tensor) -> Tensor:
        """The gradients [G, S] of what this rank made."""
        width, spans = self._widths_W[self._me], self._spans_W[self._me]
        grad_GS = empty_cached((sum(samples_W), width), grad_BS)
        rows_W = grad_GS.split(samples_W)
        out = [
            PeerBlocks(()) if w == self._me else PeerBlocks.of([pick(grad_BS, runs)], self._spans_W[w])
            for w, runs in enumerate(self._picks_W)
        ]
        back = [PeerBlocks([(samples, width)], spans) for samples in samples_W]
        incoming = self._back.exchange_blocks(out, back, "gradients", gradient_scale(len(grad_GS)))
        torch.ops.rowwise.place([grad_BS], self._picks_W[self._me], rows_W[self._me])
        for w, blocks in enumerate(incoming.wait()):
            if w != self._me:
                rows_W[w].copy_(blocks[0])
        return grad_GS


def place(blocks: list[Tensor], runs_RC: Tensor, out_BS: Tensor) -> None:
    """Columns of blocks [B, columns] to where they belong: placed, or added to what is there."""
    torch.ops.rowwise.place([block.contiguous() for block in blocks], runs_RC, out_BS)


def pick(grad_BS: Tensor, runs_RC: Tensor) -> Tensor:
    """Columns of a matrix, side by side."""
    width = int(runs_RC[:, 3].sum())
    out = empty_cached((len(grad_BS), width), grad_BS)
    torch.ops.rowwise.place([grad_BS], runs_RC, out)
    return out


def as_tensor(runs: list[ColumnRun]) -> Tensor:
    """For `place`: which block, its first column, where that goes, how many columns, whether they are added."""
    rows = [(run.rank, run.source, run.target, run.width, run.range > 0) for run in runs]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)


def as_picks(runs: list[ColumnRun]) -> Tensor:
    """For `pick`: the other way round."""
    rows = [(0, run.target, run.source, run.width, 0) for run in runs]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)
