"""A local folder as Storage: an object is a file, which is synced to the disk before it gets its name."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, final

from rowwise.base.errors import StorageError
from rowwise.base.inside import fault_of_name
from rowwise.base.storage.interface import MissingObjectError, ObjectExistsError, Pieces, SameObject, StoredObject
from rowwise.base.textfile import open_regular, sync, write_new

PART = ".part"  # suffix of incomplete files


@final
class LocalStorage:
    """The files of a folder, which need not exist yet; links are not followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def url(self) -> str:
        return str(self.folder)

    def read(self, name: str, begin: int = 0, end: int | None = None, same: SameObject | None = None) -> memoryview:
        with self._open(name) as file:
            file.seek(begin)
            return memoryview(file.read(-1 if end is None else max(0, end - begin)))

    def stat(self, name: str) -> StoredObject:
        with self._open(name) as file:
            status = os.fstat(file.fileno())
            return StoredObject(name, status.st_size, status.st_mtime)

    def write(self, name: str, pieces: Pieces, size_bytes: int) -> None:
        path = self._path(name)
        with _errors_of(path), _unfinished(path) as unfinished:
            count = 0
            with unfinished.open("xb") as file:
                for piece in pieces():
                    count += file.write(piece)
                check_size(path, count, size_bytes)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
            sync(path.parent)

    def create(self, name: str, content: bytes) -> None:
        path = self._path(name)
        with _errors_of(path), _unfinished(path) as unfinished:
            write_new(unfinished, content)
            sync(unfinished)
            try:
                os.link(unfinished, path)  # raises if it exists, which a rename does not
            except FileExistsError:
                if self.read(name) != content:
                    raise ObjectExistsError(f"{path} exists, with another content", "another place") from None
            sync(path.parent)

    def list(self, prefix: str) -> list[StoredObject]:
        top = self._path(prefix.rstrip("/")) if prefix else self.folder
        objects: list[StoredObject] = []
        for folder, _, files in os.walk(top):
            for name in files:
                path = Path(folder) / name
                if name.endswith(PART) or path.is_symlink():
                    continue
                with suppress(FileNotFoundError):  # removed in the meantime
                    status = path.stat()
                    relative_name = path.relative_to(self.folder).as_posix()
                    objects.append(StoredObject(relative_name, status.st_size, status.st_mtime))
        return sorted(objects)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with _errors_of(path):
            path.unlink(missing_ok=True)

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        path = self._path(name)
        with _errors_of(path), open_regular(path, links=False) as file:
            yield file

    def _path(self, name: str) -> Path:
        for component in name.split("/"):
            fault = fault_of_name(component)
            if fault:
                raise StorageError(f"{self.folder}: the name {name[:200]!r} is not used: {fault}", "another name")
        return self.folder / name


def check_size(place: object, count: int, size_bytes: int) -> None:
    if count != size_bytes:
        raise StorageError(
            f"{place} was not written: its source has {count:,} bytes", f"{size_bytes:,}", hint="try again"
        )


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A free path beside `path`; its file is removed at the end, unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        yield unfinished
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise MissingObjectError(f"{path}: no such file", "another name") from None
    except OSError as error:
        if error.strerror is None:  # a RowwiseError, which has a message
            raise
        raise StorageError(f"{path}: {error.strerror}", "a folder that can be read and written") from error
