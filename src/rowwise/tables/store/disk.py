"""`DiskRows`: tables whose rows and optimizer state are on disk, with a cache of rows in memory.

Kernels see the cache: `pin` replaces row numbers by slots for a call. A row travels with its optimizer state. A row
that was never changed takes no memory: `SlotTable.initial` makes it when it is looked up. The file is unlinked and
vanishes with the process: a killed run resumes from its checkpoint.

[Note: Pinned rows]
Some rows of a table may have slots of their own (`SlotTable.pinned_rows`, chosen by how often they are looked up): a
bit for each row, and a rank for each 64, map them to their slots. Such a row is read once, by its first lookup, and
stays. All others share an LRU cache of the remaining slots. What rows hold does not depend on which are pinned.

[Note: Rows in slots]
Staged gradients keep row numbers. A lookup and its update each pin their rows, so rows may be evicted in between: the
cache has to hold the rows of one kernel call, not those of an accumulated batch.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from rowwise.base.errors import StateError, StoreError
from rowwise.base.library import address_of
from rowwise.base.quantity import format_bytes
from rowwise.tables.store import native
from rowwise.tables.store.native import NativeTable, Segment, Status
from rowwise.tables.store.policy import DEFAULT_POLICY, WAYS, Policy
from rowwise.tables.store.row_store import (
    CacheCounters,
    OpenStore,
    RecordStore,
    SlotIds,
    SlotTable,
    StoreUse,
    TooManyRowsError,
    sum_up,
)
from rowwise.tables.store.sizes import FLOAT_bytes, HEADER_bytes, INDEX_bytes

SEGMENT_bytes = 8 << 20  # of one write: rows go to disk at its sequential speed
UNUSABLE, A_FOLDER = "rows could not be read or written", "a folder on a disk that can be written, by `disk`"


@final
class DiskRows(RecordStore):
    """Rows on disk, of all tables of one arena."""

    reads_ahead = True

    def __init__(
        self,
        tables: Sequence[SlotTable],
        folder: Path,
        *,
        policy: Policy = DEFAULT_POLICY,
        segment_bytes: int = SEGMENT_bytes,
        uring: bool = True,
    ) -> None:
        """`folder`: of the unlinked file."""
        super().__init__(tables)
        self.folder = folder
        self._library, self._tier = native.library, None
        descriptors = (NativeTable * len(tables))()
        for table, entry in zip(tables, descriptors, strict=True):
            pinned = table.pinned_rows.contiguous()
            slots = len(table.row_memory) - len(pinned) - table.overflow
            assert slots > 0, table.name
            assert slots % WAYS == 0, table.name
            entry.rows, entry.slots, entry.overflow = table.rows, slots, table.overflow
            # Beside pinned rows, counts of all rows find no more frequent ones.
            entry.policy = policy == "lfu" and not len(pinned)
            entry.pinned_rows, entry.pinned = address_of(pinned), len(pinned)
            entry.row_bytes, entry.state_bytes = table.row_bytes, table.state_width * 4
            entry.row_memory, entry.state_memory = address_of(table.row_memory), address_of(table.state_memory)
            entry.slot_rows = address_of(table.slot_rows)
        status = Status()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: {UNUSABLE}: {error.strerror}", A_FOLDER) from None
        path = os.fsencode(folder)
        self._tier = self._library.tier_open(path, segment_bytes, uring, len(tables), descriptors, status)
        self._check(status)

    @classmethod
    def opener(cls, folder: Path) -> OpenStore:
        return lambda slots: cls(slots.tables, folder)

    def __del__(self) -> None:
        if getattr(self, "_tier", None):
            self._library.tier_close(self._tier)

    def __reduce__(self) -> NoReturn:
        names = ", ".join(table.name for table in self.tables)
        raise StateError(f"tables on disk ({names}) cannot be copied or pickled", hint="save a checkpoint instead")

    @property
    def file(self) -> int:
        """The descriptor of the file."""
        return int(self._library.tier_file(self._tier))

    @property
    def disk_bytes(self) -> int:
        return int(self._library.tier_disk_bytes(self._tier))

    @contextmanager
    def pin(self, ids: SlotIds, *, changes: bool, counts: bool) -> Iterator[Tensor]:
        ids = ids._replace(values_N=ids.values_N.contiguous())
        slots_N, status = ids.values_N.clone(), Status()
        segments = _segments(ids, slots_N)
        with self.lock:
            self._library.tier_pin(self._tier, len(segments), segments, changes, counts, status)
        if status.code == native.BAD_ID:
            raise RuntimeError(f"rowwise: an id is outside table {self.tables[status.table].name!r}")
        self._check(status)
        for number in {segment.table for segment in segments}:
            self._make_new_rows(number)
        try:
            yield slots_N
        finally:
            self._call("tier_unpin")  # writes back changed rows in overflow slots

    def read_ahead(self, ids: SlotIds) -> None:
        """See `RowStore`. Up to four batches may be prefetched before a lookup; older ones are dropped."""
        ids = ids._replace(values_N=ids.values_N.contiguous())
        segments, status = _segments(ids, ids.values_N), Status()
        with self.lock:
            self._library.tier_read_ahead(self._tier, len(segments), segments, status)
        if status.code != native.BAD_ID:
            self._check(status)

    def read(self, table: int, rows_U: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.tables[table]
        rows_U = rows_U.long().contiguous()
        stored = torch.empty(len(rows_U), slots.row_bytes, dtype=torch.uint8)
        state = torch.empty(len(rows_U), slots.state_width)
        is_written = torch.empty(len(rows_U), dtype=torch.bool)
        self._call("tier_read", table, rows_U, len(rows_U), stored, state, is_written)
        new_U = (~is_written).nonzero().flatten()
        if len(new_U):
            stored[new_U], state[new_U] = slots.initial(rows_U[new_U])
        return stored, state

    def write(self, table: int, rows_U: Tensor, stored: Tensor, state: Tensor) -> None:
        rows_U, stored, state = rows_U.long().contiguous(), stored.contiguous(), state.contiguous()
        self._call("tier_write", table, rows_U, len(rows_U), stored, state)

    def written(self, table: int, first: int, last: int) -> Tensor:
        with self.lock:
            self._call("tier_flush")
            rows_U = torch.empty(self._library.tier_written(self._tier, table, first, last, None), dtype=torch.int64)
            self._library.tier_written(self._tier, table, first, last, rows_U)
        return rows_U

    def forget(self, table: int) -> None:
        with self.lock:
            self._library.tier_forget(self._tier, table)

    def use(self) -> StoreUse:
        values = np.zeros(len(native.IO_COUNTERS))
        with self.lock:
            self._library.tier_io(self._tier, values)
        counts: dict[str, Any] = dict(zip(native.IO_COUNTERS, values.tolist(), strict=True))
        counts |= {name: int(counts[name]) for name in ("reads", "read_bytes", "written_bytes")}
        disk_use = StoreUse(**counts, disk_bytes=self.disk_bytes)
        table_uses = (StoreUse(tables={table.name: self.counters(number)}) for number, table in enumerate(self.tables))
        return sum_up([disk_use, *table_uses])

    @property
    def place(self) -> str:
        return f"on disk ({self.folder})"

    def counters(self, table: int) -> CacheCounters:
        values = np.zeros(len(native.COUNTERS), np.int64)
        self._library.tier_counters(self._tier, table, values)
        counts = dict(zip(native.COUNTERS, values.tolist(), strict=True))
        return CacheCounters(**counts, memory_bytes=_memory_bytes(self.tables[table]))

    def read_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """(begin, end) of reads by time.perf_counter: the latest 4,096 that end after `since_s`."""
        begins, ends = np.zeros((2, native.MAX_INTERVALS))
        count = self._library.tier_busy(self._tier, since_s, native.MAX_INTERVALS, begins, ends)
        return list(zip(begins[:count].tolist(), ends[:count].tolist(), strict=True))

    def _make_new_rows(self, number: int) -> None:
        """Fill the slots of rows that were never written."""
        count = self._library.tier_new_rows(self._tier, number, None, None)
        if not count:
            return
        rows_U, slots_U = torch.empty(2, count, dtype=torch.int64)
        self._library.tier_new_rows(self._tier, number, rows_U, slots_U)
        table = self.tables[number]
        table.row_memory[slots_U], table.state_memory[slots_U] = table.initial(rows_U)

    def _call(self, name: str, *arguments: Any) -> None:
        status = Status()
        with self.lock:
            getattr(self._library, name)(self._tier, *arguments, status)
        self._check(status)

    def _check(self, status: Status) -> None:
        if status.code == native.OK:
            return
        name = self.tables[status.table].name if 0 <= status.table < len(self.tables) else ""
        match status.code:
            case native.TOO_SMALL:
                raise TooManyRowsError(name, status.distinct)
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
                raise StoreError(
                    f"{self.folder}: {UNUSABLE} by a fork of their process", hint="make tables in the fork"
                )
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


def _segments(ids: SlotIds, slots_N: Tensor) -> Any:
    """One segment per feature with a table on disk: its ids, and the part of `slots_N` for its slots."""
    values_N, bounds = ids.values_N, ids.bounds_F1.tolist()
    size, address, slots = values_N.element_size(), values_N.data_ptr(), slots_N.data_ptr()
    segments = [
        Segment(table, size == 8, address + begin * size, end - begin, slots + begin * size)
        for table, (begin, end) in zip(ids.tables_F, pairwise(bounds), strict=True)
        if table >= 0
    ]
    return (Segment * len(segments))(*segments)


def _memory_bytes(table: SlotTable) -> int:
    slot_bytes = table.row_bytes + table.state_width * FLOAT_bytes + HEADER_bytes
    return len(table.row_memory) * slot_bytes + table.rows * INDEX_bytes
