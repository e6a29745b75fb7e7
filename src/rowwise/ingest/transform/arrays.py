"""Arrow columns taken apart into plain arrays, and put together again: chunks, slices, list layouts and nulls end here.

Its own file so that no transform knows how Arrow keeps a column. There are two views, as ids and numbers mean
different things by "missing": a missing id inside a list is left out, as everywhere else; a missing number keeps its
place, since what stands at the same place of another list may belong to it. Known limits: nothing is done in place,
and each step makes new arrays. Sizes: R rows, N elements.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest.bags import Ints, flatten_lists, hash_ids, int64
from rowwise.ingest.columns import is_list, is_text
from rowwise.ingest.mix import Words, mix, remainder

Mask = NDArray[np.bool_]
Numeric = NDArray[Any]  # float32, float64, int64 or uint64


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IdLists:
    """Row r has values[offsets_R1[r]:offsets_R1[r + 1]], nothing missing among them; without offsets, values[r]."""

    values: pa.Array
    offsets_R1: Ints | None
    null_R: Mask | None  # the rows that are null; None: none is
    single: bool  # the column holds one value in a row, not lists

    def starts(self) -> Ints:
        """The offsets, also where every row has one value."""
        return np.arange(len(self.values) + 1) if self.offsets_R1 is None else self.offsets_R1

    def with_values(self, values: Numeric | pa.Array) -> pa.Array:
        made = values if isinstance(values, pa.Array) else pa.array(values)
        if not self.single:
            return lists(made, self.starts(), self.null_R)
        return made if self.null_R is None else _among_nulls(made, self.null_R)


def ids_of(array: pa.Array) -> IdLists:
    """A column of ids, or of lists of them."""
    values, offsets_R1 = flatten_lists(array, None)
    return IdLists(values=values, offsets_R1=offsets_R1, null_R=nulls(array), single=not is_list(array.type))


def nulls(array: pa.Array) -> Mask | None:
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def either(a_R: Mask | None, b_R: Mask | None) -> Mask | None:
    """What is null in one or the other."""
    if a_R is None or b_R is None:
        return b_R if a_R is None else a_R
    return a_R | b_R


def lists(values: pa.Array, offsets_R1: Ints, null_R: Mask | None) -> pa.Array:
    """A column of lists; a row that is null has no values."""
    mask = None if null_R is None else pa.array(null_R)
    return pa.LargeListArray.from_arrays(pa.array(offsets_R1, pa.int64()), values, mask=mask)


def _among_nulls(values: pa.Array, null_R: Mask) -> pa.Array:
    return values.take(pa.array(np.maximum(np.cumsum(~null_R) - 1, 0), mask=null_R))


def sums(counts_R: Numeric | Mask) -> Ints:
    sums_R1 = np.zeros(len(counts_R) + 1, np.int64)
    np.cumsum(counts_R, out=sums_R1[1:])
    return sums_R1


def rows_of(offsets_R1: Ints) -> Ints:
    """The row of each element."""
    return np.repeat(np.arange(len(offsets_R1) - 1), np.diff(offsets_R1))


def words_of(values: pa.Array) -> Ints:
    """Whole numbers as they are; of text its hash."""
    return int64(values) if whole_kind(values.type) else hash_ids(values).view(np.int64)


def fold(so_far_N: Words, next_N: Words) -> Words:
    """Hashes combined so that their order counts."""
    return mix(so_far_N ^ next_N)


def rows_or_words(hash_N: Words, rows: int | None) -> Ints:
    """Hashes cut to the rows of a table, or all their bits."""
    return hash_N.view(np.int64) if rows is None else remainder(hash_N, rows)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NumberArray:
    """Numbers of rows, or of lists: the n-th is x_N[n], of no meaning where null_N[n]."""

    x_N: Numeric
    null_N: Mask | None
    offsets_R1: Ints | None  # None: one in each row
    null_R: Mask | None  # lists that are null

    def with_numbers(self, x_N: Numeric, null_N: Mask | None) -> pa.Array:
        made = pa.array(x_N, mask=null_N)
        return made if self.offsets_R1 is None else lists(made, self.offsets_R1, self.null_R)

    @property
    def missing_N(self) -> Mask | None:
        if self.x_N.dtype.kind != "f":
            return self.null_N
        nan_N = np.isnan(self.x_N)
        return either(self.null_N, nan_N if nan_N.any() else None)


def numbers_of(array: pa.Array) -> NumberArray:
    """A column of numbers, or of lists of them, in the type that `number_kind` says."""
    values, offsets_R1 = elements(array)
    null_R = None if offsets_R1 is None else nulls(array)
    values = values.cast(number_kind(values.type), safe=False)
    null_N = nulls(values)
    x_N = (values if null_N is None else values.fill_null(0)).to_numpy(zero_copy_only=False)
    return NumberArray(x_N=x_N, null_N=null_N, offsets_R1=offsets_R1, null_R=null_R)


def elements(array: pa.Array) -> tuple[pa.Array, Ints | None]:
    """What is in a column one after another, nulls in their places, and where each row's begin; None: one a row."""
    if not is_list(array.type):
        return array, None
    lengths_R = pc.fill_null(pc.call_function("list_value_length", [array]), 0).to_numpy(zero_copy_only=False)
    return array.flatten(), sums(lengths_R)


def element_kind(kind: pa.DataType) -> pa.DataType:
    """Of a list what is in it; else the type itself."""
    return kind.value_type if is_list(kind) else kind


def like(kind: pa.DataType, element: pa.DataType) -> pa.DataType:
    """Lists of elements where there were lists, single ones else."""
    return pa.large_list(element) if is_list(kind) else element


def plain_kind(kind: pa.DataType) -> pa.DataType:
    """The type that a column counts as, whatever its layout: wide lists and wide text."""
    if is_list(kind):
        return pa.large_list(kind.value_type)
    return wide_kind(kind) if is_text(kind) else kind


def wide_kind(kind: pa.DataType) -> pa.DataType:
    """Text and bytes without a limit to their length."""
    return pa.large_binary() if types.is_binary(kind) or types.is_large_binary(kind) else pa.large_string()


def whole_kind(kind: pa.DataType) -> bool:
    """Whole numbers, in a dictionary or not."""
    return bool(types.is_integer(kind.value_type if types.is_dictionary(kind) else kind))


def number_kind(kind: pa.DataType) -> pa.DataType:
    """What numbers are computed in: 32-bit floats stay, whole numbers stay whole, all else is a 64-bit float."""
    if types.is_float16(kind) or types.is_float32(kind):
        return pa.float32()
    if types.is_uint64(kind):
        return pa.uint64()
    return pa.int64() if types.is_integer(kind) else pa.float64()


def float_kind(kind: pa.DataType) -> pa.DataType:
    """The floats that functions of such numbers come in."""
    return pa.float32() if number_kind(kind) == pa.float32() else pa.float64()
