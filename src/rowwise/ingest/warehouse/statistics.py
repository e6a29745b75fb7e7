"""Row counts and column bounds of row groups from a Parquet footer, for pruning groups by a filter."""

from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq
from pyarrow import types

from rowwise.ingest.kinds import decoded_kind
from rowwise.ingest.warehouse.ranges import leaves_of
from rowwise.ingest.where import ColumnBounds, RowFilter


class RowGroup(NamedTuple):
    """A row group, from which a split is made."""

    index: int
    first_row: int
    rows: int
    may_hold: bool  # false if no row can pass the filter


def groups_of(footer: pq.FileMetaData, where: RowFilter, schema: pa.Schema) -> list[RowGroup]:
    """The non-empty row groups, in order. Bounds of a column are used only if its type is that of the schema."""
    groups: list[RowGroup] = []
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
        bounds = {n: bounds_of_chunk(group.column(leaf), schema.field(n).type, rows) for n, leaf in leaves.items()}
        if rows:
            groups.append(RowGroup(index, first_row, rows, where.may_hold(bounds, schema)))
        first_row += rows
    return groups


def bounds_of_chunk(chunk: pq.ColumnChunkMetaData, kind: pa.DataType, rows: int) -> ColumnBounds:
    """Bounds and null count of a column chunk, as far as its statistics can be trusted."""
    plain = decoded_kind(kind)
    statistics = chunk.statistics
    if statistics is None or types.is_nested(plain):
        return ColumnBounds()
    nulls = statistics.null_count if statistics.has_null_count else None
    if not statistics.has_min_max or types.is_float16(plain) or types.is_interval(plain):
        return ColumnBounds(nulls=nulls, rows=rows)
    if types.is_temporal(plain):
        is_integer = chunk.physical_type in ("INT32", "INT64")
        bounds = (statistics.min_raw, statistics.max_raw) if is_integer else (None, None)
        return ColumnBounds(least=bounds[0], most=bounds[1], nulls=nulls, rows=rows)
    return ColumnBounds(least=statistics.min, most=statistics.max, nulls=nulls, rows=rows)
