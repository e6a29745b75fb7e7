"""Encodes the Arrow columns of a split into one block, of which batches copy slices.

All work on values happens here, once a split and on whole columns: missing values, hashing, logarithms, and the checks
that name file, row and value. `collate` only copies. The kernels of `native` write straight into the block's arrays.
Sizes: R rows, F dense columns, K labels, N ids.

[Note: refused rows] Only `_refusals` decides which rows are refused and why. Kernels see every value anyway and return
whether one may be bad; then `_refusals` checks the columns again, row by row. So `bad_rows` and the errors of `encode`
agree. Rows outside the requested order are not checked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest import native
from rowwise.ingest.bags import as_float32, bits, combine_chunks, floats, lists, view, words_of
from rowwise.ingest.block import ALIGNMENT, Allocator, BlockSizes, EncodedRows, Floats, Ints, allocate, lay_out
from rowwise.ingest.columns import Columns, Dense, Sparse
from rowwise.ingest.kinds import element_of, holds_whole, is_list
from rowwise.ingest.labels import WANTED, bad_values
from rowwise.ingest.native import Bitmap, Lists, PickedIds, RowMapping
from rowwise.ingest.reader import Split
from rowwise.tables.spec import Value

ROWS_AT_ONCE = 8192  # rows of dense columns that stay in cache through all steps
MAX_REASONS = 5  # per column; further bad rows are refused without a description
Mask = NDArray[np.bool_]


class RefusalReason(Value, frozen=True):
    """Why the value of one column makes a row unusable."""

    row: int  # in the split
    column: str
    reason: str

    def error(self, split: Split) -> DataError:
        """An error that names the file, to be raised."""
        return DataError(f"{split.locate_row(self.row)}, column {self.column!r}: {self.reason}")


class RefusedRows(NamedTuple):
    """The rows of a split that are refused."""

    mask_R: Mask
    reasons: tuple[RefusalReason, ...]  # the first MAX_REASONS of each column


def encode(
    table: pa.Table,
    columns: Columns,
    table_rows: Mapping[str, int],
    split: Split,
    order_R: Ints | None = None,
    allocator: Allocator = allocate,
) -> EncodedRows:
    """Encode the rows of a split in an order; raises for the first bad one among them.

    Args:
        table: the rows.
        columns: the role of each column.
        table_rows: rows of the tables whose ids are hashed to rows or must lie in range.
        split: named in errors.
        order_R: row numbers in the order of use, maybe a subset; None for all rows in table order.
        allocator: allocates the block.
    """
    columns.check(table.schema, split.source)
    order_R = _check_order(order_R, table.num_rows)
    arrays = {name: combine_chunks(table[name]) for name in columns.names}
    shared = [s.feature_name in columns.shared for s in columns.sparse]
    id_lists = [lists(arrays[s.column]) for s in columns.sparse]
    group = [(ids, s.first) for ids, s, is_shared in zip(id_lists, columns.sparse, shared, strict=True) if is_shared]
    distinct = _find_distinct(group, order_R)
    orders = [distinct.order_U if is_shared and distinct else order_R for is_shared in shared]
    picked = [PickedIds(ids, order, s.first) for ids, order, s in zip(id_lists, orders, columns.sparse, strict=True)]
    sizes = BlockSizes(
        rows=table.num_rows if order_R is None else len(order_R),
        dense=len(columns.dense),
        labels=len(columns.labels),
        ids=[ids.total for ids in picked],
        listed=[is_list(arrays[s.column].type) or bits(arrays[s.column]) is not None for s in columns.sparse],
        shared=shared,
        distinct=None if distinct is None else len(distinct.order_U),
        weighted=columns.weight is not None,
        keyed=columns.key is not None,
        timed=columns.time is not None,
    )
    layout = lay_out(sizes)
    block = allocator(layout.size)
    assert len(block) == 0 or block.ctypes.data % ALIGNMENT == 0
    encoded = EncodedRows.from_block(block, layout)
    if distinct is not None and encoded.inverse_R is not None:
        encoded.inverse_R[:] = distinct.inverse_R
    maybe_bad = _write_dense(arrays, columns.dense, order_R, encoded.dense_RF)
    maybe_bad |= _write_row_columns(arrays, columns, order_R, encoded)
    for ids, sparse, bags in zip(picked, columns.sparse, encoded.bags, strict=True):
        mapping = row_mapping(sparse, arrays[sparse.column].type, table_rows.get(sparse.table_name))
        maybe_bad |= ids.write(mapping, bags.values_N, bags.offsets_R1)
    if maybe_bad:
        _raise_first(_refusals(arrays, columns, table_rows, order_R), split)
    return encoded


class _DistinctRows(NamedTuple):
    """Runs of neighbouring rows with equal bags of all shared features."""

    order_U: Ints  # the first row of each run
    inverse_R: Ints  # the run of each row


def _find_distinct(group: Sequence[tuple[Lists, int | None]], order_R: Ints | None) -> _DistinctRows | None:
    """Compare each row, in the order, with the previous row: ids as read, lists truncated to `first`."""
    if not group:
        return None
    begins_R = np.zeros(group[0][0].rows if order_R is None else len(order_R), np.bool_)
    begins_R[:1] = True
    for ids, first in group:
        PickedIds(ids, order_R, first).mark_changes(begins_R)
    order_U = np.flatnonzero(begins_R) if order_R is None else order_R[begins_R]
    return _DistinctRows(order_U, np.cumsum(begins_R, dtype=np.int64) - 1)


def bad_rows(table: pa.Table, columns: Columns, table_rows: Mapping[str, int], split: Split) -> RefusedRows | None:
    """The rows that `encode` would refuse, or None. A column of the wrong type raises."""
    columns.check(table.schema, split.source)
    arrays = {name: combine_chunks(table[name]) for name in columns.names}
    mask_R = np.zeros(table.num_rows, np.bool_)
    reasons: list[RefusalReason] = []
    for refusal in _refusals(arrays, columns, table_rows, None):
        mask_R[refusal.rows_N] = True
        reasons.extend(refusal.described)
    return RefusedRows(mask_R, tuple(reasons)) if reasons else None


def _check_order(order_R: Ints | None, rows: int) -> Ints | None:
    if order_R is None:
        return None
    order_R = np.ascontiguousarray(order_R, np.int64)
    if len(order_R) and (order_R.min() < 0 or order_R.max() >= rows):
        raise IndexError(f"order_R: got rows {order_R.min()} to {order_R.max()}, expected 0 to {rows - 1}")
    return order_R


def _write_dense(arrays: Mapping[str, pa.Array], dense: Sequence[Dense], order_R: Ints | None, out_RF: Floats) -> bool:
    """Fill, take logarithms and transpose, a cache-sized part of the rows at a time; true if a value is infinite."""
    if not dense:
        return False
    rows = len(arrays[dense[0].column])
    if order_R is not None and 2 * len(order_R) > rows:  # gathering rows once is faster than gathering every column
        rows_RF = np.empty((rows, len(dense)), np.float32)
        infinite = _write_dense(arrays, dense, None, rows_RF)
        rows_RF.take(order_R, axis=0, out=out_RF, mode="clip")  # the other modes make a copy first
        return infinite
    columns = [as_float32(arrays[d.column]) for d in dense]
    numbers = [view(array.buffers()[1], np.float32, array.offset, rows) for array in columns]
    filled = native.FilledColumns([d.fill for d in dense])
    filled.point_to([x_R.ctypes.data for x_R in numbers], [native.bitmap_place(bits(array)) for array in columns])
    scratch = np.empty(len(dense) * ROWS_AT_ONCE, np.float32)
    infinite = False
    for begin in range(0, len(out_RF), ROWS_AT_ONCE):
        rows_RF = out_RF[begin : begin + ROWS_AT_ONCE]
        columns_FR = scratch[: rows_RF.size].reshape(rows_RF.shape[::-1])
        infinite |= filled.write(order_R, columns_FR, begin)
        scale(columns_FR, dense)
        native.transpose(columns_FR, rows_RF)
    return infinite


def scale(columns_FR: Floats, dense: Sequence[Dense]) -> None:
    """Take logarithms and standardise, in place."""
    at = 0
    for log1p, run in groupby(dense, lambda d: d.log1p):
        part_FR = columns_FR[at : (at := at + len(list(run)))]
        if log1p:  # numpy's vector code: several times as fast as a scalar loop, with the bits of earlier versions
            np.log1p(np.maximum(part_FR, np.float32(0), out=part_FR), out=part_FR)
    for column, x_R in zip(dense, columns_FR, strict=True):
        if column.mean or column.std != 1:
            np.divide(np.subtract(x_R, np.float32(column.mean), out=x_R), np.float32(column.std), out=x_R)


def _write_row_columns(
    arrays: Mapping[str, pa.Array], columns: Columns, order_R: Ints | None, encoded: EncodedRows
) -> bool:
    """Write labels, weights, keys and times; true if a value is bad."""
    order = slice(None) if order_R is None else order_R
    bad = False
    for k, label in enumerate(columns.parsed_labels):
        encoded.labels_RK[:, k] = label.values(arrays)[order]
        bad |= bool(bad_values(encoded.labels_RK[:, k], columns.label_values).any())
    if columns.weight is not None and encoded.weights_R is not None:
        encoded.weights_R[:] = floats(arrays[columns.weight])[order]
        bad |= bool(_is_bad_weight(encoded.weights_R).any())
    for name, out_R in ((columns.key, encoded.keys_R), (columns.time, encoded.times_R)):
        if name is not None and out_R is not None:
            values_R, valid = _keys_or_times(arrays[name])
            out_R[:] = values_R[order]
            bad |= bool(_missing(len(values_R), valid)[order].any())
    return bad


def _keys_or_times(array: pa.Array) -> tuple[NDArray[np.generic], Bitmap | None]:
    """64-bit words of a column of keys or times, and its validity bitmap."""
    if types.is_date(array.type) or types.is_timestamp(array.type):
        # Finer times are cut down to microseconds.
        array = array.cast(pa.timestamp("us", tz=getattr(array.type, "tz", None)), safe=False).cast(pa.int64())
    return words_of(array)


def row_mapping(sparse: Sparse, kind: pa.DataType, rows: int | None) -> RowMapping:
    """The kernel's mapping of ids to rows. Text is hashed already, so only the remainder is taken."""
    if sparse.ids == "direct":
        return RowMapping() if rows is None else RowMapping(native.CHECK, rows)
    assert rows is not None  # `table_rows_for_ids` has the tables of all hashed features
    whole = holds_whole(element_of(kind))
    return RowMapping(native.HASH if whole else native.REMAINDER, rows)


