"""The byte ranges of a Parquet file to read for some columns of a row group, and read counters.

Reads of wanted chunks that are at most `gap` bytes apart are merged, including the bytes between them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq
from pyarrow import types

from rowwise.tables.spec import Value

GAP_BYTES = 1 << 20
PADDING = 100  # bytes; old writers omit the dictionary header from a chunk's size


class ReadRange(NamedTuple):
    """A range of bytes read at once, and the number of wanted bytes in it."""

    start: int
    stop: int
    wanted: int


class ReadCounters(Value, frozen=True):
    """Cumulative requests, bytes and seconds of a reader; subtract two to measure an interval."""

    reads: int = 0
    bytes_read: int = 0
    bytes_wanted: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    rows: int = 0
    groups: int = 0  # row groups read
    pruned_groups: int = 0  # row groups skipped by their statistics

    @property
    def over_read(self) -> float:
        """Bytes read per wanted byte."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else 1.0

    def __add__(self, other: "ReadCounters") -> "ReadCounters":
        return ReadCounters(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def __sub__(self, before: "ReadCounters") -> "ReadCounters":
        return ReadCounters(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


def counters_of(reader: object) -> ReadCounters:
    """The counters of a reader; zeros if it has none."""
    return getattr(reader, "counters", ReadCounters())


def leaves_of(schema: pa.Schema) -> dict[str, range]:
    """The leaf columns (column chunks) of each column: one for a number, two for a map, and so on."""
    leaves: dict[str, range] = {}
    at = 0
    for field in schema:
        count = _leaves(field.type)
        leaves[field.name] = range(at, at + count)
        at += count
    return leaves


def ranges_of(footer: pq.FileMetaData, group: int, leaves: Sequence[int], gap: int) -> tuple[ReadRange, ...]:
    """The ranges to read for these column chunks."""
    row_group = footer.row_group(group)
    pad = PADDING if footer.created_by.startswith(("parquet-mr", "parquet-cpp version")) else 0
    end = footer_start(footer) if pad else 0
    chunks = sorted(chunk_place(row_group.column(leaf)) for leaf in leaves)
    ranges: list[ReadRange] = []
    for start, size in chunks:
        stop = max(start + size, min(start + size + pad, end))
        last = ranges[-1] if ranges else None
        if last is not None and (start < last.stop or (gap and start - last.stop <= gap)):
            ranges[-1] = ReadRange(last.start, max(stop, last.stop), last.wanted + size)
        else:
            ranges.append(ReadRange(start, stop, size))
    return tuple(ranges)


def footer_start(footer: pq.FileMetaData) -> int:
    """The end of the last column chunk."""
    if not footer.num_row_groups:
        return 0
    last = footer.row_group(footer.num_row_groups - 1)
    return max(sum(chunk_place(last.column(leaf))) for leaf in range(last.num_columns))


def chunk_place(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Offset and size of the pages of a column chunk."""
    begin = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset and column.dictionary_page_offset > 0:
        begin = min(begin, column.dictionary_page_offset)
    return begin, column.total_compressed_size


def _leaves(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    if types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    if types.is_nested(kind) and hasattr(kind, "value_type"):
        return _leaves(kind.value_type)
    if types.is_struct(kind):
        return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields))
    return 1
