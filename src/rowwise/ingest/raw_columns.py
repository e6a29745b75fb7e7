"""`RawColumns`: the columns of some rows, with plain numbers in blocks of one type.

A request has tens of columns and few rows. An Arrow array for each column costs more than the numbers in it, so those
without nulls stay in matrices, and kernels read them by address. A column becomes an Arrow array when it is asked
for.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa


class NumberBlock(NamedTuple):
    """Columns of one type of numbers, without nulls."""

    kind: pa.DataType
    names: tuple[str, ...]
    values_CR: np.ndarray[Any, np.dtype[Any]]  # a column is contiguous

    def array(self, index: int) -> pa.Array:
        return pa.array(self.values_CR[index], self.kind)


@final
class RawColumns(Mapping[str, pa.Array]):
    """Columns by name, of equal length.

    Args:
        names: the order of the columns.
        rows: number of rows.
        blocks: columns of numbers.
        arrays: the other columns.
    """

    def __init__(
        self, names: tuple[str, ...], rows: int, blocks: Sequence[NumberBlock], arrays: Mapping[str, pa.Array]
    ) -> None:
        self.names, self.rows, self.blocks, self.arrays = names, rows, tuple(blocks), arrays

    @classmethod
    def of(cls, arrays: Mapping[str, pa.Array]) -> "RawColumns":
        if isinstance(arrays, RawColumns):
            return arrays
        return cls(tuple(arrays), len(next(iter(arrays.values()), ())), (), arrays)

    def replace(self, arrays: Mapping[str, pa.Array]) -> "RawColumns":
        """The columns, with these in place of those of the same name."""
        return RawColumns(self.names, self.rows, self.blocks, {**self.arrays, **arrays})

    def __getitem__(self, name: str) -> pa.Array:
        if name not in self.arrays:
            for block in self.blocks:
                if name in block.names:
                    return block.array(block.names.index(name))
        return self.arrays[name]

    def has(self, name: str) -> bool:
        """Whether there is a column, in `names` or not."""
        return name in self.arrays or any(name in block.names for block in self.blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def addresses(self) -> dict[str, int]:
        """Addresses of the columns that are in blocks only, valid while these columns live."""
        found: dict[str, int] = {}
        for _, names, values_CR in self.blocks:
            begin, step = values_CR.__array_interface__["data"][0], values_CR.strides[0]
            found |= zip(names, range(begin, begin + step * len(names), step), strict=True)
        for name in self.arrays:
            found.pop(name, None)
        return found

    def slice(self, begin: int, end: int) -> "RawColumns":
        blocks = [block._replace(values_CR=block.values_CR[:, begin:end]) for block in self.blocks]
        arrays = {name: array.slice(begin, end - begin) for name, array in self.arrays.items()}
        return RawColumns(self.names, end - begin, blocks, arrays)

    @classmethod
    def join(cls, parts: Sequence["RawColumns"]) -> "RawColumns":
        """Rows of several, one after the other, which have the same columns of the same types."""
        first = parts[0]
        if len(parts) == 1:
            return first
        rows = sum(part.rows for part in parts)
        joined: list[NumberBlock] = []
        layout = [block.names for block in first.blocks]
        if all([block.names for block in part.blocks] == layout for part in parts):
            joined = [
                block._replace(values_CR=np.concatenate([part.blocks[k].values_CR for part in parts], 1))
                for k, block in enumerate(first.blocks)
            ]
            names: Collection[str] = first.arrays.keys() & set(first.names)
        else:  # some sent nulls, or columns as a context
            names = first.names
        arrays = {name: pa.concat_arrays([part[name] for part in parts]) for name in names}
        return cls(first.names, rows, joined, arrays)
