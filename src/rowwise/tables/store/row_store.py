"""`RowStore`: the rows and optimizer state of tables for which an arena has slots only.

Kernels see slots: `pin` puts the rows of a batch into slots, and unpins them when the kernel has run. A custom store is
a class with the methods below; `shard(..., disk=OpenStore)` uses it for the tiles of tier `disk`.
"""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, final

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from rowwise.base.errors import SpecError
from rowwise.tables.spec import Value
from rowwise.tables.store.row_stream import InitialValues, RowStream


class TooManyRowsError(SpecError):
    """A batch has rows for which a cache has no slots."""

    def __init__(self, table: str, slots: int) -> None:
        rows = f"a batch has more rows of table {table!r} than find room in its cache of {slots:,} slots"
        super().__init__(rows, "a larger cache (memory), or smaller batches (train.batch)")


HotRows = Mapping[str, Tensor]  # by table: some of its rows, the most frequently looked up first
NO_HOT_ROWS: HotRows = {}
NO_ROWS = torch.empty(0, dtype=torch.int64)
InitialRows = Callable[[Tensor], tuple[Tensor, Tensor]]  # row numbers -> stored bytes [U, bytes] and state [U, floats]
WINDOW_bytes = 16 << 20  # bytes of records that a stream reads at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTable:
    """A table, or piece of one, with slots for some of its rows."""

    name: str
    index: int = 0  # in the arena
    rows: int
    spare_rows: int = 0  # behind those, with rows of later versions
    row_memory: Tensor  # of the slots: uint8 [slots, row_bytes]
    state_memory: Tensor  # float32 [slots, state_width]
    slot_rows: Tensor  # int64 [slots]: the row in each slot, -1: none
    overflow: int  # number of slots for rows whose set is full of rows of the same batch
    pinned_rows: Tensor = NO_ROWS  # int64, ascending; their slots are behind those of the sets
    initial: InitialRows

    @property
    def row_bytes(self) -> int:
        return self.row_memory.shape[1]

    @property
    def state_width(self) -> int:
        return self.state_memory.shape[1]


class ArenaSlots(NamedTuple):
    """The slots of all tables of an arena, one table after the other."""

    tables: tuple[SlotTable, ...]
    slot_rows: Tensor


class SlotIds(NamedTuple):
    """The ids of a batch, and the cached table of each feature."""

    values_N: Tensor
    bounds_F1: Tensor  # where the ids of each feature begin
    tables_F: Sequence[int]  # the number of each feature's table in `ArenaSlots`; -1: not cached, so ids are unchanged


class RowPart(NamedTuple):
    """The stored rows of a table, or columns of its optimizer state."""

    dtype: torch.dtype
    initial: InitialValues
    columns: slice | None = None  # columns of the optimizer state; None for the stored rows


