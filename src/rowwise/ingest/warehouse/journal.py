"""A write-ahead journal of a conversion, from which the same command resumes after a kill at any point.

[Note: going on] The first line of the journal is the request, the second the survey of the source, followed by one line
per file. A file's line is appended once the file is complete, and has the position of the next file's first row. So a
kill loses at most the work on one file, and rewriting a file gives the same bytes. A torn last line is dropped.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

import msgspec

from rowwise.base.errors import DataError
from rowwise.base.inside import fault_of_name, has_no_link
from rowwise.base.storage.folder import StorageFolder, read_file, read_pieces
from rowwise.base.storage.interface import ObjectExistsError
from rowwise.base.textfile import MAX_BYTES, append, decode_json, open_regular, read_bytes, refuse_links, sync
from rowwise.ingest.warehouse.layout import Key, WarehouseLayout
from rowwise.tables.spec import Value

FOLDER = "_rowwise"
LONGEST_NAME = 255
ANEW = "delete the folder and convert the data again"
T = TypeVar("T")


class ConversionRequest(Value, frozen=True):
    """The source and layout of a conversion."""

    version: int
    source: str  # digest
    layout: WarehouseLayout


class SourceSurvey(Value, frozen=True):
    """Map keys and column popularity of the source, determined before the first row is written."""

    keys: dict[str, tuple[Key, ...]]
    popularity: dict[str, float]


class WarehouseFile(Value, frozen=True):
    """A finished file, and the position of the next file's first row."""

    path: str
    rows: int
    bytes: int
    groups: int
    unit: int  # of the next row: a split of the source, or an index of `Spill.ranges()`
    row: int  # of the next row, in that unit


class WarehouseManifest(Value, frozen=True):
    """The contents of a finished warehouse."""

    asked: ConversionRequest
    found: SourceSurvey
    columns: tuple[str, ...]
    parts: tuple[WarehouseFile, ...]


@final
class StoredWarehouse:
    """A warehouse in an object store: each file is uploaded once it is complete, and the manifest last.

    The journal is an object beside the files, from which the same command resumes after a kill. While it exists,
    readers refuse the URL. Sorted runs are in a temporary folder, and are made again after a kill.
    """

    def __init__(self, place: StorageFolder) -> None:
        self.place = place
        self.sizes: dict[str, int] = {}  # object sizes at the start of the conversion

    def fetch(self, folder: Path) -> None:
        """Download an earlier process's journal into a folder; raises if the URL has objects but no warehouse."""
        self.sizes = {name: info.size_bytes for name, info in self.place.relative_names().items()}
        notes = [name for name in self.sizes if name.startswith(f"{folder.name}/")]
        if self.sizes and not notes:
            raise DataError(f"{self.place}: has objects but is not a warehouse", "a new URL")
        for name in notes:
            short = name.removeprefix(f"{folder.name}/")
            if "/" not in short:
                (folder / short).write_bytes(read_file(self.place / folder.name, short, MAX_BYTES))

    def begin(self, name: str, content: bytes) -> None:
        """Create the journal atomically; raises if another process has."""
        try:
            self.place.storage.create(self.place.inside(name), content)
        except ObjectExistsError:
            raise DataError(f"{self.place}: another process converts into it", hint="wait until it ends") from None

    def send(self, file: Path, name: str) -> None:
        size_bytes = file.stat().st_size
        pieces = partial(read_pieces, file.parent, file.name, size_bytes)
        self.place.storage.write(self.place.inside(name), pieces, size_bytes)

    def delete(self, name: str) -> None:
        self.place.storage.delete(self.place.inside(name))


