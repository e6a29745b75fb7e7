"""Files on this machine's disks, or in any store that pyarrow or fsspec reach by a URL. Read only.

A `FileStore` is pickled as its path; each worker process makes connections of its own.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol, final

import pyarrow as pa
from pyarrow import fs

from rowwise.errors import DataError
from rowwise.ingest.reader import GLOB, find_files

UNFINISHED = "_rowwise/journal.jsonl"  # is in a warehouse until `convert` has finished it
FINISH = "its conversion is unfinished: want the same `rowwise data convert` command again, to finish it"
URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


class OpenFile(Protocol):
    """An open file of any store, read at byte offsets."""

    @property
    def size(self) -> int: ...

    def read_into(self, target: memoryview, at: int) -> int:
        """Fill the target with bytes from `at` on; returns how many, fewer only at the file's end."""
        ...

    def close(self) -> None: ...


def is_url(path: object) -> bool:
    """Whether this is a URL, not a path of this machine."""
    return URL.match(str(path)) is not None


@final
class FileStore:
    """The files of a path, a folder, a pattern or a URL of these."""

    def __init__(self, path: str | os.PathLike[str], endings: Sequence[str]) -> None:
        self._path = str(path)
        self.files = self._find(tuple(endings)) if is_url(path) else find_files(self._path, endings)

    @property
    def root(self) -> str:
        """The path up to its first wildcard, with which the names of all files begin."""
        return _fixed_part(self._path)

    def open(self, source: str) -> OpenFile:
        with name_file_in_errors(source):
            return _RemoteFile(self.stream(source)) if is_url(source) else _LocalFile(source)

    def stream(self, source: str) -> Any:
        """A file as Arrow's readers take it."""
        if not is_url(source):
            return pa.OSFile(source)
        return self._remote[0].open_input_file(self._inside(source))

    def stamp(self, source: str) -> tuple[int, int]:
        """Size in bytes and modification time, to detect a change."""
        with name_file_in_errors(source):
            if not is_url(source):
                status = os.stat(source)
                return status.st_size, status.st_mtime_ns
            info = self._remote[0].get_file_info(self._inside(source))
            return info.size or 0, info.mtime_ns or 0

    def __getstate__(self) -> dict[str, object]:
        return {"_path": self._path, "files": self.files}

    @cached_property
    def _remote(self) -> tuple[fs.FileSystem, str]:
        return _connect(self.root)

    def _inside(self, source: str) -> str:
        """The path of a file inside the store."""
        base, rest = self._remote[1], source[len(self.root) :].lstrip("/")
        return f"{base.rstrip('/')}/{rest}" if rest else base

    def _find(self, endings: tuple[str, ...]) -> tuple[str, ...]:
        with name_file_in_errors(self._path):
            system, base = self._remote
            info = system.get_file_info(base)
            if info.type == fs.FileType.File:
                return (self._path,)
            if info.type == fs.FileType.NotFound:
                raise DataError(f"{self._path}: no such file or folder: want the URL of a file, a folder or a pattern")
            inside = system.get_file_info(fs.FileSelector(base, recursive=True))
        skip = len(base.strip("/"))
        names = sorted(i.path.strip("/")[skip:].lstrip("/") for i in inside if i.type == fs.FileType.File)
        root = self.root.rstrip("/")
        if UNFINISHED in names:
            raise DataError(f"{self._path}: {FINISH}")
        if self._path.rstrip("/") == root:
            named = [n for n in names if n.endswith(endings) and not any(part[0] in "._" for part in n.split("/"))]
            none = f"no file in it ends with {' or '.join(endings)}: want at least one"
        else:
            matches = re.compile(_as_regex(self._path[len(self.root) :].lstrip("/")))
            named, none = [n for n in names if matches.fullmatch(n)], "no file matches the pattern: want another"
        if not named:
            raise DataError(f"{self._path}: {none}")
        return tuple(f"{root}/{n}" for n in named)


@contextmanager
def name_file_in_errors(name: str) -> Iterator[None]:
    """Turn errors of access into a DataError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        want = "want it back, as it was when the splits were made, or a new run without it"
        raise DataError(f"{name}: the file is gone: {want}") from error
    except (pa.ArrowException, OSError, ImportError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name}: cannot be reached: {error}: want a path or URL that this user can read") from error


def _connect(url: str) -> tuple[fs.FileSystem, str]:
    """Connect by pyarrow if it knows the scheme, else by fsspec."""
    try:
        return fs.FileSystem.from_uri(url)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        scheme = url.partition("://")[0]
        try:
            import fsspec
        except ImportError:
            want = f"want pip install fsspec, and its package for {scheme}"
            raise DataError(f"{url}: pyarrow cannot read {scheme}://: {want}") from None
        system, path = fsspec.core.url_to_fs(url)
        return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def _fixed_part(path: str) -> str:
    """A path up to the folder before its first wildcard."""
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
            got = os.preadv(self._fd, [target[done:]], at + done)
            if not got:
                break
            done += got
        return done

    def close(self) -> None:
        os.close(self._fd)


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
