"""`DiskTables`: tables whose rows and optimizer state are on disk, with a cache of rows in memory.

Kernels see the cache: before a call `pin` replaces row numbers by slots, after it `unpin` lets the slots go. A row
travels with its optimizer state. A row that was never changed takes no memory: `SlotTable.initial` makes it when it is
looked up. The file has no name and ends with the process: a run that was killed starts from its checkpoint.

[Note: Rows in slots]
Staged gradients keep row numbers. A lookup and its update each pin their rows, so rows may leave the cache in between,
and no budget is too small for gradient accumulation: a single call of a kernel must fit.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from rowwise.errors import SpecError, StateError, StoreError
from rowwise.quantity import format_bytes
from rowwise.store import native
from rowwise.store.native import NativeTable, Segment, Status
from rowwise.store.policy import DEFAULT_POLICY, WAYS, Policy
from rowwise.store.row_store import (
    ArenaSlots,
    CacheCounters,
    DiskCounters,
    OpenStore,
    RowPart,
    RowStore,
    SlotIds,
    SlotTable,
    StoreUse,
    TableUse,
)
from rowwise.store.row_stream import InitialValues
from rowwise.store.sizes import FLOAT_bytes, HEADER_bytes, INDEX_bytes

SEGMENT_bytes = 8 << 20  # of one write: rows go to disk at its sequential speed
UNUSABLE, A_FOLDER = "rows could not be read or written", "a folder on a disk that can be written, by `disk`"
WINDOW_bytes = 16 << 20  # of records that a stream reads at a time


@dataclass(frozen=True, slots=True)
class FeatureIds:
    """The ids of a feature of a batch: positions [begin, end) of its values."""

    table: int
    begin: int
    end: int


@final
class DiskTables:
    """The tables of one arena that are on disk."""

    def __init__(
        self,
        tables: Sequence[SlotTable],
        folder: Path,
        *,
        policy: Policy = DEFAULT_POLICY,
        segment_bytes: int = SEGMENT_bytes,
        uring: bool = True,
    ) -> None:
        """`folder`: where the file without a name is made."""
        self.tables, self.folder = tuple(tables), folder
        self.lock = threading.RLock()  # threads of a checkpoint read and write rows and state of one table at once
        self._library, self._tier = native.library(), None
        described = (NativeTable * len(tables))()
        for table, entry in zip(tables, described, strict=True):
            slots = len(table.row_memory) - table.overflow
            assert slots > 0, table.name
            assert slots % WAYS == 0, table.name
            entry.rows, entry.slots, entry.overflow, entry.policy = table.rows, slots, table.overflow, policy == "lfu"
            entry.row_bytes, entry.state_bytes = table.row_bytes, table.state_width * 4
            entry.row_memory, entry.state_memory = table.row_memory.data_ptr(), table.state_memory.data_ptr()
            entry.slot_rows = table.slot_rows.data_ptr()
        status = Status()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: {UNUSABLE}: {error.strerror}", A_FOLDER) from None
        path = os.fsencode(folder)
        self._tier = self._library.tier_open(path, segment_bytes, uring, len(tables), described, byref(status))
        self._check(status)

    def __del__(self) -> None:
        if getattr(self, "_tier", None):
            self._library.tier_close(self._tier)

    def __reduce__(self) -> NoReturn:
        names = ", ".join(table.name for table in self.tables)
        raise StateError(f"tables on disk cannot be copied or pickled ({names})", "a checkpoint")

    @property
    def file(self) -> int:
        """The descriptor of the file."""
        return int(self._library.tier_file(self._tier))

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the system's page cache."""
        return bool(self._library.tier_is_direct(self._tier))

    @property
    def uses_uring(self) -> bool:
        return bool(self._library.tier_uses_uring(self._tier))

    @property
    def disk_bytes(self) -> int:
        return int(self._library.tier_disk_bytes(self._tier))

    def pin(self, values_N: Tensor, features: Sequence[FeatureIds], *, changes: bool, counts: bool) -> Tensor:
        """The values with the ids of these features replaced by slots, which hold their rows until `unpin`.

        `changes`: the rows will change. `counts`: ids count for the policy. Raises RuntimeError for an id outside its
        table, as the kernels do.
        """
        values_N = values_N.contiguous()
        slots_N = values_N.clone()
        segments, status = _segments(values_N, slots_N, features), Status()
        with self.lock:
            self._library.tier_pin(self._tier, len(features), segments, changes, counts, byref(status))
        if status.code == native.BAD_ID:
            raise RuntimeError(f"rowwise: an id is outside table {self.tables[status.table].name!r}")
        self._check(status)
        for number in {feature.table for feature in features}:
            self._make_new_rows(number)
        return slots_N

    def read_ahead(self, values_N: Tensor, features: Sequence[FeatureIds]) -> None:
        """Start to read the rows of a batch that will be looked up; ids outside their tables read nothing.

        May be called for further batches before that: the rows of the last four are kept.
        """
        values_N = values_N.contiguous()
        segments, status = _segments(values_N, values_N, features), Status()
        with self.lock:
            self._library.tier_read_ahead(self._tier, len(features), segments, byref(status))
        if status.code != native.BAD_ID:
            self._check(status)

    def unpin(self) -> None:
        """Let the slots go; changed rows that have no slot in their set are written."""
        self._call("tier_unpin")

    def read(self, table: int, rows_U: Tensor) -> tuple[Tensor, Tensor]:
        """Stored rows [U, bytes] and state [U, floats]; rows may be cached, on disk or never written."""
        one = self.tables[table]
        rows_U = rows_U.long().contiguous()
        stored = torch.empty(len(rows_U), one.row_bytes, dtype=torch.uint8)
        state = torch.empty(len(rows_U), one.state_width)
        found = torch.empty(len(rows_U), dtype=torch.bool)
        pointers = [x.data_ptr() for x in (stored, state, found)]
        self._call("tier_read", table, rows_U.data_ptr(), len(rows_U), *pointers)
        new_U = (~found).nonzero().flatten()
        if len(new_U):
            stored[new_U], state[new_U] = one.initial(rows_U[new_U])
        return stored, state

    def write(self, table: int, rows_U: Tensor, stored: Tensor, state: Tensor) -> None:
        """Overwrite distinct rows and their state."""
        rows_U, stored, state = rows_U.long().contiguous(), stored.contiguous(), state.contiguous()
        self._call("tier_write", table, rows_U.data_ptr(), len(rows_U), stored.data_ptr(), state.data_ptr())

    def written(self, table: int, first: int, last: int) -> Tensor:
        """The rows in [first, last) that were ever changed, ascending."""
        with self.lock:
            self._call("tier_flush")
            rows_U = torch.empty(self._library.tier_written(self._tier, table, first, last, None), dtype=torch.int64)
            self._library.tier_written(self._tier, table, first, last, rows_U.data_ptr())
        return rows_U

    def forget(self, table: int | None = None) -> None:
        """Make all rows of a table, or of all, as if they were never changed."""
        with self.lock:
            for number in range(len(self.tables)) if table is None else [table]:
                self._library.tier_forget(self._tier, number)

    def counters(self, table: int) -> CacheCounters:
        values = (ctypes.c_int64 * len(native.COUNTERS))()
        self._library.tier_counters(self._tier, table, values)
        return CacheCounters(**dict(zip(native.COUNTERS, values, strict=True)))

    def io_counters(self) -> DiskCounters:
        values = (ctypes.c_double * len(native.IO_COUNTERS))()
        with self.lock:
            self._library.tier_io(self._tier, values)
        reads, read_bytes, written_bytes, read_wait_s, write_wait_s, busy_s = values
        return DiskCounters(
            reads=int(reads), read_bytes=int(read_bytes), written_bytes=int(written_bytes),
            read_wait_s=read_wait_s, write_wait_s=write_wait_s, busy_s=busy_s,
        )  # fmt: skip

    def read_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """When rows were read, by time.perf_counter: the latest 4,096 intervals that end after `since_s`."""
        begins, ends = ((ctypes.c_double * native.MOST_INTERVALS)() for _ in range(2))
        count = self._library.tier_busy(self._tier, since_s, native.MOST_INTERVALS, begins, ends)
        return list(zip(begins[:count], ends[:count], strict=True))

    def _make_new_rows(self, number: int) -> None:
        """Fill the slots of rows that were never written."""
        count = self._library.tier_new_rows(self._tier, number, None, None)
        if not count:
            return
        rows_U, slots_U = torch.empty(2, count, dtype=torch.int64)
        self._library.tier_new_rows(self._tier, number, rows_U.data_ptr(), slots_U.data_ptr())
        table = self.tables[number]
        table.row_memory[slots_U], table.state_memory[slots_U] = table.initial(rows_U)

    def _call(self, name: str, *arguments: Any) -> None:
        status = Status()
        with self.lock:
            getattr(self._library, name)(self._tier, *arguments, byref(status))
        self._check(status)

    def _check(self, status: Status) -> None:
        if status.code == native.OK:
            return
        name = self.tables[status.table].name if 0 <= status.table < len(self.tables) else ""
        match status.code:
            case native.TOO_SMALL:
                rows = f"a batch has more rows of table {name!r} than its cache, which holds {status.distinct:,}"
                raise SpecError(rows, "a larger memory, or fewer samples a batch")
            case native.DAMAGED:
                row = f"table {name!r}, row {status.row}: its" if status.row >= 0 else "a"
                raise StoreError(
                    f"{row} record in {self.folder} does not match its checksum",
                    hint="use another disk, and resume from a checkpoint",
                )
            case native.IO:
                raise StoreError(f"{self.folder}: {self._system_error(status.error)}")
            case native.LOG_FULL:
                raise StoreError(
                    f"table {name!r} has more records on disk than 2**32", hint="cut the table into more tiles"
                )
            case native.FORKED:
                raise StoreError(f"{self.folder}: {UNUSABLE} by a fork of their process", "tables made in the fork")
            case _:
                raise StoreError(f"the memory of the caches of {len(self.tables)} tables on disk was not allocated")

    def _system_error(self, number: int) -> str:
        text = f"{UNUSABLE}: {os.strerror(number)}"
        if number != errno.ENOSPC:
            return f"{text}: expected {A_FOLDER}"
        free = ""
        with suppress(OSError):
            space = os.statvfs(self.folder)
            free = f", {format_bytes(space.f_bavail * space.f_frsize)} are free"
        used = format_bytes(self.disk_bytes) if self._tier else "0 B"
        return f"{text}; the rows take {used}{free}: expected more space, or another folder by `disk`"


