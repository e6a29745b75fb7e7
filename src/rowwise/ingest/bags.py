"""Views of Arrow columns of ids, lists or single values, in the form that the kernels read.

Buffers of whole numbers are used without a copy; text is hashed to 64-bit words first. Only the kernels and
`flatten_lists` leave out missing ids.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest.block import Floats, Ints
from rowwise.ingest.kinds import holds_whole, is_list, is_text, wide_text
from rowwise.ingest.mix import Words, mix
from rowwise.ingest.native import Bitmap, Lists, mix_bytes

FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # names in Arrow and in numpy


def combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array; text and chunked lists get 64-bit offsets, which cannot overflow."""
    kind = column.type
    if is_text(kind):
        column = column.cast(wide_text(kind))
    if types.is_list_view(kind):
        column = pa.chunked_array([_flatten_views(chunk) for chunk in column.chunks], pa.large_list(kind.value_type))
    elif is_list(kind) and not types.is_large_list(kind) and (column.num_chunks != 1 or not types.is_list(kind)):
        column = column.cast(pa.large_list(kind.value_type))
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _flatten_views(array: pa.Array) -> pa.Array:
    """A list view as lists with consecutive values; Arrow's own cast of sliced list views is wrong."""
    missing_R = array.is_null()
    begins_R, lengths_R = array.offsets.to_numpy().astype(np.int64), array.sizes.to_numpy().astype(np.int64)
    lengths_R[missing_R.to_numpy(zero_copy_only=False)] = 0
    moved_R1 = to_offsets(lengths_R)
    # The index of each value: its place in the result, shifted from the new to the old begin of its list.
    at_N = np.arange(moved_R1[-1]) + np.repeat(begins_R - moved_R1[:-1], lengths_R)
    return pa.LargeListArray.from_arrays(pa.array(moved_R1), array.values.take(pa.array(at_N)), mask=missing_R)


def floats(array: pa.Array) -> Floats:
    """32-bit floats; NaN for missing values."""
    return as_float32(array).to_numpy(zero_copy_only=False)


def as_float32(array: pa.Array) -> pa.Array:
    """A column of numbers as 32-bit floats; missing values stay missing."""
    if types.is_decimal(array.type):
        array = array.cast(pa.float64())
    return array if types.is_float32(array.type) else array.cast(pa.float32(), safe=False)


def lists(array: pa.Array) -> Lists:
    """A column of ids, from `combine_chunks`, in the layout of the kernels."""
    if not is_list(array.type):
        values, valid = words_of(array)
        return Lists(values=values, row_valid=valid)
    if len(array) == 0:
        return Lists(values=np.empty(0, np.int64), offsets=np.zeros(1, np.int64))  # Arrow may give no buffers
    width = np.int64 if types.is_large_list(array.type) else np.int32
    offsets_R1 = view(array.buffers()[1], width, array.offset, len(array) + 1)
    # The values of a slice are those of the whole column: hash only the used ones.
    begin = int(offsets_R1[0])
    values, valid = words_of(array.values.slice(begin, int(offsets_R1[-1]) - begin))
    return Lists(values=values, offsets=offsets_R1, base=begin, row_valid=bits(array), id_valid=valid)


def words_of(array: pa.Array) -> tuple[NDArray[Any], Bitmap | None]:
    """Integers as they are and text hashed, and the validity bitmap; the word of a missing entry is undefined."""
    if types.is_dictionary(array.type) and (holds_whole(array.type) or array.dictionary.null_count):
        array = array.dictionary_decode()
    valid = bits(array)
    if not types.is_integer(array.type):
        return _text_hash(array).view(np.int64), valid
    # Unsigned ids from 2**63 on wrap to negative.
    kind = np.dtype(np.int64) if types.is_uint64(array.type) else numpy_type(array.type)
    return view(array.buffers()[1], kind, array.offset, len(array)), valid


def numpy_type(kind: pa.DataType) -> np.dtype[Any]:
    """The type of a number, without `to_pandas_dtype`, which needs pandas before pyarrow 23."""
    return np.dtype(FLOATS.get(str(kind), str(kind)))


def view(buffer: pa.Buffer | None, kind: Any, begin: int, count: int) -> NDArray[Any]:
    """Entries of an Arrow buffer as numpy; copied only if a foreign buffer is not aligned."""
    if buffer is None or not count:
        return np.empty(0, kind)
    part = np.frombuffer(buffer, kind, count, begin * np.dtype(kind).itemsize)
    return part if part.flags.aligned else part.copy()


def bits(array: pa.Array) -> Bitmap | None:
    return Bitmap(np.frombuffer(array.buffers()[0], np.uint8), array.offset) if array.null_count else None


def hash_ids(ids: pa.Array) -> Words:
    """A 64-bit hash of each id, the same for every integer width and every layout of text."""
    return mix(int64(ids).view(np.uint64)) if holds_whole(ids.type) else _text_hash(ids)


def int64(array: pa.Array) -> Ints:
    """Integers or times as 64-bit integers; unsigned ones from 2**63 on wrap to negative."""
    array = decoded(array)
    if types.is_timestamp(array.type):
        array = array.cast(pa.int64())
    values_N = words_of(array)[0] if types.is_integer(array.type) else array.to_numpy(zero_copy_only=False)
    return values_N.astype(np.int64, copy=False)


def decoded(array: pa.Array) -> pa.Array:
    """The values of a dictionary array; other arrays as they are."""
    return array.dictionary_decode() if types.is_dictionary(array.type) else array


def flatten_lists(array: pa.Array) -> tuple[pa.Array, Ints | None]:
    """The ids without missing ones, and the row offsets (None for one id per row)."""
    ids, offsets_R1 = flatten_values(array)
    if ids.null_count:
        offsets_N1 = to_offsets(ids.is_valid().to_numpy(zero_copy_only=False))
        ids, offsets_R1 = ids.drop_null(), offsets_N1 if offsets_R1 is None else offsets_N1[offsets_R1]
    return ids, offsets_R1


def flatten_values(array: pa.Array) -> tuple[pa.Array, Ints | None]:
    """The values of a column including nulls, and the row offsets (None for single values)."""
    if not is_list(array.type):
        return array, None
    lengths_R = pc.fill_null(pc.call_function("list_value_length", [array]), 0).to_numpy(zero_copy_only=False)
    # Unlike .values, without entries outside the slice or under a null list.
    return array.flatten(), to_offsets(lengths_R)


def to_offsets(counts_R: NDArray[np.generic]) -> Ints:
    sums_R1 = np.zeros(len(counts_R) + 1, np.int64)
    np.cumsum(counts_R, out=sums_R1[1:])
    return sums_R1


def _text_hash(array: pa.Array) -> Words:
    if types.is_dictionary(array.type):
        hash_D = _text_hash(array.dictionary)
        index_N, _ = words_of(array.indices.fill_null(0))
        return hash_D[index_N] if len(hash_D) else np.zeros(len(array), np.uint64)
    array = array.cast(wide_text(array.type)).cast(pa.large_binary())
    if len(array) == 0:
        return np.empty(0, np.uint64)  # Arrow may give no buffers
    _, offsets, data = array.buffers()
    offsets_N1 = view(offsets, np.int64, array.offset, len(array) + 1)
    return mix_bytes(np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8), offsets_N1)
