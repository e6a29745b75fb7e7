"""The encoded rows of a split as one block of bytes, and the layout that finds the arrays in it again.

Known limits: a block is written whole, so how much there is of everything is known before the first byte is written.
Sizes: R rows of the split, F dense columns, K labels, N ids of a feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import DataError
from rowwise.spec import Value

ALIGNMENT = 64  # bytes; a cache line, and the widest vector
WIDTHS = {"f4": 4, "i8": 8}
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Memory = Callable[[int], Bytes]  # so many bytes or more, the first of which is aligned


def private(count: int) -> Bytes:
    """Memory of this process."""
    room = np.empty(count + ALIGNMENT, np.uint8)
    skip = -room.ctypes.data % ALIGNMENT
    return room[skip : skip + count]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedColumn:
    """Row r has values_N[offsets_R1[r]:offsets_R1[r + 1]]; without offsets every row has one value, values_N[r]."""

    values_N: Ints
    offsets_R1: Ints | None


class BlockArray(Value, frozen=True):
    """An array in a block."""

    kind: Literal["f4", "i8"]  # 32-bit floats, 64-bit whole numbers; lowest byte first
    shape: tuple[int, ...]
    offset: int  # bytes

    @property
    def end(self) -> int:
        """The byte after it."""
        return self.offset + WIDTHS[self.kind] * prod(self.shape)

    def within(self, block: Bytes) -> NDArray[Any]:
        return block[self.offset : self.end].view(f"<{self.kind}").reshape(self.shape)


class BlockSizes(NamedTuple):
    """The number of rows, values and columns of a block."""

    rows: int
    dense: int
    labels: int
    ids: Sequence[int]  # of each feature
    listed: Sequence[bool]  # whether it has offsets
    shared: Sequence[bool]  # whether its bags are those of distinct rows
    distinct: int | None = None  # how many there are of those; None: no feature is shared
    weighted: bool = False
    keyed: bool = False
    timed: bool = False


class BlockLayout(Value, frozen=True):
    """The offsets of all arrays of a block."""

    rows: int
    dense: BlockArray
    labels: BlockArray
    values: BlockArray  # of all features, one after another
    begins: tuple[int, ...]  # of each feature's values among them, and where the last ones end
    offsets: BlockArray  # of those features that have any, one after another, each counted from its feature's begin
    listed: tuple[bool, ...]  # which have
    shared: tuple[bool, ...]  # which have the bags of distinct rows, and their offsets apart
    shared_offsets: BlockArray | None = None
    inverse: BlockArray | None = None  # which distinct row each row is
    weights: BlockArray | None = None
    keys: BlockArray | None = None
    times: BlockArray | None = None
    size: int = 0  # bytes


def lay_out(sizes: BlockSizes) -> BlockLayout:
    """A place for everything: what is larger comes later, and each array begins at a cache line."""
    end = 0

    def place(kind: Literal["f4", "i8"], *shape: int) -> BlockArray:
        nonlocal end
        made = BlockArray(kind=kind, shape=shape, offset=-(-end // ALIGNMENT) * ALIGNMENT)
        end = made.end
        return made

    distinct, listed = sizes.distinct, sum(sizes.listed)
    listed_shared = sum(one and other for one, other in zip(sizes.listed, sizes.shared, strict=True))
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
class Encoded:
    """The rows of one split: views of a block. Bags of shared features are those of distinct rows."""

    block: Bytes
    layout: BlockLayout
    rows: int
    dense_RF: Floats
    labels_RK: Floats
    bags: tuple[RaggedColumn, ...]  # in the order of Columns.sparse
    weights_R: Floats | None
    keys_R: Ints | None
    times_R: Ints | None
    inverse_R: Ints | None  # which distinct row each row is: ascending, one by one; None: no feature is shared

    @classmethod
    def of(cls, block: Bytes, layout: BlockLayout) -> Self:
        """The rows that were laid out so in these bytes, or will be."""
        if len(block) < layout.size:
            raise DataError(f"a block of {len(block)} bytes: its layout needs {layout.size}")

        def found(place: BlockArray | None) -> Any:
            return None if place is None else place.within(block)

        return cls(
            block=block[: layout.size],
            layout=layout,
            rows=layout.rows,
            dense_RF=found(layout.dense),
            labels_RK=found(layout.labels),
            bags=_bags(layout, found(layout.values), found(layout.offsets), found(layout.shared_offsets)),
            weights_R=found(layout.weights),
            keys_R=found(layout.keys),
            times_R=found(layout.times),
            inverse_R=found(layout.inverse),
        )


def _bags(
    layout: BlockLayout, values: Ints, own: Sequence[Ints], shared: Sequence[Ints] | None
) -> tuple[RaggedColumn, ...]:
    rest = {False: iter(own), True: iter(shared if shared is not None else ())}
    spans = zip(layout.begins, layout.begins[1:], layout.listed, layout.shared, strict=False)  # the last only ends
    return tuple(
        RaggedColumn(values_N=values[begin:end], offsets_R1=next(rest[of_distinct]) if listed else None)
        for begin, end, listed, of_distinct in spans
    )
