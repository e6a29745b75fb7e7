"""Concatenates and joins Arrow tables of published files."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyarrow import compute as pc

from rowwise.ingest.bags import decoded


def gather(tables: Iterator[pa.Table], texts: Sequence[str] = ()) -> pa.Table:
    """All rows in memory; the columns `texts` are dictionary-encoded."""
    parts: list[pa.Table] = []
    for table in tables:
        for name in texts:
            table = with_column(table, name, table[name].dictionary_encode())
        parts.append(table)
    return pa.concat_tables(parts).unify_dictionaries().combine_chunks()


def join(rows: pa.Table, other: pa.Table, key: str) -> pa.Table:
    """Left join with a table of unique keys.

    Arrow's own joins do not support lists.
    """
    keys = decoded(rows[key].combine_chunks())
    details = other.take(pc.call_function("index_in", [keys], pc.SetLookupOptions(other[key].combine_chunks())))
    for name in other.schema.names:
        if name != key:
            rows = rows.append_column(name, details[name])
    return rows


def with_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def split_column(table: pa.Table, name: str, separator: str) -> pa.Table:
    """Replace a column of texts by lists."""
    texts = table[name].combine_chunks()
    return with_column(table, name, pc.call_function("split_pattern", [texts], pc.SplitPatternOptions(separator)))
