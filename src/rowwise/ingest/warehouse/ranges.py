"""Byte ranges of a row group's columns in a Parquet file, and the cost of reading them.

A read that takes unwanted bytes along is cheaper than two reads, up to a gap; how large a gap is the caller's choice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq
from pyarrow import types

from rowwise.spec import Value

GAP_BYTES = 1 << 20
PADDING = 100  # writers of old left the header of a dictionary out of a chunk's size


class ReadRange(NamedTuple):
    """Bytes that are read together, and how many of them are wanted."""

    start: int
    stop: int
    wanted: int


class ReadCounters(Value, frozen=True):
    """Bytes, requests and seconds of a reader so far; the difference of two is that of an interval."""

    reads: int = 0
    bytes_read: int = 0
    bytes_wanted: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    rows: int = 0
    groups: int = 0  # row groups that were read
    pruned_groups: int = 0  # that statistics have shown to hold no wanted row

    @property
    def over_read(self) -> float:
        """Bytes read for each byte wanted."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else 1.0

    def __add__(self, other: "ReadCounters") -> "ReadCounters":
        return ReadCounters(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def __sub__(self, before: "ReadCounters") -> "ReadCounters":
        return ReadCounters(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


def disk_seconds(counters: ReadCounters, seek_s: float, bytes_s: float) -> float:
    """Seconds of a disk that seeks once per read and then streams at a fixed rate."""
    return counters.reads * seek_s + counters.bytes_read / bytes_s


def leaves_of(schema: pa.Schema) -> dict[str, range]:
    """The column chunks of each column: one for a number, two for a map, and so on."""
    found: dict[str, range] = {}
    at = 0
    for field in schema:
        count = _leaves(field.type)
        found[field.name] = range(at, at + count)
        at += count
    return found


def ranges_of(footer: pq.FileMetaData, group: int, leaves: Sequence[int], gap: int) -> tuple[ReadRange, ...]:
    """The reads that bring these column chunks."""
    row_group = footer.row_group(group)
    pad = PADDING if footer.created_by.startswith(("parquet-mr", "parquet-cpp version")) else 0
    end = footer_start(footer) if pad else 0
    chunks = sorted(_chunk(row_group.column(leaf)) for leaf in leaves)
    made: list[ReadRange] = []
    for start, size in chunks:
        stop = max(start + size, min(start + size + pad, end))
        last = made[-1] if made else None
        if last is not None and (start < last.stop or (gap and start - last.stop <= gap)):
            made[-1] = ReadRange(last.start, max(stop, last.stop), last.wanted + size)
        else:
            made.append(ReadRange(start, stop, size))
    return tuple(made)


def footer_start(footer: pq.FileMetaData) -> int:
    """The largest possible end of the last column chunk."""
    if not footer.num_row_groups:
        return 0
    last = footer.row_group(footer.num_row_groups - 1)
    return max(sum(_chunk(last.column(leaf))) for leaf in range(last.num_columns))


def _chunk(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
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
