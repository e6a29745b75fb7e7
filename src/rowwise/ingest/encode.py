"""From the Arrow columns of a split to arrays that batches are slices of.

Everything that looks at values happens here, once for each split and for whole columns: missing values, hashing,
logarithms, and the checks that name file, row and value. Apart from `collate`, which only copies.
Sizes: R rows of the split, F dense columns, K labels, N ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from rowwise.errors import DataError
from rowwise.ingest.bags import Bags, Ints, flat
from rowwise.ingest.columns import Columns, Dense, Sparse, is_list, is_text
from rowwise.ingest.mix import mix, mix_bytes, remainder
from rowwise.ingest.reader import Split

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The rows of one split."""

    rows: int
    dense_RF: Floats
    labels_RK: Floats
    bags: tuple[Bags, ...]  # in the order of Columns.sparse
    weights_R: Floats | None
    keys_R: Ints | None
    times_R: Ints | None


def encode(
    table: pa.Table, columns: Columns, rows_of: Mapping[str, int], split: Split, order_R: Ints | None = None
) -> Encoded:
    """All columns of a split.

    Args:
        table: its rows.
        columns: what they are.
        rows_of: how many rows a table has, where ids are hashed to them or refused outside them.
        split: for errors to name.
        order_R: which row comes first, second and so on, some left out maybe; None: all as they are. One column at a
            time is reordered, while it is in cache: picking the rows of each batch from all columns later takes
            several times as long.
    """
    columns.check(table.schema, split.source)
    arrays = {name: whole(table[name]) for name in columns.names}
    rows, order = table.num_rows, slice(None) if order_R is None else order_R
    dense = (_dense(arrays[d.column], d, split) for d in columns.dense)
    labels = (_labels(arrays[name], name, split) for name in columns.labels)
    return Encoded(
        rows=rows if order_R is None else len(order_R),
        dense_RF=_side_by_side(dense, rows, len(columns.dense))[order],
        labels_RK=_side_by_side(labels, rows, len(columns.labels))[order],
        bags=tuple(_bags(arrays[s.column], s, rows_of, split).reordered(order_R) for s in columns.sparse),
        weights_R=None if columns.weight is None else _weights(arrays[columns.weight], columns.weight, split)[order],
        keys_R=None if columns.key is None else _keys(arrays[columns.key], columns.key, split)[order],
        times_R=None if columns.time is None else _times(arrays[columns.time], columns.time, split)[order],
    )


def whole(column: pa.ChunkedArray) -> pa.Array:
    """One array; text in wide offsets, so that no number of bytes is too much."""
    kind = column.type
    if is_text(kind):
        column = column.cast(pa.large_binary() if _is_bytes(kind) else pa.large_string())
    if is_list(kind) and kind != pa.large_list(kind.value_type):
        column = column.cast(pa.large_list(kind.value_type))
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _side_by_side(columns: Iterable[Floats], rows: int, count: int) -> Floats:
    """Rows together, as batches hold them."""
    together = np.empty((rows, count), np.float32)
    for index, column_R in enumerate(columns):
        together[:, index] = column_R
    return together


def floats(array: pa.Array) -> Floats:
    """32-bit floats, NaN where there is nothing."""
    if types.is_decimal(array.type):
        array = array.cast(pa.float64())
    return array.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)


def _dense(array: pa.Array, dense: Dense, split: Split) -> Floats:
    x_R = floats(array)
    finite_R = np.isfinite(x_R)
    if not finite_R.all():
        _refuse(np.isinf(x_R), array, dense.column, split, "want a finite number in 32 bits")
        x_R = np.where(finite_R, x_R, np.float32(dense.fill))
    return np.log1p(np.maximum(x_R, np.float32(0))) if dense.log1p else x_R


def _labels(array: pa.Array, name: str, split: Split) -> Floats:
    x_R = floats(array)
    _refuse((x_R != 0) & (x_R != 1), array, name, split, "want a label of 0 or 1")
    return x_R


