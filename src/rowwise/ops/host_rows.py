"""`HostRows`: rows in host memory, of tables that a device looks up in slots of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from rowwise.ops.device_cache import DeviceCache
from rowwise.ops.reference.cache import HostTable
from rowwise.store.row_store import ArenaSlots, OpenStore, RowPart, RowStore, SlotIds, SlotTable, StoreUse, TableUse

if TYPE_CHECKING:
    from rowwise.ops.arena import Arena


@final
class HostRows(RowStore):
    """The whole tables of an arena in host memory, behind slots on a device."""

    def __init__(self, slots: ArenaSlots, host: "Arena") -> None:
        # Rows without optimizer state are only looked up, by who needs all of them at once.
        tables = [_host_table(table, host) for table in slots.tables]
        self.cache = DeviceCache(tables, slots.slot_rows, waits=host.state.is_meta)
        self._rows = [table.rows for table in slots.tables]  # without those of newer versions behind them
        self._host = host

    @classmethod
    def opener(cls, host: "Arena") -> OpenStore:
        return lambda slots: cls(slots, host)

    @contextmanager
    def pin(self, ids: SlotIds, *, changes: bool, counts: bool) -> Iterator[Tensor]:
        try:
            yield self.cache.pin(*ids, changes=changes, counts=counts)
        finally:
            self.cache.unpin()

    def part(self, table: int, part: RowPart) -> Tensor:
        self.cache.write_back()
        one, rows = self.cache.tables[table], self._rows[table]
        if part.columns is None:
            return torch.from_dlpack(one.rows[:rows].view(part.dtype))  # of a storage of its own: see `Arena.table`
        state = one.state[:rows, part.columns]
        return state[:, 0] if state.shape[1] == 1 else state

    def use(self) -> StoreUse:
        tables = [
            TableUse(one.name, self.cache.counters(number), one.row_memory.nbytes + one.state_memory.nbytes)
            for number, one in enumerate(self.cache.tables)
        ]
        return StoreUse(tuple(tables))

    @property
    def place(self) -> str:
        return f"cached on {self.cache.device}"

    def write_back(self) -> None:
        self.cache.write_back()


def cache_of(arena: "Arena") -> DeviceCache | None:
    """The cache of rows in host memory; None: an arena has no such rows."""
    return arena.store.cache if isinstance(arena.store, HostRows) else None


def _host_table(table: SlotTable, host: "Arena") -> HostTable:
    offset, count, width = host.offsets[table.index], table.rows + table.room, table.state_width
    rows = host.rows[offset.base : offset.base + count * table.row_bytes]
    state = torch.empty(0)  # also of a host without memory for it
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
