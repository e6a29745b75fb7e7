"""Statistics of row groups in a footer: rows, least and greatest values."""

from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq
from pyarrow import types

from rowwise.ingest.warehouse.ranges import leaves_of
from rowwise.ingest.where import ColumnBounds, RowFilter


class RowGroup(NamedTuple):
    """A row group, as splits need it."""

    index: int
    first_row: int
    rows: int
    may_hold: bool


def groups_of(footer: pq.FileMetaData, where: RowFilter, schema: pa.Schema) -> list[RowGroup]:
    """All nonempty row groups, in order. Columns whose type differs from the schema have no statistics."""
    found: list[RowGroup] = []
    leaves: dict[str, int] = {}
    if where.all_of:
        inside = footer.schema.to_arrow_schema()
        known = [
            n for n in where.columns if inside.names.count(n) == 1 and inside.field(n).type == schema.field(n).type
        ]
        leaves = {name: leaves_of(inside)[name][0] for name in known}
    first_row = 0
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        rows = group.num_rows
        seen = {n: bounds_of_chunk(group.column(leaf), schema.field(n).type, rows) for n, leaf in leaves.items()}
        if rows:
            found.append(RowGroup(index, first_row, rows, where.may_hold(seen, schema)))
        first_row += rows
    return found


def bounds_of_chunk(chunk: pq.ColumnChunkMetaData, kind: pa.DataType, rows: int) -> ColumnBounds:
    """Statistics of one column of a row group."""
    plain = kind.value_type if types.is_dictionary(kind) else kind
    statistics = chunk.statistics
    if statistics is None or types.is_nested(plain):
        return ColumnBounds()
    nulls = statistics.null_count if statistics.has_null_count else None
    if not statistics.has_min_max or types.is_float16(plain) or types.is_interval(plain):
        return ColumnBounds(nulls=nulls, rows=rows)
    if types.is_temporal(plain):
        counted = chunk.physical_type in ("INT32", "INT64")
        bounds = (statistics.min_raw, statistics.max_raw) if counted else (None, None)
        return ColumnBounds(least=bounds[0], most=bounds[1], nulls=nulls, rows=rows)
    return ColumnBounds(least=statistics.min, most=statistics.max, nulls=nulls, rows=rows)
