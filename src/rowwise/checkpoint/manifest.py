"""The manifest of a checkpoint: named tensors as pieces, each in a file with a checksum, and plain data.

Known limits: nothing is compressed. Changed bytes are found wherever they are: of the manifest and of the head of each
file there is a checksum, too.

[Note: Pieces]
A tensor is whole and has the same name whatever the plan; its pieces are rectangles of rows and columns, written by
whichever rank held them. A tensor of any shape is (rows, columns) here: its first dimension, and all others in one; a
single number is one row of one column. Rows of a table are (rows, dim) whatever their row type, and a piece has its
columns as a tile of these columns stores them: of int8 the scales of their groups, then their codes. A table's rows may
be rounded to fewer bits: 8 are int8 rows of one group, 4 those of [Note: Four bits] in `ops/_cpp/quantise.h`. Pieces
without `ids` cover each place once. One with `ids` has some rows, which changed since an earlier checkpoint: pieces are
applied in the order in which they are listed.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rowwise.errors import CheckpointError, SpecError
from rowwise.inside import fault_of_name
from rowwise.spec import Bits, RowType, Table, Value, quantised_bytes, row_bytes
from rowwise.textfile import printable, read_bytes

FORMAT = 2
NAME = "manifest.json"
MOST_BYTES = 1 << 30  # of a manifest
LONGEST_NAME = 1000  # of a tensor, between two slashes
MOST_ROWS = 1 << 48  # in each dimension
BLANK = b'"crc32": "00000000"'  # stands first in a manifest, and is what its own checksum is taken of
MOST_DIMS = 64  # of a tensor
NUMBERS = {  # kinds of them, as torch calls them, and their bytes
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
Span = tuple[int, int]  # from, to (exclusive)


class PieceRows(Value, frozen=True):
    """The row numbers of a chunk that does not hold a contiguous range: ascending, in the same file."""

    count: int
    key: str
    crc32: int


class TensorChunk(Value, frozen=True, omit_defaults=True):
    """A rectangle of a tensor, under a key of a safetensors file."""

    rows: Span
    cols: Span | None  # None: all
    file: str
    key: str
    crc32: int  # of the bytes of the piece
    bits: Bits | None = None  # 8 or 4 for each weight, instead of what the row type takes
    ids: PieceRows | None = None

    @property
    def count(self) -> int:
        return self.rows[1] - self.rows[0] if self.ids is None else self.ids.count


class TensorEntry(Value, frozen=True):
    """The type, shape and chunks of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    row_type: RowType | None = None  # of a table's rows
    column_group: int | None = None  # of int8 rows: columns that share a scale
    pieces: tuple[TensorChunk, ...] = ()

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def scaled(self) -> bool:
        """Whether it has rows whose columns share scales."""
        return self.row_type is not None and self.row_type.facts.scaled

    def width(self, cols: Span) -> int:
        count = cols[1] - cols[0]
        return row_bytes(self.row_type, count, self.column_group or 0) if self.row_type and self.scaled else count

    def width_of(self, piece: TensorChunk) -> int:
        """Elements of a piece's row as its file stores it."""
        cols = self.cols_of(piece)
        return self.width(cols) if piece.bits is None else quantised_bytes(cols[1] - cols[0], piece.bits)

    def cols_of(self, piece: TensorChunk) -> Span:
        """The columns of a piece."""
        return piece.cols or (0, self.columns)

    def bytes_of(self, piece: TensorChunk) -> int:
        return piece.count * self.width_of(piece) * (1 if piece.bits else NUMBERS[self.dtype])

    def wrong(self, piece: TensorChunk) -> str | None:
        """Why the tensor can have no such piece."""
        (row, rows), (col, cols) = piece.rows, self.cols_of(piece)
        what = f"{self.place(piece.rows, (col, cols))}"
        if not (0 <= row <= rows <= self.rows and 0 <= col <= cols <= self.columns):
            return f"{what} are not there at all"
        if self.row_type is not None:
            block = (self.column_group or self.columns) if self.scaled else 1
            if col == cols or col % block or (cols % block and cols != self.columns):
                return f"{what} are cut inside of a group of columns"
        elif piece.bits is not None:
            return f"{what} are rounded to {piece.bits} bits, and no rows of a table"
        if piece.ids is not None and not (self.shape and 0 <= piece.ids.count <= rows - row):
            return f"{what} are {piece.ids.count} of {rows - row} rows"
        return None

    def place(self, rows: Span, cols: Span) -> str:
        where = f"rows {rows[0]} to {rows[1] - 1}" if self.shape else "the number"
        return where if cols == (0, self.columns) else f"{where}, columns {cols[0]} to {cols[1] - 1}"


class CheckpointFile(Value, frozen=True):
    """A file that pieces are in."""

    size_bytes: int
    head_crc32: int  # of all that stands before the pieces


