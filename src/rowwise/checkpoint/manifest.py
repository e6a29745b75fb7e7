"""The manifest of a checkpoint: tensors, their chunks in files, and the run's data as JSON.

Every byte has a checksum: each chunk, the header of each file, and the manifest. Nothing is compressed.

[Note: Chunks] Names and shapes of tensors do not depend on the plan. A chunk is a rectangle of rows and columns of a
tensor, written by a rank that held it. Every tensor counts as (rows, columns): its first dimension, and the product of
all others; a scalar is one row of one column. A table is (rows, dim) for every row type, and a chunk stores its columns
as a tile does: int8 rows have the scales of their groups first, then the codes. Rows may be rounded to fewer bits: 8
are int8 rows of one group, 4 those of [Note: Four bits] in `tables/ops/_cpp/quantise.h`. Chunks without `ids` cover
each element once. A chunk with `ids` holds rows that changed since an earlier checkpoint; chunks are applied in the
order in which they are listed. A chunk with `initial` is in no file: its rows have their initial values, as unchanged
rows of a table on disk.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Self

import msgspec

from rowwise.base.errors import CheckpointError, DamageError, SpecError, StorageError, printable
from rowwise.base.inside import fault_of_name
from rowwise.base.storage.folder import Folder, read_file
from rowwise.tables.spec import Bits, Constant, RowType, Table, Value, quantised_bytes, row_bytes
from rowwise.tables.store.row_stream import InitialValues

FORMAT = 2
NAME = "manifest.json"
MAX_BYTES = 1 << 30  # max. size of a manifest
MAX_NAME = 1000  # max. length of a part of a tensor's name between slashes
MAX_ROWS = 1 << 48  # max. size of a dimension
BLANK = b'"crc32": "00000000"'  # the first field of a manifest, whose checksum is computed with zeros in its place
MAX_DIMS = 64  # max. dimensions of a tensor
NUMBERS = {  # bytes of torch's dtypes
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
Span = tuple[int, int]  # from, to (exclusive)


class ChunkRows(Value, frozen=True):
    """The row numbers (`ids`) of a chunk of changed rows: ascending, under a key of the same file."""

    count: int
    key: str
    crc32: int


class TensorChunk(Value, frozen=True, omit_defaults=True):
    """A rectangle of a tensor, under a key of a safetensors file."""

    rows: Span
    cols: Span | None  # None for all
    file: str
    key: str
    crc32: int  # checksum of the chunk's bytes
    bits: Bits | None = None  # 8 or 4 if rounded to fewer bits than the row type
    ids: ChunkRows | None = None
    initial: InitialValues | None = None

    @property
    def count(self) -> int:
        return self.rows[1] - self.rows[0] if self.ids is None else self.ids.count


class TensorEntry(Value, frozen=True, rename={"chunks": "pieces"}):
    """The type, shape and chunks of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    row_type: RowType | None = None  # row type of a table
    column_group: int | None = None  # columns that share a scale, in int8 rows
    chunks: tuple[TensorChunk, ...] = ()  # in manifest.json: pieces

    @classmethod
    def of(cls, table: Table) -> Self:
        """The rows of a table, without chunks."""
        kind, shape = table.row_type, (table.rows, table.dim)
        return cls(dtype=kind.facts.numbers, shape=shape, row_type=kind, column_group=table.column_group)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.stored_width((0, self.columns)) * NUMBERS[self.dtype]

    @property
    def scaled(self) -> bool:
        """Whether rows store scales for groups of columns, as int8 rows do."""
        return self.row_type is not None and self.row_type.facts.scaled

    def stored_width(self, cols: Span) -> int:
        count = cols[1] - cols[0]
        return row_bytes(self.row_type, count, self.column_group or 0) if self.row_type and self.scaled else count

    def chunk_width(self, chunk: TensorChunk) -> int:
        """Elements of a chunk's row, as stored in its file."""
        cols = self.chunk_cols(chunk)
        return self.stored_width(cols) if chunk.bits is None else quantised_bytes(cols[1] - cols[0], chunk.bits)

    def chunk_cols(self, chunk: TensorChunk) -> Span:
        return chunk.cols or (0, self.columns)

    def chunk_bytes(self, chunk: TensorChunk) -> int:
        if chunk.initial is not None:
            return 0
        return chunk.count * self.chunk_width(chunk) * (1 if chunk.bits else NUMBERS[self.dtype])

    def find_fault(self, chunk: TensorChunk) -> str | None:
        """The reason why a chunk does not fit this tensor, or None."""
        (row, rows), (col, cols) = chunk.rows, self.chunk_cols(chunk)
        place = f"{self.describe(chunk.rows, (col, cols))}"
        if not (0 <= row <= rows <= self.rows and 0 <= col <= cols <= self.columns):
            return f"{place} are outside of its shape {str(self.shape)[:80]}"
        if self.row_type is not None:
            block = (self.column_group or self.columns) if self.scaled else 1
            if col == cols or col % block or (cols % block and cols != self.columns):
                return f"{place} are cut inside of a group of columns"
        elif chunk.bits is not None:
            return f"{place} are rounded to {chunk.bits} bits, but the tensor is no table"
        if chunk.initial is not None:
            if chunk.ids is not None or chunk.bits is not None or chunk.file:
                return f"{place} have initial values, and are in a file too"
            if self.row_type is None and not isinstance(chunk.initial.init, Constant):
                return f"{place} have random initial values, but the tensor is no table"
        if chunk.ids is not None and not (self.shape and 0 <= chunk.ids.count <= rows - row):
            return f"{place} are {chunk.ids.count} of {rows - row} rows"
        return None

    def describe(self, rows: Span, cols: Span) -> str:
        where = f"rows {rows[0]} to {rows[1] - 1}" if self.shape else "the number"
        return where if cols == (0, self.columns) else f"{where}, columns {cols[0]} to {cols[1] - 1}"


