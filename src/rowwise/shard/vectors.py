"""Blocks of vectors between ranks, each as its link's codec has it.

Exact wires are sent as they lie in memory. What a rank keeps for itself is never rounded. Known limits: for lossy
wires a copy of everything on both sides.
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
    """The blocks that go to a rank, or the shapes of those that come from it; spans as in `comm.codec`."""

    shapes: Sequence[tuple[int, int]]
    spans: Spans = ()
    tensors: Sequence[Tensor] = ()
    more: "tuple[PeerBlocks, ...]" = ()  # which follow these, and have other spans

    @classmethod
    def of(cls, tensors: Sequence[Tensor], spans: Spans = ()) -> "PeerBlocks":
        return cls([(len(x), x.shape[1]) for x in tensors], spans, tensors)

    @property
    def runs(self) -> "tuple[PeerBlocks, ...]":
        """All of them, those of the same spans together."""
        return (self._replace(more=()), *self.more)

    def size(self, codec: WireCodec) -> int:
        """Bytes on the wire."""
        return sum(codec.block_bytes(shape, run.spans) for run in self.runs for shape in run.shapes)


@dataclass(frozen=True, slots=True)
class WireCodecs:
    """The codecs of what travels between this rank and each one of a group, in one direction."""

    comm: Comm
    codecs_W: tuple[WireCodec, ...]

    @classmethod
    def of(cls, comm: Comm, wire: Wire, *, backward: bool) -> "WireCodecs":
        """As the links between them say."""
        me = comm.ranks[comm.rank]
        codecs = {"host": wire.host, "network": wire.network}
        links = [codecs[comm.topology.link(me, other)] for other in comm.ranks]
        types = [link.backward if backward else link.forward for link in links]
        types[comm.rank] = WireType.FP32
        return cls(comm, tuple(map(codec_of, types)))

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return not any(codec.lossy for codec in self.codecs_W)

    def exchange_blocks(
        self, out_W: Sequence[PeerBlocks], in_W: Sequence[PeerBlocks], what: str, scale: float = 1.0
    ) -> "PendingBlocks":
        """Send blocks to each rank, and expect some. `scale` keeps small numbers in the range of fp16.

        A scale is a power of two, so that nothing but the range changes by it.
        """
        me = self.comm.rank
        kept, nothing = out_W[me], PeerBlocks(())
        # What a rank has for itself stays where it is.
        out_W, in_W = ([nothing if w == me else b for w, b in enumerate(side)] for side in (out_W, in_W))
        back = [blocks.size(codec) for blocks, codec in zip(in_W, self.codecs_W, strict=True)]
        if self.exact:
            flat = _joined([x for blocks in out_W for run in blocks.runs for x in run.tensors])
            out = [blocks.size(codec) // 4 for blocks, codec in zip(out_W, self.codecs_W, strict=True)]
            back = [size // 4 for size in back]
        else:
            coded = [_encode(blocks, codec, scale) for blocks, codec in zip(out_W, self.codecs_W, strict=True)]
            flat, out = torch.cat(coded), [len(x) for x in coded]
        return PendingBlocks(self, self.comm.all_to_all(flat, out, back, what), in_W, kept, scale)


@final
@dataclass(frozen=True, slots=True)
class PendingBlocks:
    """Blocks of vectors whose all-to-all is under way."""

    lanes: WireCodecs
    handle: Handle
    expected_W: Sequence[PeerBlocks]
    kept: PeerBlocks
    scale: float

    def wait(self) -> list[list[Tensor]]:
        """The blocks that each rank sent, as floats."""
        flat = self.handle.wait()
        came: list[list[Tensor]] = []
        at = 0
        for blocks, codec in zip(self.expected_W, self.lanes.codecs_W, strict=True):
            found: list[Tensor] = []
            for run, shape in ((r, shape) for r in blocks.runs for shape in r.shapes):
                if self.lanes.exact:
                    size = math.prod(shape)
                    found.append(flat[at : at + size].view(shape))
                else:
                    size = codec.block_bytes(shape, run.spans)
                    found.append(codec.decode(flat[at : at + size], shape, run.spans, self.scale))
                at += size
            came.append(found)
        came[self.lanes.comm.rank] = [block for run in self.kept.runs for block in run.tensors]
        return came


def joined(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks one below the other: without a copy, where they already lie so."""
    filled = [block for block in blocks if block.numel()] or list(blocks[:1])
    first, at = filled[0], filled[0].data_ptr()
    home = first.untyped_storage().data_ptr()
    for block in filled:
        if not block.is_contiguous() or block.data_ptr() != at or block.untyped_storage().data_ptr() != home:
            return torch.cat(list(blocks))
        at += block.nbytes
    return first.as_strided((sum(len(block) for block in blocks), *first.shape[1:]), first.stride())


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """The blocks in a row: without a copy, where they already lie so."""
    return joined([block.reshape(-1) for block in blocks]) if blocks else torch.empty(0)


def _encode(blocks: PeerBlocks, codec: WireCodec, scale: float) -> Tensor:
    coded = [codec.encode(block, run.spans, scale) for run in blocks.runs for block in run.tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *coded])
