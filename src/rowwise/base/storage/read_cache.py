"""Caches ranges of objects in a local folder, for later reads of any process.

A range is a file whose name follows from the object, its size, its time and the range, so another object is never taken
for it. It ends with a checksum: a damaged file is a range that is read from the store again. Files are written
atomically. Beyond the folder's bound the least recently used are removed. A folder that cannot be written only disables
the cache.
"""

import hashlib
import os
import threading
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, final

from rowwise.base.storage.interface import StoredObject
from rowwise.base.textfile import open_regular


class CacheFolder(NamedTuple):
    """A folder for cached ranges of objects or copies of files, and a bound on its bytes."""

    folder: Path
    max_bytes: int


CHECK_bytes = 4
KEPT = 0.9  # fraction of the bound that an eviction leaves
LARGEST, BETWEEN = 0.25, 0.05  # fractions of the bound: largest range kept, bytes written between two evictions


@final
class ReadCache:
    """Ranges of objects in a folder.

    Args:
        folder: made if it does not exist; only ranges are in it.
        max_bytes: of its files; several processes that write at once may exceed it by a twentieth each.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._written = max_bytes  # by this process since it last checked the bound; the first write checks
        self._lock, self._is_broken = threading.Lock(), False

    def read(self, url: str, stored: StoredObject, begin: int, end: int, fetch: Callable[[], memoryview]) -> memoryview:
        """The bytes of an object from `begin` to `end`, which `fetch` reads on a miss."""
        text = f"{url}\n{stored.name}\n{stored.size_bytes}\n{stored.modified_s}\n{begin}\n{end}"
        name = hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
        path = self.folder / name[:2] / name[2:]
        cached = _read_checked(path, end - begin)
        if cached is not None:
            return cached
        content = fetch()
        if len(content) == end - begin <= LARGEST * self.max_bytes and not self._is_broken:
            self._store(path, content)
        return content

    def _store(self, path: Path, content: memoryview) -> None:
        part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("xb") as file:
                file.write(content)
                file.write(zlib.crc32(content).to_bytes(CHECK_bytes, "little"))
            with suppress(FileNotFoundError):  # evicted by another reader
                part.replace(path)
        except OSError as error:
            self._is_broken = True
            with suppress(OSError):
                part.unlink(missing_ok=True)
            warnings.warn(
                f"{self.folder} cannot keep what is read: {error.strerror}: reads go to the store", stacklevel=2
            )
            return
        with self._lock:
            self._written += len(content)
            is_due = self._written > BETWEEN * self.max_bytes
            self._written = 0 if is_due else self._written
        if is_due:
            make_room(CacheFolder(self.folder, self.max_bytes), "??/*", KEPT)


def make_room(place: CacheFolder, pattern: str, kept: float = 1.0, newest: Path | None = None) -> None:
    """Remove the least recently used files beyond the bound, but not `newest`; `kept`: fraction of the bound left."""
    files: list[tuple[int, int, Path]] = []
    for path in place.folder.glob(pattern):
        with suppress(OSError):  # another process has removed it
            status = path.stat()
            files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= place.max_bytes:
        return
    for _, size, path in sorted(files):
        if path == newest:
            continue
        with suppress(OSError):
            path.unlink(missing_ok=True)
        total -= size
        if total <= kept * place.max_bytes:
            return


@lru_cache(maxsize=4)
def read_cache(folder: Path, max_bytes: int) -> ReadCache:
    """The cache of a folder, one for all readers of this process."""
    return ReadCache(folder, max_bytes)


def _read_checked(path: Path, length: int) -> memoryview | None:
    """The range in a file; None if it is missing or damaged. A read makes the file the most recently used."""
    try:
        with open_regular(path, links=False) as file:
            content = memoryview(file.read(length + CHECK_bytes + 1))
        os.utime(path)
    except OSError:
        return None
    data, check = content[:length], content[length:]
    return data if check == zlib.crc32(data).to_bytes(CHECK_bytes, "little") else None