class CheckpointFile(Value, frozen=True):
    """A safetensors file of a checkpoint."""

    size_bytes: int
    head_crc32: int  # checksum of the file's header


class CheckpointManifest(Value, frozen=True):
    """The manifest of a checkpoint: files, tensors and chunks."""

    format: int
    data: dict[str, Any]  # any JSON
    files: dict[str, CheckpointFile]
    tensors: dict[str, TensorEntry]
    chain_bytes: tuple[int, ...] = ()  # bytes written by the full checkpoint, then by each increment up to this one

    def to_json(self) -> bytes:
        """The content of manifest.json, with its checksum in the first field."""
        body = msgspec.json.format(msgspec.json.encode({"crc32": "00000000", **msgspec.structs.asdict(self)}), indent=1)
        return body.replace(BLANK, BLANK.replace(b"00000000", f"{zlib.crc32(body):08x}".encode()), 1)

    @classmethod
    def read(cls, folder: Folder) -> "CheckpointManifest":
        """Read and check the manifest of a checkpoint."""
        path = folder / NAME
        try:
            content = read_file(folder, NAME, MAX_BYTES)
            plain = msgspec.json.decode(content)
            _check_format(path, plain)
            crc32 = plain.pop("crc32", None) if isinstance(plain, dict) else None
            manifest = msgspec.convert(plain, cls)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is not a checkpoint: it has no {NAME}", hint="choose another folder"
            ) from None
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            fault = printable(str(error)).replace("\n", " ")[:300]
            raise DamageError(f"{path} is damaged: {fault}; use another checkpoint") from None
        except (CheckpointError, StorageError):
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; use another checkpoint") from None
        manifest.check(str(path), "; use another checkpoint")
        blank = content.replace(f'"crc32": "{crc32}"'.encode(), BLANK, 1)
        if crc32 != f"{zlib.crc32(blank):08x}":
            raise DamageError(f"{path} is damaged: it does not match its checksum; use another checkpoint")
        return manifest

    def check(self, where: str, suffix: str = "") -> None:
        """Raise unless names are safe, the chunks of each tensor cover it exactly once, and all are in listed files."""
        for name in self.files:
            fault = fault_of_name(name)
            if fault:
                raise CheckpointError(f"{where}: file {name[:80]!r} is not used: {fault}{suffix}")
        used: dict[str, int] = dict.fromkeys(self.files, 0)
        keys: set[tuple[str, str]] = set()
        count = 0
        for name, entry in self.tensors.items():
            fault = find_entry_fault(name, entry) or next(filter(None, map(entry.find_fault, entry.chunks)), None)
            stored = [chunk for chunk in entry.chunks if chunk.initial is None]
            fault = fault or next((f"{p.file!r} is not listed" for p in stored if p.file not in self.files), None)
            fault = fault or find_coverage_fault(entry, [chunk for chunk in entry.chunks if chunk.ids is None])
            if fault:
                raise CheckpointError(f"{where}: tensor {name[:200]!r}: {fault}{suffix}")
            count += len(stored)
            for chunk in stored:
                used[chunk.file] += entry.chunk_bytes(chunk)
                keys.add((chunk.file, chunk.key))
        for name, size_bytes in used.items():
            if size_bytes > self.files[name].size_bytes:
                sizes = f"{self.files[name].size_bytes} bytes, but its chunks have {size_bytes}"
                raise CheckpointError(f"{where}: file {name!r} has {sizes}{suffix}")
        if len(keys) < count:
            raise CheckpointError(f"{where}: two chunks have the same key in a file", f"one key for each chunk{suffix}")


