"""Kernels of `route`: from ids to sorted contributions, rows and units of rows. A program has a tile of bags or ids.

Axes are those of `route`. Unused contributions have the key `rows`.
"""

import triton
import triton.language as tl

from rowwise.tables.ops._triton.sums import bits
from rowwise.tables.ops.layout import FeatureDescriptor, Mode, TableDescriptor

FIELDS = tl.constexpr(len(FeatureDescriptor._fields))
TABLE_FIELDS = tl.constexpr(len(TableDescriptor._fields))
MEAN, WEIGHTED = tl.constexpr(int(Mode.MEAN)), tl.constexpr(int(Mode.WEIGHTED))
BLOCK_SHIFT = tl.constexpr(8)  # [Note: Merge order]
LONG_ROW = tl.constexpr(128)  # least number of contributions of a row that is cut into units
UNIT = tl.constexpr(64)  # contributions of a unit on average


@triton.jit
def count_below(numbers, limit, n, STRIDE: tl.constexpr = 1):
    """The number of `n` ascending numbers, STRIDE elements apart, below each limit; a binary search."""
    low, high = limit * 0, limit * 0 + n
    width = n
    while width > 0:
        middle = low + (high - low) // 2
        wide = low < high
        less = wide & (tl.load(numbers + middle * STRIDE, mask=wide, other=0).to(tl.int64) < limit)
        low, high = tl.where(less, middle + 1, low), tl.where(wide & ~less, middle, high)
        width //= 2
    return low


