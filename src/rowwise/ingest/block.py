"""The encoded rows of a split as one block of bytes, and the layout of the arrays in it.

One block per split means one shared-memory slot, or one object of a cluster, without serialization. All sizes are known
before the first byte is written. Sizes: R rows of the split, F dense columns, K labels, N ids of a feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import DataError
from rowwise.tables.spec import Value

ALIGNMENT = 64  # bytes; a cache line, and the widest vector
WIDTHS = {"f4": 4, "i8": 8}
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Allocator = Callable[[int], Bytes]  # (bytes) -> aligned memory of at least this size


def allocate(count: int) -> Bytes:
    """Memory of this process, aligned to ALIGNMENT bytes."""
    buffer = np.empty(count + ALIGNMENT, np.uint8)
    skip = -buffer.ctypes.data % ALIGNMENT
    return buffer[skip : skip + count]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedColumn:
    """Row r has values_N[offsets_R1[r]:offsets_R1[r + 1]]; without offsets every row has one value, values_N[r]."""

    values_N: Ints
    offsets_R1: Ints | None


class BlockArray(Value, frozen=True):
    """The type, shape and place of an array in a block."""

    kind: Literal["f4", "i8"]  # 32-bit floats or 64-bit integers, little-endian
    shape: tuple[int, ...]
    offset: int  # bytes

    @property
    def end(self) -> int:
        """Offset of the first byte after the array."""
        return self.offset + WIDTHS[self.kind] * prod(self.shape)

    def view_in(self, block: Bytes) -> NDArray[Any]:
        return block[self.offset : self.end].view(f"<{self.kind}").reshape(self.shape)


class BlockSizes(NamedTuple):
    """The number of rows, values and columns of a block."""

    rows: int
    dense: int
    labels: int
    ids: Sequence[int]  # number of ids of each feature
    listed: Sequence[bool]  # by feature: has offsets
    shared: Sequence[bool]  # by feature: one bag per distinct row instead of per row
    distinct: int | None = None  # number of distinct rows; None without shared features
    weighted: bool = False
    keyed: bool = False
    timed: bool = False


class BlockLayout(Value, frozen=True):
    """The offsets of all arrays of a block."""

    rows: int
    dense: BlockArray
    labels: BlockArray
    values: BlockArray  # of all features, one after another
    begins: tuple[int, ...]  # first value of each feature in `values`, then the total
    offsets: BlockArray  # of the listed unshared features; relative to the feature's begin
    listed: tuple[bool, ...]  # by feature: has offsets
    shared: tuple[bool, ...]  # by feature: one bag per distinct row instead of per row
    shared_offsets: BlockArray | None = None  # of the listed shared features
    inverse: BlockArray | None = None  # index of the distinct row of each row
    weights: BlockArray | None = None
    keys: BlockArray | None = None
    times: BlockArray | None = None
    size: int = 0  # bytes


def lay_out(sizes: BlockSizes) -> BlockLayout:
    """Place all arrays of a block: small ones first, each at the beginning of a cache line."""
    end = 0

    def place(kind: Literal["f4", "i8"], *shape: int) -> BlockArray:
        nonlocal end
        array = BlockArray(kind=kind, shape=shape, offset=-(-end // ALIGNMENT) * ALIGNMENT)
        end = array.end
        return array

    distinct, listed = sizes.distinct, sum(sizes.listed)
    listed_shared = sum(offsets and shared for offsets, shared in zip(sizes.listed, sizes.shared, strict=True))
    rows, begins = sizes.rows, np.concatenate([[0], np.cumsum(sizes.ids, dtype=np.int64)]).tolist()
    return BlockLayout(
        rows=rows,
        labels=place("f4", rows, sizes.labels),
        weights=place("f4", rows) if sizes.weighted else None,
        keys=place("i8", rows) if sizes.keyed else None,
        times=place("i8", rows) if sizes.timed else None,
        dense=place("f4", rows, sizes.dense),
        inverse=None if distinct is None else place("i8", rows),
        offsets=place("i8", listed - listed_shared, rows + 1),
        shared_offsets=None if distinct is None else place("i8", listed_shared, distinct + 1),
        values=place("i8", begins[-1]),
        begins=tuple(begins),
        listed=tuple(sizes.listed),
        shared=tuple(sizes.shared),
        size=end,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """The encoded rows of one split, as views of a block. Shared features have a bag for each distinct row."""

    block: Bytes
    layout: BlockLayout
    rows: int
    dense_RF: Floats
    labels_RK: Floats
    bags: tuple[RaggedColumn, ...]  # in the order of Columns.sparse
    weights_R: Floats | None
    keys_R: Ints | None
    times_R: Ints | None
    inverse_R: Ints | None  # index of each row's distinct row, in steps of 0 or 1; None without shared features

    @classmethod
    def from_block(cls, block: Bytes, layout: BlockLayout) -> Self:
        """Views of a block, for reading or writing; copies nothing."""
        if len(block) < layout.size:
            raise DataError(
                f"a block has {len(block)} bytes", f"the {layout.size} of its layout", hint="prepare it again"
            )

        def array_of(array: BlockArray | None) -> Any:
            return None if array is None else array.view_in(block)

        return cls(
            block=block[: layout.size],
            layout=layout,
            rows=layout.rows,
            dense_RF=array_of(layout.dense),
            labels_RK=array_of(layout.labels),
            bags=_bags(layout, array_of(layout.values), array_of(layout.offsets), array_of(layout.shared_offsets)),
            weights_R=array_of(layout.weights),
            keys_R=array_of(layout.keys),
            times_R=array_of(layout.times),
            inverse_R=array_of(layout.inverse),
        )


def _bags(
    layout: BlockLayout, values: Ints, per_row: Sequence[Ints], shared: Sequence[Ints] | None
) -> tuple[RaggedColumn, ...]:
    offsets = {False: iter(per_row), True: iter(shared if shared is not None else ())}
    features = zip(layout.begins, layout.begins[1:], layout.listed, layout.shared, strict=False)
    return tuple(
        RaggedColumn(values_N=values[begin:end], offsets_R1=next(offsets[is_shared]) if listed else None)
        for begin, end, listed, is_shared in features
    )
