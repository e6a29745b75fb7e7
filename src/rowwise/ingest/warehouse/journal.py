"""What is done of a conversion, so that the same command goes on after a kill at any point.

[Note: going on] The first line of the journal is what was asked for, the next what was found out before writing, then
one line a file. A line is written after its file is there whole, and says with which row the next file begins; so a
kill costs at most one file's work, and what was written twice is the same. A last line that is torn is not there.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import msgspec

from rowwise.errors import DataError
from rowwise.ingest.warehouse.layout import Key, Layout
from rowwise.spec import Value

FOLDER = "_rowwise"


class Asked(Value, frozen=True):
    """What a conversion is of."""

    version: int
    source: str  # digest
    layout: Layout


class Found(Value, frozen=True):
    """What was found out before the first row was written."""

    keys: dict[str, tuple[Key, ...]]
    popularity: dict[str, float]


class Part(Value, frozen=True):
    """A file, and where the next one begins."""

    path: str
    rows: int
    bytes: int
    groups: int
    unit: int  # of the next row
    row: int  # of that unit


class Manifest(Value, frozen=True):
    """A warehouse that is whole."""

    asked: Asked
    found: Found
    columns: tuple[str, ...]
    parts: tuple[Part, ...]


@final
class Journal:
    """The notes of a warehouse, in a folder inside it that readers skip."""

    def __init__(self, dest: Path) -> None:
        """Nothing is read or written yet."""
        self.place = dest / FOLDER
        self._dest = dest
        self._path, self._manifest = self.place / "journal.jsonl", self.place / "warehouse.json"
        self.found: Found | None = None
        self.parts: list[Part] = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else works on it."""
        if self._dest.exists() and not self.place.exists() and (not self._dest.is_dir() or any(self._dest.iterdir())):
            raise DataError(f"{self._dest}: is there already, and no warehouse: want a new folder, or an empty one")
        self.place.mkdir(parents=True, exist_ok=True)
        with (self.place / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DataError(
                    f"{self._dest}: another process is converting into it: wait for it, or stop it"
                ) from None
            yield

    def done(self, asked: Asked) -> Manifest | None:
        """The warehouse, if it is whole."""
        if not self._manifest.exists():
            return None
        manifest = msgspec.json.decode(self._manifest.read_bytes(), type=Manifest)
        self._check(manifest.asked, asked, "holds a warehouse")
        return manifest

    def take_up(self, asked: Asked) -> bool:
        """Begin, or go on with what is there; true for the latter."""
        if not self._path.exists():
            self._replace(self._path, _line(asked))
            return False
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        there = msgspec.json.decode(lines[0], type=Asked)
        if there != asked and len(lines) <= 2 and not (self.place / "spill" / "0.json").exists():
            self._replace(self._path, _line(asked))  # no row was written: a mistake that is put right now
            return False
        self._check(there, asked, "holds an unfinished conversion")
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        self.found = msgspec.json.decode(lines[1], type=Found) if len(lines) > 1 else None
        self.parts = [msgspec.json.decode(line, type=Part) for line in lines[2:]]
        return True

    def note(self, what: Found | Part) -> None:
        """One more line, which a power cut leaves or takes whole."""
        with self._path.open("ab") as file:
            file.write(_line(what))
            file.flush()
            os.fsync(file.fileno())
        if isinstance(what, Found):
            self.found = what
        else:
            self.parts.append(what)

    def finish(self, manifest: Manifest) -> None:
        """The warehouse is whole."""
        self._replace(self._manifest, msgspec.json.format(msgspec.json.encode(manifest)))
        self._path.unlink()

    def _check(self, there: Asked, asked: Asked, what: str) -> None:
        if there == asked:
            return
        changed = [n for n in Layout.__struct_fields__ if getattr(there.layout, n) != getattr(asked.layout, n)]
        made = "of other data, or the data has changed since"
        if there.source == asked.source:
            made = f"made with other options ({', '.join(changed)})"
        out = "give the command of before, or another folder, or delete this one first"
        raise DataError(f"{self._dest}: {what} {made}: {out}")

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def _line(what: Any) -> bytes:
    return msgspec.json.encode(what) + b"\n"
