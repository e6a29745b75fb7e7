"""Reads untrusted Arrow and Parquet files: their decompressed size is bounded before anything is decompressed.

A few kilobytes can expand to gigabytes in three ways: compressed buffers and pages, run-length encoding, and long texts
in dictionaries. All are counted before anything is expanded, the last by reading texts as dictionary indices. Arrow
raises its own errors for damaged files, and so do these functions.
"""

import io
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet as pq
from pyarrow import types

from rowwise.base.textfile import open_regular, read_bytes
from rowwise.ingest.arrow_sizes import decompressed_bytes
from rowwise.ingest.block import Ints
from rowwise.ingest.page_sizes import unpacked_size
from rowwise.ingest.warehouse.footer import check_chunks, check_footer

MAX_UNPACKED_bytes = 256 << 20  # limit of a file
MAX_TIMES = 64  # expansion ratio allowed to a Parquet file, if that is more
MAX_COLUMNS = 1 << 14
MAX_CACHED_bytes = 1 << 16  # of a schema whose check is cached
MAX_DEPTH = 8  # nesting of lists and structs
MAGIC = b"ARROW1\0\0"  # a file is this, a stream, and a footer, which is not needed here
NUMBERS = (
    *(types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_temporal, types.is_null),
    *(types.is_fixed_size_binary,),
)
TEXTS = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
VIEWS = (types.is_string_view, types.is_binary_view)
LISTS = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_map)


def read_arrow_file(source: Path | bytes, max_bytes: int = MAX_UNPACKED_bytes) -> pa.Table:
    """Read an Arrow IPC file from a path or bytes; raises pa.ArrowException if it is damaged."""
    content = source if isinstance(source, bytes) else read_bytes(source, max_bytes, links=False)
    if not content.startswith(MAGIC):
        raise pa.ArrowInvalid("it is no Arrow file")
    return read_arrow_stream(pa.py_buffer(content).slice(len(MAGIC)), max_bytes)


def write_arrow_file(path: Path, table: pa.Table) -> None:
    """Write a file in Arrow's IPC format."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def read_arrow_stream(
    content: bytes | bytearray | pa.Buffer,
    max_bytes: int,
    check_names: Callable[[Sequence[str]], None] | None = None,
) -> pa.Table:
    """The table of an Arrow IPC stream, of at most `max_bytes` in memory.

    Args:
        content: the stream.
        max_bytes: limit of the table in memory.
        check_names: called with the column names before any value is read; may raise.
    """
    with _as_arrow_errors():
        stream = pa.py_buffer(content)
        _check_size(decompressed_bytes(stream), max_bytes)
        with pa.ipc.open_stream(stream) as reader:
            if check_names is not None:
                check_names(reader.schema.names)
            schema = pa.ipc.read_message(stream).serialize().to_pybytes()
            shared = (_shared_of if len(schema) <= MAX_CACHED_bytes else _shared_of.__wrapped__)(schema)
            table = reader.read_all()
        table.validate(full=True)  # offsets and text
        _check_size(_plain_bytes(table, shared), max_bytes)
    return table


@lru_cache(64)  # servers receive the same schemas repeatedly
def _shared_of(schema: bytes) -> tuple[str, ...]:
    """The columns whose values may share bytes, from a stream's schema message."""
    return _check_schema(pa.ipc.read_schema(pa.py_buffer(schema)))


def read_parquet(source: Path | bytes, columns: Sequence[str] | None = None, *, links: bool = False) -> pa.Table:
    """Read a Parquet file from a path or bytes; raises pa.ArrowException if it is damaged.

    Args:
        source: the path or the content.
        columns: columns to read; by default all.
        links: whether the path may be a symbolic link.
    """
    opened = io.BytesIO(source) if isinstance(source, bytes) else open_regular(source, links=links)
    with opened as file, _as_arrow_errors():
        footer, size = pq.read_metadata(file), file.seek(0, io.SEEK_END)
        check_footer(footer)
        check_chunks(footer, size)
        schema, max_bytes = footer.schema.to_arrow_schema(), max(MAX_UNPACKED_bytes, MAX_TIMES * size)
        names = schema.names if columns is None else list(columns)
        missing = [name for name in names if name not in schema.names]
        if missing:
            raise pa.ArrowInvalid(f"it has no column {missing[0]!r}")
        _check_schema(pa.schema([field for field in schema if field.name in names]))
        unpacked = unpacked_size(file, footer, names)
        _check_size(unpacked.size_bytes, max_bytes)
        # If dictionary texts could exceed the limit, read them as indices until they are counted.
        texts = list(unpacked.texts) if unpacked.size_bytes + sum(unpacked.texts.values()) > max_bytes else []
        # No Arrow threads: they would call Python, maybe during its shutdown.
        reader = pq.ParquetFile(file, metadata=footer, read_dictionary=texts, pre_buffer=False)
        groups = [reader.read_row_group(group, names, use_threads=False) for group in range(footer.num_row_groups)]
        table = pa.concat_tables(groups) if groups else reader.read(names, use_threads=False)
        _check_size(_plain_bytes(table, _check_schema(table.schema)), max_bytes)
        fields = [schema.field(name) for name in table.column_names]
        if texts:
            table = table.cast(pa.schema([field.with_type(_without_views(field.type)) for field in fields]))
        return table.cast(pa.schema(fields))


