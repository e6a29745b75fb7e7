"""A Parquet file as far as it is needed: reads of our choice into memory that looks like the whole file.

[Note: a sparse image] Arrow decodes from a buffer of the file's size, of which only the pages that we read into exist:
an anonymous mapping costs nothing where nobody writes. So one large read serves many columns, no Python is called
while decoding, and nothing is copied between. After the decode the pages go back to the system; Arrow's Parquet
decoder copies every value out (test_parquet_reads.py reads every type, and the memory is zeros by then). Known limits:
systems that count address space, where a file of 10 GB counts as much.
"""

import mmap
import sys
import time
from collections.abc import Sequence
from typing import final

import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.errors import DataError
from rowwise.ingest.warehouse.ranges import ReadCounters, ReadRange, leaves_of, ranges_of
from rowwise.ingest.warehouse.storage import OpenFile

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)  # and reserve nothing
HUGE_BYTES = 4 << 20  # two pages of the large kind


@final
class SparseFile:
    """A file of which only the fetched bytes are in memory."""

    def __init__(self, source: str, opened: OpenFile, footer: pq.FileMetaData, *, verify: bool) -> None:
        self.source, self.footer = source, footer
        self.schema: pa.Schema = footer.schema.to_arrow_schema()
        self._opened = opened
        self._memory = mmap.mmap(-1, max(opened.size, 1), flags=PRIVATE)
        # Not `page_checksum_verification` alone: pre_buffer would read in threads of its own.
        self._file = pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(self._memory)),
            metadata=footer,
            pre_buffer=False,
            page_checksum_verification=verify,
        )
        self.leaves = leaves_of(self.schema)
        # Asked for once: a wide file is asked about each column of each row group.
        described = footer.schema
        self.paths = [described.column(leaf).path for leaf in range(len(described))]
        self.types = {field.name: field.type for field in self.schema}

    def read(self, group: int, columns: Sequence[str], *, gap: int, threads: bool) -> tuple[pa.Table, ReadCounters]:
        """These columns of a row group, and what that took."""
        leaves = [leaf for name in columns for leaf in self.leaves[name]]
        ranges = ranges_of(self.footer, group, leaves, gap)
        begin_s = time.perf_counter()
        self._want_huge_pages(ranges)
        try:
            with memoryview(self._memory) as memory:
                for start, stop, _ in ranges:
                    with memory[start:stop] as target:
                        self._fill(target, start)
            read_s = time.perf_counter()
            table = self._decode(group, columns, leaves, threads=threads)
        finally:
            for start, stop, _ in ranges:
                page = start - start % mmap.PAGESIZE
                self._memory.madvise(mmap.MADV_DONTNEED, page, stop - page)
        return table, ReadCounters(
            reads=len(ranges),
            bytes_read=sum(r.stop - r.start for r in ranges),
            bytes_wanted=sum(r.wanted for r in ranges),
            read_s=read_s - begin_s,
            decode_s=time.perf_counter() - read_s,
            rows=table.num_rows,
            groups=1,
        )

    def close(self) -> None:
        """Let go of the file and its memory."""
        self._opened.close()

    def _want_huge_pages(self, ranges: Sequence[ReadRange]) -> None:
        """The system clears large pages faster than small ones; small reads would waste most of one."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        for start, stop, _ in ranges:
            if stop - start >= HUGE_BYTES:
                page = start - start % mmap.PAGESIZE
                self._memory.madvise(mmap.MADV_HUGEPAGE, page, stop - page)

    def _fill(self, target: memoryview, at: int) -> None:
        got = self._opened.read_into(target, at)
        if got < len(target):
            raise DataError(
                f"{self.source}: ends at byte {at + got}: its footer speaks of bytes up to {at + len(target)}"
            )

    def _decode(self, group: int, columns: Sequence[str], leaves: Sequence[int], *, threads: bool) -> pa.Table:
        paths = [self.paths[leaf] for leaf in leaves]
        try:
            table = self._file.read_row_group(group, columns=paths, use_threads=threads)
        except (pa.ArrowException, OSError) as error:
            name, cause = self._culprit(group, columns) or (None, error)
            where = f"row group {group}" + ("" if name is None else f", column {name!r}")
            out = "convert the data again, or leave the rows out with data.on_bad_rows=quarantine"
            raise DataError(f"{self.source}: cannot be read as Parquet: {where}: {cause}; {out}") from error
        return table.select(list(columns))

    def _culprit(self, group: int, columns: Sequence[str]) -> tuple[str, Exception] | None:
        """Arrow says what is wrong, but not where: each column for itself."""
        for name in columns:
            paths = [self.paths[leaf] for leaf in self.leaves[name]]
            try:
                self._file.read_row_group(group, columns=paths, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                return name, error
        return None
