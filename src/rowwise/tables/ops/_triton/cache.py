"""Kernels of the cache of rows on a device, with the slots of [Note: Device cache]. Nothing waits for the device.

The distinct rows of a batch are found by a sort of keys that number rows by (table, set, row), so a set's rows are
neighbours. Rows in host memory are read and written by their address, over the bus.

Axes: N ids, C cached tables; M missed rows and U distinct rows, of which there are at most N.
"""

import triton
import triton.language as tl

from rowwise.tables.ops._triton.contributions import count_below
from rowwise.tables.ops.reference.cache import CachedTable
from rowwise.tables.store.policy import WAYS as WAYS_OF_SET

FIELDS = tl.constexpr(len(CachedTable._fields))
WAYS = tl.constexpr(WAYS_OF_SET)
NO_WAY = tl.constexpr(1 << 62)


@triton.jit
def up_to(sums, count):
    """The sum of the first `count` numbers, from their inclusive prefix sums."""
    return tl.load(sums + count - 1, mask=count > 0, other=0).to(tl.int64)


@triton.jit
def table_of(tables, key, num_tables):
    """The number of each key's table."""
    return tl.maximum(count_below(tables, key + 1, num_tables, FIELDS) - 1, 0)


@triton.jit(do_not_specialize=["max_key"])
def number_rows(values, bounds, cached, tables, keys, slots, max_key, IDS: tl.constexpr):
    """The key of each id of a feature with a cached table; ids outside their table get slot -1."""
    number = tl.load(cached + tl.program_id(1))
    first, last = tl.load(bounds + tl.program_id(1)), tl.load(bounds + tl.program_id(1) + 1)
    last = tl.where(number >= 0, last, first)
    table = tables + tl.maximum(number, 0) * FIELDS
    first_key, rows, sets, rows_of_set = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    i = first + tl.program_id(0).to(tl.int64) * IDS
    while i < last:
        k = i + tl.arange(0, IDS)
        row = tl.load(values + k, mask=k < last, other=0).to(tl.int64)
        good = (row >= 0) & (row < rows)
        safe = tl.where(good, row, 0)
        of_set = safe // sets
        key = tl.where(good, first_key + (safe - of_set * sets) * rows_of_set + of_set, max_key)
        tl.store(keys + k, key.to(keys.dtype.element_ty), mask=k < last)
        tl.store(slots + k, (row * 0 - 1).to(slots.dtype.element_ty), mask=(k < last) & ~good)
        i += tl.num_programs(0).to(tl.int64) * IDS


@triton.jit(do_not_specialize=["max_key", "n"])
def find_firsts(keys, is_first, max_key, n, TILE: tl.constexpr):
    """Mark the first of equal sorted keys."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    key = tl.load(keys + at, mask=at < n, other=0)
    before = tl.load(keys + at - 1, mask=(at < n) & (at > 0), other=-1)
    tl.store(is_first + at, tl.where((key != before) & (key < max_key), 1, 0), mask=at < n)


@triton.jit(do_not_specialize=["now", "num_tables", "n"])
def find_rows(
    keys,
    is_first,
    numbers,  # of distinct rows, from 1
    tables,
    slot_rows,
    stamps,
    found,  # the slot of each distinct row
    is_missed,
    now,
    num_tables,
    n,
    ROWS: tl.constexpr,
):
    """The slots of rows that are cached, whose stamps become `now`."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < n
    first = tl.load(is_first + at, mask=inside, other=0) != 0
    key = tl.load(keys + at, mask=first, other=0).to(tl.int64)
    table = tables + table_of(tables, key, num_tables) * FIELDS
    place = key - tl.load(table, mask=first, other=0)
    sets, rows_of_set = tl.load(table + 2, mask=first, other=1), tl.load(table + 3, mask=first, other=1)
    set_number = place // rows_of_set
    base = tl.load(table + 4, mask=first, other=0) + set_number * WAYS
    row = (place - set_number * rows_of_set) * sets + set_number
    ways = tl.arange(0, WAYS)[None, :]
    cached = tl.load(slot_rows + base[:, None] + ways, mask=first[:, None], other=-1)
    way = tl.max(tl.where(cached == row[:, None], ways, -1), 1)
    hit = first & (way >= 0)
    slot = set_number * WAYS + way
    number = tl.load(numbers + at, mask=first, other=1) - 1
    tl.store(found + number, tl.where(hit, slot, -1), mask=first)
    tl.store(stamps + base + way, now, mask=hit)
    tl.store(is_missed + at, tl.where(first & ~hit, 1, 0), mask=inside)


