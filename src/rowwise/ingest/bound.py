"""Prepares rows of requests: transforms and encodes them like those of a split, with columns checked once per schema.

`encode` checks types and lays a block out at each call, which takes milliseconds however few the rows are. A
`BoundPreparation` has done this for one schema. Its result equals that of `transform.apply` and `encode`.
Sizes: B rows in the order of use, F features, N ids.
"""

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
import pyarrow as pa
from msgspec import structs
from pyarrow import types

from rowwise.base.library import address_of
from rowwise.ingest import native
from rowwise.ingest.bags import as_float32, combine_chunks, lists, numpy_type
from rowwise.ingest.block import Floats, Ints
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.encode import encode, row_mapping, scale
from rowwise.ingest.kinds import is_list, is_text
from rowwise.ingest.raw_columns import RawColumns
from rowwise.ingest.reader import Split
from rowwise.ingest.transform import BoundTransforms, LoadedTransforms, RowPosition, serving

NO_BITMAP = (0, 0)  # of a column without nulls
REQUEST = Split(source="request", start=0, stop=0, first_row=0)


class PreparedRows(NamedTuple):
    """Numbers and ids of rows, features one after another as in a `Jagged`."""

    dense_BF: Floats
    values_N: Ints
    lengths_FB: Ints  # flattened


