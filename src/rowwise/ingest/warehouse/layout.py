"""The layout of a warehouse: order of columns, and rows of a row group.

Sizes are counted from the values alone, so that the cuts do not depend on how the rows were read.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.errors import DataError, SpecError
from rowwise.ingest.reader import check_columns
from rowwise.inside import fault_of_name
from rowwise.spec import Value

VERSION = 1
LEAST_MEMORY = 450_000_000
BASE_MEMORY = 348 << 20  # Python, Arrow, a row group on its way, and what the allocator keeps
COLUMN_MEMORY = 350_000  # of each column: a page and its packed form, read and written
ROOM_FOR_COLUMNS = 250  # that the least memory is enough for
Key = int | str


class WarehouseLayout(Value, frozen=True):
    """The arrangement of rows and columns in files that `convert` writes."""

    columns: tuple[str, ...] | None = None  # of the source, or `<map column>.<key>`; None: all
    keys: dict[str, tuple[Key, ...]] = msgspec.field(default_factory=dict)  # of map columns; others: those found
    partition_by: tuple[str, ...] = ()  # a folder for each value
    cluster_by: str | None = None  # rows with the same value stand together, in the order of its hash
    sort_by: str | None = None  # inside such rows; None: as they came
    compression: Literal["zstd", "snappy", "none"] = "zstd"
    group_rows: int = 65_536  # of a row group, at most
    group_bytes: int = 48 << 20  # of a row group when decoded, about
    part_groups: int = 16  # row groups of a file, at most
    memory_bytes: int = 2 << 30  # of the whole process, at most
    popularity: dict[str, float] | None = None  # how often columns are used: the most used ones are written first

    def __post_init__(self) -> None:
        counts = (self.group_rows, self.group_bytes, self.part_groups)
        if min(counts) < 1:
            raise SpecError(f"layout: rows, bytes and groups are {counts}: want at least 1 of each")
        if self.memory_bytes < LEAST_MEMORY:
            want = f"want at least {LEAST_MEMORY / 1e6:.0f}MB, as Python and Arrow take some for themselves"
            raise SpecError(f"layout: memory of {self.memory_bytes / 1e6:.0f}MB: {want}")
        if self.sort_by is not None and self.cluster_by is None:
            raise SpecError(
                f"layout: sort_by={self.sort_by!r} without cluster_by: rows are sorted inside sessions only"
            )
        bad = [name for name in self.partition_by if fault_of_name(name) or name[0] == "_" or "=" in name]
        if bad:
            raise SpecError(
                f"layout: partition_by {bad[0][:80]!r} makes no folder that is read again: rename the column"
            )

    @property
    def working_bytes(self) -> int:
        """Rows that are held at a time: copies, sorting and the writer take several times that."""
        return max((self.memory_bytes - BASE_MEMORY) // 8, 10 << 20)

    def check_columns(self, count: int) -> None:
        """Refuse so many columns where there is no room for a page of each."""
        wanted = LEAST_MEMORY + max(count - ROOM_FOR_COLUMNS, 0) * COLUMN_MEMORY
        if self.memory_bytes < wanted:
            got = f"memory of {self.memory_bytes / 1e6:.0f}MB for {count:,} columns"
            raise SpecError(f"layout: {got}: want at least {wanted / 1e6:.0f}MB, or fewer --columns")

    @property
    def decoded_bytes(self) -> int:
        """Decoded bytes of a row group: the requested size, limited by memory."""
        return min(self.group_bytes, 2 * self.working_bytes)

    @property
    def spills(self) -> bool:
        """Whether rows have to be brought into another order."""
        return bool(self.partition_by or self.cluster_by)


class FlattenedColumns(Value, frozen=True):
    """The columns that a source's columns become."""

    plain: tuple[str, ...]  # that stay
    maps: dict[str, tuple[Key, ...]]  # each key becomes a column

    @property
    def read(self) -> tuple[str, ...]:
        """The columns of the source that are needed."""
        return (*self.plain, *self.maps)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that it makes."""
        return (*self.plain, *(flat_name(name, key) for name, keys in self.maps.items() for key in keys))


def flat_name(column: str, key: Key) -> str:
    """The name of the column that holds a key's values."""
    return f"{column}.{key}"


def map_columns(schema: pa.Schema) -> list[str]:
    """The columns that are flattened."""
    return [field.name for field in schema if types.is_map(field.type)]


def choose(how: WarehouseLayout, schema: pa.Schema, source: str) -> tuple[list[str], dict[str, list[Key] | None]]:
    """The plain columns that are wanted, and the map columns with the keys that are; None: all of them."""
    maps = map_columns(schema)
    unknown = [name for name in how.keys if name not in maps]
    if unknown:
        raise DataError(f"{source}: keys of {unknown[0]!r}: want a map column; there are: {', '.join(maps) or 'none'}")
    chosen: dict[str, list[Key] | None] = {}
    plain: list[str] = []
    for name in schema.names if how.columns is None else how.columns:
        if name in maps:
            given = how.keys.get(name)
            chosen[name] = None if given is None else list(given)
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
            if text.removeprefix("-").isdecimal():
                return column, int(text)
    check_columns([name], schema, source)
    raise AssertionError(name)


def order_by_popularity(names: tuple[str, ...], popularity: Mapping[str, float]) -> tuple[str, ...]:
    """The most used columns first; others as they were."""
    return tuple(sorted(names, key=lambda name: -popularity.get(name, 0.0)))


def content_bytes(column: pa.ChunkedArray | pa.Array) -> float:
    """Bytes of the decoded values, independent of how rows are cut into groups."""
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
    """The range of entries of a slice's rows."""
    return (column.offsets[0].as_py(), column.offsets[-1].as_py()) if len(column) else (0, 0)


def table_bytes(table: pa.Table) -> float:
    """Decoded bytes of all columns."""
    return sum(content_bytes(column) for column in table.columns)


def rows_in(bytes_wanted: int, sample: pa.Table, most: int) -> int:
    """The number of rows like these in so many bytes."""
    if not sample.num_rows:
        return most
    return int(max(1, min(most, bytes_wanted * sample.num_rows // max(table_bytes(sample), 1))))
