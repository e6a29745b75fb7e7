"""The decompressed size of the pages of a Parquet file, computed before decompressing any.

A page begins with a header in Thrift's compact protocol, with the decompressed size of the page and its number of
values: a reader allocates for both. A footer has these, too, but no reader compares it with the pages.
"""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.ingest.warehouse.ranges import chunk_place

HEADER_bytes, MAX_HEADER_bytes = 1 << 10, 16 << 20  # of the first read; Arrow's limit
VALUE_bytes = 16  # minimum for a value with its levels
DEPTH = 16  # maximum nesting of structs in a header
# Thrift field ids of a page header; KINDS: struct of a page type -> field of its encoding.
UNPACKED, PACKED, KINDS, DICTIONARY, COUNT = 2, 3, {5: 2, 7: 2, 8: 4}, 7, 1
PREFIXED = 7  # DELTA_BYTE_ARRAY: a byte can repeat all text before it
TEXT = "BYTE_ARRAY"


class ParquetSize(NamedTuple):
    """Memory that reading a file takes."""

    size_bytes: int  # pages, and values without dictionary texts
    texts: dict[str, int]  # upper bound of expanded dictionary texts, by column


def unpacked_size(file: BinaryIO, footer: pq.FileMetaData, columns: Sequence[str]) -> ParquetSize:
    """The declared sizes of the pages of columns."""
    total, texts = 0, dict[str, int]()
    for group in range(footer.num_row_groups):
        for leaf in range(footer.num_columns):
            chunk, described = footer.row_group(group).column(leaf), footer.schema.column(leaf)
            path = described.path
            if not any(path == name or path.startswith(f"{name}.") for name in columns):
                continue
            longest = 0  # bytes of the longest dictionary text
            for header, at in _headers(file, chunk):
                total += HEADER_bytes + header[UNPACKED]
                for kind, encoding in KINDS.items():
                    about = header.get(kind, {})
                    if about.get(encoding) == PREFIXED:
                        raise pa.ArrowInvalid(f"column {path!r} is DELTA_BYTE_ARRAY: expected another encoding")
                    total += max(VALUE_bytes, described.length or 0) * about.get(COUNT, 0)
                    if longest:
                        texts[path] = texts.get(path, 0) + longest * about.get(COUNT, 0)
                if DICTIONARY in header and described.physical_type == TEXT:
                    file.seek(at)
                    longest = max(longest, _longest(file.read(header[PACKED]), header[UNPACKED], chunk.compression))
    return ParquetSize(total, texts)


def _longest(page: bytes, size: int, codec: str) -> int:
    """The length of the longest text of a dictionary page, or the size of the page if it cannot be decompressed."""
    if codec != "UNCOMPRESSED":
        if size > MAX_HEADER_bytes or codec not in ("SNAPPY", "GZIP", "BROTLI", "ZSTD"):
            return size
        page = pa.decompress(page, size, codec.lower(), asbytes=True)
    longest = at = 0
    while at + 4 <= len(page):
        length = int.from_bytes(page[at : at + 4], "little")
        longest, at = max(longest, length), at + 4 + length
    return longest


def _headers(file: BinaryIO, chunk: pq.ColumnChunkMetaData) -> Iterator[tuple[dict[int, Any], int]]:
    """The header of each page of a chunk, at the offset where Arrow reads it, and the offset of its end."""
    at, size = chunk_place(chunk)
    end = at + size
    while 0 <= at < end:
        header, length = _read_header(file, at, end)
        counts = [_whole(header, UNPACKED, -1), _whole(header, PACKED, -1)]
        counts += [_whole(header.get(kind, {}), COUNT, 0) for kind in KINDS]
        if min(counts) < 0:
            raise pa.ArrowInvalid(f"the page at byte {at:,} has no sizes")
        yield header, at + length
        at += length + header[PACKED]


def _whole(fields: Any, number: int, usual: int) -> int:
    """An integer field of a struct; -1 if it has another type."""
    value = fields.get(number, usual) if isinstance(fields, dict) else -1
    return value if type(value) is int else -1


def _read_header(file: BinaryIO, at: int, end: int) -> tuple[dict[int, Any], int]:
    """The fields of a header, and its size in bytes."""
    for most in (HEADER_bytes, MAX_HEADER_bytes):
        file.seek(at)
        try:
            return _read_struct(file.read(min(most, end - at)), 0, DEPTH)
        except IndexError:  # the header is longer than the bytes read
            continue
    raise pa.ArrowInvalid(f"the page at byte {at:,} has no whole header")


def _read_number(content: bytes, at: int) -> tuple[int, int]:
    """A varint (seven bits a byte), and the offset of its end."""
    value = shift = 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise pa.ArrowInvalid("a number in the header of a page is too long")


def _read_struct(content: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by id, and the offset of its end; IndexError if the bytes are too short."""
    fields: dict[int, Any] = {}
    number = 0
    while (head := content[at]) != 0:
        at += 1
        number += head >> 4
        if not head >> 4:
            number, at = _read_signed(content, at)
        fields[number], at = _read_value(content, at, head & 15, depth)
    return fields, at + 1


def _read_signed(content: bytes, at: int) -> tuple[int, int]:
    value, at = _read_number(content, at)
    return value >> 1 ^ -(value & 1), at


def _read_value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value of a Thrift type; page headers have no lists and maps."""
    match kind:
        case 1 | 2:
            return kind == 1, at
        case 3:
            return content[at], at + 1
        case 4 | 5 | 6:
            return _read_signed(content, at)
        case 7:
            return None, at + 8
        case 8:
            length, at = _read_number(content, at)
            return None, at + length
        case 12 if depth:
            return _read_struct(content, at, depth - 1)
        case _:
            raise pa.ArrowInvalid("the header of a page has a field of an unknown kind")
