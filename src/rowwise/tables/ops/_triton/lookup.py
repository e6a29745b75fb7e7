"""Kernels of lookups: pooled rows, rows per id, the gradient of per-id weights, and marks of touched rows.

Axes of the grid: bags, features. `features`: rows of `FeatureDescriptor` on the device; `chosen`: the features of a
launch, which have one row format. An id outside its table is never read and sets the fault word.
"""

import triton
import triton.language as tl

from rowwise.tables.ops._triton.rows import read_row, row_bytes
from rowwise.tables.ops._triton.sums import column_sums, neutral
from rowwise.tables.ops.layout import FeatureDescriptor, Mode

FIELDS = tl.constexpr(len(FeatureDescriptor._fields))
MEAN, WEIGHTED = tl.constexpr(int(Mode.MEAN)), tl.constexpr(int(Mode.WEIGHTED))


@triton.jit(do_not_specialize=["batch", "columns"])
def pool(
    arena,  # bytes
    out,
    values,
    offsets,
    weights,
    features,
    chosen,
    fault,
    batch,
    columns,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes that divide every address of a row
    DIVISOR: tl.constexpr,  # divides every dim, so that masks do not split vector loads
    OUT_ALIGN: tl.constexpr,  # floats that divide every place in the output
    BAGS: tl.constexpr,
    IDS: tl.constexpr,  # of a bag, whose rows are loaded together
    TILES: tl.constexpr,  # of bags, one after the other
    HAS_WEIGHTS: tl.constexpr,
):
    feature = features + tl.load(chosen + tl.program_id(1)) * FIELDS
    source, base, rows = tl.load(feature), tl.load(feature + 2), tl.load(feature + 3)
    dim, column, mode = tl.load(feature + 4).to(tl.int32), tl.load(feature + 5), tl.load(feature + 6)
    base, dim = tl.multiple_of(base, ALIGN), tl.multiple_of(dim, DIVISOR)
    width = tl.multiple_of(row_bytes(dim, TYPE, GROUP).to(tl.int64), ALIGN)
    t = 0
    while t < TILES:
        b = (tl.program_id(0).to(tl.int64) * TILES + t) * BAGS + tl.arange(0, BAGS)
        d = tl.arange(0, BLOCK)
        bag = source * batch + b
        begin = tl.load(offsets + bag, mask=b < batch, other=0)
        count = tl.load(offsets + bag + 1, mask=b < batch, other=0) - begin
        longest = tl.max(count, 0)
        total = neutral((BAGS, BLOCK))
        bad = tl.zeros((BAGS,), tl.int1)
        i = longest * 0
        while i < longest:
            for u in tl.static_range(IDS):
                has = i + u < count
                at = begin + i + u
                row = tl.load(values + at, mask=has, other=0).to(tl.int64)
                good = (row >= 0) & (row < rows)
                bad = bad | (has & ~good)
                use = (has & good)[:, None] & (d < dim)[None, :]
                address = arena + (base + row * width)
                x = read_row(address[:, None], d[None, :], use, dim, TYPE, GROUP)
                if HAS_WEIGHTS:
                    weight = tl.load(weights + at, mask=has, other=1.0)
                    x = x * tl.where(mode == WEIGHTED, weight, 1.0)[:, None]
                total = tl.where(use, total + x, total)
            i += IDS
        tl.store(fault + b * 0, 1, mask=bad)  # every program that finds a bad id stores 1
        total = tl.where((count > 0)[:, None], total, 0.0)
        if mode == MEAN:
            total = total * tl.div_rn(1.0, tl.maximum(count, 1).to(tl.float32))[:, None]
        place = tl.multiple_of(b * columns + column, OUT_ALIGN)
        tl.store(out + place[:, None] + d[None, :], total, mask=(b < batch)[:, None] & (d < dim)[None, :])
        t += 1


