"""Kernels of updates: sums of parts of hot rows, then each touched row merged and changed once.

`records`: 32 bytes for each row, one sector of memory: (first term, number of terms), (table, row), place of the first
term. The rows of a launch have one row format and one optimizer. Programs are as many as fit on the device; each takes
every n-th row of the span.
"""

import triton
import triton.language as tl

from rowwise.tables.ops._triton.rows import FP32, read_row, row_bits, row_bytes, write_row
from rowwise.tables.ops._triton.rules import change, read_state, write_state
from rowwise.tables.ops._triton.sums import column_sum, load_places, tree_sum
from rowwise.tables.ops.layout import TableDescriptor
from rowwise.tables.row_optimizers import KernelHyperparameters

FIELDS = tl.constexpr(len(TableDescriptor._fields))
HYPER = tl.constexpr(len(KernelHyperparameters._fields))  # columns of hyper_TH


@triton.jit(do_not_specialize=["levels"])
def sum_units(
    grad,
    places,
    scales,
    joins,
    unit_first,
    unit_last,
    unit_dims,
    span,
    waiting,
    partial,
    levels,  # vectors of a program in `waiting`
    BLOCK: tl.constexpr,
    TERMS: tl.constexpr,
    DIVISOR: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Sum the units of hot rows; a unit is whole nodes of the tree, so the bits do not depend on the cut."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    unit, end = tl.load(span) + program, tl.load(span + 1)
    while unit < end:
        first = tl.load(unit_first + unit)
        last = tl.minimum(tl.load(unit_first + unit + 1), tl.load(unit_last + unit))
        dim = tl.multiple_of(tl.load(unit_dims + unit), DIVISOR)
        of_terms = load_places(places, first, last, TERMS, GRAD_ALIGN)
        total = tree_sum(
            grad, of_terms, places, scales, joins, first, last, waiting + program * levels * BLOCK, dim,
            BLOCK, TERMS, GRAD_ALIGN, False, SCALED,
        )  # fmt: skip
        tl.store(partial + unit * BLOCK + d, total)
        unit += programs


@triton.jit
def read_record(records, which, end):
    """The record `which`, or at the end the unused one after the last."""
    record = records + tl.multiple_of(tl.minimum(which, end).to(tl.int64) * 4, 4)
    return tl.load(record), tl.load(record + 1), tl.load(record + 2)


@triton.jit
def load_row(
    arena,
    state,
    tables,
    terms,
    places,
    scales,
    packed,  # fields of the record
    named,
    place,
    inside,  # whether the record exists
    d,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    RULE: tl.constexpr,
    TERMS: tl.constexpr,
    ALIGN: tl.constexpr,
    DIVISOR: tl.constexpr,
    STATE_ALIGN: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Addresses and numbers of a row and its state, its first term if AHEAD, and places of the first few.

    A record without terms reads nothing.
    """
    first, count = (packed >> 32).to(tl.int32), packed.to(tl.int32)
    has = inside & (count > 0)
    index, slot = tl.where(has, named >> 48, 0).to(tl.int32), tl.where(has, named & 0xFFFFFFFFFFFF, 0)
    table = tables + index * FIELDS
    dim = tl.multiple_of(tl.load(table + 2).to(tl.int32), DIVISOR)
    width = tl.multiple_of(row_bytes(dim, TYPE, GROUP).to(tl.int64), ALIGN)
    row = arena + (tl.multiple_of(tl.load(table), ALIGN) + slot * width)
    own = state + tl.multiple_of(tl.load(table + 3) + slot * tl.load(table + 4), STATE_ALIGN)
    mask = has & (d < dim)
    w = tl.where(mask, read_row(row, d, mask, dim, TYPE, GROUP), 0.0)
    one, two, number = read_state(own, d, mask, dim, has, RULE)
    g, of_terms = w, ()
    if AHEAD:
        g = tl.load(terms + tl.multiple_of(tl.where(has, place, 0), GRAD_ALIGN) + d, mask=mask)
        if SCALED:
            g = g * tl.load(scales + first, mask=has, other=1.0)
    if not UNITS:
        of_terms = load_places(places, first, first + tl.where(has, count, 0), TERMS, GRAD_ALIGN)
    return row, own, dim, w, one, two, number, g, of_terms


@triton.jit(do_not_specialize=["levels"])
def apply(
    arena,
    state,
    tables,  # rows of TableDescriptor on the device
    hyper,
    keys,
    slot_rows,
    terms,  # gradients, or the sums of units
    places,
    scales,
    joins,
    records,
    span,
    waiting,
    fault,
    levels,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    TERMS: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes that divide every address of a row
    DIVISOR: tl.constexpr,
    STATE_ALIGN: tl.constexpr,  # floats that divide the place of every row's state
    GRAD_ALIGN: tl.constexpr,
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    AHEAD: tl.constexpr,  # whether a row is prefetched while the one before it is updated
):
    """Merge the contributions to each row, and update the row once."""
    d = tl.arange(0, BLOCK)
    # Indices of records have 32 bits, as registers limit the occupancy of an update.
    which, end = tl.load(span) + tl.program_id(0), tl.load(span + 1)
    packed, named, place = read_record(records, which, end)
    if AHEAD:
        row, own, dim, w, one, two, number, g, of_terms = load_row(
            arena, state, tables, terms, places, scales, packed, named, place, which < end, d,
            TYPE, GROUP, RULE, TERMS, ALIGN, DIVISOR, STATE_ALIGN, GRAD_ALIGN, UNITS, SCALED, AHEAD,
        )  # fmt: skip
        next_packed, next_named, next_place = read_record(records, which + tl.num_programs(0), end)
    while which < end:
        first, index, slot = (packed >> 32).to(tl.int32), (named >> 48).to(tl.int32), named & 0xFFFFFFFFFFFF
        last = first + packed.to(tl.int32)
        if not AHEAD:
            row, own, dim, w, one, two, number, g, of_terms = load_row(
                arena, state, tables, terms, places, scales, packed, named, place, True, d,
                TYPE, GROUP, RULE, TERMS, ALIGN, DIVISOR, STATE_ALIGN, GRAD_ALIGN, UNITS, SCALED, AHEAD,
            )  # fmt: skip
        # Prefetch while this row is updated: the next row, and the record of the one after it.
        which += tl.num_programs(0)
        if AHEAD:
            packed, named, place = next_packed, next_named, next_place
            next_row, next_own, next_dim, next_w, next_one, next_two, next_number, next_g, next_terms = load_row(
                arena, state, tables, terms, places, scales, packed, named, place, which < end, d,
                TYPE, GROUP, RULE, TERMS, ALIGN, DIVISOR, STATE_ALIGN, GRAD_ALIGN, UNITS, SCALED, AHEAD,
            )  # fmt: skip
            next_packed, next_named, next_place = read_record(records, which + tl.num_programs(0), end)
        else:
            packed, named, place = read_record(records, which, end)
        if last > first:  # else the terms of the row are units, or the unit begins no row
            table, mask = tables + index * FIELDS, d < dim
            mine = waiting + tl.program_id(0).to(tl.int64) * levels * BLOCK
            if UNITS:
                g = tree_sum(
                    terms, of_terms, places, scales, joins, first, last, mine, dim, BLOCK, TERMS, BLOCK, True, False,
                )  # fmt: skip
            elif (not AHEAD) or last - first > 1:
                g = tree_sum(
                    terms, of_terms, places, scales, joins, first, last, mine, dim,
                    BLOCK, TERMS, GRAD_ALIGN, False, SCALED,
                )  # fmt: skip
            g = tl.where(mask, g, 0.0)
            finite = tl.sum(tl.where(g * 0.0 == 0.0, 0, 1), 0) == 0
            clip = tl.load(hyper + index * HYPER + 3)
            if clip > 0:
                length = tl.sqrt_rn(column_sum(g * g, BLOCK))
                g = g * tl.where(length > clip, tl.div_rn(clip, length), 1.0)
            w, one, two, number = change(w, g, one, two, number, dim, hyper + index * HYPER, BLOCK, RULE)
            if finite:
                write_state(own, d, mask, dim, one, two, number, RULE)
                if TYPE == FP32:
                    write_row(row, d, w, mask, d, dim, TYPE, GROUP)
                else:
                    full_row = slot
                    if HAS_SLOTS:
                        listed = tl.load(table + 12)
                        full_row = tl.load(slot_rows + listed + slot, mask=listed >= 0, other=0)
                        full_row = tl.where(listed >= 0, full_row, slot)
                    columns = d + tl.load(table + 11).to(tl.int32)
                    bits = row_bits(tl.load(keys + index), full_row + tl.load(table + 10), columns)
                    write_row(row, d, w, mask, bits, dim, TYPE, GROUP)
            else:
                tl.store(fault + 1, 1)
        if AHEAD:
            row, own, dim, w, g, of_terms = next_row, next_own, next_dim, next_w, next_g, next_terms
            one, two, number = next_one, next_two, next_number