def _is_bad_weight(x_R: Floats) -> Mask:
    return ~(np.isfinite(x_R) & (x_R >= 0))


def _missing(rows: int, valid: Bitmap | None) -> Mask:
    if valid is None:
        return np.zeros(rows, np.bool_)
    return np.unpackbits(valid.bytes, count=valid.first + rows, bitorder="little")[valid.first :] == 0


class _ColumnRefusal(NamedTuple):
    """The rows refused because of one column."""

    column: str
    rows_N: Ints  # in the split, ascending
    reasons: Sequence[str]  # of the first MAX_REASONS rows

    @property
    def described(self) -> list[RefusalReason]:
        pairs = zip(self.rows_N.tolist(), self.reasons, strict=False)
        return [RefusalReason(row=row, column=self.column, reason=reason) for row, reason in pairs]


def _raise_first(refusals: Iterator[_ColumnRefusal], split: Split) -> None:
    for refusal in refusals:
        raise refusal.described[0].error(split)


def _refusals(
    arrays: Mapping[str, pa.Array], columns: Columns, table_rows: Mapping[str, int], order_R: Ints | None
) -> Iterator[_ColumnRefusal]:
    """Find the bad rows, column by column. See [Note: refused rows]."""
    for name, bad_of, expected in _checks(columns, arrays):
        rows_N = _bad_in_order(bad_of(arrays[name]), order_R)
        if len(rows_N):
            cells = arrays[name].take(pa.array(rows_N[:MAX_REASONS])).to_pylist()
            yield _ColumnRefusal(name, rows_N, [f"{cell!r}: {expected}" for cell in cells])
    for sparse in columns.sparse:
        rows = table_rows.get(sparse.table_name)
        if sparse.ids == "direct" and rows is not None:
            yield from _ids_out_of_range(arrays[sparse.column], sparse, rows, order_R)


