"""Pooled vectors: from the ranks that hold rows to those of the samples, in one exchange; gradients the other way."""

from typing import final

import torch
from torch import Tensor

from rowwise.comm.seam import Comm
from rowwise.shard.ids import Routed
from rowwise.shard.routes import Routes, Run, Way
from rowwise.shard.vectors import Blocks, Incoming, Lanes, common_group, fitting_scale, joined
from rowwise.spec import Wire


@final
class PooledExchange:
    """The columns that every rank makes in a way, and where they belong."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, way: Way) -> None:
        """Work out what does not depend on a batch."""
        ranks = range(routes.world)
        self._me = comm.rank
        self._there, self._back = (Lanes.of(comm, wire, backward=backward) for backward in (False, True))
        self._runs_W = [routes.runs(w, way) for w in ranks]
        # The first range of rows is placed, which covers every column once; the others are added in their order.
        self._in_order = sorted((run for runs in self._runs_W for run in runs), key=lambda run: run.range)
        self._widths_W = [routes.made(w, way) for w in ranks]
        self._groups_W = [common_group([held.width for held, _ in routes.pooled(w, way)]) for w in ranks]
        self.any = any(self._widths_W)

    def send(self, routed: Routed, made_GS: Tensor) -> Incoming:
        """What this rank looked up for the samples of all ranks."""
        group, batch = self._groups_W[self._me], routed.asked.jagged.batch_size
        out = [Blocks.of([block], group) for block in made_GS.split(routed.samples_W)]
        back = [Blocks([(batch, d)], g) for d, g in zip(self._widths_W, self._groups_W, strict=True)]
        return self._there.swap(out, back, "pooled")

    def place(self, incoming: Incoming, out_BS: Tensor) -> None:
        """Where it belongs."""
        place([blocks[0] for blocks in incoming.wait()], self._in_order, out_BS)

    def backward(self, routed: Routed, grad_BS: Tensor) -> Tensor:
        """The gradients [G, S] of what this rank made."""
        width, group = self._widths_W[self._me], self._groups_W[self._me]
        out = [Blocks.of([pick(grad_BS, runs)], g) for runs, g in zip(self._runs_W, self._groups_W, strict=True)]
        back = [Blocks([(samples, width)], group) for samples in routed.samples_W]
        incoming = self._back.swap(out, back, "gradients", fitting_scale(sum(routed.samples_W)))
        return joined([blocks[0] for blocks in incoming.wait()])


def place(blocks: list[Tensor], in_order: list[Run], out_BS: Tensor) -> None:
    """Columns of blocks [B, columns], by rank, to where they belong: placed, or added to what is there."""
    for run in in_order:
        source = blocks[run.rank][:, run.source : run.source + run.width]
        target = out_BS[:, run.target : run.target + run.width]
        target.add_(source) if run.range else target.copy_(source)


def pick(grad_BS: Tensor, runs: list[Run]) -> Tensor:
    """The columns of these runs, side by side."""
    if not runs:
        return grad_BS[:, :0]
    return torch.cat([grad_BS[:, run.target : run.target + run.width] for run in runs], 1)
