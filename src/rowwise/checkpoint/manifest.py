"""What a checkpoint holds: named tensors in pieces, each in a file with a checksum, and plain data beside them.

Its own file because it is all that a reader of another plan, or of another program, has to know. A tensor is cut
along its first dimension only where it is large; who needs some rows reads the pieces that overlap them. Gives up:
nothing is compressed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rowwise.errors import CheckpointError
from rowwise.spec import Value

FORMAT = 1
NAME = "manifest.json"


class Piece(Value, frozen=True):
    """Rows [begin, end) of a tensor, under a key of a safetensors file."""

    begin: int
    end: int
    file: str
    key: str
    crc32: int  # of the bytes of the piece


class Entry(Value, frozen=True):
    """One tensor; its pieces cover its rows in order. A tensor without dimensions is one row."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Manifest(Value, frozen=True):
    """All of a checkpoint."""

    format: int
    tensors: dict[str, Entry]
    data: dict[str, Any]  # numbers, names and lists: whatever JSON can hold

    def files(self) -> Iterator[str]:
        """The files that pieces are in, each once."""
        return iter(dict.fromkeys(piece.file for entry in self.tensors.values() for piece in entry.pieces))

    def to_json(self) -> bytes:
        """As it is saved."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check the manifest of a checkpoint."""
        path = folder / NAME
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {NAME}") from None
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path} is damaged: {error}; use another checkpoint") from None
        if found.format != FORMAT:
            raise CheckpointError(f"{path} has format {found.format}; this rowwise reads format {FORMAT}")
        for name, entry in found.tensors.items():
            _check_cover(path, name, entry)
        return found


def _check_cover(path: Path, name: str, entry: Entry) -> None:
    rows = entry.shape[0] if entry.shape else 1
    at = 0
    for piece in entry.pieces:
        if piece.begin != at or piece.end < piece.begin:
            raise CheckpointError(f"{path}: tensor {name!r}: a piece begins at row {piece.begin}, want {at}")
        at = piece.end
    if at != rows:
        raise CheckpointError(f"{path}: tensor {name!r}: pieces end at row {at}, want {rows}")
