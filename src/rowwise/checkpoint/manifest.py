"""What a checkpoint holds: named tensors in pieces, each in a file with a checksum, and plain data beside them.

Its own file because it is all that a reader of another plan, or of another program, has to know. Gives up: nothing is
compressed. Changed bytes are found wherever they are: of the manifest and of the head of each file there is a checksum,
too.

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
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rowwise.errors import CheckpointError
from rowwise.spec import Bits, RowType, Value, quantised_bytes, row_bytes

FORMAT = 2
NAME = "manifest.json"
BLANK = b'"crc32": "00000000"'  # stands first in a manifest, and is what its own checksum is taken of
MOST_DIMS = 64  # of a tensor
NUMBERS = {  # kinds of them, as torch calls them, and their bytes
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
Span = tuple[int, int]  # from, to (exclusive)


class Ids(Value, frozen=True):
    """Which rows a piece has, if not all from the first to the last: their numbers, ascending, in the same file."""

    count: int
    key: str
    crc32: int


class Piece(Value, frozen=True, omit_defaults=True):
    """Some rows and columns of a tensor, under a key of a safetensors file."""

    rows: Span
    cols: Span | None  # None: all
    file: str
    key: str
    crc32: int  # of the bytes of the piece
    bits: Bits | None = None  # 8 or 4 for each weight, instead of what the row type takes
    ids: Ids | None = None

    @property
    def count(self) -> int:
        """How many rows it has."""
        return self.rows[1] - self.rows[0] if self.ids is None else self.ids.count


class Entry(Value, frozen=True):
    """One tensor."""

    dtype: str
    shape: tuple[int, ...]
    row_type: RowType | None = None  # of a table's rows
    column_group: int | None = None  # of int8 rows: columns that share a scale
    pieces: tuple[Piece, ...] = ()

    @property
    def rows(self) -> int:
        """Of the whole tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Likewise."""
        return math.prod(self.shape[1:])

    def width(self, cols: Span) -> int:
        """Of some columns as they are stored, in elements."""
        count = cols[1] - cols[0]
        return row_bytes(RowType.INT8, count, self.column_group or 0) if self.row_type is RowType.INT8 else count

    def width_of(self, piece: Piece) -> int:
        """Of a piece's rows as they are stored in its file, in elements."""
        cols = self.cols_of(piece)
        return self.width(cols) if piece.bits is None else quantised_bytes(cols[1] - cols[0], piece.bits)

    def cols_of(self, piece: Piece) -> Span:
        """The columns of a piece."""
        return piece.cols or (0, self.columns)

    def place(self, rows: Span, cols: Span) -> str:
        """As messages name it."""
        where = f"rows {rows[0]} to {rows[1] - 1}" if self.shape else "the number"
        return where if cols == (0, self.columns) else f"{where}, columns {cols[0]} to {cols[1] - 1}"


class File(Value, frozen=True):
    """A file that pieces are in."""

    size_bytes: int
    head_crc32: int  # of all that stands before the pieces


class Manifest(Value, frozen=True):
    """All of a checkpoint."""

    format: int
    data: dict[str, Any]  # numbers, names and lists: whatever JSON can hold
    files: dict[str, File]
    tensors: dict[str, Entry]
    chain_bytes: tuple[int, ...] = ()  # what was written: by a full checkpoint, then by each increment up to this one

    def to_json(self) -> bytes:
        """As it is saved, with a checksum of everything else in front."""
        body = msgspec.json.format(msgspec.json.encode({"crc32": "00000000", **msgspec.structs.asdict(self)}), indent=1)
        return body.replace(BLANK, BLANK.replace(b"00000000", f"{zlib.crc32(body):08x}".encode()), 1)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check the manifest of a checkpoint."""
        path = folder / NAME
        try:
            content = path.read_bytes()
            plain = msgspec.json.decode(content)
            if isinstance(plain, dict) and plain.get("format", FORMAT) != FORMAT:
                raise CheckpointError(f"{path} has format {plain['format']}; this rowwise reads format {FORMAT}")
            crc32 = plain.pop("crc32", None) if isinstance(plain, dict) else None
            found = msgspec.convert(plain, cls)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {NAME}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; use another checkpoint") from None
        found.check(str(path))
        blank = content.replace(f'"crc32": "{crc32}"'.encode(), BLANK, 1)
        if crc32 != f"{zlib.crc32(blank):08x}":
            raise CheckpointError(f"{path} is damaged: it does not match its checksum; use another checkpoint")
        return found

    def check(self, where: str) -> None:
        """Raise unless each place of each tensor is in one of its pieces, and each piece in a file that is listed."""
        for name, entry in self.tensors.items():
            wrong = find_wrong_cover(entry, [piece for piece in entry.pieces if piece.ids is None])
            wrong = wrong or _find_outside(entry, [piece for piece in entry.pieces if piece.ids is not None])
            wrong = wrong or next((f"{p.file} is not listed" for p in entry.pieces if p.file not in self.files), None)
            if wrong:
                raise CheckpointError(f"{where}: tensor {name!r}: {wrong}")


def find_wrong_cover(entry: Entry, pieces: Sequence[Piece]) -> str | None:
    """The first place that is in none of the pieces, or in two."""
    at = 0
    for begin, end, inside in bands([piece.rows for piece in pieces]):
        if begin > at:
            return f"{entry.place((at, begin), (0, entry.columns))} are in no piece"
        column, both = 0, (begin, end)
        for cols in sorted(entry.cols_of(pieces[k]) for k in inside):
            if cols[0] < column:
                return f"{entry.place(both, (cols[0], min(column, cols[1])))} are in two pieces"
            if cols[0] > column:
                break
            column = cols[1]
        if column > entry.columns:
            return f"columns of {entry.place(both, (0, entry.columns))} end at {column}, want {entry.columns}"
        if column < entry.columns:
            after = min((c for k in inside if (c := entry.cols_of(pieces[k])[0]) > column), default=entry.columns)
            return f"{entry.place(both, (column, after))} are in no piece"
        at = end
    if at == entry.rows:
        return None
    return f"pieces end at row {at}, want {entry.rows}"


def _find_outside(entry: Entry, pieces: Sequence[Piece]) -> str | None:
    """The first place that the tensor does not have."""
    for piece in pieces:
        (row, rows), (col, cols) = piece.rows, entry.cols_of(piece)
        if not (0 <= row <= rows <= entry.rows and 0 <= col <= cols <= entry.columns):
            return f"{entry.place(piece.rows, (col, cols))} are not there at all"
    return None


def bands(rows: Sequence[Span]) -> Iterable[tuple[int, int, list[int]]]:
    """Runs of rows between two cuts, and which of the given runs they are in; runs in none are left out."""
    starts = sorted(range(len(rows)), key=lambda k: rows[k])
    inside: list[int] = []
    cuts, next_start = sorted({cut for run in rows if run[0] < run[1] for cut in run}), 0
    for begin, end in pairwise(cuts):
        inside = [k for k in inside if rows[k][1] > begin]
        while next_start < len(starts) and rows[starts[next_start]][0] <= begin:
            inside += [starts[next_start]] if rows[starts[next_start]][1] > begin else []
            next_start += 1
        if inside:
            yield begin, end, inside