def _check_format(path: Folder, plain: Any) -> None:
    if isinstance(plain, dict) and plain.get("format", FORMAT) != FORMAT:
        fmt = repr(plain["format"])[:40]
        raise CheckpointError(f"{path} has format {fmt}; this rowwise reads format {FORMAT}: use the one that wrote it")


def find_entry_fault(name: str, entry: TensorEntry) -> str | None:
    """The reason why the name, type or shape of a tensor is not allowed, or None."""
    fault = next(filter(None, (fault_of_name(part, MAX_NAME) for part in name.split("/"))), None)
    if fault:
        return f"its name is not used: {fault}"
    if entry.dtype not in NUMBERS:
        return f"it has numbers of {entry.dtype[:40]!r}: expected one of {', '.join(NUMBERS)}"
    if len(entry.shape) > MAX_DIMS or not all(0 <= n < MAX_ROWS for n in entry.shape):
        return f"its shape is {str(entry.shape)[:80]}: expected at most {MAX_DIMS} numbers from 0 to 2**48"
    if entry.row_type is None:
        return None if entry.column_group is None else "it has a column_group, but is no table"
    numbers = entry.row_type.facts.numbers
    if len(entry.shape) != 2 or entry.dtype != numbers:
        return f"it has {entry.row_type} rows, shape {entry.shape} and {entry.dtype}: expected (rows, dim) of {numbers}"
    table = name.removeprefix("model/").rpartition(".")[2]
    rows, dim = entry.shape
    try:
        Table(name=table, rows=rows, dim=dim, row_type=entry.row_type, column_group=entry.column_group)
    except SpecError as error:
        return str(error)
    return None


def find_coverage_fault(entry: TensorEntry, chunks: Sequence[TensorChunk]) -> str | None:
    """The first elements in no chunk or in two; None if the chunks cover the tensor exactly once.

    The top-left and bottom-right corners of a rectangle count 1, the other two -1. The counts of all chunks equal those
    of the whole tensor if and only if the chunks cover it exactly once. It takes O(n log n) for n chunks.
    """
    corners: Counter[Span] = Counter()
    whole = (-1, (0, entry.rows), (0, entry.columns))
    for sign, rows, cols in (whole, *((1, chunk.rows, entry.chunk_cols(chunk)) for chunk in chunks)):
        corners[rows[0], cols[0]] += sign
        corners[rows[0], cols[1]] -= sign
        corners[rows[1], cols[0]] -= sign
        corners[rows[1], cols[1]] += sign
    unbalanced = sorted(corner for corner, count in corners.items() if count)
    if not unbalanced:
        return None
    (row, col), (_, col_end) = unbalanced[:2]  # the sign of the first corner's count: covered twice, or not at all
    row_end = min(r for r, c in unbalanced if r > row and c < col_end)
    if not (0 <= row < entry.rows and 0 <= col < entry.columns):
        return f"{entry.describe((row, row_end), (col, col_end))} are outside of its shape {str(entry.shape)[:80]}"
    where = entry.describe((row, min(row_end, entry.rows)), (col, min(col_end, entry.columns)))
    return f"{where} are in {'two chunks' if corners[row, col] > 0 else 'no chunk'}"


def split_rows(rows: Sequence[Span]) -> Iterable[Span]:
    """The union of spans of rows, split at every begin and end of a span."""
    depth, change = 0, Counter[int]()
    for begin, end in rows:
        change[begin] += 1
        change[end] -= 1
    for begin, end in pairwise(sorted(change)):
        depth += change[begin]
        if depth:
            yield begin, end
