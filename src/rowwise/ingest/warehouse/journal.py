"""The journal of a conversion, by which the same command continues after a kill at any point.

[Note: going on] The first line of the journal is what was asked for, the next what was found out before writing, then
one line a file. A line is written after its file is there whole, and says with which row the next file begins; so a
kill costs at most one file's work, and what was written twice is the same. A last line that is torn is not there.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, final

import msgspec

from rowwise.errors import DataError
from rowwise.ingest.warehouse.layout import Key, WarehouseLayout
from rowwise.inside import fault_of_name, has_no_link
from rowwise.spec import Value
from rowwise.textfile import append, decode_json, open_regular, read_bytes, refuse_links

FOLDER = "_rowwise"
LONGEST_NAME = 255
ANEW = "delete the folder and convert again"
T = TypeVar("T")


class ConversionRequest(Value, frozen=True):
    """The source and layout of a conversion."""

    version: int
    source: str  # digest
    layout: WarehouseLayout


class SourceSurvey(Value, frozen=True):
    """Sizes and popularity of the source's columns, taken before the first row is written."""

    keys: dict[str, tuple[Key, ...]]
    popularity: dict[str, float]


class WarehouseFile(Value, frozen=True):
    """A file, and where the next one begins."""

    path: str
    rows: int
    bytes: int
    groups: int
    unit: int  # of the next row
    row: int  # of that unit


class WarehouseManifest(Value, frozen=True):
    """A warehouse that is whole."""

    asked: ConversionRequest
    found: SourceSurvey
    columns: tuple[str, ...]
    parts: tuple[WarehouseFile, ...]


@final
class Journal:
    """The notes of a warehouse, in a folder inside it that readers skip."""

    def __init__(self, dest: Path) -> None:
        self.place = dest / FOLDER
        self._dest = dest
        self._path, self._manifest = self.place / "journal.jsonl", self.place / "warehouse.json"
        self.found: SourceSurvey | None = None
        self.parts: list[WarehouseFile] = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else works on it."""
        if self._dest.exists() and not self.place.exists() and (not self._dest.is_dir() or any(self._dest.iterdir())):
            raise DataError(f"{self._dest}: exists and is not a warehouse: want a new folder, or an empty one")
        self.place.mkdir(parents=True, exist_ok=True)
        refuse_links(self._dest)
        with open_regular(self.place / "lock", "a+b", links=False) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DataError(
                    f"{self._dest}: another process is converting into it: wait for it, or stop it"
                ) from None
            yield

    def done(self, asked: ConversionRequest) -> WarehouseManifest | None:
        """The warehouse, if it is whole."""
        if not self._manifest.exists():
            return None
        manifest = _decode_records(read_bytes(self._manifest), WarehouseManifest, str(self._manifest))
        self._check(manifest.asked, asked, "holds a warehouse")
        return manifest

    def take_up(self, asked: ConversionRequest) -> bool:
        """Begin, or continue an unfinished conversion; returns whether it continues."""
        if not self._path.exists():
            self._replace(self._path, _line(asked))
            return False
        data = read_bytes(self._path)
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        there = _decode_records(lines[0] if lines else b"", ConversionRequest, f"{self._path}, line 1")
        if there != asked and len(lines) <= 2 and not (self.place / "spill" / "0.json").exists():
            self._replace(self._path, _line(asked))  # no row was written: a mistake that is put right now
            return False
        self._check(there, asked, "holds an unfinished conversion")
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        self.found = _decode_records(lines[1], SourceSurvey, f"{self._path}, line 2") if len(lines) > 1 else None
        self.parts = [
            _decode_records(line, WarehouseFile, f"{self._path}, line {k}") for k, line in enumerate(lines[2:], start=3)
        ]
        for part in self.parts:
            self._check_part(part)
        return True

    def note(self, what: SourceSurvey | WarehouseFile) -> None:
        """One more line, which a power cut leaves or takes whole."""
        append(self._path, _line(what), sync=True)
        if isinstance(what, SourceSurvey):
            self.found = what
        else:
            self.parts.append(what)

    def finish(self, manifest: WarehouseManifest) -> None:
        """The warehouse is whole."""
        self._replace(self._manifest, msgspec.json.format(msgspec.json.encode(manifest)))
        self._path.unlink()

    def _check(self, there: ConversionRequest, asked: ConversionRequest, what: str) -> None:
        if there == asked:
            return
        changed = [n for n in WarehouseLayout.__struct_fields__ if getattr(there.layout, n) != getattr(asked.layout, n)]
        made = "of other data, or the data has changed since"
        if there.source == asked.source:
            made = f"made with other options ({', '.join(changed)})"
        out = "give the command of before, or another folder, or delete this one first"
        raise DataError(f"{self._dest}: {what} {made}: {out}")

    def _check_part(self, part: WarehouseFile) -> None:
        """Raise unless the recorded file exists with the recorded size."""
        path = self._dest / part.path
        plain = not any(fault_of_name(name, LONGEST_NAME) for name in part.path.split("/"))
        inside = plain and path.is_file() and has_no_link(self._dest, part.path)
        if not inside or path.stat().st_size != part.bytes or min(part.unit, part.row, part.rows, part.groups) < 0:
            raise DataError(f"{self._path}: {part.path[:200]!r} is missing or was changed: {ANEW}")

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def _decode_records(line: bytes, kind: type[T], place: str) -> T:
    try:
        return decode_json(line, kind)
    except msgspec.DecodeError as error:
        raise DataError(f"{place}: not a note of a conversion: {error}: {ANEW}") from None


def _line(what: Any) -> bytes:
    return msgspec.json.encode(what) + b"\n"
