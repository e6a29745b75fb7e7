"""Read-only files on local disks, or in any store that a URL names.

Object stores are read by `storage`, which retries transient failures; other stores, or without its client, by pyarrow
or fsspec. A `FileStore` is pickled as its path; each worker process opens its own connections.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, Protocol, final

import pyarrow as pa
from pyarrow import fs

from rowwise.base.errors import DataError
from rowwise.base.storage.cloud import SCHEMES
from rowwise.base.storage.folder import StorageFolder, parse_folder
from rowwise.base.storage.interface import MissingObjectError, Storage
from rowwise.base.storage.read_cache import CacheFolder, ReadCache, read_cache
from rowwise.ingest.reader import GLOB, find_files
from rowwise.ingest.warehouse.footer import SeekableFile

UNFINISHED = "_rowwise/journal.jsonl"  # exists in a warehouse until `convert` has finished it
FINISH = "run the same `rowwise data convert` command again to finish it"
GONE = "put it back as it was when the splits were made, or start a new run without it"
URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


class OpenFile(Protocol):
    """An open file of any store, read at byte offsets."""

    @property
    def size(self) -> int: ...

    def read_into(self, target: memoryview, at: int) -> int:
        """Fill the target with bytes from offset `at` on; returns the number read, less only at the end of the file."""
        ...

    def close(self) -> None: ...


def is_url(path: object) -> bool:
    """Whether this is a URL, not a local path."""
    return URL.match(str(path)) is not None


@final
class FileStore:
    """The files of a path, a folder, a pattern or a URL of these.

    Args:
        path: the path or URL.
        endings: file name endings, for a folder.
        cache: read cache for objects; None sends every read to the store.
        files: files below the path, if they are known.
        gone: what to do about a file that is gone.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        endings: Sequence[str],
        cache: CacheFolder | None = None,
        *,
        files: tuple[str, ...] | None = None,
        gone: str = GONE,
    ) -> None:
        self._path, self._cache, self._gone = str(path), cache, gone
        if files is None:
            files = self._find(tuple(endings)) if is_url(path) else find_files(self._path, endings)
        self.files = files

    @property
    def root(self) -> str:
        """The path up to its first wildcard: the common prefix of all files."""
        return _fixed_part(self._path)

    def open(self, source: str) -> OpenFile:
        with name_file_in_errors(source, self._gone):
            if not is_url(source):
                return _LocalFile(source)
            return _RemoteFile(self.stream(source)) if self._place is None else self._open_object(source)

    def stream(self, source: str) -> Any:
        """A file object for Arrow's readers."""
        if not is_url(source):
            return pa.OSFile(source)
        if self._place is not None:
            return pa.PythonFile(_ObjectStream(self._open_object(source)), mode="r")
        return self._remote[0].open_input_file(self._inside(source))

    def stamp(self, source: str) -> tuple[int, int]:
        """Size in bytes and modification time, to detect a change."""
        with name_file_in_errors(source, self._gone):
            if not is_url(source):
                status = os.stat(source)
                return status.st_size, status.st_mtime_ns
            if self._place is not None:
                info = self._place.storage.stat(self._name_of(source))
                return info.size_bytes, int(info.modified_s * 1e9)
            info = self._remote[0].get_file_info(self._inside(source))
            return info.size or 0, info.mtime_ns or 0

    def __getstate__(self) -> dict[str, object]:
        return {"_path": self._path, "_cache": self._cache, "_gone": self._gone, "files": self.files}

    @cached_property
    def _place(self) -> StorageFolder | None:
        """The root in an object store, or None if `storage` does not support it."""
        scheme = self._path.partition("://")[0].lower()
        if scheme not in SCHEMES or "?" in self._path or find_spec("obstore") is None:
            return None
        place = parse_folder(self.root.rstrip("/"))
        assert isinstance(place, StorageFolder)
        return place

    def _name_of(self, source: str) -> str:
        """The object name of a file."""
        assert self._place is not None
        return source[len(self._place.storage.url) :].lstrip("/")

    def _open_object(self, source: str) -> "_ObjectFile":
        assert self._place is not None
        cache = None if self._cache is None else read_cache(*self._cache)
        return _ObjectFile(self._place.storage, self._name_of(source), cache)

    @cached_property
    def _remote(self) -> tuple[fs.FileSystem, str]:
        return _connect(self.root)

    def _inside(self, source: str) -> str:
        """The path of a file inside the store."""
        base, rest = self._remote[1], source[len(self.root) :].lstrip("/")
        return f"{base.rstrip('/')}/{rest}" if rest else base

    def _remote_names(self) -> list[str] | str | None:
        """The files below the root, the root itself if it is a file, or None if it does not exist."""
        system, base = self._remote
        info = system.get_file_info(base)
        if info.type == fs.FileType.File:
            return base
        if info.type == fs.FileType.NotFound:
            return None
        skip = len(base.strip("/"))
        inside = system.get_file_info(fs.FileSelector(base, recursive=True))
        return sorted(i.path.strip("/")[skip:].lstrip("/") for i in inside if i.type == fs.FileType.File)

    def _find(self, endings: tuple[str, ...]) -> tuple[str, ...]:
        with name_file_in_errors(self._path):
            names = self._remote_names() if self._place is None else _names_at(self._place)
            if names is None:
                raise DataError(f"{self._path}: no such file or folder", "the URL of a file, a folder or a pattern")
        if isinstance(names, str):
            return (self._path,)
        root = self.root.rstrip("/")
        if UNFINISHED in names:
            raise DataError(f"{self._path}: its conversion is unfinished", hint=FINISH)
        if self._path.rstrip("/") == root:
            named = [n for n in names if n.endswith(endings) and not any(part[0] in "._" for part in n.split("/"))]
            problem = f"no file in it ends with {' or '.join(endings)}: expected at least one"
        else:
            matches = re.compile(_as_regex(self._path[len(self.root) :].lstrip("/")))
            named = [n for n in names if matches.fullmatch(n)]
            problem = "no file matches the pattern: expected at least one"
        if not named:
            raise DataError(f"{self._path}: {problem}")
        return tuple(f"{root}/{n}" for n in named)


