"""Measures the disk below a folder: random reads of three sizes, and one long write, past the system's page cache.

Reads are direct (O_DIRECT), from a temporary file without a name, by threads with one request in flight each. File
systems in memory refuse direct reads. Known limit: Linux only.
"""

import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import msgspec

from rowwise.tables.spec import Value

FILE_bytes = 256 << 20
CHUNK_bytes = 8 << 20
READ_bytes = (512, 4096, 65536)
ROW_bytes = 4096  # the reads that tables on disk do
IN_FLIGHT = 32
PARTS = 1 + len(READ_bytes)  # of the time


class DiskRates(Value, frozen=True, kw_only=True):
    """Speed of a disk; without rates, the reason why they could not be measured."""

    reads_s: dict[int, float] = msgspec.field(default_factory=dict)  # random reads a second, by bytes of a read
    write_Bps: float = 0.0
    refused: str = ""


def measure_disk(folder: Path, seconds: float, file_bytes: int = FILE_bytes) -> DiskRates:
    """Rates of the disk below a folder, measured for at most about `seconds`."""
    size = min(file_bytes, shutil.disk_usage(folder).free // 4) // CHUNK_bytes * CHUNK_bytes
    if not size:
        return DiskRates(refused=f"{folder} has no room for a file of {4 * CHUNK_bytes:,} bytes")
    if not hasattr(os, "O_DIRECT"):
        return DiskRates(refused="this system has no O_DIRECT")
    try:
        with _direct_file(folder) as file:
            written, write_Bps = _write(file, size, seconds / PARTS)
            reads_s = {read: _read(file, written, read, seconds / PARTS) for read in READ_bytes}
    except OSError as error:
        return DiskRates(refused=f"{folder} refuses direct reads and writes: {error.strerror}")
    return DiskRates(reads_s={read: rate for read, rate in reads_s.items() if rate}, write_Bps=write_Bps)


@contextmanager
def _direct_file(folder: Path) -> Iterator[int]:
    """An unlinked temporary file, open for direct reads and writes."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".disk-", suffix=".tmp")
    try:
        os.close(descriptor)
        file = os.open(name, os.O_RDWR | os.O_DIRECT)
    finally:
        os.unlink(name)
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, size: int, seconds: float) -> tuple[int, float]:
    """Bytes written, and bytes a second."""
    chunk = mmap.mmap(-1, CHUNK_bytes)  # aligned to a page, as direct I/O requires
    chunk.write(random.Random(0).randbytes(CHUNK_bytes))
    begin_s, written = monotonic(), 0
    while written < size and (not written or monotonic() - begin_s < seconds):
        written += os.pwritev(file, [chunk], written)
    os.fsync(file)
    return written, written / (monotonic() - begin_s)


def _read(file: int, size: int, read_bytes: int, seconds: float) -> float:
    """Reads a second; 0 where the disk has larger blocks than a read."""
    begin_s = monotonic()

    def read_random(seed: int) -> int:
        buffer, draw, count = mmap.mmap(-1, read_bytes), random.Random(seed), 0
        while not count or monotonic() - begin_s < seconds:
            os.preadv(file, [buffer], draw.randrange(size // read_bytes) * read_bytes)
            count += 1
        return count

    try:
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            count = sum(threads.map(read_random, range(IN_FLIGHT)))
    except OSError:
        return 0.0
    return count / (monotonic() - begin_s)
