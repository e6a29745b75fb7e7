"""`HostRows`: tables whose rows and optimizer state are in host memory, with a cache of rows on a device.

Kernels see the cache: `pin` replaces row numbers by slots and copies the missed rows into them; after the call
rows in overflow slots are evicted ([Note: Device cache] in `reference/cache.py`). The host does not wait for the
device. On the CPU the reference does the same, for tests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from rowwise.base.errors import StateError, TableMemoryError
from rowwise.base.quantity import format_bytes
from rowwise.tables.ops.reference import cache as reference
from rowwise.tables.ops.reference.cache import HITS, MISSES, NONE, CachedTable, CacheMemory, CacheMoves, HostTable
from rowwise.tables.store.policy import WAYS
from rowwise.tables.store.row_store import (
    ArenaSlots,
    CacheCounters,
    OpenStore,
    RowPart,
    RowStore,
    SlotIds,
    SlotTable,
    StoreUse,
    TooManyRowsError,
    sum_up,
)

if TYPE_CHECKING:
    from rowwise.tables.ops.arena import Arena


class CacheOperators(NamedTuple):
    """The operators of a cache on a device; see `reference/cache.py`."""

    place_rows: Callable[..., tuple[Tensor, CacheMoves]]
    move_rows: Callable[..., None]
    leave_overflow: Callable[..., None]


@final
class HostRows(RowStore):
    """The full tables of an arena in host memory, cached in slots on a device.

    Without optimizer state (serving) the distinct rows of a batch are counted first, which waits for the device, so
    that too many rows raise before the lookup. In training the host does not wait: the device reports the fault later.
    """

    def __init__(self, slots: ArenaSlots, host: "Arena") -> None:
        tables, slot_rows = [_host_table(table, host) for table in slots.tables], slots.slot_rows
        self.tables, self.device, self._counts_first = tuple(tables), slot_rows.device, host.state.is_meta
        self._rows = [table.rows for table in slots.tables]  # without spare rows
        descriptors: list[CachedTable] = []
        first_key = first_slot = 0
        for table in tables:
            (rows, row_bytes), count = table.rows.shape, len(table.row_memory)
            sets, remainder = divmod(count - table.overflow, WAYS)
            assert sets > 0, table.name
            assert not remainder, table.name
            rows_of_set = -(-rows // sets)
            memory = (table.row_memory, table.state_memory, table.rows, table.state)
            addresses = [x.data_ptr() for x in memory]
            descriptors.append(
                CachedTable(first_key, rows, sets, rows_of_set, first_slot, table.overflow, row_bytes,
                            table.state.shape[1], *addresses)
            )  # fmt: skip
            first_key, first_slot = first_key + sets * rows_of_set, first_slot + count
        self._tables_CK = torch.tensor(descriptors, dtype=torch.int64)
        self._memory = CacheMemory(
            slot_rows=slot_rows.fill_(NONE),
            stamps=torch.zeros_like(slot_rows, dtype=torch.int32),
            changed=torch.zeros_like(slot_rows, dtype=torch.uint8),
            counts_CK=torch.zeros(len(tables), 4, dtype=torch.int64, device=self.device),
            overflow_C=torch.zeros(len(tables), dtype=torch.int64, device=self.device),
        )
        self._calls, self._reported = 0, [0, 0]
        self._registered: list[int] = []
        for table in tables if self.device.type == "cuda" else ():
            for x in (table.rows, table.state):
                self._register(table.name, x)

    def _register(self, name: str, x: Tensor) -> None:
        """Let the device read and write host memory."""
        if not x.nbytes:
            return
        error = torch.cuda.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, 0)
        if int(error):
            size = format_bytes(x.nbytes)
            raise TableMemoryError(
                f"table {name!r}: the driver could not lock {size} of host memory for {self.device} ({error})",
                "a host with more memory, or smaller tables",
            )
        self._registered.append(x.data_ptr())

    def __del__(self) -> None:
        registered = getattr(self, "_registered", [])
        with suppress(Exception):  # the device has failed, or the interpreter is shutting down
            if registered:
                torch.cuda.synchronize(self.device)
        for address in registered:
            with suppress(Exception):
                torch.cuda.cudart().cudaHostUnregister(address)

    def __reduce__(self) -> NoReturn:
        names = ", ".join(table.name for table in self.tables)
        raise StateError(
            f"tables cached on {self.device} cannot be copied or pickled ({names})", hint="save a checkpoint instead"
        )

    @classmethod
    def opener(cls, host: "Arena") -> OpenStore:
        return lambda slots: cls(slots, host)

    @contextmanager
    def pin(self, ids: SlotIds, *, changes: bool, counts: bool) -> Iterator[Tensor]:
        """See `RowStore`. The bounds are on the device; an id outside its table gets slot -1, which kernels find."""
        if self._counts_first:
            self._check_size(ids)
        try:
            yield self._assign_slots(ids, changes + 2 * counts)
        finally:  # writes back changed rows in overflow slots
            self._operators.leave_overflow(self._memory, self.tables, self._tables_CK)

    def _assign_slots(self, ids: SlotIds, flags: int) -> Tensor:
        self._calls += 1
        operators, tables_F = self._operators, torch.tensor(ids.tables_F, dtype=torch.int64)
        slots_N, moves = operators.place_rows(
            self._memory, self._tables_CK, ids.bounds_F1.contiguous(), tables_F, ids.values_N.contiguous(), self._calls,
            flags,
        )  # fmt: skip
        operators.move_rows(moves, self.tables, self._tables_CK, out=True)
        operators.move_rows(moves, self.tables, self._tables_CK, out=False)
        if self.device.type == "cpu" and bool((moves.slots_M[: int(moves.count)] == NONE).any()):
            self._raise_too_small(self.tables[int(moves.tables_M[moves.slots_M == NONE][0])])
        return slots_N

    def _check_size(self, ids: SlotIds) -> None:
        """Raise if the distinct rows of a batch would not fit an empty cache."""
        bounds = ids.bounds_F1.tolist()
        for number, table in enumerate(CachedTable.read(self._tables_CK)):
            spans = [slice(*bounds[f : f + 2]) for f, cached in enumerate(ids.tables_F) if cached == number]
            if sum(span.stop - span.start for span in spans) <= table.overflow:
                continue
            sets_U = torch.cat([ids.values_N[span] for span in spans]).unique() % table.sets
            if int((sets_U.bincount() - WAYS).clamp(min=0).sum()) > table.overflow:
                self._raise_too_small(self.tables[number])

    def part(self, table: int, part: RowPart) -> Tensor:
        self.write_back()
        host, rows = self.tables[table], self._rows[table]
        if part.columns is None:
            return torch.from_dlpack(host.rows[:rows].view(part.dtype))  # of a storage of its own: see `Arena.table`
        state = host.state[:rows, part.columns]
        return state[:, 0] if state.shape[1] == 1 else state

    def use(self) -> StoreUse:
        return sum_up(StoreUse(tables={host.name: self.counters(number)}) for number, host in enumerate(self.tables))

    @property
    def place(self) -> str:
        return f"cached on {self.device}"

    def write_back(self) -> None:
        """Write all changed rows to host memory, and empty the cache; the host waits for it."""
        at_M = self._memory.changed.nonzero().flatten()
        firsts_C = self._tables_CK[:, CachedTable._fields.index("first_slot")].contiguous().to(self.device)
        tables_M = torch.searchsorted(firsts_C, at_M, right=True) - 1
        rows_M, count = self._memory.slot_rows[at_M], torch.tensor([len(at_M)], dtype=torch.int32, device=self.device)
        moves = CacheMoves(tables_M, at_M - firsts_C[tables_M], rows_M, rows_M, count)
        self._operators.move_rows(moves, self.tables, self._tables_CK, out=True)
        self.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget(self) -> None:
        """Empty the cache without writing back: the rows in host memory are the current ones."""
        self._memory.slot_rows.fill_(NONE)
        self._memory.changed.zero_()

    def counters(self, table: int) -> CacheCounters:
        """Counts of a table's cache since the run began; the host waits for the device."""
        hits, misses, evictions, writes = self._memory.counts_CK[table].tolist()
        memory_bytes = self.tables[table].row_memory.nbytes + self.tables[table].state_memory.nbytes
        return CacheCounters(hits=hits, misses=misses, evictions=evictions, writes=writes, memory_bytes=memory_bytes)

    def take_counts(self) -> tuple[int, int]:
        """Ids that hit and rows that missed the cache since the last call; the host waits for the device."""
        totals, before = self._memory.counts_CK[:, [HITS, MISSES]].sum(0).tolist(), self._reported
        self._reported = totals
        return totals[0] - before[0], totals[1] - before[1]

    @property
    def _operators(self) -> CacheOperators:
        """The reference on the CPU, launches of kernels on a GPU."""
        if self.device.type == "cpu":
            return CacheOperators(reference.place_rows, reference.move_rows, reference.leave_overflow)
        from rowwise.tables.ops._triton import slots  # not above, as in `operators`: Triton takes seconds to import

        return CacheOperators(slots.place_rows, slots.move_rows, slots.leave_overflow)

    def _raise_too_small(self, table: HostTable) -> NoReturn:
        raise TooManyRowsError(table.name, len(table.row_memory))


def host_rows(arena: "Arena") -> HostRows | None:
    """The arena's store of rows in host memory; None if it has none."""
    return arena.store if isinstance(arena.store, HostRows) else None


def _host_table(table: SlotTable, host: "Arena") -> HostTable:
    offset, count, width = host.offsets[table.index], table.rows + table.spare_rows, table.state_width
    rows = host.rows[offset.base : offset.base + count * table.row_bytes]
    state = torch.empty(0)  # of width 0: also where the host has allocated none
    if width:
        state = host.state[offset.state_base : offset.state_base + count * width]
    return HostTable(
        name=table.name,
        rows=rows.view(count, -1),
        state=state.view(count, width),
        row_memory=table.row_memory,
        state_memory=table.state_memory,
        overflow=table.overflow,
    )
