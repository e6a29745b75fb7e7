"""All-to-all of blocks of vectors, encoded for the link between two ranks.

Exact wires send blocks as they lie in memory; lossy wires cost a copy on both sides. A rank's blocks for itself are
never encoded, so never rounded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from rowwise.parallel.comm.codec import BlockScales, WireCodec, codec_of
from rowwise.parallel.comm.interface import Comm, Work
from rowwise.tables.spec import Wire, WireType


class Block(NamedTuple):
    """A block [n, d] of vectors to send; scales as in `comm.codec`."""

    vectors: Tensor
    scales: BlockScales = ()

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.vectors), self.vectors.shape[1]


class ExpectedBlock(NamedTuple):
    """The shape of a block that another rank sends, and its scales."""

    shape: tuple[int, int]
    scales: BlockScales = ()


@dataclass(frozen=True, slots=True)
class WireCodecs:
    """The codec for each rank of a communicator, in one direction: forward or backward."""

    comm: Comm
    codecs_W: tuple[WireCodec, ...]

    @classmethod
    def of(cls, comm: Comm, wire: Wire, *, backward: bool) -> "WireCodecs":
        """The codecs that `wire` names for the link to each rank."""
        me = comm.ranks[comm.rank]
        types = [wire.vectors(comm.topology.link(me, rank), backward=backward) for rank in comm.ranks]
        types[comm.rank] = WireType.FP32
        return cls(comm, tuple(map(codec_of, types)))

    @property
    def exact(self) -> bool:
        """Whether no codec is lossy."""
        return not any(codec.lossy for codec in self.codecs_W)

    def exchange_blocks(
        self,
        send_W: Sequence[Sequence[Block]],
        expected_W: Sequence[Sequence[ExpectedBlock]],
        purpose: str,
        device: torch.device,
        loss_scale: float = 1.0,
    ) -> "PendingBlocks":
        """Start an all-to-all of blocks; this rank's blocks for itself are not sent.

        `device`: of the blocks, alike on all ranks, as a rank without blocks joins the same collective.
        `loss_scale`, a power of two, multiplies numbers on an fp16 wire and divides them on arrival.
        """
        me = self.comm.rank
        self_blocks = [block.vectors for block in send_W[me]]
        send_W = [() if w == me else blocks for w, blocks in enumerate(send_W)]
        expected_W = [() if w == me else blocks for w, blocks in enumerate(expected_W)]
        send_sizes, recv_sizes = self._bytes(send_W), self._bytes(expected_W)
        if self.exact:
            flat = concat_blocks([block.vectors.reshape(-1) for blocks in send_W for block in blocks], device)
            send_sizes, recv_sizes = ([size // 4 for size in sizes] for sizes in (send_sizes, recv_sizes))
        else:
            pairs = [(block, c) for blocks, c in zip(send_W, self.codecs_W, strict=True) for block in blocks]
            coded = [codec.encode(block.vectors, block.scales, loss_scale) for block, codec in pairs]
            flat = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *coded])
        work = self.comm.all_to_all(flat, send_sizes, recv_sizes, purpose)
        return PendingBlocks(self, work, expected_W, self_blocks, loss_scale)

    def _bytes(self, blocks_W: Sequence[Sequence[Block | ExpectedBlock]]) -> list[int]:
        """Bytes on the wire, by rank."""
        pairs = zip(blocks_W, self.codecs_W, strict=True)
        return [sum(codec.block_bytes(block.shape, block.scales) for block in blocks) for blocks, codec in pairs]


@final
@dataclass(frozen=True, slots=True)
class PendingBlocks:
    """An all-to-all of blocks in flight."""

    codecs: WireCodecs
    work: Work
    expected_W: Sequence[Sequence[ExpectedBlock]]
    self_blocks: list[Tensor]
    loss_scale: float

    def wait(self) -> list[list[Tensor]]:
        """The blocks that each rank sent, decoded to float32."""
        flat = self.work.wait()
        received_W: list[list[Tensor]] = []
        at = 0
        for expected, codec in zip(self.expected_W, self.codecs.codecs_W, strict=True):
            blocks: list[Tensor] = []
            for shape, scales in expected:
                if self.codecs.exact:
                    size = math.prod(shape)
                    blocks.append(flat[at : at + size].view(shape))
                else:
                    size = codec.block_bytes(shape, scales)
                    blocks.append(codec.decode(flat[at : at + size], shape, scales, self.loss_scale))
                at += size
            received_W.append(blocks)
        received_W[self.codecs.comm.rank] = self.self_blocks
        return received_W


def concat_blocks(blocks: Sequence[Tensor], device: torch.device) -> Tensor:
    """torch.cat along rows, without a copy if the blocks already lie one after the other in one storage."""
    if not blocks:
        return torch.empty(0, device=device)
    filled = [block for block in blocks if block.numel()] or list(blocks[:1])
    first, at = filled[0], filled[0].data_ptr()
    storage_ptr = first.untyped_storage().data_ptr()
    for block in filled:
        if not block.is_contiguous() or block.data_ptr() != at or block.untyped_storage().data_ptr() != storage_ptr:
            return torch.cat(list(blocks))
        at += block.nbytes
    return first.as_strided((sum(len(block) for block in blocks), *first.shape[1:]), first.stride())
