"""The layout of a warehouse: columns, their order, and the sizes of row groups and files.

Sizes are computed from the values alone, so row groups do not depend on the splits of the source.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import DataError, SpecError
from rowwise.base.inside import fault_of_name
from rowwise.base.textfile import parse_whole
from rowwise.ingest.reader import check_columns
from rowwise.tables.spec import Value

VERSION = 1
MIN_MEMORY = 450_000_000
BASE_MEMORY = 348 << 20  # Python, Arrow, the row group being written, and allocator overhead
COLUMN_MEMORY = 350_000  # per column: a page and its compressed form, read and written
ROOM_FOR_COLUMNS = 250  # columns for which MIN_MEMORY suffices
Key = int | str


class WarehouseLayout(Value, frozen=True):
    """The arrangement of rows and columns in files that `convert` writes."""

    columns: tuple[str, ...] | None = None  # of the source, or `<map column>.<key>`; None for all
    keys: dict[str, tuple[Key, ...]] = msgspec.field(default_factory=dict)  # of map columns; by default all keys
    partition_by: tuple[str, ...] = ()  # one folder for each value of these columns
    cluster_by: str | None = None  # rows with equal values (a session id) are neighbours, ordered by its hash
    sort_by: str | None = None  # order of the rows of a session; None for the order of the source
    compression: Literal["zstd", "snappy", "none"] = "zstd"
    group_rows: int = 65_536  # maximum rows of a row group
    group_bytes: int = 48 << 20  # approximate decoded size of a row group
    part_groups: int = 16  # maximum row groups of a file
    memory_bytes: int = 2 << 30  # memory budget of the process
    popularity: dict[str, float] | None = None  # uses of each column: the most used are written first, side by side

    def __post_init__(self) -> None:
        counts = (self.group_rows, self.group_bytes, self.part_groups)
        if min(counts) < 1:
            raise SpecError(f"layout: group_rows, group_bytes, part_groups = {counts}", "at least 1 each")
        if self.memory_bytes < MIN_MEMORY:
            raise SpecError(
                f"layout: memory of {self.memory_bytes / 1e6:.0f}MB",
                f"at least {MIN_MEMORY / 1e6:.0f}MB, which includes Python's and Arrow's own",
            )
        if self.sort_by is not None and self.cluster_by is None:
            raise SpecError(
                f"layout: sort_by={self.sort_by!r} without cluster_by",
                "cluster_by, too, as rows are sorted inside sessions only",
            )
        bad = [name for name in self.partition_by if fault_of_name(name) or name[0] == "_" or "=" in name]
        if bad:
            raise SpecError(
                f"layout: partition_by {bad[0][:80]!r} cannot be the name of a folder with values",
                hint="rename the column",
            )

    @property
    def working_bytes(self) -> int:
        """Budget of the rows in memory: copies, sorting and the writer take several times as much."""
        return max((self.memory_bytes - BASE_MEMORY) // 8, 10 << 20)

    def check_columns(self, count: int) -> None:
        """Refuse more columns than fit into the memory budget: each needs a page."""
        wanted = MIN_MEMORY + max(count - ROOM_FOR_COLUMNS, 0) * COLUMN_MEMORY
        if self.memory_bytes < wanted:
            raise SpecError(
                f"layout: memory of {self.memory_bytes / 1e6:.0f}MB for {count:,} columns",
                f"at least {wanted / 1e6:.0f}MB, or fewer --columns",
            )

    @property
    def decoded_bytes(self) -> int:
        """Decoded size of a row group: `group_bytes`, or less with a small memory budget."""
        return min(self.group_bytes, 2 * self.working_bytes)

    @property
    def spills(self) -> bool:
        """Whether rows are reordered, by an external sort."""
        return bool(self.partition_by or self.cluster_by)


class FlattenedColumns(Value, frozen=True):
    """The columns of a warehouse: columns of the source, and one for each key of a map column."""

    plain: tuple[str, ...]  # written as they are
    maps: dict[str, tuple[Key, ...]]  # keys by map column

    @property
    def read(self) -> tuple[str, ...]:
        """The columns to read from the source."""
        return (*self.plain, *self.maps)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to write."""
        return (*self.plain, *(flat_name(name, key) for name, keys in self.maps.items() for key in keys))


def flat_name(column: str, key: Key) -> str:
    return f"{column}.{key}"


def map_columns(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if types.is_map(field.type)]


def choose_columns(
    layout: WarehouseLayout, schema: pa.Schema, source: str
) -> tuple[list[str], dict[str, list[Key] | None]]:
    """The plain columns to write, and the map columns with their keys (None for all keys of the data)."""
    maps = map_columns(schema)
    unknown = [name for name in layout.keys if name not in maps]
    if unknown:
        raise DataError(
            f"{source}: keys of {unknown[0]!r}", "a map column", hint=f"the map columns: {', '.join(maps) or 'none'}"
        )
    chosen: dict[str, list[Key] | None] = {}
    plain: list[str] = []
    for name in schema.names if layout.columns is None else layout.columns:
        if name in maps:
            map_keys = layout.keys.get(name)
            chosen[name] = None if map_keys is None else list(map_keys)
        elif name in schema.names:
            plain.append(name)
        else:
            column, key = _key_of_map(name, schema, source)
            keys = chosen.setdefault(column, [])
            if keys is not None:
                keys.append(key)
    return plain, chosen


def _key_of_map(name: str, schema: pa.Schema, source: str) -> tuple[str, Key]:
    for column in map_columns(schema):
        if name.startswith(f"{column}."):
            text = name[len(column) + 1 :]
            if not types.is_integer(schema.field(column).type.key_type):
                return column, text
            number = parse_whole(text, signed=True)
            if number is not None:
                return column, number
    check_columns([name], schema, source)
    raise AssertionError(name)


def order_by_popularity(names: tuple[str, ...], popularity: Mapping[str, float]) -> tuple[str, ...]:
    """Stably sort columns by use, most used first."""
    return tuple(sorted(names, key=lambda name: -popularity.get(name, 0.0)))


def content_bytes(column: pa.ChunkedArray | pa.Array) -> float:
    """The decoded size of the values; additive over slices."""
    if isinstance(column, pa.ChunkedArray):
        return sum(content_bytes(chunk) for chunk in column.chunks)
    kind = column.type
    if types.is_dictionary(kind):
        return 4 * len(column)
    if types.is_map(kind):
        first, last = _extent(column)
        children = (column.keys, column.items)
        return 4 * len(column) + sum(content_bytes(child.slice(first, last - first)) for child in children)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 4 * len(column) + content_bytes(column.flatten())
    if types.is_struct(kind):
        return sum(content_bytes(child) for child in column.flatten())
    try:
        return kind.bit_width * len(column) / 8
    except ValueError:
        texts = column.cast(pa.large_binary()) if types.is_string_view(kind) or types.is_binary_view(kind) else column
        return 4 * len(column) + int(pc.call_function("sum", [pc.call_function("binary_length", [texts])]).as_py() or 0)


def _extent(column: pa.MapArray) -> tuple[int, int]:
    """The range of entries of a slice of maps."""
    return (column.offsets[0].as_py(), column.offsets[-1].as_py()) if len(column) else (0, 0)


def table_bytes(table: pa.Table) -> float:
    return sum(content_bytes(column) for column in table.columns)


def rows_in(size_bytes: int, sample: pa.Table, max_rows: int) -> int:
    """The number of rows like those of the sample that fit into `size_bytes`, at most `max_rows`."""
    if not sample.num_rows:
        return max_rows
    return int(max(1, min(max_rows, size_bytes * sample.num_rows // max(table_bytes(sample), 1))))
