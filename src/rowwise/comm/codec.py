"""How blocks of numbers are written for the wire, and read again: a codec for each `WireType`.

A block is [n, d] floats, encoded as bytes. A codec that keeps a scale keeps one for each row, or, where spans say so,
for each of several vectors that lie side by side: a table of small numbers is not rounded by its neighbour's scale.
The exchange knows no more of a codec than `WireCodec`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from rowwise.ops import rowtype
from rowwise.spec import RowType, WireType

FAST = 16  # groups of a multiple of so many columns are coded side by side
Shape = tuple[int, int]


class ColumnSpan(NamedTuple):
    """Neighbouring columns, of which so many each are encoded together."""

    columns: int
    group: int


Spans = tuple[ColumnSpan, ...]  # of all columns of a block; none: each row is encoded as a whole


class WireCodec(Protocol):
    """Writes blocks as bytes, of a size that their shape tells.

    `codec_of` makes one for each peer and direction, so a codec may keep what it has to remember of its own sends.
    """

    @property
    def lossy(self) -> bool:
        """Whether what is decoded may differ from what was encoded."""
        ...

    def block_bytes(self, shape: Shape, spans: Spans = ()) -> int:
        """Of a block when it is encoded."""
        ...

    def encode(self, block_ND: Tensor, spans: Spans = (), scale: float = 1.0) -> Tensor:
        """The bytes of a block [P]. `scale`, a power of two, is for codecs whose range is narrow; others ignore it."""
        ...

    def decode(self, coded_P: Tensor, shape: Shape, spans: Spans = (), scale: float = 1.0) -> Tensor:
        """The block that was encoded with this scale; it may lie in the memory of `coded_P`."""
        ...


def codec_of(kind: WireType) -> WireCodec:
    """A codec for one peer and direction."""
    match kind:
        case WireType.FP32:
            return FloatCodec(torch.float32)
        case WireType.FP16:
            return FloatCodec(torch.float16, narrow=True)
        case WireType.BF16:
            return FloatCodec(torch.bfloat16)
        case WireType.INT8:
            return Int8Codec()


@final
@dataclass(frozen=True, slots=True)
class FloatCodec:
    """Each number rounded to the nearest of a type of floats."""

    dtype: torch.dtype
    narrow: bool = False  # in range: gradients of a mean over a large batch would become zero

    @property
    def lossy(self) -> bool:
        """All but 32 bits are."""
        return self.dtype is not torch.float32

    def block_bytes(self, shape: Shape, spans: Spans = ()) -> int:
        """See `WireCodec`; spans make no difference."""
        return shape[0] * shape[1] * self.dtype.itemsize

    def encode(self, block_ND: Tensor, spans: Spans = (), scale: float = 1.0) -> Tensor:
        scaled_ND = block_ND * scale if self.narrow and scale != 1 else block_ND
        return scaled_ND.to(self.dtype).reshape(-1).view(torch.uint8)

    def decode(self, coded_P: Tensor, shape: Shape, spans: Spans = (), scale: float = 1.0) -> Tensor:
        block_ND = _aligned(coded_P, self.dtype.itemsize).view(self.dtype).view(shape).float()
        return block_ND / scale if self.narrow and scale != 1 else block_ND


@final
@dataclass(frozen=True, slots=True)
class Int8Codec:
    """A byte for each number, and two floats (scale and offset) for each vector: the rows of `RowType.INT8`."""

    @property
    def lossy(self) -> bool:
        """Half a step of 255."""
        return True

    def block_bytes(self, shape: Shape, spans: Spans = ()) -> int:
        return sum(_bytes_of(shape[0], span) for span in _spans(shape, spans))

    def encode(self, block_ND: Tensor, spans: Spans = (), scale: float = 1.0) -> Tensor:
        spans = _spans(block_ND.shape, spans)
        if not spans:
            return block_ND.new_empty(0, dtype=torch.uint8)
        coded: list[Tensor] = []
        for part, span in zip(block_ND.split([span.columns for span in spans], 1), spans, strict=True):
            width, group = _coded_together(span)
            coded.append(rowtype.pack(part.reshape(-1, width), RowType.INT8, group).flatten())
        return coded[0] if len(coded) == 1 else torch.cat(coded)

    def decode(self, coded_P: Tensor, shape: Shape, spans: Spans = (), scale: float = 1.0) -> Tensor:
        rows, spans = shape[0], _spans(shape, spans)
        found: list[Tensor] = []
        for part, span in zip(coded_P.split([_bytes_of(rows, span) for span in spans]), spans, strict=True):
            width, group = _coded_together(span)
            packed = _aligned(part, 4).view(rows * span.columns // width, -1)
            found.append(rowtype.unpack(packed, width, RowType.INT8, group).view(rows, span.columns))
        if not found:
            return torch.empty(shape, device=coded_P.device)
        return found[0] if len(found) == 1 else torch.cat(found, 1)


def gradient_scale(samples: int) -> float:
    """What gradients of a mean over so many samples are multiplied by on the way: a power of two."""
    return 2.0 ** math.ceil(math.log2(max(1, samples)))


def spans_of(widths: Sequence[int]) -> Spans:
    """A scale for each of the vectors that lie side by side; smaller groups where one call can code them all."""
    width = math.gcd(*widths) if widths else 0
    if width % FAST == 0:
        return (ColumnSpan(sum(widths), width),) if width else ()
    runs = ((own, sum(1 for _ in same)) for own, same in groupby(widths))
    return tuple(ColumnSpan(own * count, own) for own, count in runs)


def _spans(shape: Sequence[int], spans: Spans) -> Spans:
    """Those of a block that is not empty."""
    rows, columns = shape
    return (spans or (ColumnSpan(columns, columns),)) if rows and columns else ()


def _aligned(coded_P: Tensor, number_bytes: int) -> Tensor:
    """The same bytes, where numbers of so many may begin; in the middle of a message they may not."""
    return coded_P.clone() if (coded_P.storage_offset() | coded_P.data_ptr()) % number_bytes else coded_P


def _bytes_of(rows: int, span: ColumnSpan) -> int:
    return rows * (span.columns // span.group) * WireType.INT8.vector_bytes(span.group)


def _coded_together(span: ColumnSpan) -> tuple[int, int | None]:
    """How many columns are a row of the kernel, and how many of them share a scale, if not all."""
    side_by_side = span.group % FAST == 0 and span.columns > span.group
    return (span.columns, span.group) if side_by_side else (span.group, None)
