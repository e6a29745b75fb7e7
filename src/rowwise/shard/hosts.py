"""Exchange path `hierarchical`: tables whose rows are spread over one host are summed there before the network.

Inside a host, a reduce-scatter gives device j the sums for the samples of every host's device j. An all-to-all between
the devices of number j then sends each host its samples. So a vector crosses the network once, not once per device that
holds rows of its table. Gradients go back the same way: an all-to-all between hosts, then an all-gather in each host.
"""

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from rowwise.comm.codec import ColumnSpan, gradient_scale, spans_of
from rowwise.comm.seam import Comm
from rowwise.shard.pooled import pick_columns, place_columns, runs_from_output, runs_to_output
from rowwise.shard.routes import ExchangePath, Routes
from rowwise.shard.vectors import PeerBlocks, WireCodecs, concat_blocks
from rowwise.spec import Wire


@final
class HostExchange:
    """Two-step exchange of pooled vectors: reduce-scatter inside a host, all-to-all between hosts."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, groups: tuple[Comm, Comm] | None = None) -> None:
        """`groups`: the ranks of this host, and those of this device number on all hosts; None: collective, splits."""
        hosts, devices = routes.topology.hosts, routes.topology.devices
        self._host, self._device = divmod(comm.rank, devices)
        self._runs_H = [routes.host_column_runs(host) for host in range(hosts)]
        self._placed = runs_to_output([run for runs in self._runs_H for run in runs])
        self._picks_H = [runs_from_output(runs) for runs in self._runs_H]
        self._widths_H = [sum(run.width for run in runs) for runs in self._runs_H]
        self._spans_H = [spans_of([piece.width for piece, _ in routes.host_pieces(host)]) for host in range(hosts)]
        # A rank may hold some of its host's columns only, and a reduce-scatter wants the same columns from all ranks.
        host_column = {
            column: k for k, column in enumerate(_column_numbers((r.target, r.width) for r in self._runs_H[self._host]))
        }
        mine = _column_numbers(
            (run.target, run.width) for run in routes.column_runs(comm.rank, ExchangePath.HIERARCHICAL)
        )
        self._columns = torch.tensor([host_column[column] for column in mine], dtype=torch.int64)
        self._whole = mine == list(host_column)
        self._devices, self._hosts = devices, hosts
        # For each device number, the ranks of that number on all hosts.
        self._peers_D = [[h * devices + d for h in range(hosts)] for d in range(devices)]
        if groups is None:
            inside = comm.split([[h * devices + d for d in range(devices)] for h in range(hosts)])
            groups = inside, comm.split(self._peers_D)
        self.groups = groups
        self._codecs = {
            (group, backward): WireCodecs.of(c, wire, backward=backward)
            for group, c in zip(("inside", "across"), groups, strict=True)
            for backward in (False, True)
        }

    def forward(self, samples_W: tuple[int, ...], local_GS: Tensor, out_BS: Tensor) -> None:
        """Sum inside the host, send between hosts, and write the output columns."""
        width, spans = self._widths_H[self._host], self._spans_H[self._host]
        partial_GS = self._to_host_columns(local_GS, width)
        blocks = partial_GS.split(samples_W)
        # Reduce-scatter wants one run per device of this host, and the ranks with one device number are not neighbours.
        for_D = [torch.cat([blocks[rank] for rank in peers]) for peers in self._peers_D]
        summed = self._sum_inside(for_D, spans)
        mine = [samples_W[rank] for rank in self._peers_D[self._device]]
        out = [PeerBlocks.of([block], spans) for block in summed.split(mine)]
        back = [PeerBlocks([(len(out_BS), w)], own) for w, own in zip(self._widths_H, self._spans_H, strict=True)]
        came = self._codecs["across", False].exchange_blocks(out, back, "pooled").wait()
        place_columns([x[0] for x in came], self._placed, out_BS)

    def backward(self, samples_W: tuple[int, ...], grad_BS: Tensor) -> Tensor:
        """The gradients [G, columns] of this rank's pooled vectors, of the samples of all ranks."""
        scale = gradient_scale(sum(samples_W))
        width, spans = self._widths_H[self._host], self._spans_H[self._host]
        out = [
            PeerBlocks.of([pick_columns(grad_BS, runs)], own)
            for runs, own in zip(self._picks_H, self._spans_H, strict=True)
        ]
        back = [PeerBlocks([(samples_W[rank], width)], spans) for rank in self._peers_D[self._device]]
        mine = concat_blocks(
            [x[0] for x in self._codecs["across", True].exchange_blocks(out, back, "gradients", scale).wait()]
        )
        sizes_D = [sum(samples_W[rank] for rank in peers) for peers in self._peers_D]
        codecs = self._codecs["inside", True]
        if codecs.exact:
            receives = [n * width for n in sizes_D]
            flat = codecs.comm.all_gather(mine.flatten(), receives, "gradients").wait()
            gathered = [x.view(n, width) for x, n in zip(flat.split(receives), sizes_D, strict=True)]
        else:
            expected = [PeerBlocks([(n, width)], spans) for n in sizes_D]
            came = codecs.exchange_blocks(
                [PeerBlocks.of([mine], spans)] * self._devices, expected, "gradients", scale
            ).wait()
            gathered = [x[0] for x in came]
        # The all-gather came by device number; the lookup's samples are in rank order.
        by_rank: dict[int, Tensor] = {}
        for peers, block in zip(self._peers_D, gathered, strict=True):
            by_rank |= dict(zip(peers, block.split([samples_W[rank] for rank in peers]), strict=True))
        grad_GS = torch.cat([by_rank[rank] for rank in range(len(samples_W))])
        return grad_GS if self._whole else grad_GS[:, self._columns]

    def _to_host_columns(self, local_GS: Tensor, width: int) -> Tensor:
        """This rank's columns widened to those of its host, zero where it holds none."""
        if self._whole:
            return local_GS
        # index_add_, not assignment: a rank may hold two row ranges of the same columns.
        return local_GS.new_zeros((len(local_GS), width)).index_add_(1, self._columns, local_GS)

    def _sum_inside(self, for_D: list[Tensor], spans: tuple[ColumnSpan, ...]) -> Tensor:
        """Reduce-scatter in the host; for lossy wires an all-to-all, then the sum of the decoded blocks."""
        codecs, width = self._codecs["inside", False], for_D[0].shape[1]
        if codecs.exact:
            flat = torch.cat([x.flatten() for x in for_D])
            summed = codecs.comm.reduce_scatter(flat, [x.numel() for x in for_D], "pooled").wait()
            return summed.view(len(for_D[self._device]), width)
        mine = [PeerBlocks([(len(for_D[self._device]), width)], spans)] * self._devices
        came = codecs.exchange_blocks([PeerBlocks.of([x], spans) for x in for_D], mine, "pooled").wait()
        summed = came[0][0].clone()
        for blocks in came[1:]:
            summed += blocks[0]
        return summed


def _column_numbers(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [column for first, width in runs for column in range(first, first + width)]
