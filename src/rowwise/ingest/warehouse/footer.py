"""The footer of a Parquet file, checked before it is used: Arrow ends the process for what some footers say.

Reading rows meets the same checks where they are caught, so that is begun here, and stopped at its first byte.
"""

import io

import pyarrow as pa
from pyarrow import parquet as pq


class _StopReading(Exception):
    """Every column chunk was described, and its bytes are wanted."""


class _Unread(io.RawIOBase):
    """A file of known size whose contents cannot be read."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        self._at = to + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        raise _StopReading


def check_footer(footer: pq.FileMetaData) -> None:
    """Refuse names that are not UTF-8, and row groups that are not the rows of the file."""
    _ = footer.created_by, [footer.schema.column(leaf).path for leaf in range(len(footer.schema))]
    rows = sum(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    if rows != footer.num_rows:
        raise pa.ArrowInvalid(f"its row groups have {rows:,} rows, and the file has {footer.num_rows:,}")


def check_chunks(footer: pq.FileMetaData, size: int) -> None:
    """Refuse what a column chunk cannot be, in a file of so many bytes; some 3 us of each chunk."""
    file = pq.ParquetFile(pa.PythonFile(_Unread(size), mode="r"), metadata=footer, pre_buffer=True)
    try:
        file.read_row_groups(list(range(footer.num_row_groups)), use_threads=False)
    except _StopReading:
        return
