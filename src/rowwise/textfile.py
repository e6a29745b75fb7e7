"""Files that other people and other programs write: opened only if regular, read within bounds, decoded strictly.

A recipe, a plan or a run folder may come from anybody. What is wrong with a file itself is an OSError that names it, so
that it ends where a missing file does. What is wrong with its content is a ValueError whose text is one line.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

T = TypeVar("T")
KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISCHR, "a device"))
FLAGS = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND}
MOST_BYTES = 64 << 20


def open_regular(path: str | Path, mode: Literal["rb", "r+b", "a+b"] = "rb", *, links: bool = True) -> BinaryIO:
    """Open what is there; a folder, a FIFO, a socket, a device or, without `links`, a link is refused.

    With "a+b" a file is made where there is none, and each write is one of the system's, which may take less.
    """
    flags = FLAGS[mode] | (0 if links else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        found = os.open(path, flags, 0o666)  # of a socket this fails; nothing is waited for
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "this is a link: want the file itself in its place", str(path)) from None
        raise
    of = os.fstat(found).st_mode
    if not stat.S_ISREG(of):
        os.close(found)
        kind = next((name for test, name in KINDS if test(of)), "no regular file")
        raise OSError(errno.EINVAL, f"this is {kind}: want a regular file", str(path))
    return os.fdopen(found, mode, buffering=0 if mode == "a+b" else -1)


def append(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Add to the end of a file, in one write if the system takes it; with `sync` it is on the disk then."""
    with open_regular(path, "a+b", links=False) as file:
        left = memoryview(content)
        while left:  # it says why it took less only when asked again
            left = left[file.write(left) :]
        if sync:
            os.fsync(file.fileno())


def write_new(path: Path, content: bytes) -> None:
    """A file with this content; what was called so is not written to, nor is what a link of that name leads to."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)


def refuse_links(folder: Path) -> None:
    """Before anything is written below a folder that strangers may have made: only files and folders are in it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise OSError(errno.ELOOP, "this is a link: want what it leads to in its place", entry.path)
            if entry.is_dir():
                refuse_links(Path(entry.path))
            elif not entry.is_file():
                raise OSError(errno.EINVAL, "this is no regular file: remove it", entry.path)


def read_bytes(path: str | Path, most: int = MOST_BYTES, *, links: bool = True) -> bytes:
    """All of a file of at most so many bytes."""
    with open_regular(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        # Files of /proc have no size: what comes is counted, too.
        data = b"" if size > most else file.read(most + 1)
    if max(size, len(data)) > most:
        raise OSError(errno.EFBIG, f"more than {most >> 20} MB: want a file of at most so much", str(path))
    return data


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """All of a file in UTF-8, with or without a byte order mark."""
    data = read_bytes(path, most)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        got = f"line {line}: byte {data[error.start]:#04x} is not UTF-8"
        raise OSError(errno.EILSEQ, f"{got}: want a text in UTF-8", str(path)) from None


def decode_json(data: str | bytes, kind: type[T]) -> T:
    """JSON as a type; a key that is given twice is refused, which msgspec reads as its last value."""
    try:
        found = msgspec.json.decode(data, type=kind)
        json.loads(data, object_pairs_hook=unique_keys, parse_int=str, parse_float=str)
    except RecursionError:
        raise msgspec.DecodeError("lists and objects in one another without an end in sight") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"byte {error.start} is not UTF-8") from None
    return found


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON as a mapping, for `json.loads`."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise msgspec.DecodeError(f"key {key!r} is given twice: want each key once")
        made[key] = value
    return made


def printable(text: str) -> str:
    r"""A text for a terminal: what would move its cursor or change its colours is written out, as \x1b."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
