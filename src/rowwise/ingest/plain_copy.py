"""Plain copies of text files without random access: compressed files, and other encodings than UTF-8.

A copy is made once, in a cache folder of the user, for all processes and later runs: its name is a hash of the file's
path, size, modification time and encoding. It appears complete. Beyond the folder's size limit the least recently used
copies are evicted; a reader makes an evicted copy again.
"""

import bz2
import fcntl
import gzip
import hashlib
import io
import lzma
import os
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from rowwise.base.errors import DataError
from rowwise.base.storage.read_cache import CacheFolder, make_room
from rowwise.base.textfile import open_regular

CHUNK = 1 << 20
ENDING = ".text"
MAGIC = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"PK\3\4": "zip"}
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, pa.ArrowException, RuntimeError)


def packing_of(path: str) -> str:
    """The compression of a file by its magic number; empty for a plain file."""
    with open_regular(path) as file:
        head = file.read(8)
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), "")


@contextmanager
def open_unpacked(path: str) -> Iterator[BinaryIO]:
    """A file's decompressed bytes."""
    packing = packing_of(path)
    try:
        with _open(path, packing) as file:
            yield file
    except DAMAGED as error:
        if not packing or isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be unpacked as {packing}: {error}", "an undamaged file") from error


@contextmanager
def _open(path: str, packing: str) -> Iterator[BinaryIO]:
    if packing == "zip":
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            if len(members) != 1:
                raise DataError(
                    f"{path}: the archive has {len(members)} files", "one file, or a folder with the unpacked files"
                )
            with archive.open(members[0]) as file:
                yield cast("BinaryIO", file)
    elif packing == "zst":
        with pa.CompressedInputStream(pa.OSFile(path), "zstd") as stream:
            yield cast("BinaryIO", io.BufferedReader(cast("io.RawIOBase", stream), CHUNK))
    else:
        opened = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}.get(packing, open_regular)(path)
        with cast("BinaryIO", opened) as file:
            yield file


def plain_copy(path: str, encoding: str, place: CacheFolder) -> Path:
    """The copy of a file in UTF-8 with LF line ends; makes it if the cache lacks it."""
    status = os.stat(path)
    key = f"{Path(path).absolute()}\n{status.st_size}\n{status.st_mtime_ns}\n{encoding}"
    copy = place.folder / f"{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}{ENDING}"
    with suppress(FileNotFoundError):
        _mark_used(copy)
        return copy
    part = copy.with_suffix(".part")
    place.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one process makes the copy, others wait for it
        if copy.exists():
            return copy
        file.truncate(0)
        try:
            with open_unpacked(path) as source:
                _write(file, source, encoding, path, place.max_bytes)
        except BaseException:
            file.truncate(0)
            raise
        part.replace(copy)
    _mark_used(copy)
    make_room(place, f"*{ENDING}", newest=copy)
    return copy


def _mark_used(copy: Path) -> None:
    """Mark a copy as the most recently used; the file system's own clock ticks in milliseconds."""
    now_ns = time.time_ns()
    os.utime(copy, ns=(now_ns, now_ns))


def _write(file: BinaryIO, source: BinaryIO, encoding: str, path: str, max_bytes: int) -> None:
    text, written, lines = io.TextIOWrapper(source, encoding=encoding, newline=None), 0, 0
    try:
        while chunk := text.read(CHUNK).encode():
            written += len(chunk)
            if written > max_bytes:
                raise DataError(
                    f"{path}: takes more than {max_bytes:,} bytes when it is unpacked",
                    "a larger data.text.unpacked_gb in a recipe, or --unpacked-gb",
                )
            file.write(chunk)
            lines += chunk.count(b"\n")
    except UnicodeError as error:
        raise DataError(
            f"{path}: is not {encoding}, somewhere after line {lines}: {error}",
            hint="set --encoding, or data.text.encoding in a recipe",
        ) from error
    finally:
        text.detach()
