"""Kernels of updates: sums of parts of hot rows, then each touched row merged and changed once.

`records`: 32 bytes for each row, one sector of memory: (first term, number of terms), (table, row), place of the first
term. The rows of a launch have one row format and one optimizer. Programs are as many as fit on the device; each takes
every n-th row of the span.
"""

import triton
import triton.language as tl

from rowwise.ops._triton.rows import FP32, read_row, row_bits, row_bytes, write_row
from rowwise.ops._triton.rules import change, read_state, write_state
from rowwise.ops._triton.sums import column_sum, tree_sum
from rowwise.ops.layout import TableDescriptor
from rowwise.row_optimizers import KernelHyperparameters

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
    """The parts of rows that very many samples look up; a part is whole nodes of the tree, so any cut has the bits."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    unit, end = tl.load(span) + program, tl.load(span + 1)
    while unit < end:
        first = tl.load(unit_first + unit)
        last = tl.minimum(tl.load(unit_first + unit + 1), tl.load(unit_last + unit))
        dim = tl.multiple_of(tl.load(unit_dims + unit), DIVISOR)
        total = tree_sum(
            grad, places, scales, joins, first, last, tl.load(places + first), waiting + program * levels * BLOCK, dim,
            BLOCK, TERMS, GRAD_ALIGN, False, SCALED,
        )  # fmt: skip
        tl.store(partial + unit * BLOCK + d, total)
        unit += programs


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
):
    """Merge what reached each row, and change the row once."""
    d = tl.arange(0, BLOCK)
    # Numbers of records have 32 bits, as registers are what an update is short of.
    which, end = tl.load(span) + tl.program_id(0), tl.load(span + 1)
    record = records + tl.multiple_of(tl.minimum(which, end).to(tl.int64) * 4, 4)
    packed, named, place = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    while which < end:
        first, index, slot = (packed >> 32).to(tl.int32), (named >> 48).to(tl.int32), named & 0xFFFFFFFFFFFF
        last, place_of_first = first + packed.to(tl.int32), place
        # The next record is loaded while this row is worked on. There is one after the last.
        which += tl.num_programs(0)
        record = records + tl.multiple_of(tl.minimum(which, end).to(tl.int64) * 4, 4)
        packed, named, place = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        if last > first:  # not: the terms of the row are units, or the unit begins no row
            table = tables + index * FIELDS
            dim = tl.multiple_of(tl.load(table + 2).to(tl.int32), DIVISOR)
            width = tl.multiple_of(row_bytes(dim, TYPE, GROUP).to(tl.int64), ALIGN)
            row = arena + (tl.multiple_of(tl.load(table), ALIGN) + slot * width)
            own = state + tl.multiple_of(tl.load(table + 3) + slot * tl.load(table + 4), STATE_ALIGN)
            mask = d < dim
            mine = waiting + tl.program_id(0).to(tl.int64) * levels * BLOCK
            # Before the sum, so that row and state are loaded meanwhile.
            w = tl.where(mask, read_row(row, d, mask, dim, TYPE, GROUP), 0.0)
            one, two, number = read_state(own, d, mask, dim, RULE)
            if UNITS:
                g = tree_sum(
                    terms, places, scales, joins, first, last, place_of_first, mine, dim,
                    BLOCK, TERMS, BLOCK, True, False,
                )  # fmt: skip
            else:
                g = tree_sum(
                    terms, places, scales, joins, first, last, place_of_first, mine, dim,
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
