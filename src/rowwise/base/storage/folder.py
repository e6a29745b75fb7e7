"""Names folders of this machine and of object stores alike: a path, or a URL such as s3://bucket/runs/1."""

import errno
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self, final

from rowwise.base.errors import StorageError
from rowwise.base.inside import fault_of_name, has_control, open_inside
from rowwise.base.storage.cloud import CONCURRENCY, SCHEMES, CloudStorage, RANGE_bytes, RetryPolicy
from rowwise.base.storage.interface import MissingObjectError, Piece, SameObject, Storage, StoredObject
from rowwise.base.storage.local import LocalStorage
from rowwise.base.textfile import read_bytes

PIECE_bytes = 4 << 20
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.S)
ONE_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):(?!//)/?(.*)", re.S | re.I)


@dataclass(frozen=True, slots=True)
class StorageFolder:
    """A folder of a Storage: the objects whose names begin with its path and a slash."""

    storage: Storage
    path: str = ""

    @property
    def name(self) -> str:
        return (self.path or self.storage.url).rpartition("/")[2]

    @property
    def parent(self) -> "StorageFolder":
        return StorageFolder(self.storage, self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> "StorageFolder":
        return StorageFolder(self.storage, self.inside(name))

    def inside(self, name: str) -> str:
        """The name in the storage of an object of this folder."""
        return f"{self.path}/{name}" if self.path else name

    def __str__(self) -> str:
        return f"{self.storage.url}/{self.path}" if self.path else self.storage.url

    def relative_names(self) -> dict[str, StoredObject]:
        """The objects of this folder and below, by names relative to it."""
        prefix = f"{self.path}/" if self.path else ""
        return {entry.name.removeprefix(prefix): entry for entry in self.storage.list(prefix)}


Folder = Path | StorageFolder


def parse_folder(text: str, retry: RetryPolicy | None = None) -> Folder:
    """A folder by its path or URL; `retry`: policy of requests to its store."""
    match = URL.fullmatch(text)
    if match is None:
        near_url = ONE_SLASH.fullmatch(text)
        if near_url is not None:
            raise StorageError(
                text[:200], f"{near_url[1].lower()}://{near_url[2][:200]}, or ./{text[:200]} for a folder of that name"
            )
        return Path(text)
    scheme, rest = match[1].lower(), match[2]
    bucket, _, path = rest.partition("/")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise StorageError(f"{scheme}:// is no known kind of object store", f"a path, or a URL of {known}")
    if "@" in bucket or "?" in rest or "#" in rest:  # the message does not repeat what may be a secret
        raise StorageError(
            f"{scheme}://...", "a URL without user, password and query", hint="set credentials in the environment"
        )
    parts = path.strip("/").split("/") if path.strip("/") else []
    if not bucket or has_control(bucket) or any(fault_of_name(part) for part in parts):
        raise StorageError(text[:200], f"a URL such as {scheme}://bucket/folder")
    return StorageFolder(_open_bucket(f"{scheme}://{bucket}", retry), "/".join(parts))


def refuse_url(path: Path, hint: str) -> None:
    """Raise for a path made from a URL (which loses a slash), where a local folder is needed."""
    if ONE_SLASH.fullmatch(str(path)):
        raise StorageError(str(path).replace(":/", "://", 1), "a folder of this machine", hint=hint)


def as_storage(folder: Folder) -> StorageFolder:
    """The folder as a `StorageFolder`."""
    return StorageFolder(LocalStorage(folder)) if isinstance(folder, Path) else folder


@lru_cache(maxsize=16)
def _open_bucket(url: str, retry: RetryPolicy | None) -> CloudStorage:
    return CloudStorage(url, retry)


@final
class RangeReader:
    """Reads a range of an object in order: large targets by concurrent requests, small ones with prefetch."""

    def __init__(self, folder: StorageFolder, name: str, begin: int, end: int) -> None:
        self._read, self._name = partial(folder.storage.read, same=SameObject()), folder.inside(name)
        self._at, self._end = begin, end  # the range that is not requested yet
        self._pool = ThreadPoolExecutor(CONCURRENCY)
        self._ahead: list[Future[memoryview]] = []
        self._current = memoryview(b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def readinto(self, target: memoryview) -> int:
        """Fill the target, or a part of it; 0 at the end of the range or object."""
        if len(target) > RANGE_bytes and not self._current and not self._ahead:
            return self._fill(target)
        while not self._current:
            while self._at < self._end and len(self._ahead) < CONCURRENCY:
                self._ahead.append(self._pool.submit(self._read, self._name, *self._next_span()))
            if not self._ahead:
                return 0
            self._current = self._ahead.pop(0).result()
        count = min(len(target), len(self._current))
        target[:count] = self._current[:count]
        self._current = self._current[count:]
        return count

    def _fill(self, target: memoryview) -> int:
        base, end = self._at, min(self._end, self._at + len(target))
        spans: list[tuple[int, int]] = []
        while self._at < end:
            spans.append(self._next_span(end))

        def fetch(begin: int, end: int) -> int:
            part = self._read(self._name, begin, end)
            target[begin - base : begin - base + len(part)] = part
            return len(part)

        return sum(self._pool.map(fetch, *zip(*spans, strict=True))) if spans else 0

    def _next_span(self, end: int | None = None) -> tuple[int, int]:
        begin = self._at
        self._at = min(begin + RANGE_bytes, self._end if end is None else end)
        return begin, self._at


class OpenRange(Protocol):
    """An open range of a file."""

    def readinto(self, target: memoryview) -> int:
        """Read the next bytes into `target`; returns their number, 0 at the end."""
        ...


@final
class _FileRange:
    """An open file from its current position on."""

    def __init__(self, file: BinaryIO) -> None:
        self._handle = file.fileno()

    def readinto(self, target: memoryview) -> int:
        return os.readv(self._handle, [target])


@contextmanager
def open_range(folder: Folder, name: str, begin: int, end: int) -> Iterator[OpenRange]:
    """Open a range of a file for reading in order; a missing one raises FileNotFoundError in any folder."""
    if isinstance(folder, Path):
        with open_inside(folder, name) as file:
            os.lseek(file.fileno(), begin, os.SEEK_SET)
            yield _FileRange(file)
        return
    with _missing_as_file(folder, name), RangeReader(folder, name, begin, end) as reader:
        yield reader


def read_file(folder: Folder, name: str, max_bytes: int) -> bytes:
    """Read a small file, of at most `max_bytes`."""
    if isinstance(folder, Path):
        return read_bytes(folder / name, max_bytes, links=False)
    with _missing_as_file(folder, name):
        size_bytes = folder.storage.stat(folder.inside(name)).size_bytes
        if size_bytes > max_bytes:
            raise StorageError(f"{folder / name} has {size_bytes:,} bytes", f"at most {max_bytes:,}")
        return bytes(folder.storage.read(folder.inside(name), 0, size_bytes))


def read_range(folder: Folder, name: str, begin: int, end: int) -> bytes:
    """The bytes of a short range; fewer if the file ends before."""
    return b"".join(read_pieces(folder, name, end - begin, begin))


def read_pieces(folder: Folder, name: str, size_bytes: int, begin: int = 0) -> Iterator[Piece]:
    """The `size_bytes` bytes from `begin` on, in order; fewer if the file ends before."""
    left = size_bytes
    with open_range(folder, name, begin, begin + size_bytes) as file:
        while left > 0:
            piece = memoryview(bytearray(min(PIECE_bytes, left)))
            count = file.readinto(piece)
            if not count:
                return
            left -= count
            yield piece[:count]


def size_of_file(folder: Folder, name: str) -> int:
    if isinstance(folder, Path):
        with open_inside(folder, name) as file:
            return os.fstat(file.fileno()).st_size
    with _missing_as_file(folder, name):
        return folder.storage.stat(folder.inside(name)).size_bytes


@contextmanager
def _missing_as_file(folder: StorageFolder, name: str) -> Iterator[None]:
    try:
        yield
    except MissingObjectError:
        raise FileNotFoundError(errno.ENOENT, "no such object", str(folder / name)) from None
