"""The cache of rows on a device: which rows of a batch it inserts, into which slots, and which it evicts.

[Note: Device cache] Rows of a table are cached in *sets* of 32 *ways*: row r is in a way of set r % sets. A batch is
one access of each of its distinct rows, in this order:

- Rows that are in their set stay where they are.
- The missed rows of a set enter it by ascending row. Each takes the way of the row that was accessed longest ago,
  empty ways first; of equals the first way. Rows of this batch are not replaced.
- Rows for which their set has no way left go to the *overflow*, slots behind those of the sets, by (set, row).
  They are evicted when the batch ends.
- Rows for which the overflow has no slot get slot -1, which kernels neither read nor write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.tables.store.policy import WAYS, choose_way

NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """A table in host memory, and the slots of its cache on the device."""

    name: str
    rows: Tensor  # uint8 [rows, row_bytes], on the host
    state: Tensor  # float32 [rows, state_width]
    row_memory: Tensor  # of the slots: uint8 [slots, row_bytes], on the device
    state_memory: Tensor
    overflow: int  # number of slots for rows whose set is full of rows of the same batch

    def read_slots(self, slots_M: Tensor, rows_M: Tensor) -> None:
        """Copy rows from host memory into slots."""
        self.row_memory[slots_M], self.state_memory[slots_M] = self.rows[rows_M], self.state[rows_M]

    def write_slots(self, slots_M: Tensor, rows_M: Tensor) -> None:
        """Copy slots to the rows of host memory."""
        self.rows[rows_M], self.state[rows_M] = self.row_memory[slots_M], self.state_memory[slots_M]


class CachedTable(NamedTuple):
    """A table as the kernels of the cache see it: a row of `tables_CK`."""

    first_key: int  # keys number the rows of all tables by (table, set, row)
    rows: int
    sets: int
    rows_of_set: int  # rows / sets, rounded up
    first_slot: int  # in `slot_rows`
    overflow: int  # slots behind those of the sets
    row_bytes: int
    state_floats: int
    device_rows: int  # addresses of row 0, or slot 0, and of its optimizer state
    device_state: int
    host_rows: int
    host_state: int

    @classmethod
    def read(cls, tables_CK: Tensor) -> list["CachedTable"]:
        return [cls(*row) for row in tables_CK.tolist()]

    @property
    def slots(self) -> int:
        """The slots of the sets."""
        return self.sets * WAYS


class CacheMemory(NamedTuple):
    """The state of the slots of a cache, which the kernels change."""

    slot_rows: Tensor  # int64: the row in each slot, -1: none
    stamps: Tensor  # int32: the batch that last accessed it
    changed: Tensor  # uint8: whether it differs from the row in host memory
    counts_CK: Tensor  # int64, by table: ids that hit, ids that missed, rows replaced, and those of them written back
    overflow_C: Tensor  # int64: slots of the overflow that the batch uses, by table


HITS, MISSES, EVICTIONS, WRITES = range(4)


class CacheMoves(NamedTuple):
    """Rows to read into slots, in order, and the evicted rows that have to be written back first."""

    tables_M: Tensor
    slots_M: Tensor  # of the table; -1: no slot
    rows_M: Tensor
    victims_M: Tensor  # row to write back; -1: none
    count: Tensor  # number of moves; entries behind these are undefined


def place_rows(
    memory: CacheMemory, tables_CK: Tensor, bounds_F1: Tensor, cached_F: Tensor, values_N: Tensor, now: int, flags: int
) -> tuple[Tensor, CacheMoves]:
    """The slots of a batch's ids, and the rows to move; see [Note: Device cache].

    `bounds_F1`: first id of each feature; `cached_F`: its table, or -1 without a cache, which leaves its ids unchanged.
    `flags`: 1 if the rows will change, plus 2 if the access counts. Ids outside their table get slot -1.
    """
    changes, counts = flags & 1, flags & 2
    slots_N, moves, bounds = values_N.clone(), list[tuple[int, int, int, int]](), bounds_F1.tolist()
    for number, table in enumerate(CachedTable.read(tables_CK)):
        features = [f for f, cached in enumerate(cached_F.tolist()) if cached == number]
        at_N = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(*bounds[f : f + 2]) for f in features)])
        ids = values_N[at_N].tolist()
        rows = sorted({row for row in ids if 0 <= row < table.rows}, key=lambda row, n=table.sets: (row % n, row))
        slots = {row: slot for row in rows if (slot := _find_row(memory, table, row)) != NONE}
        for slot in slots.values():
            memory.stamps[table.first_slot + slot] = now
        missed, overflow = [row for row in rows if row not in slots], 0  # overflow slots in use
        for row in missed:
            slot = _choose_way(memory, table, row, now)
            if slot == NONE:
                slot = table.slots + overflow if overflow < table.overflow else NONE
                overflow += slot != NONE
            slots[row] = slot
            moves.append(
                (number, slot, row, NONE if slot == NONE else _insert(memory, number, table, (slot, row), now))
            )
        memory.overflow_C[number] = overflow
        slots_N[at_N] = torch.tensor([slots.get(row, NONE) for row in ids], dtype=slots_N.dtype)
        if changes:
            used = [slot for slot in slots.values() if slot != NONE]
            memory.changed[table.first_slot + torch.tensor(used, dtype=torch.int64)] = 1
        if counts:
            memory.counts_CK[number, HITS] += sum(row in slots for row in ids) - len(missed)
            memory.counts_CK[number, MISSES] += len(missed)
    tables_M, slots_M, rows_M, victims_M = torch.tensor(moves, dtype=torch.int64).view(-1, 4).unbind(1)
    count = torch.tensor([len(moves)], dtype=torch.int32)
    return slots_N, CacheMoves(tables_M, slots_M, rows_M, victims_M, count)


def _find_row(memory: CacheMemory, table: CachedTable, row: int) -> int:
    """The slot of a row; -1 if it is not cached."""
    first = row % table.sets * WAYS
    ways = memory.slot_rows[table.first_slot + first :][:WAYS].tolist()
    return first + ways.index(row) if row in ways else NONE


def _choose_way(memory: CacheMemory, table: CachedTable, row: int, now: int) -> int:
    """The slot for a missed row; -1 if its set is full of rows of this batch."""
    first = row % table.sets * WAYS
    ways = slice(table.first_slot + first, table.first_slot + first + WAYS)
    rows_W, stamp_W = memory.slot_rows[ways].numpy(), memory.stamps[ways].numpy()
    way = choose_way("lru", rows_W, stamp_W, stamp_W, pinned_W=stamp_W == now)
    return NONE if way is None else first + way


def _insert(memory: CacheMemory, number: int, table: CachedTable, move: tuple[int, int], now: int) -> int:
    """Insert a row into a slot; returns the evicted row if it has to be written back, else -1."""
    slot, at = move[0], table.first_slot + move[0]
    before, is_changed = int(memory.slot_rows[at]), bool(memory.changed[at])
    memory.slot_rows[at], memory.stamps[at], memory.changed[at] = move[1], now, 0
    memory.counts_CK[number, EVICTIONS] += before != NONE
    memory.counts_CK[number, WRITES] += is_changed
    return before if slot < table.slots and is_changed else NONE


def move_rows(moves: CacheMoves, tables: Sequence[HostTable], tables_CK: Tensor, *, out: bool) -> None:
    """Write the evicted rows of `moves` back if `out`, else read the inserted ones."""
    rows_M = moves.victims_M if out else moves.rows_M
    for number, table in enumerate(tables):
        chosen = (moves.tables_M == number) & (moves.slots_M != NONE) & (rows_M != NONE)
        (table.write_slots if out else table.read_slots)(moves.slots_M[chosen], rows_M[chosen])


def leave_overflow(memory: CacheMemory, tables: Sequence[HostTable], tables_CK: Tensor) -> None:
    """Write the changed rows of the overflow back, and empty it."""
    for number, table in enumerate(CachedTable.read(tables_CK)):
        slots = table.slots + torch.arange(int(memory.overflow_C[number]))
        used = table.first_slot + slots
        changed = memory.changed[used] != 0
        tables[number].write_slots(slots[changed], memory.slot_rows[used[changed]])
        memory.slot_rows[used], memory.changed[used] = NONE, 0
