"""Blocks of vectors between ranks, each as its link's codec has it.

A block is [n, d] floats; int8 keeps a scale for each of its rows, or for each vector of several side by side: a table
of small numbers is not rounded by the scale of its neighbour. Exact wires are sent as they lie in memory. What a rank
keeps for itself is never rounded. Gives up: for lossy wires a copy of everything on both sides.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, final

import torch
from torch import Tensor

from rowwise.comm.seam import Comm, Handle
from rowwise.ops import rowtype
from rowwise.spec import RowType, Wire, row_bytes

FAST = 16  # groups of a multiple of so many columns are coded side by side


class Span(NamedTuple):
    """Neighbouring columns, of which so many each share an int8 scale."""

    columns: int
    group: int


Spans = tuple[Span, ...]


class Blocks(NamedTuple):
    """What goes to a rank, or only the shapes of what comes from it; without spans a row has one int8 scale."""

    shapes: Sequence[tuple[int, int]]
    spans: Spans = ()
    tensors: Sequence[Tensor] = ()
    more: "tuple[Blocks, ...]" = ()  # which follow these, and have other spans

    @classmethod
    def of(cls, tensors: Sequence[Tensor], spans: Spans = ()) -> "Blocks":
        """To send."""
        return cls([(len(x), x.shape[1]) for x in tensors], spans, tensors)

    @property
    def runs(self) -> "tuple[Blocks, ...]":
        """All of them, those of the same spans together."""
        return (self._replace(more=()), *self.more)

    def size(self, kind: RowType) -> int:
        """Bytes on the wire."""
        return sum(run.block_bytes(shape, kind) for run in self.runs for shape in run.shapes)

    def block_bytes(self, shape: tuple[int, int], kind: RowType) -> int:
        """Of one block."""
        n, d = shape
        if not d:
            return 0
        if kind is not RowType.INT8:
            return n * row_bytes(kind, d)
        return n * sum(columns // group * row_bytes(kind, group) for columns, group in self.spans or [Span(d, d)])


@dataclass(frozen=True, slots=True)
class Lanes:
    """The type of what travels between this rank and each one of a group, in one direction."""

    comm: Comm
    types_W: tuple[RowType, ...]

    @classmethod
    def of(cls, comm: Comm, wire: Wire, *, backward: bool) -> "Lanes":
        """As the links between them say."""
        me = comm.ranks[comm.rank]
        codecs = {"host": wire.host, "network": wire.network}
        chosen = [codecs[comm.topology.link(me, other)] for other in comm.ranks]
        types = [codec.backward if backward else codec.forward for codec in chosen]
        types[comm.rank] = RowType.FP32
        return cls(comm, tuple(types))

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return all(kind is RowType.FP32 for kind in self.types_W)

    def swap(self, out_W: Sequence[Blocks], in_W: Sequence[Blocks], what: str, scale: float = 1.0) -> "Incoming":
        """Send blocks to each rank, and expect some. `scale` keeps small numbers in the range of fp16.

        A scale is a power of two, so that nothing but the range changes by it.
        """
        me = self.comm.rank
        kept, nothing = out_W[me], Blocks(())
        # What a rank has for itself stays where it is.
        out_W, in_W = ([nothing if w == me else b for w, b in enumerate(side)] for side in (out_W, in_W))
        if self.exact:
            flat = _joined([x for blocks in out_W for run in blocks.runs for x in run.tensors])
            out, back = ([b.size(RowType.FP32) // 4 for b in side] for side in (out_W, in_W))
        else:
            coded = [_encode(b, kind, scale) for b, kind in zip(out_W, self.types_W, strict=True)]
            flat, out = torch.cat(coded), [len(x) for x in coded]
            back = [b.size(kind) for b, kind in zip(in_W, self.types_W, strict=True)]
        return Incoming(self, self.comm.all_to_all(flat, out, back, what), in_W, kept, scale)


@final
@dataclass(frozen=True, slots=True)
class Incoming:
    """Blocks under way."""

    lanes: Lanes
    handle: Handle
    expected_W: Sequence[Blocks]
    kept: Blocks
    scale: float

    def wait(self) -> list[list[Tensor]]:
        """The blocks that each rank sent, as floats."""
        flat = self.handle.wait()
        came: list[list[Tensor]] = []
        at = 0
        for blocks, kind in zip(self.expected_W, self.lanes.types_W, strict=True):
            found: list[Tensor] = []
            for run, (n, d) in ((r, shape) for r in blocks.runs for shape in r.shapes):
                if self.lanes.exact:
                    size = n * d
                    found.append(flat[at : at + size].view(n, d))
                else:
                    size = run.block_bytes((n, d), kind)
                    found.append(_decode(flat[at : at + size], (n, d), kind, run.spans, self.scale))
                at += size
            came.append(found)
        came[self.lanes.comm.rank] = [block for run in self.kept.runs for block in run.tensors]
        return came


def fitting_scale(samples: int) -> float:
    """What gradients of a mean over so many samples are multiplied by on the way."""
    return 2.0 ** math.ceil(math.log2(max(1, samples)))


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


def spans_of(widths: Sequence[int]) -> Spans:
    """A scale for each of the vectors that lie side by side; smaller groups where one call can code them all."""
    width = math.gcd(*widths) if widths else 0
    if width % FAST == 0:
        return (Span(sum(widths), width),) if width else ()
    runs = ((own, sum(1 for _ in same)) for own, same in groupby(widths))
    return tuple(Span(own * count, own) for own, count in runs)


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """The blocks in a row: without a copy, where they already lie so."""
    return joined([block.reshape(-1) for block in blocks]) if blocks else torch.empty(0)


def _encode(blocks: Blocks, kind: RowType, scale: float) -> Tensor:
    coded = [torch.empty(0, dtype=torch.uint8)]
    for run, block in ((r, block) for r in blocks.runs for block in r.tensors):
        if not block.numel():
            continue
        if kind is RowType.INT8:
            coded += _encode_spans(block, run.spans)
        else:
            scaled = block * scale if kind is RowType.FP16 and scale != 1 else block
            coded.append(rowtype.pack(scaled, kind).contiguous().view(torch.uint8).flatten())
    return torch.cat(coded)


def _encode_spans(block: Tensor, spans: Spans) -> Iterator[Tensor]:
    parts = block.split([columns for columns, _ in spans], 1) if spans else [block]
    for part, (columns, group) in zip(parts, spans or [Span(block.shape[1], block.shape[1])], strict=True):
        width = columns if group % FAST == 0 else group
        yield rowtype.pack(part.reshape(-1, width), RowType.INT8, group if width > group else None).flatten()


def _decode(coded: Tensor, shape: tuple[int, int], kind: RowType, spans: Spans, scale: float) -> Tensor:
    n, d = shape
    if not n * d:
        return torch.empty(shape, device=coded.device)
    if kind is RowType.INT8:
        return _decode_spans(coded, shape, spans or (Span(d, d),))
    # A copy begins where its type wants to begin; a part of a message may not.
    floats = rowtype.unpack(coded.clone().view(rowtype.DTYPES[kind]).view(n, -1), d, kind)
    return floats / scale if kind is RowType.FP16 and scale != 1 else floats


def _decode_spans(coded: Tensor, shape: tuple[int, int], spans: Spans) -> Tensor:
    n = shape[0]
    found: list[Tensor] = []
    sizes = [n * (columns // group) * row_bytes(RowType.INT8, group) for columns, group in spans]
    for part, (columns, group) in zip(coded.split(sizes), spans, strict=True):
        width = columns if group % FAST == 0 else group
        packed = part.clone().view(n * columns // width, -1)
        found.append(rowtype.unpack(packed, width, RowType.INT8, group if width > group else None).view(n, columns))
    return found[0] if len(found) == 1 else torch.cat(found, 1)
