"""The share of decompression in decoding Parquet.

Arrow does both in one pass, page by page. So some rows are written to memory twice, with the encodings of the file:
with its codec, and without compression. The difference of their read times is the time of decompression. Known limits:
the level of the codec and the size of pages are those of this writer, not of the file's.
"""

from collections import Counter
from time import process_time
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.warehouse.ranges import leaves_of
from rowwise.ingest.warehouse.storage import is_url

MAX_ROWS = 65_536
MAX_BYTES = 64 << 20
ROUNDS = 4
LIKE_THE_FILE = ("DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "BYTE_STREAM_SPLIT")
CODECS = {"LZ4_RAW": "lz4", "UNCOMPRESSED": ""}  # footer names -> writer names


class DecompressionTimes(NamedTuple):
    """The share of decompression in the time of decoding."""

    share: float = 0.0
    codec: str = ""


class _Leaf(NamedTuple):
    """The encoding and compression of a column chunk."""

    codec: str
    bytes: int
    dictionary: bool
    encoding: str | None


def unpacking_of(reader: Reader, split: Split, names: tuple[str, ...]) -> DecompressionTimes:
    """The share of decompression for the columns of a split; 0 for files that are not local Parquet."""
    if not isinstance(reader, ParquetReader) or is_url(split.source):
        return DecompressionTimes()
    footer = pq.read_metadata(split.source)
    leaves_by_name = leaves_of(footer.schema.to_arrow_schema())
    inside = [name for name in names if name in leaves_by_name]
    table = reader.read(split, inside)  # first, as it validates the column chunks
    leaves = [_leaf(footer.row_group(split.start).column(leaf)) for name in inside for leaf in leaves_by_name[name]]
    sizes: Counter[str] = Counter()
    for leaf in leaves:
        sizes[leaf.codec] += leaf.bytes
    codec = sizes.most_common(1)[0][0] if sizes else ""
    if not codec or not pa.Codec.is_available(codec):
        return DecompressionTimes(codec=codec)
    table = table.slice(0, max(1, min(MAX_ROWS, table.num_rows * MAX_BYTES // max(table.nbytes, 1))))
    return DecompressionTimes(_share(table, leaves, codec), codec)


def _leaf(column: pq.ColumnChunkMetaData) -> _Leaf:
    encoding = next((name for name in column.encodings if name in LIKE_THE_FILE), None)
    codec = CODECS.get(column.compression, column.compression.lower())
    return _Leaf(codec, column.total_compressed_size, column.has_dictionary_page, encoding)


def _share(table: pa.Table, leaves: list[_Leaf], codec: str) -> float:
    options = _writer_options(table.schema, leaves)
    packed, plain = (_encode_parquet(table, codec=name, **options) for name in (codec, "none"))
    best_packed = best_plain = float("inf")
    for _ in range(ROUNDS):
        best_packed, best_plain = min(best_packed, _time(packed)), min(best_plain, _time(plain))
    return min(max(1 - best_plain / max(best_packed, 1e-9), 0.0), 1.0)


def _writer_options(schema: pa.Schema, leaves: list[_Leaf]) -> dict[str, Any]:
    """Options of a writer for the encodings of the file's columns."""
    described = pq.read_metadata(pa.BufferReader(_encode_parquet(schema.empty_table(), codec="none"))).schema
    paths = [described.column(leaf).path for leaf in range(len(described))]
    if len(paths) != len(leaves):
        return {}
    pairs = list(zip(paths, leaves, strict=True))
    dictionary = [path for path, leaf in pairs if leaf.dictionary]
    encodings = {path: leaf.encoding for path, leaf in pairs if leaf.encoding and not leaf.dictionary}
    return {"use_dictionary": dictionary or False, "column_encoding": encodings or None}


def _encode_parquet(table: pa.Table, *, codec: str, **options: Any) -> pa.Buffer:
    out = pa.BufferOutputStream()
    pq.write_table(table, out, compression=codec, row_group_size=max(table.num_rows, 1), **options)
    return out.getvalue()


def _time(file: pa.Buffer) -> float:
    begin_s = process_time()
    pq.ParquetFile(pa.BufferReader(file), pre_buffer=False).read(use_threads=False)
    return process_time() - begin_s