@triton.jit(do_not_specialize=["batch", "num_features"])
def count_ids(features, offsets, counts, batch, num_features, TILE: tl.constexpr):
    """Ids of each bag."""
    bag = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = bag < batch * num_features
    source = tl.load(features + bag % num_features * FIELDS, mask=inside, other=0)
    place = offsets + (source * batch + bag // num_features)
    count = tl.load(place + 1, mask=inside, other=0) - tl.load(place, mask=inside, other=0)
    tl.store(counts + bag, count.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["batch", "num_features", "rows"])
def expand(
    features,
    first_rows,  # of tables
    values,
    offsets,
    ends,  # of bags, in contributions
    keys,
    bags,
    fault,
    batch,
    num_features,
    rows,
    BAGS: tl.constexpr,
    IDS: tl.constexpr,  # of a bag, at a time
):
    """The key of each contribution, and its bag."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    inside = bag < batch * num_features
    feature = features + bag % num_features * FIELDS
    source, table = tl.load(feature, mask=inside, other=0), tl.load(feature + 1, mask=inside, other=0)
    limit, first_row = tl.load(feature + 3, mask=inside, other=0), tl.load(first_rows + table, mask=inside, other=0)
    place = offsets + (source * batch + bag // num_features)
    begin = tl.load(place, mask=inside, other=0)
    count = (tl.load(place + 1, mask=inside, other=0) - begin).to(tl.int32)
    to = tl.load(ends + bag, mask=inside, other=0) - count
    longest = tl.max(count, 0)
    i = longest * 0
    while i < longest:
        k = i + tl.arange(0, IDS)[None, :]
        has = k < count[:, None]
        row = tl.load(values + (begin[:, None] + k), mask=has, other=0).to(tl.int64)
        good = (row >= 0) & (row < limit[:, None])
        key = tl.where(good, first_row[:, None] + row, rows)
        at = to[:, None] + k
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=has)
        tl.store(bags + at, bag[:, None] + k * 0, mask=has)
        tl.store(fault + at * 0, 1, mask=has & ~good)  # every program that finds a bad id stores 1
        i += IDS


@triton.jit(do_not_specialize=["batch", "num_features", "stride", "rows", "n"])
def locate(
    keys,  # sorted
    order,  # of the contributions before they were sorted
    bags,
    ends,
    features,
    starts,  # first float of each feature, if PER_ID
    offsets,
    weights,
    places,
    scales,
    joins,
    is_first,  # of its row: 1
    batch,
    num_features,
    stride,
    rows,
    n,
    PER_ID: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The place of each contribution's gradient, its factor, and the level at which it joins those before it."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < n
    key = tl.load(keys + at, mask=inside, other=rows)
    new = key != tl.load(keys + at - 1, mask=inside & (at > 0), other=-1)
    used = inside & (key < rows)
    number = tl.load(order + at, mask=used, other=0)
    bag = tl.load(bags + number, mask=used, other=0)
    meets = used & ~new
    bag_before = tl.load(bags + tl.load(order + at - 1, mask=meets, other=0), mask=meets, other=0)
    sample, feature = bag // num_features, features + bag % num_features * FIELDS
    block, block_before = sample >> BLOCK_SHIFT, bag_before // num_features >> BLOCK_SHIFT
    tl.store(joins + at, tl.where(meets, bits(block ^ block_before), 0).to(tl.int8), mask=inside)
    tl.store(is_first + at, tl.where(new, 1, 0), mask=inside)
    if PER_ID or SCALED:
        source = tl.load(feature, mask=used, other=0) * batch
        begin = tl.load(offsets + source + sample, mask=used, other=0)
        position = begin + (number - tl.load(ends + bag - 1, mask=used & (bag > 0), other=0))
    if PER_ID:
        dim, start = tl.load(feature + 4, mask=used, other=0), tl.load(starts + bag % num_features, mask=used, other=0)
        place = start + (position - tl.load(offsets + source, mask=used, other=0)) * dim
    else:
        place = sample.to(tl.int64) * stride + tl.load(feature + 5, mask=used, other=0)
    tl.store(places + at, place, mask=inside)
    if SCALED:
        mode = tl.load(feature + 6, mask=used, other=0)
        count = tl.load(offsets + source + sample + 1, mask=used, other=1) - begin
        scale = tl.where(mode == MEAN, tl.div_rn(1.0, tl.maximum(count, 1).to(tl.float32)), 1.0)
        if HAS_WEIGHTS:
            weight = tl.load(weights + position, mask=used & (mode == WEIGHTED), other=1.0)
            scale = tl.where(mode == WEIGHTED, weight, scale)
        tl.store(scales + at, scale, mask=inside)


@triton.jit(do_not_specialize=["n"])
def find_rows(row_numbers, firsts, n, TILE: tl.constexpr):
    """The first contribution of each row; `row_numbers`: the row of each contribution, from 1."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < n
    row = tl.load(row_numbers + at, mask=inside, other=0)
    before = tl.load(row_numbers + at - 1, mask=inside & (at > 0), other=0)
    tl.store(firsts + row - 1, at, mask=inside & (row != before))
    tl.store(firsts + row, at + 1, mask=at == n - 1)


@triton.jit(do_not_specialize=["rows", "blocks", "levels", "n"])
def cut(keys, row_numbers, firsts, joins, begins_unit, rows, blocks, levels, n, TILE: tl.constexpr):
    """Mark first contributions of units: nodes of a hot row at the lowest level with about UNIT contributions each."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < n
    used = inside & (tl.load(keys + at, mask=inside, other=rows) < rows)
    row = tl.load(row_numbers + at, mask=used, other=1) - 1
    first = tl.load(firsts + row, mask=used, other=0)
    count = tl.load(firsts + row + 1, mask=used, other=1) - first
    level = tl.minimum(bits((blocks * UNIT - 1) // tl.maximum(count, 1)), levels)
    join = tl.load(joins + at, mask=used, other=0).to(tl.int32)
    begins = used & (count >= LONG_ROW) & ((at == first) | (join > level))
    tl.store(begins_unit + at, tl.where(begins, 1, 0), mask=inside)


@triton.jit(do_not_specialize=["num_features", "rows", "n"])
def write_records(
    keys,
    order,
    bags,
    features,
    tables,
    first_rows,
    row_numbers,
    firsts,
    unit_numbers,
    places,
    joins,
    records,
    unit_records,
    unit_first,
    unit_last,
    unit_joins,
    unit_dims,
    num_features,
    rows,
    n,
    TILE: tl.constexpr,
):
    """The record of each row, and of each unit; that of a hot row, or of a unit that begins no row, has no terms."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < n
    key = tl.load(keys + at, mask=inside, other=rows).to(tl.int64)
    used = inside & (key < rows)
    row = tl.load(row_numbers + at, mask=used, other=1) - 1
    first = tl.load(firsts + row, mask=used, other=-1)
    begins_row = used & (at == first)
    units = tl.load(unit_numbers + at, mask=inside, other=0)
    begins_unit = used & (units != tl.load(unit_numbers + at - 1, mask=inside & (at > 0), other=0))
    begins = begins_row | begins_unit
    last = tl.load(firsts + row + 1, mask=begins, other=0)
    bag = tl.load(bags + tl.load(order + at, mask=begins, other=0), mask=begins, other=0)
    table = tl.load(features + bag % num_features * FIELDS + 1, mask=begins, other=0)
    named = (table << 48) | (key - tl.load(first_rows + table, mask=begins, other=0))
    count = tl.where(begins_unit, 0, last - first)
    terms = (first.to(tl.int64) << 32) | count
    place = tl.load(places + at, mask=begins_row, other=0)
    fields = tl.reshape(tl.join(tl.join(terms, place), tl.join(named, place)), (TILE, 4))  # the last field is unused
    to = (row.to(tl.int64) * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(records + tl.multiple_of(to, (1, 4)), fields, mask=begins_row[:, None])
    unit = units - 1
    tl.store(unit_first + unit, at, mask=begins_unit)
    tl.store(unit_first + units, at + 1, mask=at == n - 1)
    tl.store(unit_last + unit, last, mask=begins_unit)
    tl.store(unit_joins + unit, tl.load(joins + at, mask=begins_unit, other=0), mask=begins_unit)
    dim = tl.load(tables + table * TABLE_FIELDS + 2, mask=begins_unit, other=0)
    tl.store(unit_dims + unit, dim.to(tl.int32), mask=begins_unit)
    both = begins_row & begins_unit
    count = tl.load(unit_numbers + last - 1, mask=both, other=0) - unit
    terms = tl.where(both, (unit.to(tl.int64) << 32) | count, 0)
    record = unit_records + unit.to(tl.int64) * 4
    tl.store(record, terms, mask=begins_unit)
    tl.store(record + 1, named, mask=begins_unit)
    tl.store(record + 2, named * 0, mask=begins_unit)


@triton.jit(do_not_specialize=["num_bounds", "n"])
def find_bounds(keys, starts, row_numbers, unit_numbers, row_bounds, unit_bounds, num_bounds, n, BOUNDS: tl.constexpr):
    """Rows and units before each bucket; a binary search in the sorted keys."""
    bound = tl.program_id(0) * BOUNDS + tl.arange(0, BOUNDS)
    inside = bound < num_bounds
    start = tl.load(starts + bound, mask=inside, other=0)
    low = count_below(keys, start, n)
    some = inside & (low > 0)
    tl.store(row_bounds + bound, tl.load(row_numbers + low - 1, mask=some, other=0), mask=inside)
    tl.store(unit_bounds + bound, tl.load(unit_numbers + low - 1, mask=some, other=0), mask=inside)
