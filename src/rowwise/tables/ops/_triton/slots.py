"""Launches of the cache of rows on a device: the functions of `reference/cache.py`, for tensors on a GPU.

Sizes follow from the number of ids, so nothing waits for the device.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rowwise.tables.ops._triton import cache as kernels
from rowwise.tables.ops._triton import specialise
from rowwise.tables.ops._triton.launch import (
    TILED,
    begin,
    empty_numbers,
    end,
    on_device,
    over,
    programs_of,
    shared_programs,
)
from rowwise.tables.ops.faults import SLOTS
from rowwise.tables.ops.reference.cache import CachedTable, CacheMemory, CacheMoves, HostTable

IDS = 256  # ids that a program numbers at a time
ROWS = 16  # rows of a program that searches sets
OVERFLOW_PROGRAMS = 128  # programs of a table's overflow
COUNTED = 1024  # moves that a program counts at a time
ROW_BYTES = CachedTable._fields.index("row_bytes")


def place_rows(
    memory: CacheMemory, tables_CK: Tensor, bounds_F1: Tensor, cached_F: Tensor, values_N: Tensor, now: int, flags: int
) -> tuple[Tensor, CacheMoves]:
    device, n, num_tables = values_N.device, len(values_N), len(tables_CK)
    fault, tables = begin(device), on_device(tables_CK, device)
    last = CachedTable(*tables_CK[-1].tolist())
    max_key = last.first_key + last.sets * last.rows_of_set

    numbers = partial(empty_numbers, device)
    slots_N = values_N.clone()
    if not n:
        empty = numbers(0, torch.int64)
        memory.overflow_C.zero_()
        return slots_N, CacheMoves(empty, empty, empty, empty, torch.zeros(1, dtype=torch.int32, device=device))
    # Half of the passes of a radix sort where keys have 32 bits.
    key_type = torch.int32 if max_key < 2**31 - 1 else torch.int64
    keys_N = torch.full((n,), max_key, dtype=key_type, device=device)
    features = len(cached_F)
    kernels.number_rows[shared_programs(n, IDS, device, features), features](
        values_N, bounds_F1, on_device(cached_F, device), tables, keys_N, slots_N, max_key, IDS=IDS,
        num_warps=specialise.TILE_WARPS,
    )  # fmt: skip
    keys_N, order_N = torch.sort(keys_N, stable=True)
    is_first_N, is_missed_N = numbers(n), numbers(n)
    kernels.find_firsts[over(n)](keys_N, is_first_N, max_key, n, **TILED)
    numbers_N, slot_U = is_first_N.cumsum(0, dtype=torch.int32), numbers(n, torch.int64)
    kernels.find_rows[over(n, ROWS)](
        keys_N, is_first_N, numbers_N, tables, memory.slot_rows, memory.stamps, slot_U, is_missed_N, now, num_tables,
        n, ROWS=ROWS, num_warps=specialise.TILE_WARPS,
    )  # fmt: skip
    missed_N, at_M = is_missed_N.cumsum(0, dtype=torch.int32), numbers(n)
    way_M = torch.zeros(n, dtype=torch.int32, device=device)
    kernels.choose_ways[min(n, programs_of(device)),](
        keys_N, missed_N, tables, memory.slot_rows, memory.stamps, at_M, way_M, now, num_tables, n, num_warps=1
    )
    spilled_M = (way_M < 0).cumsum(0, dtype=torch.int32)
    move_tables, move_slots, move_rows, victims = (numbers(n, torch.int64) for _ in range(4))
    evicted_M = numbers(n)
    kernels.enter[over(n)](
        keys_N, numbers_N, missed_N, at_M, way_M, spilled_M, tables, memory.slot_rows, memory.stamps, memory.changed,
        slot_U, move_tables, move_slots, move_rows, victims, evicted_M, fault[SLOTS:], now, num_tables, n, **TILED,
    )  # fmt: skip
    kernels.write_slots[over(n)](
        keys_N, order_N, is_first_N, numbers_N, slot_U, tables, slots_N, memory.changed, max_key, num_tables, n,
        CHANGES=flags & 1, **TILED,
    )  # fmt: skip
    kernels.count[num_tables,](
        keys_N, missed_N, spilled_M, evicted_M, victims, tables, memory.counts_CK, memory.overflow_C, max_key,
        num_tables, n, COUNTS=flags >> 1, TILE=COUNTED, num_warps=specialise.TILE_WARPS,
    )  # fmt: skip
    end(device)
    return slots_N, CacheMoves(move_tables, move_slots, move_rows, victims, missed_N[-1:])


def move_rows(moves: CacheMoves, tables: Sequence[HostTable], tables_CK: Tensor, *, out: bool) -> None:
    device, max_moves = moves.slots_M.device, len(moves.slots_M)
    if not max_moves:
        return
    kernels.move[min(max_moves, programs_of(device)),](
        moves.tables_M, moves.slots_M, moves.victims_M if out else moves.rows_M, moves.count,
        on_device(tables_CK, device), OUT=out, **_shape(tables_CK),
    )  # fmt: skip


def leave_overflow(memory: CacheMemory, tables: Sequence[HostTable], tables_CK: Tensor) -> None:
    kernels.leave_overflow[OVERFLOW_PROGRAMS, len(tables_CK)](
        on_device(tables_CK, memory.changed.device), memory.slot_rows, memory.changed, memory.overflow_C,
        **_shape(tables_CK),
    )  # fmt: skip


def _shape(tables_CK: Tensor) -> dict[str, int]:
    """The constants of copies: words where all rows are of whole words."""
    sizes = tables_CK[:, ROW_BYTES].tolist()
    unit = 4 if all(size % 4 == 0 for size in sizes) else 1
    return {"UNIT": unit, "BLOCK": min(1024, specialise.power_of_two(max(sizes) // unit)), "num_warps": 1}
