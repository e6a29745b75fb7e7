"""From the Arrow columns of a split to a block of encoded rows that batches are slices of.

Everything that looks at values happens here, once for each split and for whole columns: missing values, hashing,
logarithms, and the checks that name file, row and value. Apart from `collate`, which only copies. The kernels of
`native` write straight to where the block has its arrays.
Sizes: R rows, F dense columns, K labels, N ids.

[Note: refused rows] What a split is refused for is said in one place, `_refusals`. Kernels only tell that something
may be wrong, as they see every value anyway; then `_refusals` looks again and finds what to say, row by row. So
`bad_rows` and the errors of `encode` cannot disagree. Rows that are not asked for are not looked at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from rowwise.errors import DataError
from rowwise.ingest import native
from rowwise.ingest.bags import bits, combine_chunks, hashed, holds_whole, ids_of, int64, lists, view
from rowwise.ingest.block import ALIGNMENT, BlockSizes, Encoded, Floats, Ints, Memory, lay_out, private
from rowwise.ingest.columns import Columns, Dense, Sparse, is_list
from rowwise.ingest.native import Bitmap, Lists, PickedIds, RowMapping
from rowwise.ingest.reader import Split
from rowwise.spec import Value

__all__ = [
    "Encoded",
    "Floats",
    "RefusalReason",
    "RefusedRows",
    "bad_rows",
    "combine_chunks",
    "encode",
    "floats",
    "hashed",
    "int64",
]

ROWS_AT_ONCE = 8192  # of dense columns: few enough to stay in cache through all steps
NAMED = 5  # bad rows of each column that are described
Mask = NDArray[np.bool_]


class RefusalReason(Value, frozen=True):
    """The reason why a row is refused."""

    row: int  # of the split
    column: str
    reason: str


class RefusedRows(NamedTuple):
    """The rows of a split that are refused."""

    mask_R: Mask
    wrong: tuple[RefusalReason, ...]  # the first few of each column


def encode(
    table: pa.Table,
    columns: Columns,
    rows_of: Mapping[str, int],
    split: Split,
    order_R: Ints | None = None,
    memory: Memory = private,
) -> Encoded:
    """All columns of a split.

    Args:
        table: its rows.
        columns: what they are.
        rows_of: how many rows a table has, where ids are hashed to them or refused outside them.
        split: for errors to name.
        order_R: which row comes first, second and so on, some left out maybe; None: all as they are.
        memory: gives the bytes that everything is written to.
    """
    columns.check(table.schema, split.source)
    order_R = _check_order(order_R, table.num_rows)
    arrays = {name: combine_chunks(table[name]) for name in columns.names}
    shared = [s.feature_name in columns.shared for s in columns.sparse]
    held = [lists(arrays[s.column]) for s in columns.sparse]
    group = [(ids, s.first) for ids, s, is_shared in zip(held, columns.sparse, shared, strict=True) if is_shared]
    repeats = _repeats(group, order_R)
    orders = [repeats.order_U if is_shared and repeats else order_R for is_shared in shared]
    picked = [PickedIds(ids, order, s.first) for ids, order, s in zip(held, orders, columns.sparse, strict=True)]
    sizes = BlockSizes(
        rows=table.num_rows if order_R is None else len(order_R),
        dense=len(columns.dense),
        labels=len(columns.labels),
        ids=[ids.total for ids in picked],
        listed=[is_list(arrays[s.column].type) or bits(arrays[s.column]) is not None for s in columns.sparse],
        shared=shared,
        distinct=None if repeats is None else len(repeats.order_U),
        weighted=columns.weight is not None,
        keyed=columns.key is not None,
        timed=columns.time is not None,
    )
    layout = lay_out(sizes)
    block = memory(layout.size)
    assert len(block) == 0 or block.ctypes.data % ALIGNMENT == 0
    encoded = Encoded.of(block, layout)
    if repeats is not None and encoded.inverse_R is not None:
        encoded.inverse_R[:] = repeats.inverse_R
    doubtful = _write_dense(arrays, columns.dense, order_R, encoded.dense_RF)
    doubtful |= _write_about_rows(arrays, columns, order_R, encoded)
    for ids, sparse, bags in zip(picked, columns.sparse, encoded.bags, strict=True):
        make = _row_mapping(sparse, arrays[sparse.column].type, rows_of.get(sparse.table_name))
        doubtful |= ids.write(make, bags.values_N, bags.offsets_R1)
    if doubtful:
        _raise_first(_refusals(arrays, columns, rows_of, order_R), split)
    return encoded


class _Repeats(NamedTuple):
    """Neighbours that have the same bags of some features."""

    order_U: Ints  # a row of the split for each distinct one
    inverse_R: Ints


def _repeats(group: Sequence[tuple[Lists, int | None]], order_R: Ints | None) -> _Repeats | None:
    """Runs of neighbouring rows with equal ids in the shared features, compared as they are used."""
    if not group:
        return None
    begins_R = np.zeros(group[0][0].rows if order_R is None else len(order_R), np.bool_)
    begins_R[:1] = True
    for ids, first in group:
        PickedIds(ids, order_R, first).mark_changes(begins_R)
    order_U = np.flatnonzero(begins_R) if order_R is None else order_R[begins_R]
    return _Repeats(order_U, np.cumsum(begins_R, dtype=np.int64) - 1)


def bad_rows(table: pa.Table, columns: Columns, rows_of: Mapping[str, int], split: Split) -> RefusedRows | None:
    """The rows that `encode` would refuse, and why; None: there are none. A column of a wrong type is still raised."""
    columns.check(table.schema, split.source)
    arrays = {name: combine_chunks(table[name]) for name in columns.names}
    mask_R = np.zeros(table.num_rows, np.bool_)
    wrong: list[RefusalReason] = []
    for refusal in _refusals(arrays, columns, rows_of, None):
        mask_R[refusal.rows_N] = True
        wrong.extend(refusal.wrong)
    return RefusedRows(mask_R, tuple(wrong)) if wrong else None


def floats(array: pa.Array) -> Floats:
    """32-bit floats, NaN where there is nothing."""
    return _single(array).to_numpy(zero_copy_only=False)


def _single(array: pa.Array) -> pa.Array:
    if types.is_decimal(array.type):
        array = array.cast(pa.float64())
    return array if types.is_float32(array.type) else array.cast(pa.float32(), safe=False)


def _check_order(order_R: Ints | None, rows: int) -> Ints | None:
    if order_R is None:
        return None
    order_R = np.ascontiguousarray(order_R, np.int64)
    if len(order_R) and (order_R.min() < 0 or order_R.max() >= rows):
        raise IndexError(f"an order of rows {order_R.min()} to {order_R.max()}: there are {rows}")
    return order_R


def _write_dense(arrays: Mapping[str, pa.Array], dense: Sequence[Dense], order_R: Ints | None, out_RF: Floats) -> bool:
    """Whether one may be infinite. Columns go through all steps a few rows at a time, and then into rows."""
    if not dense:
        return False
    rows = len(arrays[dense[0].column])
    if order_R is not None and 2 * len(order_R) > rows:  # moving rows costs less than picking from every column
        rows_RF = np.empty((rows, len(dense)), np.float32)
        infinite = _write_dense(arrays, dense, None, rows_RF)
        rows_RF.take(order_R, axis=0, out=out_RF, mode="clip")  # the other modes make a copy first
        return infinite
    filled = native.FilledColumns([_numbers(arrays[d.column], d.fill) for d in dense], order_R)
    room = np.empty(len(dense) * ROWS_AT_ONCE, np.float32)
    infinite = False
    for begin in range(0, len(out_RF), ROWS_AT_ONCE):
        rows_RF = out_RF[begin : begin + ROWS_AT_ONCE]
        columns_FR = room[: rows_RF.size].reshape(rows_RF.shape[::-1])
        infinite |= filled.write(begin, columns_FR)
        at = 0
        for log1p, run in groupby(dense, lambda d: d.log1p):
            part_FR = columns_FR[at : (at := at + len(list(run)))]
            if log1p:  # numpy's, several times as fast as one number at a time, and the same bits as ever
                np.log1p(np.maximum(part_FR, np.float32(0), out=part_FR), out=part_FR)
        native.transpose(columns_FR, rows_RF)
    return infinite


def _numbers(array: pa.Array, fill: float) -> native.NumberColumn:
    array = _single(array)
    return native.NumberColumn(view(array.buffers()[1], np.float32, array.offset, len(array)), bits(array), fill)


def _write_about_rows(arrays: Mapping[str, pa.Array], columns: Columns, order_R: Ints | None, encoded: Encoded) -> bool:
    """Write labels, weights, keys and times; returns whether any of them is bad."""
    order = slice(None) if order_R is None else order_R
    bad = False
    for k, name in enumerate(columns.labels):
        encoded.labels_RK[:, k] = floats(arrays[name])[order]
        bad |= bool(_no_label(encoded.labels_RK[:, k]).any())
    if columns.weight is not None and encoded.weights_R is not None:
        encoded.weights_R[:] = floats(arrays[columns.weight])[order]
        bad |= bool(_no_weight(encoded.weights_R).any())
    for name, out_R in ((columns.key, encoded.keys_R), (columns.time, encoded.times_R)):
        if name is not None and out_R is not None:
            values_R, valid = _keys_of(arrays[name])
            out_R[:] = values_R[order]
            bad |= bool(_missing(len(values_R), valid)[order].any())
    return bad


def _keys_of(array: pa.Array) -> tuple[NDArray[np.generic], Bitmap | None]:
    """Keys or times, and which are there."""
    if types.is_date(array.type) or types.is_timestamp(array.type):
        # Finer times are cut down to microseconds.
        array = array.cast(pa.timestamp("us", tz=getattr(array.type, "tz", None)), safe=False).cast(pa.int64())
    return ids_of(array)


def _row_mapping(sparse: Sparse, kind: pa.DataType, rows: int | None) -> RowMapping:
    """The mapping from ids of a column to rows."""
    if sparse.ids == "direct":
        return RowMapping() if rows is None else RowMapping(native.CHECK, rows)
    assert rows is not None  # the batcher gives those of all hashed features
    return RowMapping(
        native.HASH if holds_whole(kind.value_type if is_list(kind) else kind) else native.REMAINDER, rows
    )


def _no_label(x_R: Floats) -> Mask:
    return (x_R != 0) & (x_R != 1)


def _no_weight(x_R: Floats) -> Mask:
    return ~(np.isfinite(x_R) & (x_R >= 0))


def _missing(rows: int, valid: Bitmap | None) -> Mask:
    if valid is None:
        return np.zeros(rows, np.bool_)
    return np.unpackbits(valid.bytes, count=valid.first + rows, bitorder="little")[valid.first :] == 0


class _ColumnRefusal(NamedTuple):
    """Rows that are refused for what is in one column."""

    column: str
    rows_N: Ints  # of the split, ascending
    reasons: Sequence[str]  # of the first few

    @property
    def wrong(self) -> list[RefusalReason]:
        """Reasons of the first few rows."""
        pairs = zip(self.rows_N.tolist(), self.reasons, strict=False)
        return [RefusalReason(row=row, column=self.column, reason=reason) for row, reason in pairs]


def _raise_first(refusals: Iterator[_ColumnRefusal], split: Split) -> None:
    for refusal in refusals:
        first = refusal.wrong[0]
        raise DataError(f"{split.place(first.row)}, column {first.column!r}: {first.reason}")


def _refusals(
    arrays: Mapping[str, pa.Array], columns: Columns, rows_of: Mapping[str, int], order_R: Ints | None
) -> Iterator[_ColumnRefusal]:
    """Refused rows, column by column. See [Note: refused rows]."""
    for name, bad_of, want in _checks(columns):
        rows_N = _selected_rows(bad_of(arrays[name]), order_R)
        if len(rows_N):
            found = [repr(cell) for cell in arrays[name].take(pa.array(rows_N[:NAMED])).to_pylist()]
            yield _ColumnRefusal(name, rows_N, [f"{cell}: {want}" for cell in found])
    for sparse in columns.sparse:
        rows = rows_of.get(sparse.table_name)
        if sparse.ids == "direct" and rows is not None:
            yield from _outside(arrays[sparse.column], sparse, rows, order_R)


def _checks(columns: Columns) -> Iterator[tuple[str, Callable[[pa.Array], Mask], str]]:
    """Each column whose values are checked one by one, what tells the bad ones, and what is wanted."""
    for dense in columns.dense:
        yield dense.column, lambda a: np.isinf(floats(a)), "want a finite number in 32 bits"
    for name in columns.labels:
        yield name, lambda a: _no_label(floats(a)), "want a label of 0 or 1"
    if columns.weight is not None:
        yield columns.weight, lambda a: _no_weight(floats(a)), "want a weight that is finite and not negative"
    for name, want in ((columns.key, "want a key in every row"), (columns.time, "want a time in every row")):
        if name is not None:
            yield name, lambda a: _missing(len(a), _keys_of(a)[1]), want


def _selected_rows(bad_R: Mask, order_R: Ints | None) -> Ints:
    if order_R is not None:
        asked_R = np.zeros_like(bad_R)
        asked_R[order_R] = True
        bad_R = bad_R & asked_R
    return np.flatnonzero(bad_R)


def _outside(array: pa.Array, sparse: Sparse, rows: int, order_R: Ints | None) -> Iterator[_ColumnRefusal]:
    asked_R = None if order_R is None else np.unique(order_R)
    picked = PickedIds(lists(array), asked_R, sparse.first)
    values_N, offsets_R1 = np.empty(picked.total, np.int64), np.empty(picked.rows + 1, np.int64)
    picked.write(RowMapping(), values_N, offsets_R1)
    # Seen as unsigned, a negative id is large, so one comparison finds both.
    at_N = np.flatnonzero(values_N.view(np.uint64) >= rows)
    rows_N, first_N = np.unique(np.searchsorted(offsets_R1, at_N, "right") - 1, return_index=True)
    ids_N = values_N[at_N[first_N]]
    want = f"want 0 to {rows - 1}, the rows of table {sparse.table_name!r}; ids='hash' takes any"
    if len(rows_N):
        rows_N = rows_N if asked_R is None else asked_R[rows_N]
        yield _ColumnRefusal(sparse.column, rows_N, [f"id {i}: {want}" for i in ids_N[:NAMED].tolist()])
