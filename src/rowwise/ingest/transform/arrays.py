"""Converts Arrow columns to plain arrays and back, so that transforms do not deal with slices, layouts and bitmaps.

Ids and numbers have separate views, because missing values differ: a missing id inside a list is dropped, as
everywhere else; a missing number keeps its place, because it may belong to an element of another list. Known limits:
each step makes new arrays. Sizes: R rows, N elements.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from rowwise.ingest.bags import flatten_lists, flatten_values, hash_ids, int64
from rowwise.ingest.block import Ints
from rowwise.ingest.kinds import holds_whole, is_list, is_text, wide_text
from rowwise.ingest.mix import Words, mix, remainder

Mask = NDArray[np.bool_]
Numeric = NDArray[Any]  # float32, float64, int64 or uint64


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IdLists:
    """Row r has values[offsets_R1[r]:offsets_R1[r + 1]], or without offsets values[r]; missing ids are dropped."""

    values: pa.Array
    offsets_R1: Ints | None
    null_R: Mask | None  # null rows; None without nulls
    single: bool  # the column holds single values, not lists

    def starts(self) -> Ints:
        """The offsets, also of single values."""
        return np.arange(len(self.values) + 1) if self.offsets_R1 is None else self.offsets_R1

    def with_values(self, values: Numeric | pa.Array) -> pa.Array:
        array = values if isinstance(values, pa.Array) else pa.array(values)
        if not self.single:
            return lists(array, self.starts(), self.null_R)
        return array if self.null_R is None else _among_nulls(array, self.null_R)


def to_id_lists(array: pa.Array) -> IdLists:
    """The ids of a column of ids or of lists of ids."""
    values, offsets_R1 = flatten_lists(array)
    return IdLists(values=values, offsets_R1=offsets_R1, null_R=nulls(array), single=not is_list(array.type))


def nulls(array: pa.Array) -> Mask | None:
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def either_null(a_R: Mask | None, b_R: Mask | None) -> Mask | None:
    """The union of two masks of nulls."""
    if a_R is None or b_R is None:
        return b_R if a_R is None else a_R
    return a_R | b_R


def lists(values: pa.Array, offsets_R1: Ints, null_R: Mask | None) -> pa.Array:
    """A column of lists; null rows have no values."""
    mask = None if null_R is None else pa.array(null_R)
    return pa.LargeListArray.from_arrays(pa.array(offsets_R1, pa.int64()), values, mask=mask)


def _among_nulls(values: pa.Array, null_R: Mask) -> pa.Array:
    # Each valid row takes the next value; the index of a null row is masked, but has to be in range.
    return values.take(pa.array(np.maximum(np.cumsum(~null_R) - 1, 0), mask=null_R))


def row_of_each(offsets_R1: Ints) -> Ints:
    """The row of each element."""
    return np.repeat(np.arange(len(offsets_R1) - 1), np.diff(offsets_R1))


def id_words(values: pa.Array) -> Ints:
    """Integers as they are, text hashed to 64 bits."""
    return int64(values) if holds_whole(values.type) else hash_ids(values).view(np.int64)


def hash_pair(state_N: Words, next_N: Words) -> Words:
    """An order-dependent hash of two hashes."""
    return mix(state_N ^ next_N)


def to_rows(hash_N: Words, rows: int | None) -> Ints:
    """Hashes modulo the rows of a table, or as they are for None."""
    return hash_N.view(np.int64) if rows is None else remainder(hash_N, rows)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NumberArray:
    """The numbers of a column, single or in lists; x_N[n] is undefined where null_N[n]."""

    x_N: Numeric
    null_N: Mask | None
    offsets_R1: Ints | None  # None for single numbers
    null_R: Mask | None  # null lists

    def with_numbers(self, x_N: Numeric, null_N: Mask | None) -> pa.Array:
        array = pa.array(x_N, mask=null_N)
        return array if self.offsets_R1 is None else lists(array, self.offsets_R1, self.null_R)

    @property
    def missing_N(self) -> Mask | None:
        if self.x_N.dtype.kind != "f":
            return self.null_N
        nan_N = np.isnan(self.x_N)
        return either_null(self.null_N, nan_N if nan_N.any() else None)


def to_numbers(array: pa.Array) -> NumberArray:
    """A column of numbers or lists of numbers, cast to the type of `number_kind`."""
    values, offsets_R1 = flatten_values(array)
    null_R = None if offsets_R1 is None else nulls(array)
    values = values.cast(number_kind(values.type), safe=False)
    null_N = nulls(values)
    x_N = (values if null_N is None else values.fill_null(0)).to_numpy(zero_copy_only=False)
    return NumberArray(x_N=x_N, null_N=null_N, offsets_R1=offsets_R1, null_R=null_R)


def list_like(kind: pa.DataType, element: pa.DataType) -> pa.DataType:
    """The type of a column of `element`, of lists if `kind` is one of lists."""
    return pa.large_list(element) if is_list(kind) else element


def plain_kind(kind: pa.DataType) -> pa.DataType:
    """A type in its standard layout: large lists and large text."""
    if is_list(kind):
        return pa.large_list(kind.value_type)
    return wide_text(kind) if is_text(kind) else kind


def number_kind(kind: pa.DataType) -> pa.DataType:
    """The type that transforms compute in: float32 for floats of up to 32 bits, 64 bits for integers, else float64."""
    if types.is_float16(kind) or types.is_float32(kind):
        return pa.float32()
    if types.is_uint64(kind):
        return pa.uint64()
    return pa.int64() if types.is_integer(kind) else pa.float64()


def float_kind(kind: pa.DataType) -> pa.DataType:
    """The float type of the results for numbers of this type."""
    return pa.float32() if number_kind(kind) == pa.float32() else pa.float64()
