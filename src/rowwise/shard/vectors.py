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

from rowwise.comm.codec import Spans, WireCodec, codec_of
from rowwise.comm.seam import Comm, Handle
from rowwise.spec import Wire, WireType


class PeerBlocks(NamedTuple):
    """The blocks for one rank, or the shapes of the blocks expected from it; spans as in `comm.codec`."""

    shapes: Sequence[tuple[int, int]]
    spans: Spans = ()
    tensors: Sequence[Tensor] = ()
    rest: "tuple[PeerBlocks, ...]" = ()  # blocks that follow in the same message and have other spans

    @classmethod
    def of(cls, tensors: Sequence[Tensor], spans: Spans = ()) -> "PeerBlocks":
        return cls([(len(x), x.shape[1]) for x in tensors], spans, tensors)

    @property
    def span_groups(self) -> "tuple[PeerBlocks, ...]":
        """These blocks and the rest, one entry per `spans`."""
        return (self._replace(rest=()), *self.rest)

    def size(self, codec: WireCodec) -> int:
        """Bytes on the wire."""
        return sum(codec.block_bytes(shape, group.spans) for group in self.span_groups for shape in group.shapes)


@dataclass(frozen=True, slots=True)
class WireCodecs:
    """The codec for each rank of a communicator, in one direction: forward or backward."""

    comm: Comm
    codecs_W: tuple[WireCodec, ...]

    @classmethod
    def of(cls, comm: Comm, wire: Wire, *, backward: bool) -> "WireCodecs":
        """The codecs that `wire` names for the link to each rank."""
        me = comm.ranks[comm.rank]
        codecs = {"host": wire.host, "network": wire.network}
        links = [codecs[comm.topology.link(me, other)] for other in comm.ranks]
        types = [link.backward if backward else link.forward for link in links]
        types[comm.rank] = WireType.FP32
        return cls(comm, tuple(map(codec_of, types)))

    @property
    def exact(self) -> bool:
        """Whether no codec is lossy."""
        return not any(codec.lossy for codec in self.codecs_W)

    def exchange_blocks(
        self, out_W: Sequence[PeerBlocks], in_W: Sequence[PeerBlocks], what: str, scale: float = 1.0
    ) -> "PendingBlocks":
        """Start an all-to-all: blocks `out_W` to each rank, blocks of the shapes `in_W` from each.

        `scale`, a power of two, multiplies numbers on an fp16 wire and divides them on arrival.
        """
        me = self.comm.rank
        kept, nothing = out_W[me], PeerBlocks(())
        # A rank's blocks for itself are handed through.
        out_W, in_W = ([nothing if w == me else b for w, b in enumerate(side)] for side in (out_W, in_W))
        back = [blocks.size(codec) for blocks, codec in zip(in_W, self.codecs_W, strict=True)]
        if self.exact:
            flat = _concat_flat([x for blocks in out_W for group in blocks.span_groups for x in group.tensors])
            out = [blocks.size(codec) // 4 for blocks, codec in zip(out_W, self.codecs_W, strict=True)]
            back = [size // 4 for size in back]
        else:
            coded = [_encode_blocks(blocks, codec, scale) for blocks, codec in zip(out_W, self.codecs_W, strict=True)]
            flat, out = torch.cat(coded), [len(x) for x in coded]
        return PendingBlocks(self, self.comm.all_to_all(flat, out, back, what), in_W, kept, scale)


@final
@dataclass(frozen=True, slots=True)
class PendingBlocks:
    """An all-to-all of blocks that was started."""

    codecs: WireCodecs
    handle: Handle
    expected_W: Sequence[PeerBlocks]
    kept: PeerBlocks
    scale: float

    def wait(self) -> list[list[Tensor]]:
        """The blocks that each rank sent, decoded to float32."""
        flat = self.handle.wait()
        received: list[list[Tensor]] = []
        at = 0
        for blocks, codec in zip(self.expected_W, self.codecs.codecs_W, strict=True):
            found: list[Tensor] = []
            for group, shape in ((r, shape) for r in blocks.span_groups for shape in r.shapes):
                if self.codecs.exact:
                    size = math.prod(shape)
                    found.append(flat[at : at + size].view(shape))
                else:
                    size = codec.block_bytes(shape, group.spans)
                    found.append(codec.decode(flat[at : at + size], shape, group.spans, self.scale))
                at += size
            received.append(found)
        received[self.codecs.comm.rank] = [block for group in self.kept.span_groups for block in group.tensors]
        return received


def concat_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """torch.cat along rows, without a copy if the blocks already lie one after the other in one storage."""
    filled = [block for block in blocks if block.numel()] or list(blocks[:1])
    first, at = filled[0], filled[0].data_ptr()
    home = first.untyped_storage().data_ptr()
    for block in filled:
        if not block.is_contiguous() or block.data_ptr() != at or block.untyped_storage().data_ptr() != home:
            return torch.cat(list(blocks))
        at += block.nbytes
    return first.as_strided((sum(len(block) for block in blocks), *first.shape[1:]), first.stride())


def _concat_flat(blocks: Sequence[Tensor]) -> Tensor:
    return concat_blocks([block.reshape(-1) for block in blocks]) if blocks else torch.empty(0)


def _encode_blocks(blocks: PeerBlocks, codec: WireCodec, scale: float) -> Tensor:
    coded = [codec.encode(block, group.spans, scale) for group in blocks.span_groups for block in group.tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *coded])