@final
class BoundPreparation:
    """Transforms and encoding for predictions, bound to a schema.

    Args:
        schema: of the data before transforms.
        transforms: as in training; those that sample rows are left out.
        columns: as in training; labels, weights and other training-only columns are left out.
        table_rows: see `encode`.
        split: named in errors.
    """

    def __init__(
        self,
        schema: pa.Schema,
        transforms: LoadedTransforms,
        columns: Columns,
        table_rows: Mapping[str, int],
        split: Split = REQUEST,
    ) -> None:
        """Refuse columns that are missing or have wrong types."""
        self.columns = structs.replace(columns, labels=(), weight=None, time=None, key=None, shared=())
        self._transforms = BoundTransforms(schema, serving(transforms), self.columns.names, split.source)
        self.names = self._transforms.names
        self.columns.check(self._transforms.schema, split.source)
        self._table_rows, self._split, self._where = table_rows, split, RowPosition(split=split)
        self._relaid = tuple(name for name in self.names if _needs_relayout(schema.field(name).type))
        self._dense = [
            (dense.column, types.is_float32(self._transforms.schema.field(dense.column).type))
            for dense in self.columns.dense
        ]
        self._scales = any(dense.log1p or dense.mean or dense.std != 1 for dense in self.columns.dense)
        self.features = tuple(sparse.feature_name for sparse in self.columns.sparse)
        self._numbers = native.FilledColumns([dense.fill for dense in self.columns.dense])
        self._features = tuple(self._bind(sparse) for sparse in self.columns.sparse)
        self._singles = native.SingleIds([f.mapping for f in self._features], [f.kind for f in self._features])

    def _bind(self, sparse: Sparse) -> "_BoundFeature":
        kind, rows = self._transforms.schema.field(sparse.column).type, self._table_rows.get(sparse.table_name)
        mapping = row_mapping(sparse, kind, rows)
        ids = native.BoundIds(mapping, sparse.first)
        if not types.is_integer(kind):
            return _BoundFeature(sparse.column, mapping, ids)
        number = np.dtype(np.int64) if types.is_uint64(kind) else numpy_type(kind)
        return _BoundFeature(sparse.column, mapping, ids, native.KINDS[number], number.itemsize)

    def __call__(self, arrays: Mapping[str, pa.Array], order_B: Ints) -> PreparedRows:
        """Prepare rows in an order, which may name a row several times; raises for the first bad one.

        Args:
            arrays: the columns `names`, of the schema's types and of equal length.
            order_B: row numbers, in range.
        """
        columns = RawColumns.of(arrays)
        if self._relaid:
            columns = columns.replace(
                {name: combine_chunks(pa.chunked_array([columns[name]])) for name in self._relaid}
            )
        if self._transforms.makes:
            columns = columns.replace(self._transforms(columns, self._where))
        addresses = columns.addresses()
        dense_BF, bad = self._write_dense(columns, addresses, order_B)
        values_N, lengths_FB, bad_ids = self._write_ids(columns, addresses, order_B)
        if bad or bad_ids:
            table = pa.table({name: columns[name] for name in self._transforms.schema.names})
            encode(table, self.columns, self._table_rows, self._split)  # raises for the first bad row
            raise AssertionError("encode accepts what its kernels refuse")
        return PreparedRows(dense_BF, values_N, lengths_FB)

    def _write_dense(self, columns: RawColumns, addresses: Mapping[str, int], order_B: Ints) -> tuple[Floats, bool]:
        dense = self.columns.dense
        columns_FB = np.empty((len(dense), len(order_B)), np.float32)
        out_BF = np.empty((len(order_B), len(dense)), np.float32)
        if not dense:
            return out_BF, False
        begins: list[int] = []
        bitmaps: list[tuple[int, int]] = []
        alive: list[pa.Array] = []
        for name, is_plain in self._dense:
            if is_plain and name in addresses:
                begins.append(addresses[name])
                bitmaps.append(NO_BITMAP)
                continue
            array = as_float32(columns[name])
            valid, values = array.buffers()
            begins.append(values.address + 4 * array.offset)
            bitmaps.append((valid.address, array.offset) if array.null_count else NO_BITMAP)
            alive.append(array)
        self._numbers.point_to(begins, bitmaps)
        infinite = self._numbers.write(order_B, columns_FB)
        if self._scales:
            scale(columns_FB, dense)
        if len(out_BF) == 1:
            return columns_FB.reshape(1, -1), infinite
        native.transpose(columns_FB, out_BF)
        return out_BF, infinite

    def _write_ids(self, columns: RawColumns, addresses: Mapping[str, int], order_B: Ints) -> tuple[Ints, Ints, bool]:
        rows, features = len(order_B), self._features
        arrays: dict[str, pa.Array] = {}
        begins: list[int] = []
        for name, _, _, _, width in features:
            if width and name in addresses:
                begins.append(addresses[name])
                continue
            arrays[name] = columns[name]
            begins.append(singles(arrays[name], width))
        totals = np.full(len(features), rows)
        ragged = [(number, feature.ids) for number, feature in enumerate(features) if not begins[number]]
        for number, ids in ragged:
            ids.point_to(lists(arrays[features[number].column]))
            totals[number] = ids.select(order_B)
        ends = np.cumsum(totals)
        values_N = np.empty(ends[-1], np.int64)
        lengths_FB = np.ones((len(features), rows), np.int64)
        outs = address_of(values_N) + 8 * (ends - totals)
        bad = self._singles.write(begins, columns.rows, order_B, outs)
        offsets_B1 = np.empty(rows + 1, np.int64)
        for number, ids in ragged:
            bad |= ids.write(int(outs[number]), int(totals[number]), offsets_B1)
            np.subtract(offsets_B1[1:], offsets_B1[:-1], out=lengths_FB[number])
        return values_N, lengths_FB.reshape(-1), bad


class _BoundFeature(NamedTuple):
    """A sparse column, the mapping of its ids to rows, and its kernel structures."""

    column: str
    mapping: native.RowMapping
    ids: native.BoundIds
    kind: int = 0  # integer type, see `native.KINDS`
    width: int = 0  # bytes of an integer; 0 for lists and text


def singles(array: pa.Array, width: int) -> int:
    """The address of an array with one integer of `width` bytes per row; 0 for any other array."""
    if not width or array.null_count:
        return 0
    address: int = array.buffers()[1].address + width * array.offset
    return 0 if address % width else address


def _needs_relayout(kind: pa.DataType) -> bool:
    """Whether `combine_chunks` changes the layout of a single array of this type."""
    return is_text(kind) or is_list(kind)