class CheckpointManifest(Value, frozen=True):
    """The manifest of a checkpoint: files, tensors and chunks."""

    format: int
    data: dict[str, Any]  # numbers, names and lists: whatever JSON can hold
    files: dict[str, CheckpointFile]
    tensors: dict[str, TensorEntry]
    chain_bytes: tuple[int, ...] = ()  # what was written: by a full checkpoint, then by each increment up to this one

    def to_json(self) -> bytes:
        """The manifest as JSON, with a checksum of the rest in front."""
        body = msgspec.json.format(msgspec.json.encode({"crc32": "00000000", **msgspec.structs.asdict(self)}), indent=1)
        return body.replace(BLANK, BLANK.replace(b"00000000", f"{zlib.crc32(body):08x}".encode()), 1)

    @classmethod
    def read(cls, folder: Path) -> "CheckpointManifest":
        """Read and check the manifest of a checkpoint."""
        path = folder / NAME
        try:
            content = read_bytes(path, MOST_BYTES, links=False)
            plain = msgspec.json.decode(content)
            _check_format(path, plain)
            crc32 = plain.pop("crc32", None) if isinstance(plain, dict) else None
            found = msgspec.convert(plain, cls)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {NAME}") from None
        except (ValueError, RecursionError) as error:  # the former are also those of msgspec
            why = printable(str(error)).replace("\n", " ")[:300]
            raise CheckpointError(f"{path} is damaged: {why}; use another checkpoint") from None
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        found.check(str(path))
        blank = content.replace(f'"crc32": "{crc32}"'.encode(), BLANK, 1)
        if crc32 != f"{zlib.crc32(blank):08x}":
            raise CheckpointError(f"{path} is damaged: it does not match its checksum; use another checkpoint")
        return found

    def check(self, where: str) -> None:
        """Raise unless names are plain, each place of each tensor is in one of its pieces, and each piece in a file."""
        for name in self.files:
            fault = fault_of_name(name)
            if fault:
                raise CheckpointError(f"{where}: file {name[:80]!r} is not used: {fault}")
        used: dict[str, int] = dict.fromkeys(self.files, 0)
        keys: set[tuple[str, str]] = set()
        for name, entry in self.tensors.items():
            wrong = find_wrong_entry(name, entry) or next(filter(None, map(entry.wrong, entry.pieces)), None)
            wrong = wrong or next((f"{p.file!r} is not listed" for p in entry.pieces if p.file not in self.files), None)
            wrong = wrong or find_wrong_cover(entry, [piece for piece in entry.pieces if piece.ids is None])
            if wrong:
                raise CheckpointError(f"{where}: tensor {name[:200]!r}: {wrong}")
            for piece in entry.pieces:
                used[piece.file] += entry.bytes_of(piece)
                keys.add((piece.file, piece.key))
        for name, size_bytes in used.items():
            if size_bytes > self.files[name].size_bytes:
                got = f"{self.files[name].size_bytes} bytes, and pieces of {size_bytes}"
                raise CheckpointError(f"{where}: file {name!r} has {got}")
        if len(keys) < sum(len(entry.pieces) for entry in self.tensors.values()):
            raise CheckpointError(f"{where}: two pieces have one key of a file")


def _check_format(path: Path, plain: Any) -> None:
    if isinstance(plain, dict) and plain.get("format", FORMAT) != FORMAT:
        got = repr(plain["format"])[:40]
        raise CheckpointError(f"{path} has format {got}; this rowwise reads format {FORMAT}")


def find_wrong_entry(name: str, entry: TensorEntry) -> str | None:
    """Why there can be no such tensor: its name, its numbers, its shape."""
    fault = next(filter(None, (fault_of_name(part, LONGEST_NAME) for part in name.split("/"))), None)
    if fault:
        return f"its name is not used: {fault}"
    if entry.dtype not in NUMBERS:
        return f"it has numbers of {entry.dtype[:40]!r}: want one of {', '.join(NUMBERS)}"
    if len(entry.shape) > MOST_DIMS or not all(0 <= n < MOST_ROWS for n in entry.shape):
        return f"its shape is {str(entry.shape)[:80]}: want at most {MOST_DIMS} numbers from 0 to 2**48"
    if entry.row_type is None:
        return None if entry.column_group is None else "it has a column_group, and is no table"
    if len(entry.shape) != 2 or entry.dtype != entry.row_type.facts.numbers:
        return f"it has {entry.row_type} rows, shape {entry.shape} and {entry.dtype}"
    table = name.removeprefix("model/").rpartition(".")[2]
    rows, dim = entry.shape
    try:
        Table(name=table, rows=rows, dim=dim, row_type=entry.row_type, column_group=entry.column_group)
    except SpecError as error:
        return str(error)
    return None


def find_wrong_cover(entry: TensorEntry, pieces: Sequence[TensorChunk]) -> str | None:
    """The first place that is in none of the pieces, or in two.

    Of a rectangle the first corner and the one opposite count 1, the other two -1. Where the pieces cover all once,
    these add up to those of the whole tensor, and nowhere else; so the time is that of sorting, whatever they are.
    """
    corners: Counter[Span] = Counter()
    whole = (-1, (0, entry.rows), (0, entry.columns))
    for sign, rows, cols in (whole, *((1, piece.rows, entry.cols_of(piece)) for piece in pieces)):
        corners[rows[0], cols[0]] += sign
        corners[rows[0], cols[1]] -= sign
        corners[rows[1], cols[0]] -= sign
        corners[rows[1], cols[1]] += sign
    odd = sorted(corner for corner, count in corners.items() if count)
    if not odd:
        return None
    (row, col), (_, col_end) = odd[:2]  # how often the first place is there too much is what its corner counts
    row_end = min(r for r, c in odd if r > row and c < col_end)
    if not (0 <= row < entry.rows and 0 <= col < entry.columns):
        return f"{entry.place((row, row_end), (col, col_end))} are not there at all"
    where = entry.place((row, min(row_end, entry.rows)), (col, min(col_end, entry.columns)))
    return f"{where} are in {'two pieces' if corners[row, col] > 0 else 'no piece'}"


def split_rows(rows: Sequence[Span]) -> Iterable[Span]:
    """Runs of rows between two cuts, of those that are in one of the given runs."""
    depth, change = 0, Counter[int]()
    for begin, end in rows:
        change[begin] += 1
        change[end] -= 1
    for begin, end in pairwise(sorted(change)):
        depth += change[begin]
        if depth:
            yield begin, end