@triton.jit(do_not_specialize=["now", "num_tables", "n"])
def choose_ways(keys, missed, tables, slot_rows, stamps, at_of, ways_of, now, num_tables, n):
    """The way of each missed row: the k-th row of a set takes its k-th oldest free way; -1 if none is left."""
    ways = tl.arange(0, WAYS)
    count = tl.load(missed + n - 1)
    m = tl.program_id(0).to(tl.int64)
    while m < count:
        at = count_below(missed, m + 1, n)
        key = tl.load(keys + at).to(tl.int64)
        table = tables + table_of(tables, key, num_tables) * FIELDS
        first_key, rows_of_set = tl.load(table), tl.load(table + 3)
        set_number = (key - first_key) // rows_of_set
        k = m - up_to(missed, count_below(keys, first_key + set_number * rows_of_set, n))
        base = tl.load(table + 4) + set_number * WAYS
        stamp = tl.load(stamps + base + ways)
        age = tl.where(tl.load(slot_rows + base + ways) == -1, -1, stamp)
        free = age != now
        order = tl.where(free, (age.to(tl.int64) + 1) * WAYS + ways, NO_WAY)
        # The rank of each way by age: the number of ways before it.
        before = tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1)
        way = tl.max(tl.where(free & (before == k), ways, -1), 0)
        tl.store(at_of + m, at)
        tl.store(ways_of + m, way)
        m += tl.num_programs(0)


@triton.jit(do_not_specialize=["now", "num_tables", "n"])
def enter(
    keys,
    numbers,
    missed,
    at_of,
    ways_of,
    spilled,  # inclusive prefix sums of the missed rows without a way
    tables,
    slot_rows,
    stamps,
    changed,
    found,
    move_tables,
    move_slots,
    move_rows,
    move_victims,
    evicted,
    fault,
    now,
    num_tables,
    n,
    TILE: tl.constexpr,
):
    """Insert missed rows into their slots; writes the moves, and which slots held evicted rows."""
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = m < tl.load(missed + n - 1)
    at = tl.load(at_of + m, mask=inside, other=0)
    key = tl.load(keys + at, mask=inside, other=0).to(tl.int64)
    number = table_of(tables, key, num_tables)
    table = tables + number * FIELDS
    first_key = tl.load(table, mask=inside, other=0)
    sets, rows_of_set = tl.load(table + 2, mask=inside, other=1), tl.load(table + 3, mask=inside, other=1)
    set_number = (key - first_key) // rows_of_set
    row = (key - first_key - set_number * rows_of_set) * sets + set_number
    way = tl.load(ways_of + m, mask=inside, other=0)
    in_set = inside & (way >= 0)
    # Place in the overflow: the number of earlier rows of the table without a way.
    of_table = up_to(missed, count_below(keys, first_key, n))
    place = tl.load(spilled + m, mask=inside, other=0) - 1 - up_to(spilled, of_table)
    behind = tl.where(place < tl.load(table + 5, mask=inside, other=0), sets * WAYS + place, -1)
    slot = tl.where(in_set, set_number * WAYS + way, behind)
    has = inside & (slot >= 0)
    to = tl.load(table + 4, mask=inside, other=0) + slot
    before = tl.load(slot_rows + to, mask=has, other=-1)
    is_changed = tl.load(changed + to, mask=has, other=0) != 0
    tl.store(slot_rows + to, row, mask=has)
    tl.store(stamps + to, now, mask=has)
    tl.store(changed + to, 0, mask=has)
    tl.store(found + tl.load(numbers + at, mask=inside, other=1) - 1, slot, mask=inside)
    tl.store(move_tables + m, number, mask=inside)
    tl.store(move_slots + m, slot, mask=inside)
    tl.store(move_rows + m, row, mask=inside)
    tl.store(move_victims + m, tl.where(is_changed, before, -1), mask=inside)
    tl.store(evicted + m, tl.where(before >= 0, 1, 0), mask=inside)
    tl.store(fault + m * 0, 1, mask=inside & ~has)  # all programs store 1