@triton.jit(do_not_specialize=["batch"])
def gather(
    arena,
    out,
    values,
    offsets,
    starts,  # first float of each feature in the output
    features,
    chosen,
    fault,
    batch,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    DIVISOR: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    IDS: tl.constexpr,
):
    index = tl.load(chosen + tl.program_id(1))
    feature = features + index * FIELDS
    source, base, rows = tl.load(feature), tl.load(feature + 2), tl.load(feature + 3)
    dim = tl.multiple_of(tl.load(feature + 4).to(tl.int32), DIVISOR)
    base = tl.multiple_of(base, ALIGN)
    width = tl.multiple_of(row_bytes(dim, TYPE, GROUP).to(tl.int64), ALIGN)
    first, end = tl.load(offsets + source * batch), tl.load(offsets + (source + 1) * batch)
    d = tl.arange(0, BLOCK)
    i = tl.program_id(0).to(tl.int64) * IDS
    start = tl.multiple_of(tl.load(starts + index), OUT_ALIGN)
    while i < end - first:
        k = i + tl.arange(0, IDS)
        has = k < end - first
        row = tl.load(values + first + k, mask=has, other=0).to(tl.int64)
        good = (row >= 0) & (row < rows)
        tl.store(fault + k * 0, 1, mask=has & ~good)
        address = arena + (base + row * width)
        x = read_row(address[:, None], d[None, :], (has & good)[:, None] & (d < dim)[None, :], dim, TYPE, GROUP)
        x = tl.where(good[:, None], x, 0.0)
        place = start + tl.multiple_of(k * dim, OUT_ALIGN)
        tl.store(out + place[:, None] + d[None, :], x, mask=has[:, None] & (d < dim)[None, :])
        i += tl.num_programs(0).to(tl.int64) * IDS


@triton.jit(do_not_specialize=["batch", "columns"])
def pool_weight_grad(
    arena,
    out,
    values,
    offsets,
    grad,
    features,
    chosen,
    fault,
    batch,
    columns,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    DIVISOR: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    BAGS: tl.constexpr,
):
    feature = features + tl.load(chosen + tl.program_id(1)) * FIELDS
    source, base, rows = tl.load(feature), tl.load(feature + 2), tl.load(feature + 3)
    dim, column = tl.load(feature + 4).to(tl.int32), tl.load(feature + 5)
    base, dim = tl.multiple_of(base, ALIGN), tl.multiple_of(dim, DIVISOR)
    width = tl.multiple_of(row_bytes(dim, TYPE, GROUP).to(tl.int64), ALIGN)
    b = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    d = tl.arange(0, BLOCK)
    bag = source * batch + b
    begin = tl.load(offsets + bag, mask=b < batch, other=0)
    count = tl.load(offsets + bag + 1, mask=b < batch, other=0) - begin
    inside = (b < batch)[:, None] & (d < dim)[None, :]
    place = tl.multiple_of(b * columns + column, OUT_ALIGN)
    g = tl.load(grad + place[:, None] + d[None, :], mask=inside, other=0.0)
    longest = tl.max(count, 0)
    i = longest * 0
    while i < longest:
        has = i < count
        row = tl.load(values + begin + i, mask=has, other=0).to(tl.int64)
        good = (row >= 0) & (row < rows)
        tl.store(fault + b * 0, 1, mask=has & ~good)
        use = (has & good)[:, None] & (d < dim)[None, :]
        address = arena + (base + row * width)
        x = tl.where(use, read_row(address[:, None], d[None, :], use, dim, TYPE, GROUP) * g, 0.0)
        tl.store(out + begin + i, column_sums(x, BAGS, BLOCK), mask=has)
        i += 1


@triton.jit(do_not_specialize=["batch"])
def mark(touched, starts, values, offsets, features, batch, IDS: tl.constexpr):
    index = tl.program_id(1)
    feature = features + index * FIELDS
    source, rows, start = tl.load(feature), tl.load(feature + 3), tl.load(starts + index)
    first, end = tl.load(offsets + source * batch), tl.load(offsets + (source + 1) * batch)
    i = first + tl.program_id(0).to(tl.int64) * IDS
    while i < end:
        k = i + tl.arange(0, IDS)
        row = tl.load(values + k, mask=k < end, other=-1).to(tl.int64)
        tl.store(touched + start + row, 1, mask=(k < end) & (row >= 0) & (row < rows))  # all programs store 1
        i += tl.num_programs(0).to(tl.int64) * IDS
