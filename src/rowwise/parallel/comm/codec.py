"""Wire codecs: encode blocks of float32 as bytes for one `WireType`, and decode them.

A block is [n, d]. A codec with scales has one per row or, with `ScaleGroups`, one per vector where rows concatenate
several: so a table of small values is not rounded by its neighbour's scale. The exchange uses `WireCodec` only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from rowwise.tables.ops import rowtype
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.spec import RUN, WIRE_TYPES, FarType, RowType, WireType, quantised_bytes

GROUP_MULTIPLE = 16  # vectors whose width is a multiple of it are encoded in one kernel call
Shape = tuple[int, int]


class ScaleGroups(NamedTuple):
    """Groups of `width` neighbouring columns with one scale each."""

    columns: int
    width: int


BlockScales = tuple[ScaleGroups, ...]  # cover all columns of a block; () is one scale per row


class WireCodec(Protocol):
    """Encodes blocks as bytes; the size is a function of shape and scales.

    `codec_of` makes one per peer and direction, so a codec may keep state between sends.
    """

    @property
    def lossy(self) -> bool:
        """Whether decoding may change values."""
        ...

    def block_bytes(self, shape: Shape, scales: BlockScales = ()) -> int:
        """Bytes of an encoded block."""
        ...

    def encode(self, block_ND: Tensor, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        """The bytes [P] of a block. Codecs of narrow range multiply by `loss_scale`, a power of two; others do not."""
        ...

    def decode(self, coded_P: Tensor, shape: Shape, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        """The block that was encoded with this `loss_scale`; it may be a view of `coded_P`."""
        ...


def codec_of(kind: str) -> WireCodec:
    """A codec for one peer and direction, by the name in `WIRE_TYPES`."""
    facts = WIRE_TYPES[kind]
    return FloatCodec(getattr(torch, facts.dtype), narrow=facts.narrow) if facts.dtype else CODECS[kind]()


def sum_codec_of(kind: FarType) -> WireCodec:
    """A codec for the sums between groups, whose blocks are runs of `RUN` numbers."""
    return TopKCodec(kind.kept) if kind.kept < RUN else codec_of(kind.name)


@final
@dataclass(frozen=True, slots=True)
class FloatCodec:
    """Rounds each number to a floating-point dtype."""

    dtype: torch.dtype
    narrow: bool = False  # see `WireFacts`

    @property
    def lossy(self) -> bool:
        return self.dtype is not torch.float32

    def block_bytes(self, shape: Shape, scales: BlockScales = ()) -> int:
        """See `WireCodec`; scales are ignored."""
        return shape[0] * shape[1] * self.dtype.itemsize

    def encode(self, block_ND: Tensor, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        if self.narrow and loss_scale != 1:
            block_ND = torch.mul(block_ND, loss_scale, out=empty_cached(tuple(block_ND.shape), block_ND))
        if self.lossy:
            block_ND = empty_cached(tuple(block_ND.shape), block_ND.new_empty(0, dtype=self.dtype)).copy_(block_ND)
        return block_ND.reshape(-1).view(torch.uint8)

    def decode(self, coded_P: Tensor, shape: Shape, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        block_ND = _align(coded_P, self.dtype.itemsize).view(self.dtype).view(shape)
        if self.lossy:
            block_ND = empty_cached(shape, block_ND.new_empty(0, dtype=torch.float32)).copy_(block_ND)
        return block_ND.div_(loss_scale) if self.narrow and loss_scale != 1 else block_ND


@final
@dataclass(frozen=True, slots=True)
class Int8Codec:
    """A byte for each number, and two floats (scale and offset) for each vector: the rows of `RowType.INT8`."""

    @property
    def lossy(self) -> bool:
        return True

    def block_bytes(self, shape: Shape, scales: BlockScales = ()) -> int:
        return sum(_groups_bytes(shape[0], groups) for groups in _scales_of_block(shape, scales))

    def encode(self, block_ND: Tensor, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        scales = _scales_of_block(block_ND.shape, scales)
        if not scales:
            return block_ND.new_empty(0, dtype=torch.uint8)
        coded: list[Tensor] = []
        for part, groups in zip(block_ND.split([groups.columns for groups in scales], 1), scales, strict=True):
            width, scale_group = _kernel_row(groups)
            coded.append(rowtype.pack(part.reshape(-1, width), RowType.INT8, scale_group).flatten())
        return coded[0] if len(coded) == 1 else torch.cat(coded)

    def decode(self, coded_P: Tensor, shape: Shape, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        rows, scales = shape[0], _scales_of_block(shape, scales)
        decoded: list[Tensor] = []
        for part, groups in zip(coded_P.split([_groups_bytes(rows, groups) for groups in scales]), scales, strict=True):
            width, scale_group = _kernel_row(groups)
            packed = _align(part, 4).view(rows * groups.columns // width, -1)
            decoded.append(rowtype.unpack(packed, width, RowType.INT8, scale_group).view(rows, groups.columns))
        if not decoded:
            return torch.empty(shape, device=coded_P.device)
        return decoded[0] if len(decoded) == 1 else torch.cat(decoded, 1)


@final
@dataclass(frozen=True, slots=True)
class Int4Codec:
    """Half a byte for each number, and two floats for each row: the format of 4-bit rows in checkpoints.

    Scales of several vectors are not supported.
    """

    @property
    def lossy(self) -> bool:
        return True

    def block_bytes(self, shape: Shape, scales: BlockScales = ()) -> int:
        rows, columns = shape
        return rows * quantised_bytes(columns, 4) if columns else 0

    def encode(self, block_ND: Tensor, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        assert not scales
        if not block_ND.numel():
            return block_ND.new_empty(0, dtype=torch.uint8)
        return torch.ops.rowwise.pack4(block_ND.float().contiguous()).flatten()

    def decode(self, coded_P: Tensor, shape: Shape, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        rows, columns = shape
        if not rows * columns:
            return torch.empty(shape, device=coded_P.device)
        return torch.ops.rowwise.unpack4(_align(coded_P, 4).view(rows, -1).contiguous(), columns)


@final
@dataclass(frozen=True, slots=True)
class TopKCodec:
    """Top-k: the numbers of each row largest in magnitude, as floats, then their columns, a byte each.

    The rest is decoded as 0. Rows have at most 256 columns.
    """

    kept: int  # numbers per row

    @property
    def lossy(self) -> bool:
        return True

    def block_bytes(self, shape: Shape, scales: BlockScales = ()) -> int:
        rows, columns = shape
        return 5 * rows * min(self.kept, columns)

    def encode(self, block_ND: Tensor, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        columns = block_ND.shape[1]
        assert columns <= 256
        if not block_ND.numel():
            return block_ND.new_empty(0, dtype=torch.uint8)
        return torch.ops.rowwise.keep_largest(block_ND.float().contiguous(), min(self.kept, columns)).flatten()

    def decode(self, coded_P: Tensor, shape: Shape, scales: BlockScales = (), loss_scale: float = 1.0) -> Tensor:
        rows, columns = shape
        kept = min(self.kept, columns)
        block_ND = torch.zeros(shape, device=coded_P.device)
        values_NB, columns_NK = coded_P.view(rows, 5 * kept).split([4 * kept, kept], 1)
        return block_ND.scatter_(
            1, columns_NK.long(), values_NB.clone(memory_format=torch.contiguous_format).view(torch.float32)
        )


# Codecs of wire types without a dtype.
CODECS: dict[str, Callable[[], WireCodec]] = {"int8": Int8Codec, "int4": Int4Codec}


def gradient_scale(samples: int) -> float:
    """The loss scale of the wire: a power of two near the number of samples, by which a mean loss divides."""
    return 2.0 ** math.ceil(math.log2(max(1, samples)))


def scale_groups_of(widths: Sequence[int]) -> BlockScales:
    """A scale for each of several vectors side by side.

    If all widths have a large common divisor, groups of that width: smaller than a vector, but one kernel call for all.
    """
    width = math.gcd(*widths) if widths else 0
    if width % GROUP_MULTIPLE == 0:
        return (ScaleGroups(sum(widths), width),) if width else ()
    runs = ((width, sum(1 for _ in run)) for width, run in groupby(widths))
    return tuple(ScaleGroups(width * count, width) for width, count in runs)


def _scales_of_block(shape: Sequence[int], scales: BlockScales) -> BlockScales:
    """The scale groups of a block: one of all columns by default, none for an empty block."""
    rows, columns = shape
    return (scales or (ScaleGroups(columns, columns),)) if rows and columns else ()


def _align(coded_P: Tensor, number_bytes: int) -> Tensor:
    """The bytes, copied if they do not begin at a multiple of `number_bytes`, as a dtype view requires."""
    return coded_P.clone() if (coded_P.storage_offset() | coded_P.data_ptr()) % number_bytes else coded_P


def _groups_bytes(rows: int, groups: ScaleGroups) -> int:
    return rows * (groups.columns // groups.width) * WireType.INT8.vector_bytes(groups.width)


def _kernel_row(groups: ScaleGroups) -> tuple[int, int | None]:
    """Columns of a row for the kernel, and columns of it that share a scale; None if all do."""
    side_by_side = groups.width % GROUP_MULTIPLE == 0 and groups.columns > groups.width
    return (groups.columns, groups.width) if side_by_side else (groups.width, None)
