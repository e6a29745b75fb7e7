"""Checks the footer of a Parquet file before use: some damaged footers make Arrow abort the process.

Arrow validates column chunks when it begins to read rows, where errors can be caught. So a read is begun here, and
stopped at its first byte.
"""

import io

import pyarrow as pa
from pyarrow import parquet as pq


class _StopReading(Exception):
    """Arrow has validated every column chunk, and requests bytes."""


class SeekableFile(io.RawIOBase):
    """Base class of seekable files of known size; subclasses implement reading."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class _UnreadableFile(SeekableFile):
    """A file that raises `_StopReading` when read."""

    def read(self, size: int = -1) -> bytes:
        raise _StopReading


def check_footer(footer: pq.FileMetaData) -> None:
    """Refuse names that are not UTF-8, and row groups whose rows do not add up to the file's."""
    _ = footer.created_by, [footer.schema.column(leaf).path for leaf in range(len(footer.schema))]
    rows = sum(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    if rows != footer.num_rows:
        raise pa.ArrowInvalid(f"its row groups have {rows:,} rows together, but the footer says {footer.num_rows:,}")


def check_chunks(footer: pq.FileMetaData, size: int) -> None:
    """Refuse column chunks outside a file of `size` bytes; takes about 3 us a chunk."""
    file = pq.ParquetFile(pa.PythonFile(_UnreadableFile(size), mode="r"), metadata=footer, pre_buffer=True)
    try:
        file.read_row_groups(list(range(footer.num_row_groups)), use_threads=False)
    except _StopReading:
        return
