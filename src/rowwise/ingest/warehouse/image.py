"""Reads selected byte ranges of a Parquet file into a sparse memory image of the file, from which Arrow decodes.

[Note: a sparse image] The image is an anonymous mapping; only pages that bytes were read into are resident. So one
large read serves many columns, Arrow calls no Python while it decodes, and no bytes are copied in between. After the
decode the pages are returned to the system: Arrow's Parquet decoder copies every value out (test_parquet_reads.py
checks every type after the pages were zeroed). Known limits: the whole file counts towards a limit of address space.
"""

import mmap
import sys
import time
from collections.abc import Sequence
from typing import final

import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.base.errors import DataError
from rowwise.ingest.union import flat_columns
from rowwise.ingest.warehouse.ranges import ReadCounters, ReadRange, leaves_of, ranges_of
from rowwise.ingest.warehouse.storage import OpenFile

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE
HUGE_BYTES = 4 << 20  # two huge pages


@final
class SparseFile:
    """An open Parquet file; only the byte ranges being decoded are resident in memory."""

    def __init__(self, source: str, opened: OpenFile, footer: pq.FileMetaData, *, verify: bool) -> None:
        self.source, self.footer = source, footer
        self.schema: pa.Schema = footer.schema.to_arrow_schema()
        self._opened = opened
        self._memory = mmap.mmap(-1, max(opened.size, 1), flags=PRIVATE)
        # pre_buffer=False: else Arrow would read the ranges again, in its own threads.
        self._file = pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(self._memory)),
            metadata=footer,
            pre_buffer=False,
            page_checksum_verification=verify,
        )
        self.leaves = leaves_of(self.schema)
        # Cached, as footer.schema.column is slow in a file of many columns.
        described = footer.schema
        self.paths = [described.column(leaf).path for leaf in range(len(described))]
        self.flat = flat_columns(self.schema)

    def read(self, group: int, columns: Sequence[str], *, gap: int, threads: bool) -> tuple[pa.Table, ReadCounters]:
        """These columns of a row group, and the counters of this read."""
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
        self._opened.close()

    def _want_huge_pages(self, ranges: Sequence[ReadRange]) -> None:
        """Request huge pages for large reads, as they are zeroed faster. A small read would waste most of one."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        for start, stop, _ in ranges:
            if stop - start >= HUGE_BYTES:
                page = start - start % mmap.PAGESIZE
                self._memory.madvise(mmap.MADV_HUGEPAGE, page, stop - page)

    def _fill(self, target: memoryview, at: int) -> None:
        count = self._opened.read_into(target, at)
        if count < len(target):
            raise DataError(
                f"{self.source}: ends at byte {at + count}",
                f"a file of at least {at + len(target)} bytes, as its footer says",
            )

    def _decode(self, group: int, columns: Sequence[str], leaves: Sequence[int], *, threads: bool) -> pa.Table:
        paths = [self.paths[leaf] for leaf in leaves]
        try:
            table = self._file.read_row_group(group, columns=paths, use_threads=threads)
        except (pa.ArrowException, OSError) as error:
            name, cause = self._find_bad_column(group, columns) or (None, error)
            where = f"row group {group}" + ("" if name is None else f", column {name!r}")
            raise DataError(
                f"{self.source}: cannot be read as Parquet: {where}: {cause}",
                hint="convert the data again, or leave these rows out by data.on_bad_rows=quarantine",
            ) from error
        return table.select(list(columns))

    def _find_bad_column(self, group: int, columns: Sequence[str]) -> tuple[str, Exception] | None:
        """Read each column alone, as Arrow's errors do not name it."""
        for name in columns:
            paths = [self.paths[leaf] for leaf in self.leaves[name]]
            try:
                self._file.read_row_group(group, columns=paths, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                return name, error
        return None