@triton.jit(do_not_specialize=["n"])
def write_slots(
    keys, order, is_first, numbers, found, tables, slots, changed, max_key, num_tables, n,
    CHANGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The slot of each id, in the order of the batch."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    key = tl.load(keys + at, mask=at < n, other=0).to(tl.int64)
    used = (at < n) & (key < max_key)
    slot = tl.load(found + tl.load(numbers + at, mask=used, other=1) - 1, mask=used, other=0)
    tl.store(slots + tl.load(order + at, mask=used, other=0), slot.to(slots.dtype.element_ty), mask=used)
    if CHANGES:
        first = used & (tl.load(is_first + at, mask=used, other=0) != 0) & (slot >= 0)
        base = tl.load(tables + table_of(tables, key, num_tables) * FIELDS + 4, mask=first, other=0)
        tl.store(changed + base + slot, 1, mask=first)


@triton.jit(do_not_specialize=["max_key", "num_tables", "n"])
def count(
    keys, missed, spilled, evicted, move_victims, tables, counts, overflow_used, max_key, num_tables, n,
    COUNTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add to the counts of a table, and store the number of its overflow slots in use."""
    number = tl.program_id(0)
    table, to = tables + number * FIELDS, counts + number * 4
    next_key = tl.load(table + FIELDS, mask=number + 1 < num_tables, other=max_key)
    first, last = count_below(keys, tl.load(table), n), count_below(keys, next_key, n)
    first_missed, last_missed = up_to(missed, first), up_to(missed, last)
    spill = up_to(spilled, last_missed) - up_to(spilled, first_missed)
    tl.store(overflow_used + number, tl.minimum(spill, tl.load(table + 5)))
    if COUNTS:
        tl.store(to, tl.load(to) + last - first - (last_missed - first_missed))
        tl.store(to + 1, tl.load(to + 1) + last_missed - first_missed)
    evictions, writes = first_missed * 0, first_missed * 0
    i = first_missed
    while i < last_missed:
        m = i + tl.arange(0, TILE)
        evictions += tl.sum(tl.load(evicted + m, mask=m < last_missed, other=0).to(tl.int64), 0)
        writes += tl.sum((tl.load(move_victims + m, mask=m < last_missed, other=-1) >= 0).to(tl.int64), 0)
        i += TILE
    tl.store(to + 2, tl.load(to + 2) + evictions)
    tl.store(to + 3, tl.load(to + 3) + writes)


@triton.jit
def copy(source, target, size, has, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `size` bytes between addresses; UNIT divides size and addresses."""
    i = size * 0
    while i < size // UNIT:
        k = i + tl.arange(0, BLOCK)
        mask = has & (k < size // UNIT)
        if UNIT == 4:
            x = tl.load(source.to(tl.pointer_type(tl.int32)) + k, mask=mask)
            tl.store(target.to(tl.pointer_type(tl.int32)) + k, x, mask=mask)
        else:
            x = tl.load(source.to(tl.pointer_type(tl.int8)) + k, mask=mask)
            tl.store(target.to(tl.pointer_type(tl.int8)) + k, x, mask=mask)
        i += BLOCK


@triton.jit
def copy_row(table, slot, row, has, OUT: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a row and its optimizer state: from its slot to host memory if OUT, else back."""
    row_bytes, state_bytes = tl.load(table + 6), tl.load(table + 7) * 4
    device, host = tl.load(table + 8) + slot * row_bytes, tl.load(table + 10) + row * row_bytes
    device_state, host_state = tl.load(table + 9) + slot * state_bytes, tl.load(table + 11) + row * state_bytes
    if OUT:
        copy(device, host, row_bytes, has, UNIT, BLOCK)
        copy(device_state, host_state, state_bytes, has, 4, 32)
    else:
        copy(host, device, row_bytes, has, UNIT, BLOCK)
        copy(host_state, device_state, state_bytes, has, 4, 32)


@triton.jit
def move(move_tables, move_slots, move_rows, count, tables, OUT: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows between slots and host memory; skips moves whose slot or row is -1."""
    last = tl.load(count)
    m = tl.program_id(0).to(tl.int64)
    while m < last:
        slot, row = tl.load(move_slots + m).to(tl.int64), tl.load(move_rows + m)
        table = tables + tl.load(move_tables + m) * FIELDS
        copy_row(table, slot, row, (slot >= 0) & (row >= 0), OUT, UNIT, BLOCK)
        m += tl.num_programs(0)


@triton.jit
def leave_overflow(tables, slot_rows, changed, overflow_used, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Write the changed rows of the overflow back, and empty it."""
    number = tl.program_id(1)
    table = tables + number * FIELDS
    first = tl.load(table + 2) * WAYS
    used = tl.load(overflow_used + number)
    k = used * 0 + tl.program_id(0)
    while k < used:
        to = tl.load(table + 4) + first + k
        is_changed = tl.load(changed + to) != 0
        copy_row(table, first + k, tl.load(slot_rows + to), is_changed, True, UNIT, BLOCK)
        tl.store(slot_rows + to, used * 0 - 1)
        tl.store(changed + to, 0)
        k += tl.num_programs(0)