def _names_at(place: StorageFolder) -> list[str] | str | None:
    """The files below a place, the place itself if it is a file, or None if it does not exist."""
    names = sorted(place.relative_names())
    if not names and place.path:
        with suppress(MissingObjectError):
            return place.storage.stat(place.path).name
    return names or None


@contextmanager
def name_file_in_errors(name: str, gone: str = GONE) -> Iterator[None]:
    """Turn access errors into a DataError that names the file."""
    try:
        yield
    except (FileNotFoundError, MissingObjectError) as error:
        raise DataError(f"{name}: the file is gone", hint=gone) from error
    except (pa.ArrowException, OSError, ImportError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name}: cannot be reached: {error}", "a path or URL that this user can read") from error


def _connect(url: str) -> tuple[fs.FileSystem, str]:
    """Connect by pyarrow if it knows the scheme, else by fsspec."""
    try:
        return fs.FileSystem.from_uri(url)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        scheme = url.partition("://")[0]
        try:
            import fsspec
        except ImportError:
            raise DataError(
                f"{url}: pyarrow cannot read {scheme}://", hint=f"pip install fsspec, and its package for {scheme}"
            ) from None
        system, path = fsspec.core.url_to_fs(url)
        return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def _fixed_part(path: str) -> str:
    """A path up to the last folder before its first wildcard."""
    lead = URL.match(path)
    skip = lead.end() if lead else 0
    at = next((i for i, letter in enumerate(path) if i >= skip and letter in GLOB), None)
    return path if at is None else path[: path.rfind("/", 0, at) + 1]


def _as_regex(pattern: str) -> str:
    """`*` and `?` match inside one folder, `**/` any number of folders."""
    parts = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*|\?|\[[^\]]+\]|.", pattern)
    return "".join(parts.get(t) or (t.replace("[!", "[^") if len(t) > 2 else re.escape(t)) for t in tokens)


@final
class _LocalFile:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def read_into(self, target: memoryview, at: int) -> int:
        done = 0
        while done < len(target):  # one call reads at most 2 GiB
            count = os.preadv(self._fd, [target[done:]], at + done)
            if not count:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._fd)


@final
class _ObjectFile:
    """An object, read by range requests."""

    def __init__(self, storage: Storage, name: str, cache: ReadCache | None) -> None:
        self._storage, self._cache, self._object = storage, cache, storage.stat(name)
        self.size = self._object.size_bytes

    def read_into(self, target: memoryview, at: int) -> int:
        end = min(at + len(target), self.size)
        fetch = partial(self._storage.read, self._object.name, at, end)
        data = fetch() if self._cache is None else self._cache.read(self._storage.url, self._object, at, end, fetch)
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


@final
class _ObjectStream(SeekableFile):
    """An object as a Python file."""

    def __init__(self, file: _ObjectFile) -> None:
        super().__init__(file.size)
        self._file = file

    def readinto(self, buffer: Any) -> int:
        count = self._file.read_into(memoryview(buffer), self._at)
        self._at += count
        return count


@final
class _RemoteFile:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = file.size()

    def read_into(self, target: memoryview, at: int) -> int:
        data = memoryview(self._file.read_at(len(target), at))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
