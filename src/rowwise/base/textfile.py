"""Opens untrusted files only if they are regular, reads them up to a size, and decodes them strictly.

A recipe, a plan or a run folder may come from anyone. An invalid file is an OSError with its name, handled like a
missing file. Invalid content is a ValueError of one line.
"""

import errno
import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

T = TypeVar("T")
NOT_REGULAR = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISCHR, "a device"))
FLAGS = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND}
MAX_BYTES = 64 << 20
LATEST_s = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
MAX_DIGITS = 18  # of a whole number in a text: it fits 64 bits


def open_regular(path: str | Path, mode: Literal["rb", "r+b", "a+b"] = "rb", *, links: bool = True) -> BinaryIO:
    """Open a regular file; a folder, FIFO, socket, device or, without `links`, a symbolic link raises an OSError.

    "a+b" creates a missing file, and is unbuffered: each write is one system call, which may write less.
    """
    flags = FLAGS[mode] | (0 if links else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)  # fails for a socket; O_NONBLOCK: do not wait for the writer of a FIFO
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "this is a link: expected the file itself in its place", str(path)) from None
        raise
    mode_bits = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode_bits):
        os.close(fd)
        kind = next((name for test, name in NOT_REGULAR if test(mode_bits)), "no regular file")
        raise OSError(errno.EINVAL, f"this is {kind}: expected a regular file", str(path))
    return os.fdopen(fd, mode, buffering=0 if mode == "a+b" else -1)


def append(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Append to a file, if possible in one system call; `sync`: flush it to the disk."""
    with open_regular(path, "a+b", links=False) as file:
        remaining = memoryview(content)
        while remaining:  # after a short write, the next one raises with the reason
            remaining = remaining[file.write(remaining) :]
        if sync:
            os.fsync(file.fileno())


def write_new(path: Path, content: bytes) -> None:
    """Write a new file, in place of an existing file or link of that name, which is never written through."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file through a temporary one, so that readers see the old or the new content."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write_new(part, content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_links(folder: Path) -> list[Path]:
    """The files of an untrusted folder, sorted; raises if it has anything but regular files and folders."""
    files: list[Path] = []
    folders: list[str | Path] = [folder]
    for current in folders:
        with os.scandir(current) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise OSError(errno.ELOOP, "this is a link: expected its target in its place", entry.path)
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.is_file():
                    files.append(Path(entry.path))
                else:
                    raise OSError(errno.EINVAL, "this is no regular file: remove it", entry.path)
    return sorted(files)


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES, *, links: bool = True) -> bytes:
    """The content of a file of at most `max_bytes` bytes."""
    with open_regular(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        # Files of /proc report size 0, so the bytes read are counted too.
        data = b"" if size > max_bytes else file.read(max_bytes + 1)
    if max(size, len(data)) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MB: expected a smaller file", str(path))
    return data


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """The content of a file in UTF-8, with or without a byte order mark."""
    data = read_bytes(path, max_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        got = f"line {line}: byte {data[error.start]:#04x} is not UTF-8"
        raise OSError(errno.EILSEQ, f"{got}: expected a text in UTF-8", str(path)) from None


def decode_json(data: str | bytes, kind: type[T]) -> T:
    """Decode JSON as a type; raises for a duplicate key, where msgspec would take the last value."""
    try:
        value = msgspec.json.decode(data, type=kind)
        json.loads(data, object_pairs_hook=reject_duplicate_keys, parse_int=str, parse_float=str)
    except RecursionError:
        raise msgspec.DecodeError("lists and objects are nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"byte {error.start} is not UTF-8") from None
    return value


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of `json.loads` that raises for a duplicate key."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise msgspec.DecodeError(f"key {key!r} is given twice: expected each key once")
        mapping[key] = value
    return mapping


def parse_whole(text: str, *, signed: bool = False) -> int | None:
    """Parse untrusted ASCII digits, else None; int() would accept digits of all scripts, and `1_0`."""
    digits = text.removeprefix("-") if signed else text
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS else None


def file_time(seconds: float) -> datetime:
    """The time of a file in UTC, clamped to the years of `datetime`, as file systems have others."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), LATEST_s), UTC)