def _checks(columns: Columns, arrays: Mapping[str, pa.Array]) -> Iterator[tuple[str, Callable[[pa.Array], Mask], str]]:
    """Checks of single values: column name, function to the mask of bad rows, and the expectation for errors."""
    for dense in columns.dense:
        yield dense.column, lambda a: np.isinf(floats(a)), "expected a finite number in 32 bits"
    expected = WANTED[columns.label_values]
    for label in columns.parsed_labels:
        bad_R = bad_values(label.values(arrays), columns.label_values)
        yield label.name, lambda _, bad_R=bad_R: bad_R, expected
    if columns.weight is not None:
        yield columns.weight, lambda a: _is_bad_weight(floats(a)), "expected a weight that is finite and not negative"
    for name, expected in (
        (columns.key, "expected a key in every row"),
        (columns.time, "expected a time in every row"),
    ):
        if name is not None:
            yield name, lambda a: _missing(len(a), _keys_or_times(a)[1]), expected


def _bad_in_order(bad_R: Mask, order_R: Ints | None) -> Ints:
    if order_R is not None:
        used_R = np.zeros_like(bad_R)
        used_R[order_R] = True
        bad_R = bad_R & used_R
    return np.flatnonzero(bad_R)


def _ids_out_of_range(array: pa.Array, sparse: Sparse, rows: int, order_R: Ints | None) -> Iterator[_ColumnRefusal]:
    used_R = None if order_R is None else np.unique(order_R)
    values_N, offsets_R1 = PickedIds(lists(array), used_R, sparse.first).mapped(RowMapping())
    # As unsigned numbers negative ids are large, so one comparison finds ids below 0 and ids of `rows` or more.
    at_N = np.flatnonzero(values_N.view(np.uint64) >= rows)
    rows_N, first_N = np.unique(np.searchsorted(offsets_R1, at_N, "right") - 1, return_index=True)
    ids_N = values_N[at_N[first_N]]
    expected = f"expected 0 to {rows - 1}, the rows of table {sparse.table_name!r}; ids='hash' takes any"
    if len(rows_N):
        rows_N = rows_N if used_R is None else used_R[rows_N]
        yield _ColumnRefusal(sparse.column, rows_N, [f"id {i}: {expected}" for i in ids_N[:MAX_REASONS].tolist()])
