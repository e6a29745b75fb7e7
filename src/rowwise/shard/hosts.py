"""Tables whose rows are spread over one host: pooled vectors are added up there before they cross the network.

In a host, the device of number j gets the sums for the samples of all devices of that number, on any host
(reduce-scatter); then those devices swap them (all-to-all). A vector crosses the network once, not once for each
device that holds rows of its table. Gradients go back the same way: a swap, then an all-gather in each host.
"""

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from rowwise.comm.codec import ColumnSpan, gradient_scale, spans_of
from rowwise.comm.seam import Comm
from rowwise.shard.pooled import as_picks, as_tensor, pick, place
from rowwise.shard.routes import ExchangePath, Routes
from rowwise.shard.vectors import PeerBlocks, WireCodecs, joined
from rowwise.spec import Wire


@final
class HostExchange:
    """The columns that are added up inside hosts, and where they belong."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, groups: tuple[Comm, Comm] | None = None) -> None:
        """Work out what does not depend on a batch; called by all ranks, as they part into groups, if there are none.

        `groups`: the ranks of this host, and those of this device number on all hosts.
        """
        hosts, devices = routes.topology.hosts, routes.topology.devices
        self._host, self._device = divmod(comm.rank, devices)
        self._runs_H = [routes.host_columns(host) for host in range(hosts)]
        self._placed = as_tensor([run for runs in self._runs_H for run in runs])
        self._picks_H = [as_picks(runs) for runs in self._runs_H]
        self._widths_H = [sum(run.width for run in runs) for runs in self._runs_H]
        self._spans_H = [spans_of([piece.width for piece, _ in routes.host_pieces(host)]) for host in range(hosts)]
        at = {column: k for k, column in enumerate(_columns((r.target, r.width) for r in self._runs_H[self._host]))}
        mine = _columns((run.target, run.width) for run in routes.runs(comm.rank, ExchangePath.HIERARCHICAL))
        self._columns = torch.tensor([at[column] for column in mine], dtype=torch.int64)
        self._whole = mine == list(at)
        self._devices, self._hosts = devices, hosts
        # For each device number, the ranks of that number on all hosts.
        self._peers_D = [[h * devices + d for h in range(hosts)] for d in range(devices)]
        if groups is None:
            inside = comm.split([[h * devices + d for d in range(devices)] for h in range(hosts)])
            groups = inside, comm.split(self._peers_D)
        self.groups = groups
        self._lanes = {
            (group, backward): WireCodecs.of(c, wire, backward=backward)
            for group, c in zip(("inside", "across"), groups, strict=True)
            for backward in (False, True)
        }

    def forward(self, samples_W: tuple[int, ...], made_GS: Tensor, out_BS: Tensor) -> None:
        """Add up inside the host, swap between hosts, and place."""
        width, spans = self._widths_H[self._host], self._spans_H[self._host]
        partial_GS = self._spread(made_GS, width)
        blocks = partial_GS.split(samples_W)
        # Samples by device number: the ranks of one number are not neighbours.
        for_D = [torch.cat([blocks[rank] for rank in peers]) for peers in self._peers_D]
        summed = self._sum_inside(for_D, spans)
        mine = [samples_W[rank] for rank in self._peers_D[self._device]]
        out = [PeerBlocks.of([block], spans) for block in summed.split(mine)]
        back = [PeerBlocks([(len(out_BS), w)], own) for w, own in zip(self._widths_H, self._spans_H, strict=True)]
        came = self._lanes["across", False].exchange_blocks(out, back, "pooled").wait()
        place([x[0] for x in came], self._placed, out_BS)

    def backward(self, samples_W: tuple[int, ...], grad_BS: Tensor) -> Tensor:
        """The gradients [G, columns] of what this rank made."""
        scale = gradient_scale(sum(samples_W))
        width, spans = self._widths_H[self._host], self._spans_H[self._host]
        out = [
            PeerBlocks.of([pick(grad_BS, runs)], own) for runs, own in zip(self._picks_H, self._spans_H, strict=True)
        ]
        back = [PeerBlocks([(samples_W[rank], width)], spans) for rank in self._peers_D[self._device]]
        mine = joined([x[0] for x in self._lanes["across", True].exchange_blocks(out, back, "gradients", scale).wait()])
        sizes_D = [sum(samples_W[rank] for rank in peers) for peers in self._peers_D]
        lanes = self._lanes["inside", True]
        if lanes.exact:
            receives = [n * width for n in sizes_D]
            flat = lanes.comm.all_gather(mine.flatten(), receives, "gradients").wait()
            gathered = [x.view(n, width) for x, n in zip(flat.split(receives), sizes_D, strict=True)]
        else:
            expected = [PeerBlocks([(n, width)], spans) for n in sizes_D]
            came = lanes.exchange_blocks(
                [PeerBlocks.of([mine], spans)] * self._devices, expected, "gradients", scale
            ).wait()
            gathered = [x[0] for x in came]
        by_rank: dict[int, Tensor] = {}
        for peers, block in zip(self._peers_D, gathered, strict=True):
            by_rank |= dict(zip(peers, block.split([samples_W[rank] for rank in peers]), strict=True))
        grad_GS = torch.cat([by_rank[rank] for rank in range(len(samples_W))])
        return grad_GS if self._whole else grad_GS[:, self._columns]

    def _spread(self, made_GS: Tensor, width: int) -> Tensor:
        """This rank's columns among those of its host."""
        if self._whole:
            return made_GS
        # Added, as a rank may hold two ranges of rows of the same columns.
        return made_GS.new_zeros((len(made_GS), width)).index_add_(1, self._columns, made_GS)

    def _sum_inside(self, for_D: list[Tensor], spans: tuple[ColumnSpan, ...]) -> Tensor:
        """What this device gets, from all devices of its host."""
        lanes, width = self._lanes["inside", False], for_D[0].shape[1]
        if lanes.exact:
            flat = torch.cat([x.flatten() for x in for_D])
            summed = lanes.comm.reduce_scatter(flat, [x.numel() for x in for_D], "pooled").wait()
            return summed.view(len(for_D[self._device]), width)
        mine = [PeerBlocks([(len(for_D[self._device]), width)], spans)] * self._devices
        came = lanes.exchange_blocks([PeerBlocks.of([x], spans) for x in for_D], mine, "pooled").wait()
        summed = came[0][0].clone()
        for blocks in came[1:]:
            summed += blocks[0]
        return summed


def _columns(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [column for first, width in runs for column in range(first, first + width)]