def check_types(table: pa.Table, schema: pa.Schema) -> None:
    """Raise pa.ArrowInvalid unless a table has exactly the columns of a schema, without nulls."""
    for name in (*schema.names, *table.column_names):
        if name not in table.column_names:
            raise pa.ArrowInvalid(f"it has no column {name!r}")
        if name not in schema.names:
            raise pa.ArrowInvalid(f"it has a column {name[:80]!r} too many")
        got, want = table[name], schema.field(name).type
        if got.type != want or got.null_count:
            nulls = f" with {got.null_count} nulls" if got.null_count else ""
            raise pa.ArrowInvalid(
                f"its column {name!r} holds {str(got.type)[:80]}{nulls}: expected {want} without nulls"
            )


@contextmanager
def _as_arrow_errors() -> Iterator[None]:
    """Turn other errors on damaged files into Arrow's."""
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, struct.error) as error:
        raise pa.ArrowInvalid(str(error)) from None


def _check_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise pa.ArrowInvalid(f"it is {size_bytes:,} bytes when it is unpacked: expected at most {max_bytes:,}")


def _check_schema(schema: pa.Schema) -> tuple[str, ...]:
    """Refuse types whose size cannot be counted; returns the columns whose values may share bytes."""
    if len(schema) > MAX_COLUMNS:
        raise pa.ArrowInvalid(f"it has {len(schema):,} columns: expected at most {MAX_COLUMNS:,}")
    names, shared = set[str](), list[str]()
    for field in schema:
        if field.name in names:
            count = schema.names.count(field.name)
            raise pa.ArrowInvalid(f"{count} columns are called {field.name[:80]!r}: expected each name once")
        names.add(field.name)
        extent = _extent(field.type, MAX_DEPTH)
        if extent is _Extent.UNKNOWN:
            raise pa.ArrowInvalid(
                f"column {field.name[:80]!r} holds {str(field.type)[:80]}: expected plain values or lists"
            )
        if extent is _Extent.SHARED:
            shared.append(field.name)
    return tuple(shared)


class _Extent(IntEnum):
    """Whether the size of the buffers bounds the size of the values of a type."""

    BOUNDED = 0  # values do not share bytes
    SHARED = 1  # values share bytes or have none, so `_array_bytes` counts them
    UNKNOWN = 2


def _extent(kind: pa.DataType, depth: int) -> _Extent:
    if types.is_dictionary(kind):
        return _Extent.SHARED if _is(kind.value_type, (*NUMBERS, *TEXTS, *VIEWS)) else _Extent.UNKNOWN
    if _is(kind, LISTS) or types.is_struct(kind):
        inside = [_extent(kind.field(k).type, depth - 1) for k in range(kind.num_fields)] if depth else []
        return max(inside, default=_Extent.UNKNOWN)
    if _is(kind, VIEWS) or types.is_null(kind) or kind == pa.binary(0):
        return _Extent.SHARED
    return _Extent.BOUNDED if _is(kind, (*NUMBERS, *TEXTS)) else _Extent.UNKNOWN


def without_views(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text views as plain text, also in lists and dictionaries: Arrow compares, parses and takes no views."""
    kind = column.type
    plain = _without_views(kind.value_type if types.is_dictionary(kind) else kind)
    plain = pa.dictionary(kind.index_type, plain) if types.is_dictionary(kind) else plain
    return column if plain == kind else column.cast(plain)


def _without_views(kind: pa.DataType) -> pa.DataType:
    """An intermediate type for casting dictionary texts to this one."""
    if _is(kind, VIEWS):
        return pa.large_string() if types.is_string_view(kind) else pa.large_binary()
    if types.is_list(kind) or types.is_large_list(kind):
        inside = kind.value_field.with_type(_without_views(kind.value_type))
        return pa.list_(inside) if types.is_list(kind) else pa.large_list(inside)
    return kind


def _is(kind: pa.DataType, tests: Sequence[Callable[[pa.DataType], bool]]) -> bool:
    return any(test(kind) for test in tests)


def _plain_bytes(table: pa.Table, shared: Iterable[str]) -> int:
    """The size of the values of columns without sharing."""
    return sum(_array_bytes(chunk) for name in shared for chunk in table[name].chunks)


def _array_bytes(array: pa.Array) -> int:
    kind, count = array.type, len(array)
    if types.is_dictionary(kind):
        if _is(kind.value_type, NUMBERS):
            return count * _width(kind.value_type)
        lengths_D, chosen = _lengths(array.dictionary), array.indices.drop_null().to_numpy()
        return 8 * count + int(lengths_D[chosen].sum())
    if _is(kind, (*TEXTS, *VIEWS)):
        return 8 * count + int(_lengths(array).sum())
    if _is(kind, LISTS):
        return 8 * count + _array_bytes(array.values)
    if types.is_struct(kind):
        return count + sum(_array_bytes(array.field(k)) for k in range(kind.num_fields))
    return count * _width(kind)


def _width(kind: pa.DataType) -> int:
    return 1 if types.is_null(kind) else max(1, kind.bit_width // 8)


def _lengths(array: pa.Array) -> Ints:
    """The lengths of texts; undefined for nulls. Arrow validates no view of a null, but adds up their lengths."""
    if _is(array.type, VIEWS):
        count = array.offset + len(array)
        views_N4 = np.frombuffer(array.buffers()[1] or b"", "<i4", 4 * count).reshape(count, 4)
        lengths_N = views_N4[array.offset :, 0].astype(np.int64)
        if lengths_N.min(initial=0) < 0:
            raise pa.ArrowInvalid("a text has a negative length")
        return lengths_N
    return pc.call_function("binary_length", [array]).fill_null(0).to_numpy().astype(np.int64)