def _segments(values_N: Tensor, slots_N: Tensor, features: Sequence[FeatureIds]) -> Any:
    size = values_N.element_size()
    segments = (Segment * len(features))()
    for feature, segment in zip(features, segments, strict=True):
        at = feature.begin * size
        segment.table, segment.wide, segment.count = feature.table, size == 8, feature.end - feature.begin
        segment.ids, segment.slots = values_N.data_ptr() + at, slots_N.data_ptr() + at
    return segments


@final
class DiskStream:
    """The stored rows of a table on disk, or columns of their optimizer state, as a `RowStream`."""

    def __init__(
        self, disk: DiskTables, table: int, dtype: torch.dtype, initial: InitialValues, columns: slice | None = None
    ) -> None:
        """`columns`: of the optimizer state; None: the stored rows."""
        self._disk, self._table, self._columns = disk, table, columns
        self.dtype, self.initial = dtype, initial
        one = disk.tables[table]
        width = one.row_bytes // dtype.itemsize if columns is None else columns.stop - columns.start
        self.shape = (one.rows,) if columns is not None and width == 1 else (one.rows, width)
        # Rows and state are one record: few records at a time, however narrow the columns are.
        self._most_rows = max(1, WINDOW_bytes // (one.row_bytes + 4 * one.state_width))

    def written(self, begin: int, end: int) -> Tensor:
        return self._disk.written(self._table, begin, end)

    def forget(self) -> None:
        self._disk.forget(self._table)

    def read(self, begin: int, end: int) -> Tensor:
        return self.read_rows(torch.arange(begin, end))

    def read_rows(self, rows: Tensor) -> Tensor:
        runs = rows.split(self._most_rows)
        parts = [self._part(*self._disk.read(self._table, run)) for run in runs]
        return torch.cat(parts).view(len(rows), *self.shape[1:])

    def write(self, begin: int, values: Tensor) -> None:
        self.write_rows(torch.arange(begin, begin + len(values)), values)

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        for run, part in zip(rows.split(self._most_rows), values.split(self._most_rows), strict=True):
            with self._disk.lock:
                stored, state = self._disk.read(self._table, run)
                self._part(stored, state).copy_(part.view(len(run), -1))
                self._disk.write(self._table, run, stored, state)

    def _part(self, stored: Tensor, state: Tensor) -> Tensor:
        return stored.view(self.dtype) if self._columns is None else state[:, self._columns]


@final
class DiskRows(RowStore):
    """Rows on disk, of all tables of one arena."""

    reads_ahead = True

    def __init__(self, slots: ArenaSlots, folder: Path) -> None:
        self.disk = DiskTables(slots.tables, folder)

    @classmethod
    def opener(cls, folder: Path) -> OpenStore:
        return partial(cls, folder=folder)

    @contextmanager
    def pin(self, ids: SlotIds, *, changes: bool, counts: bool) -> Iterator[Tensor]:
        slots_N = self.disk.pin(ids.values_N, _features_of(ids), changes=changes, counts=counts)
        try:
            yield slots_N
        finally:
            self.disk.unpin()

    def part(self, table: int, part: RowPart) -> DiskStream:
        return DiskStream(self.disk, table, part.dtype, part.initial, part.columns)

    def use(self) -> StoreUse:
        tables = [
            TableUse(table.name, self.disk.counters(number), _memory_bytes(table))
            for number, table in enumerate(self.disk.tables)
        ]
        return StoreUse(tuple(tables), self.disk.io_counters(), self.disk.disk_bytes)

    @property
    def place(self) -> str:
        return f"on disk ({self.disk.folder})"

    def read_ahead(self, ids: SlotIds) -> None:
        self.disk.read_ahead(ids.values_N, _features_of(ids))

    def read_intervals(self, since_s: float) -> list[tuple[float, float]]:
        return self.disk.read_intervals(since_s)


def _features_of(ids: SlotIds) -> list[FeatureIds]:
    bounds = ids.bounds_F1.tolist()
    return [FeatureIds(t, bounds[f], bounds[f + 1]) for f, t in enumerate(ids.tables_F) if t >= 0]


def _memory_bytes(table: SlotTable) -> int:
    slot_bytes = table.row_bytes + table.state_width * FLOAT_bytes + HEADER_bytes
    return len(table.row_memory) * slot_bytes + table.rows * INDEX_bytes
