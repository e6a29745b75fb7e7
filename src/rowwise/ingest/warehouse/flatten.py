"""Splits map columns into one column for each key, so that a job reads only the keys that it uses.

A row without a key has null in its column; of a key that a row has twice, the last value counts. Not supported: maps
of maps.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.block import Ints
from rowwise.ingest.warehouse.layout import FlattenedColumns, Key, flat_name


def flatten(table: pa.Table, flat: FlattenedColumns) -> pa.Table:
    """The plain columns, then a column for each key of each map."""
    flattened = table.select(list(flat.plain))
    for name, keys in flat.maps.items():
        for key, column in zip(keys, split_by_key(combine_chunks(table[name]), keys), strict=True):
            flattened = flattened.append_column(flat_name(name, key), column)
    return flattened


def split_by_key(array: pa.MapArray, keys: Sequence[Key]) -> list[pa.Array]:
    """A column for each key."""
    begin, end, row_N = _entries(array)
    keys_N = array.keys.slice(begin, end - begin)
    items = array.items.slice(begin, end - begin)
    wanted = pa.array(keys, array.type.key_type)
    code_N = (
        pc.call_function("index_in", [keys_N], pc.SetLookupOptions(wanted)).fill_null(-1).to_numpy(zero_copy_only=False)
    )
    code_N = np.where(row_N < 0, -1, code_N)
    order_N = np.argsort(code_N, kind="stable")
    cuts = np.searchsorted(code_N[order_N], np.arange(len(keys) + 1))
    return [_column(items, row_N, order_N[cuts[i] : cuts[i + 1]], len(array)) for i in range(len(keys))]


def count_keys(array: pa.ChunkedArray) -> Counter[Key]:
    """How many entries each key has."""
    counts: Counter[Key] = Counter()
    for chunk in array.chunks:
        begin, end, row_N = _entries(chunk)
        keys_N = chunk.keys.slice(begin, end - begin).filter(pa.array(row_N >= 0))
        for pair in pc.call_function("value_counts", [keys_N]).to_pylist():
            counts[pair["values"]] += pair["counts"]
    return counts


def _column(items: pa.Array, row_N: Ints, entry_K: Ints, rows: int) -> pa.Array:
    at_R = np.zeros(rows, np.int64)
    missing_R = np.ones(rows, np.bool_)
    at_R[row_N[entry_K]] = entry_K  # a key that a row has twice: numpy keeps the last assignment
    missing_R[row_N[entry_K]] = False
    return items.take(pa.array(at_R, mask=missing_R))


def _entries(array: pa.MapArray) -> tuple[int, int, Ints]:
    """Begin and end of a slice's entries, and the row of each entry; -1 for entries under a null map."""
    if len(array) == 0:
        return 0, 0, np.empty(0, np.int64)
    offset_R1 = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    row_R = np.where(array.is_null().to_numpy(zero_copy_only=False), -1, np.arange(len(array)))
    return int(offset_R1[0]), int(offset_R1[-1]), np.repeat(row_R, np.diff(offset_R1))
