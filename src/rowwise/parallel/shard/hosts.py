"""Exchange path `hierarchical`: tables whose rows are spread over one host are summed there before the network.

Inside a host, a reduce-scatter gives device j the sums for the samples of every host's device j. An all-to-all between
the devices of number j then sends each host its samples. So a vector crosses the network once, not once per device that
holds rows of its table. Gradients go back the same way: an all-to-all between hosts, then an all-gather in each host.
"""

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from rowwise.parallel.comm.codec import BlockScales, gradient_scale
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.shard.pooled import BlockColumns
from rowwise.parallel.shard.routes import ColumnSegment, ExchangePath, Routes
from rowwise.parallel.shard.vectors import Block, ExpectedBlock, WireCodecs, concat_blocks
from rowwise.tables.spec import Wire


@final
class HostExchange:
    """Two-step exchange of pooled vectors: reduce-scatter inside a host, all-to-all between hosts."""

    def __init__(self, routes: Routes, comm: Comm, wire: Wire, process_groups: tuple[Comm, Comm] | None = None) -> None:
        """`process_groups`: the ranks of this host, and of this device number on all hosts; by default a split."""
        hosts, devices = routes.topology.hosts, routes.topology.devices
        self._host, self._device = divmod(comm.rank, devices)
        self._blocks = BlockColumns(routes, [routes.host_pieces(host) for host in range(hosts)])
        # A rank may hold some of its host's columns only, and a reduce-scatter needs the same columns from all ranks.
        host_column = {column: k for k, column in enumerate(_column_numbers(self._blocks.segments_W[self._host]))}
        own_pieces = routes.pooled_pieces(comm.rank, ExchangePath.HIERARCHICAL)
        local_columns = _column_numbers(routes.column_segments(comm.rank, own_pieces))
        self._columns = torch.tensor([host_column[column] for column in local_columns], dtype=torch.int64)
        self._has_all_columns = local_columns == list(host_column)
        self._devices, self._hosts = devices, hosts
        # For each device number, the ranks of that number on all hosts.
        self._peers_D = [[h * devices + d for h in range(hosts)] for d in range(devices)]
        if process_groups is None:
            inside = comm.split([[h * devices + d for d in range(devices)] for h in range(hosts)])
            process_groups = inside, comm.split(self._peers_D)
        self.process_groups = process_groups
        self._codecs = {
            (name, backward): WireCodecs.of(c, wire, backward=backward)
            for name, c in zip(("inside", "across"), process_groups, strict=True)
            for backward in (False, True)
        }

    def forward(self, samples_W: tuple[int, ...], local_GS: Tensor, out_BS: Tensor) -> None:
        """Sum inside the host, send between hosts, and write the output columns."""
        width, scales = self._blocks.widths_W[self._host], self._blocks.scales_W[self._host]
        partial_GS = self._to_host_columns(local_GS, width)
        blocks = partial_GS.split(samples_W)
        # Reduce-scatter takes one segment per device of this host; ranks of one device number are not adjacent.
        segments_D = [torch.cat([blocks[rank] for rank in peers]) for peers in self._peers_D]
        summed = self._sum_inside(segments_D, scales)
        samples_H = [samples_W[rank] for rank in self._peers_D[self._device]]
        send_H = [[Block(block, scales)] for block in summed.split(samples_H)]
        expected_H = [[block] for block in self._blocks.expected(len(out_BS))]
        received_H = self._codecs["across", False].exchange_blocks(send_H, expected_H, "pooled", out_BS.device).wait()
        self._blocks.write_output([block for (block,) in received_H], out_BS)

    def backward(self, samples_W: tuple[int, ...], grad_BS: Tensor) -> Tensor:
        """The gradients [G, columns] of this rank's pooled vectors, of the samples of all ranks."""
        loss_scale = gradient_scale(sum(samples_W))
        width, scales = self._blocks.widths_W[self._host], self._blocks.scales_W[self._host]
        send_H = [[self._blocks.pick(host, grad_BS)] for host in range(self._hosts)]
        expected_H = [[ExpectedBlock((samples_W[rank], width), scales)] for rank in self._peers_D[self._device]]
        across, device = self._codecs["across", True], grad_BS.device
        received_H = across.exchange_blocks(send_H, expected_H, "gradients", device, loss_scale).wait()
        device_grad = concat_blocks([block for (block,) in received_H], device)
        samples_D = [sum(samples_W[rank] for rank in peers) for peers in self._peers_D]
        codecs = self._codecs["inside", True]
        if codecs.exact:
            sizes_D = [n * width for n in samples_D]
            flat = codecs.comm.all_gather(device_grad.flatten(), sizes_D, "gradients").wait()
            gathered_D = [x.view(n, width) for x, n in zip(flat.split(sizes_D), samples_D, strict=True)]
        else:
            expected_D = [[ExpectedBlock((n, width), scales)] for n in samples_D]
            send_D = [[Block(device_grad, scales)]] * self._devices
            received_D = codecs.exchange_blocks(send_D, expected_D, "gradients", device, loss_scale).wait()
            gathered_D = [block for (block,) in received_D]
        # The gradients are by device number; the lookup's samples are in rank order.
        by_rank: dict[int, Tensor] = {}
        for peers, block in zip(self._peers_D, gathered_D, strict=True):
            by_rank |= dict(zip(peers, block.split([samples_W[rank] for rank in peers]), strict=True))
        grad_GS = torch.cat([by_rank[rank] for rank in range(len(samples_W))])
        return grad_GS if self._has_all_columns else grad_GS[:, self._columns_on(device)]

    def _columns_on(self, device: torch.device) -> Tensor:
        self._columns = self._columns.to(device)
        return self._columns

    def _to_host_columns(self, local_GS: Tensor, width: int) -> Tensor:
        """This rank's columns widened to those of its host, zero where it holds none."""
        if self._has_all_columns:
            return local_GS
        # index_add_, not assignment: a rank may hold two row ranges of the same columns.
        return local_GS.new_zeros((len(local_GS), width)).index_add_(1, self._columns_on(local_GS.device), local_GS)

    def _sum_inside(self, segments_D: list[Tensor], scales: BlockScales) -> Tensor:
        """Reduce-scatter in the host; for lossy wires an all-to-all, then the sum of the decoded blocks."""
        codecs, samples, width = self._codecs["inside", False], len(segments_D[self._device]), segments_D[0].shape[1]
        if codecs.exact:
            flat = torch.cat([x.flatten() for x in segments_D])
            summed = codecs.comm.reduce_scatter(flat, [x.numel() for x in segments_D], "pooled").wait()
            return summed.view(samples, width)
        expected_D = [[ExpectedBlock((samples, width), scales)]] * self._devices
        send_D = [[Block(x, scales)] for x in segments_D]
        received_D = codecs.exchange_blocks(send_D, expected_D, "pooled", segments_D[0].device).wait()
        summed = received_D[0][0].clone()
        for blocks in received_D[1:]:
            summed += blocks[0]
        return summed


def _column_numbers(segments: Iterable[ColumnSegment]) -> list[int]:
    return [column for x in segments for column in range(x.target, x.target + x.width)]