class CacheCounters(Value, frozen=True, kw_only=True):
    """Counts of a table's slots since the run began, and the memory that the table takes."""

    hits: int = 0  # ids of lookups whose row was in a slot
    misses: int = 0
    new_rows: int = 0  # missed rows that were never written, so were initialised
    evictions: int = 0
    writes: int = 0  # rows written back
    memory_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)

    def plus(self, other: "CacheCounters") -> "CacheCounters":
        return CacheCounters(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def since(self, before: "CacheCounters") -> "CacheCounters":
        """The counts that are not in `before`; memory is not a count."""
        counts = {name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__}
        return structs.replace(CacheCounters(**counts), memory_bytes=self.memory_bytes)


class StoreUse(Value, frozen=True, kw_only=True):
    """Counts of stores since the run began: of their tables, of disk I/O, and of the time that calls waited for it.

    Seconds add up over ranks.
    """

    tables: dict[str, CacheCounters] = msgspec.field(default_factory=dict)
    reads: int = 0  # blocks read
    read_bytes: int = 0
    written_bytes: int = 0
    read_wait_s: float = 0.0  # in which calls waited for reads that no computation hid
    write_wait_s: float = 0.0  # in which calls waited for writes of segments and for compaction
    busy_s: float = 0.0  # in which reads were in flight
    ranks: int = 0  # ranks with stores
    disk_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        return functools.reduce(CacheCounters.plus, self.tables.values(), CacheCounters()).hit_rate

    def plus(self, other: "StoreUse") -> "StoreUse":
        tables = {**self.tables}
        for name, counters in other.tables.items():
            tables[name] = tables.get(name, CacheCounters()).plus(counters)
        sums = {name: getattr(self, name) + getattr(other, name) for name in NUMBERS}
        return StoreUse(tables=tables, **sums)

    def since(self, before: "StoreUse") -> "StoreUse":
        """The counts that are not in `before`; ranks and bytes of the disk are no counts."""
        tables = {name: now.since(before.tables.get(name, CacheCounters())) for name, now in self.tables.items()}
        sums = {
            name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__ if name != "tables"
        }
        return structs.replace(StoreUse(tables=tables, **sums), ranks=self.ranks, disk_bytes=self.disk_bytes)


NUMBERS = tuple(name for name in StoreUse.__struct_fields__ if name != "tables")


def sum_up(uses: Iterable[StoreUse]) -> StoreUse:
    return functools.reduce(StoreUse.plus, uses, StoreUse())


class RowStore(ABC):
    """Rows and optimizer state of the tables of one arena. Custom stores derive from it."""

    reads_ahead: bool = False  # whether `read_ahead` does anything

    @abstractmethod
    def pin(self, ids: SlotIds, *, changes: bool, counts: bool) -> AbstractContextManager[Tensor]:
        """The values with ids replaced by slots, which hold their rows in the context.

        `changes`: the rows will change. `counts`: the ids count as accesses for eviction. Raises RuntimeError for
        an id outside its table, or gives it slot -1.
        """

    @abstractmethod
    def part(self, table: int, part: RowPart) -> Tensor | RowStream:
        """Rows or optimizer state of a table: an up-to-date view, or a stream that is safe between threads."""

    @abstractmethod
    def use(self) -> StoreUse:
        """Counts since the run began; may wait for a device."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The place of the rows in words, such as: on disk (/data)."""

    def write_back(self) -> None:
        """Write changed rows back and empty the slots; called before code writes into views."""
        return

    def read_ahead(self, ids: SlotIds) -> None:
        """Prefetch the rows of a later batch; ids outside their tables read nothing."""
        return

    def read_intervals(self, since_s: float) -> list[tuple[float, float]]:
        """The times of reads that end after `since_s`, by time.perf_counter."""
        return []


class RecordStore(RowStore):
    """A store that keeps a row and its optimizer state as one record; custom stores may derive from it."""

    def __init__(self, tables: Sequence[SlotTable]) -> None:
        self.tables = tuple(tables)
        self.lock = threading.RLock()  # threads of a checkpoint read and write rows and state of one table at once

    @abstractmethod
    def read(self, table: int, rows_U: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of stored rows [U, bytes] and state [U, floats], initial ones of rows that were never written."""

    @abstractmethod
    def write(self, table: int, rows_U: Tensor, stored: Tensor, state: Tensor) -> None:
        """Overwrite distinct rows and their state."""

    @abstractmethod
    def written(self, table: int, first: int, last: int) -> Tensor:
        """The rows in [first, last) that were ever changed: ascending int64."""

    @abstractmethod
    def forget(self, table: int) -> None:
        """Reset all rows of a table to their initial values."""

    def part(self, table: int, part: RowPart) -> RowStream:
        return RecordStream(self, table, part)


@final
class RecordStream:
    """The stored rows of a table in a `RecordStore`, or columns of their optimizer state, as a `RowStream`."""

    def __init__(self, store: RecordStore, table: int, part: RowPart) -> None:
        self._store, self._table, self._columns = store, table, part.columns
        self.dtype, self.initial = part.dtype, part.initial
        slots, columns = store.tables[table], part.columns
        width = slots.row_bytes // part.dtype.itemsize if columns is None else columns.stop - columns.start
        self.shape = (slots.rows,) if columns is not None and width == 1 else (slots.rows, width)
        # Rows and state are one record: few records at a time, however narrow the columns are.
        self._max_rows = max(1, WINDOW_bytes // (slots.row_bytes + 4 * slots.state_width))

    def written(self, begin: int, end: int) -> Tensor:
        return self._store.written(self._table, begin, end)

    def forget(self) -> None:
        self._store.forget(self._table)

    def read(self, begin: int, end: int) -> Tensor:
        return self.read_rows(torch.arange(begin, end))

    def read_rows(self, rows: Tensor) -> Tensor:
        runs = rows.split(self._max_rows)
        parts = [self._part(*self._store.read(self._table, run)) for run in runs]
        return torch.cat(parts).view(len(rows), *self.shape[1:])

    def write(self, begin: int, values: Tensor) -> None:
        self.write_rows(torch.arange(begin, begin + len(values)), values)

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        for run, part in zip(rows.split(self._max_rows), values.split(self._max_rows), strict=True):
            with self._store.lock:
                stored, state = self._store.read(self._table, run)
                self._part(stored, state).copy_(part.view(len(run), -1))
                self._store.write(self._table, run, stored, state)

    def _part(self, stored: Tensor, state: Tensor) -> Tensor:
        return stored.view(self.dtype) if self._columns is None else state[:, self._columns]


OpenStore = Callable[[ArenaSlots], RowStore]