def _weights(array: pa.Array, name: str, split: Split) -> Floats:
    x_R = floats(array)
    _refuse(~(np.isfinite(x_R) & (x_R >= 0)), array, name, split, "want a weight that is finite and not negative")
    return x_R


def _keys(array: pa.Array, name: str, split: Split) -> Ints:
    _refuse(_missing(array), array, name, split, "want a key in every row")
    return _plain_or_hashed(array)


def _times(array: pa.Array, name: str, split: Split) -> Ints:
    _refuse(_missing(array), array, name, split, "want a time in every row")
    if types.is_date(array.type) or types.is_timestamp(array.type):
        # Finer times are cut down to microseconds.
        array = array.cast(pa.timestamp("us", tz=getattr(array.type, "tz", None)), safe=False)
    return int64(array)


def _missing(array: pa.Array) -> NDArray[np.bool_]:
    return array.is_null().to_numpy(zero_copy_only=False)


def _refuse(bad_R: NDArray[np.bool_], array: pa.Array, name: str, split: Split, want: str) -> None:
    if bad_R.any():
        row = int(np.argmax(bad_R))
        raise DataError(f"{split.place(row)}, column {name!r}: {array[row].as_py()!r}: {want}")


def _bags(array: pa.Array, sparse: Sparse, rows_of: Mapping[str, int], split: Split) -> Bags:
    ids, offsets_R1 = flat(array, sparse.first)
    rows = rows_of.get(sparse.table_name)
    if sparse.ids == "hash":
        assert rows is not None  # the batcher gives those of all hashed features
        return Bags(values_N=remainder(hashed(ids), rows), offsets_R1=offsets_R1)
    values_N = int64(ids)
    if rows is not None:
        _refuse_outside(values_N, offsets_R1, rows, sparse, split)
    return Bags(values_N=values_N, offsets_R1=offsets_R1)


def _refuse_outside(values_N: Ints, offsets_R1: Ints | None, rows: int, sparse: Sparse, split: Split) -> None:
    # Seen as unsigned, a negative id is large, so one comparison finds both.
    outside_N = values_N.view(np.uint64) >= rows
    if outside_N.any():
        at = int(np.argmax(outside_N))
        row = at if offsets_R1 is None else int(np.searchsorted(offsets_R1, at, "right")) - 1
        where = f"{split.place(row)}, column {sparse.column!r}"
        want = f"want 0 to {rows - 1}, the rows of table {sparse.table_name!r}; ids='hash' takes any"
        raise DataError(f"{where}: id {values_N[at]}: {want}")


def _plain_or_hashed(array: pa.Array) -> Ints:
    return int64(array) if _holds_whole(array.type) else _text_hash(array).view(np.int64)


def hashed(ids: pa.Array) -> NDArray[np.uint64]:
    """64 bits for each id, the same whatever the layout."""
    return mix(int64(ids).view(np.uint64)) if _holds_whole(ids.type) else _text_hash(ids)


def _holds_whole(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind.value_type if types.is_dictionary(kind) else kind))


def _text_hash(array: pa.Array) -> NDArray[np.uint64]:
    if types.is_dictionary(array.type):
        dictionary = array.dictionary.cast(pa.large_string())
        return _text_hash(dictionary)[array.indices.to_numpy(zero_copy_only=False)]
    if not _is_bytes(array.type):
        array = array.cast(pa.large_string())
    array = array.cast(pa.large_binary())
    if len(array) == 0:
        return np.empty(0, np.uint64)  # its buffers may be missing
    _, offsets, data = array.buffers()
    offsets_N1 = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    begin, end = int(offsets_N1[0]), int(offsets_N1[-1])
    empty = np.empty(0, np.uint8)
    return mix_bytes(empty if data is None else np.frombuffer(data, np.uint8)[begin:end], offsets_N1 - begin)


def int64(array: pa.Array) -> Ints:
    """The same 64 bits, whatever the integer type; unsigned ones past 2**63 turn negative."""
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_timestamp(array.type):
        array = array.cast(pa.int64())
    values_N = array.to_numpy(zero_copy_only=False)
    return values_N.astype(np.int64, copy=False)
