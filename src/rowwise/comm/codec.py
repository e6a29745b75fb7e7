"""Wire codecs: encode blocks of float32 as bytes for one `WireType`, and decode them.

A block is [n, d]. A codec with scales has one per row or, with spans, one per vector of several side by side, so that
the vector of a table of small values is not rounded by its neighbour's scale. The exchange uses `WireCodec` only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from rowwise.ops import rowtype
from rowwise.ops.output_cache import empty_cached
from rowwise.spec import RowType, WireType

GROUP_MULTIPLE = 16  # vectors whose width is a multiple of it are encoded in one kernel call
Shape = tuple[int, int]


class ColumnSpan(NamedTuple):
    """Neighbouring columns, in groups of `group` that share a scale."""

    columns: int
    group: int


Spans = tuple[ColumnSpan, ...]  # cover all columns of a block; empty: one scale per row


class WireCodec(Protocol):
    """Encodes blocks as bytes; the size is a function of shape and spans.

    `codec_of` makes one per peer and direction, so a codec may keep state between sends.
    """

    @property
    def lossy(self) -> bool:
        """Whether decoding may change values."""
        ...

    def block_bytes(self, shape: Shape, spans: Spans = ()) -> int:
        """Bytes of an encoded block."""
        ...

    def encode(self, block_ND: Tensor, spans: Spans = (), scale: float = 1.0) -> Tensor:
        """The bytes [P] of a block. Codecs of narrow range multiply by `scale`, a power of two; others ignore it."""
        ...

    def decode(self, coded_P: Tensor, shape: Shape, spans: Spans = (), scale: float = 1.0) -> Tensor:
        """The block that was encoded with this scale; it may be a view of `coded_P`."""
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
    """Rounds each number to a floating-point dtype."""

    dtype: torch.dtype
    narrow: bool = False  # range: gradients of a mean over a large batch would underflow without `scale`

    @property
    def lossy(self) -> bool:
        return self.dtype is not torch.float32

    def block_bytes(self, shape: Shape, spans: Spans = ()) -> int:
        """See `WireCodec`; spans are ignored."""
        return shape[0] * shape[1] * self.dtype.itemsize

    def encode(self, block_ND: Tensor, spans: Spans = (), scale: float = 1.0) -> Tensor:
        if self.narrow and scale != 1:
            block_ND = torch.mul(block_ND, scale, out=empty_cached(tuple(block_ND.shape), block_ND))
        if self.lossy:
            block_ND = empty_cached(tuple(block_ND.shape), block_ND.new_empty(0, dtype=self.dtype)).copy_(block_ND)
        return block_ND.reshape(-1).view(torch.uint8)

    def decode(self, coded_P: Tensor, shape: Shape, spans: Spans = (), scale: float = 1.0) -> Tensor:
        block_ND = _align(coded_P, self.dtype.itemsize).view(self.dtype).view(shape)
        if self.lossy:
            block_ND = empty_cached(shape, block_ND.new_empty(0, dtype=torch.float32)).copy_(block_ND)
        return block_ND.div_(scale) if self.narrow and scale != 1 else block_ND


@final
@dataclass(frozen=True, slots=True)
class Int8Codec:
    """A byte for each number, and two floats (scale and offset) for each vector: the rows of `RowType.INT8`."""

    @property
    def lossy(self) -> bool:
        return True

    def block_bytes(self, shape: Shape, spans: Spans = ()) -> int:
        return sum(_span_bytes(shape[0], span) for span in _spans_or_whole(shape, spans))

    def encode(self, block_ND: Tensor, spans: Spans = (), scale: float = 1.0) -> Tensor:
        spans = _spans_or_whole(block_ND.shape, spans)
        if not spans:
            return block_ND.new_empty(0, dtype=torch.uint8)
        coded: list[Tensor] = []
        for part, span in zip(block_ND.split([span.columns for span in spans], 1), spans, strict=True):
            width, group = _kernel_row(span)
            coded.append(rowtype.pack(part.reshape(-1, width), RowType.INT8, group).flatten())
        return coded[0] if len(coded) == 1 else torch.cat(coded)

    def decode(self, coded_P: Tensor, shape: Shape, spans: Spans = (), scale: float = 1.0) -> Tensor:
        rows, spans = shape[0], _spans_or_whole(shape, spans)
        found: list[Tensor] = []
        for part, span in zip(coded_P.split([_span_bytes(rows, span) for span in spans]), spans, strict=True):
            width, group = _kernel_row(span)
            packed = _align(part, 4).view(rows * span.columns // width, -1)
            found.append(rowtype.unpack(packed, width, RowType.INT8, group).view(rows, span.columns))
        if not found:
            return torch.empty(shape, device=coded_P.device)
        return found[0] if len(found) == 1 else torch.cat(found, 1)


def gradient_scale(samples: int) -> float:
    """The loss scale of the wire: a power of two near the samples that a mean loss divides by."""
    return 2.0 ** math.ceil(math.log2(max(1, samples)))


def spans_of(widths: Sequence[int]) -> Spans:
    """A scale for each of several vectors side by side.

    If all widths have a large common divisor, groups of that width: smaller than a vector, but one kernel call for all.
    """
    width = math.gcd(*widths) if widths else 0
    if width % GROUP_MULTIPLE == 0:
        return (ColumnSpan(sum(widths), width),) if width else ()
    runs = ((own, sum(1 for _ in same)) for own, same in groupby(widths))
    return tuple(ColumnSpan(own * count, own) for own, count in runs)


def _spans_or_whole(shape: Sequence[int], spans: Spans) -> Spans:
    """The spans of a block: one of all columns by default, none for an empty block."""
    rows, columns = shape
    return (spans or (ColumnSpan(columns, columns),)) if rows and columns else ()


def _align(coded_P: Tensor, number_bytes: int) -> Tensor:
    """The bytes, copied if they do not begin at a multiple of `number_bytes`, as a dtype view requires."""
    return coded_P.clone() if (coded_P.storage_offset() | coded_P.data_ptr()) % number_bytes else coded_P


def _span_bytes(rows: int, span: ColumnSpan) -> int:
    return rows * (span.columns // span.group) * WireType.INT8.vector_bytes(span.group)


def _kernel_row(span: ColumnSpan) -> tuple[int, int | None]:
    """Columns of a row for the kernel, and columns of it that share a scale; None: all."""
    side_by_side = span.group % GROUP_MULTIPLE == 0 and span.columns > span.group
    return (span.columns, span.group) if side_by_side else (span.group, None)