@final
class Journal:
    """The journal and manifest of a warehouse, in a subfolder that readers skip.

    Args:
        dest: the folder of the warehouse, or the staging folder of one in an object store.
        store: the warehouse in an object store.
    """

    def __init__(self, dest: Path, store: StoredWarehouse | None = None) -> None:
        self.folder = dest / FOLDER
        self._dest, self._store = dest, store
        self._display_name = str(dest if store is None else store.place)
        self._path, self._manifest = self.folder / "journal.jsonl", self.folder / "warehouse.json"
        self.survey: SourceSurvey | None = None
        self.parts: list[WarehouseFile] = []

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other conversions; fails if it is locked."""
        if self._dest.exists() and not self.folder.exists() and (not self._dest.is_dir() or any(self._dest.iterdir())):
            raise DataError(f"{self._dest}: exists and is not a warehouse", "a new folder, or an empty one")
        self.folder.mkdir(parents=True, exist_ok=True)
        refuse_links(self._dest)
        with open_regular(self.folder / "lock", "a+b", links=False) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DataError(f"{self._dest}: another process converts into it", hint="wait until it ends") from None
            if self._store is not None:
                self._store.fetch(self.folder)
            yield

    def read_manifest(self, request: ConversionRequest) -> WarehouseManifest | None:
        """The manifest of a finished warehouse, checked against the request; None if unfinished."""
        if not self._manifest.exists():
            return None
        manifest = _decode_records(read_bytes(self._manifest), WarehouseManifest, self._name(self._manifest))
        self._check(manifest.asked, request, "holds a warehouse")
        return manifest

    def begin_or_resume(self, request: ConversionRequest) -> bool:
        """Begin a journal with the request, or load that of an unfinished conversion; returns whether it resumes."""
        if not self._path.exists():
            if self._store is not None:
                self._store.begin(f"{FOLDER}/{self._path.name}", _line(request))
            self._replace(self._path, _line(request))
            return False
        data, name = read_bytes(self._path), self._name(self._path)
        complete = data[: data.rfind(b"\n") + 1]
        lines = complete.splitlines()
        previous = _decode_records(lines[0] if lines else b"", ConversionRequest, f"{name}, line 1")
        if previous != request and len(lines) <= 2 and not (self.folder / "spill" / "0.json").exists():
            self._replace(self._path, _line(request))  # no row was written yet: allow a corrected option
            self._send(self._path)
            return False
        self._check(previous, request, "holds an unfinished conversion")
        if len(complete) < len(data):
            os.truncate(self._path, len(complete))
        self.survey = _decode_records(lines[1], SourceSurvey, f"{name}, line 2") if len(lines) > 1 else None
        self.parts = [
            _decode_records(line, WarehouseFile, f"{name}, line {k}") for k, line in enumerate(lines[2:], start=3)
        ]
        for part in self.parts:
            self._check_part(part)
        return True

    def append(self, entry: SourceSurvey | WarehouseFile) -> None:
        """Append a line durably (fsync)."""
        append(self._path, _line(entry), sync=True)
        self._send(self._path)
        if isinstance(entry, SourceSurvey):
            self.survey = entry
        else:
            self.parts.append(entry)

    def finish(self, manifest: WarehouseManifest) -> None:
        """Write the manifest, then remove the journal."""
        self._replace(self._manifest, msgspec.json.format(msgspec.json.encode(manifest)))
        self._send(self._manifest)
        self.clean()

    def clean(self) -> None:
        """Remove the journal of a finished warehouse."""
        if self._store is not None:
            self._store.delete(f"{FOLDER}/{self._path.name}")
        self._path.unlink(missing_ok=True)

    def _send(self, path: Path) -> None:
        if self._store is not None:
            self._store.send(path, f"{FOLDER}/{path.name}")

    def _name(self, path: Path) -> str:
        """The name of a file in messages."""
        return f"{self._display_name}/{FOLDER}/{path.name}"

    def _check(self, previous: ConversionRequest, request: ConversionRequest, what: str) -> None:
        if previous == request:
            return
        fields = WarehouseLayout.__struct_fields__
        changed = [name for name in fields if getattr(previous.layout, name) != getattr(request.layout, name)]
        difference = "of other data, or the data has changed since"
        if previous.source == request.source:
            difference = f"made with other options ({', '.join(changed)})"
        raise DataError(
            f"{self._display_name}: {what} {difference}",
            hint="run the same command as before, choose another folder, or delete this one first",
        )

    def _check_part(self, part: WarehouseFile) -> None:
        """Refuse a file that is missing, changed or outside the warehouse: the journal is untrusted input."""
        path = self._dest / part.path
        plain = not any(fault_of_name(name, LONGEST_NAME) for name in part.path.split("/"))
        if self._store is not None:
            same = plain and self._store.sizes.get(part.path) == part.bytes
        else:
            inside = plain and path.is_file() and has_no_link(self._dest, part.path)
            same = inside and path.stat().st_size == part.bytes
        if not same or min(part.unit, part.row, part.rows, part.groups) < 0:
            raise DataError(f"{self._name(self._path)}: {part.path[:200]!r} is missing or was changed", hint=ANEW)

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        sync(temporary)
        os.replace(temporary, path)


def _decode_records(line: bytes, kind: type[T], place: str) -> T:
    try:
        return decode_json(line, kind)
    except msgspec.DecodeError as error:
        raise DataError(f"{place}: not an entry of a conversion's journal: {error}", hint=ANEW) from None


def _line(entry: Any) -> bytes:
    return msgspec.json.encode(entry) + b"\n"
