"""Kernels that rearrange batches: copies of segments, bags of samples, ids by bucket, packed and distinct ids.

A program has a tile of its output, or of bags. `outside`: a word that programs set which find an id out of range.
Sums and sorts between them are torch's; `jagged` launches.
"""

import triton
import triton.language as tl

from rowwise.tables.ops._triton.contributions import count_below


@triton.jit(do_not_specialize=["num_segments", "n"])
def copy_segments(
    segments,  # rows of (elements before it, its first element in `source`, and in `out`)
    source,
    out,
    weights,
    weights_out,
    num_segments,
    n,
    HAS_WEIGHTS: tl.constexpr,  # at the same places
    TILE: tl.constexpr,
):
    """Copy segments, in the type of `out`."""
    k = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = k < n
    segment = segments + (count_below(segments, k + 1, num_segments, 3) - 1) * 3
    i = k - tl.load(segment, mask=inside, other=0)
    at, to = tl.load(segment + 1, mask=inside, other=0) + i, tl.load(segment + 2, mask=inside, other=0) + i
    tl.store(out + to, tl.load(source + at, mask=inside, other=0).to(out.dtype.element_ty), mask=inside)
    if HAS_WEIGHTS:
        tl.store(weights_out + to, tl.load(weights + at, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["batch", "num_bags"])
def find_bags(
    samples,
    places,  # rows of (first bag of a feature, and of the feature in the output)
    lengths,
    offsets,
    lengths_out,
    begins,  # first id of each bag of the output
    outside,
    batch,
    num_bags,
    TILE: tl.constexpr,
):
    """The bags of samples, empty if out of range; the axes of the grid are tiles of samples, and features."""
    place = places + tl.program_id(1) * 2
    first, first_out = tl.load(place), tl.load(place + 1)
    b = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = b < batch
    bag = first + tl.load(samples + b, mask=inside, other=0).to(tl.int64)
    good = inside & (bag >= first) & (bag < num_bags)
    count = tl.load(lengths + bag, mask=good, other=0)
    tl.store(lengths_out + first_out + b, count.to(lengths_out.dtype.element_ty), mask=inside)
    tl.store(begins + first_out + b, tl.load(offsets + bag, mask=good, other=0), mask=inside)
    tl.store(outside + b * 0, 1, mask=inside & ~good)  # all programs store 1


@triton.jit(do_not_specialize=["batch"])
def copy_bags(
    places,
    begins,
    ends,  # of bags in the output
    values,
    weights,
    out,
    weights_out,
    batch,
    HAS_WEIGHTS: tl.constexpr,
    BAGS: tl.constexpr,
    IDS: tl.constexpr,  # of a bag, at a time
):
    """Copy the ids of the bags that `find_bags` has located."""
    b = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    inside = b < batch
    bag = tl.load(places + tl.program_id(1) * 2 + 1) + b
    begin = tl.load(begins + bag, mask=inside, other=0)[:, None]
    to = tl.load(ends + bag - 1, mask=inside & (bag > 0), other=0)
    count = tl.load(ends + bag, mask=inside, other=0) - tl.where(inside, to, 0)
    longest = tl.max(count, 0)
    i = longest * 0
    while i < longest:
        k = i + tl.arange(0, IDS)[None, :]
        has = k < count[:, None]
        x = tl.load(values + begin + k, mask=has, other=0)
        tl.store(out + to[:, None] + k, x.to(out.dtype.element_ty), mask=has)
        if HAS_WEIGHTS:
            tl.store(weights_out + to[:, None] + k, tl.load(weights + begin + k, mask=has, other=0.0), mask=has)
        i += IDS


@triton.jit(do_not_specialize=["num_bags", "batch", "num_bounds", "n"])
def find_buckets(
    values,
    offsets,
    bounds,  # of row ranges, feature after feature
    buckets,
    bags,
    local,
    num_bags,
    batch,
    num_bounds,
    n,
    TILE: tl.constexpr,
):
    """The bucket and the bag of each id, and the id minus its bucket's first row; -1 if it is outside its table."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    bag = tl.minimum(count_below(offsets + 1, at + 1, num_bags), num_bags - 1)
    of_feature = bounds + bag // batch * num_bounds
    row = tl.load(values + at, mask=inside, other=0).to(tl.int64)
    good = inside & (row >= 0) & (row < tl.load(of_feature + num_bounds - 1, mask=inside, other=0))
    # The last bucket that begins at or before the id: empty ones that begin there too are passed over.
    bucket = tl.where(good, count_below(of_feature + 1, row + 1, num_bounds - 2), 0)
    row = tl.where(good, row - tl.load(of_feature + bucket, mask=good, other=0), -1)
    tl.store(buckets + at, bucket.to(buckets.dtype.element_ty), mask=inside)
    tl.store(bags + at, bag.to(tl.int32), mask=inside)
    tl.store(local + at, row.to(local.dtype.element_ty), mask=inside)


@triton.jit
def key_of(order, buckets, bags, at, has, num_bags):
    """The number of the (bucket, bag) of a sorted id."""
    bag = tl.load(bags + tl.load(order + at, mask=has, other=0), mask=has, other=0)
    return tl.load(buckets + at, mask=has, other=0).to(tl.int32) * num_bags + bag


@triton.jit(do_not_specialize=["num_bags", "n"])
def place_ids(
    order,  # of ids sorted by bucket
    buckets,  # sorted
    bags,
    local,
    weights,
    out,
    weights_out,
    firsts,  # of each (bucket, bag), the first id
    lasts,  # and the id behind the last
    num_bags,
    n,
    HAS_WEIGHTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Ids in the order of their buckets, and the range of each (bucket, bag)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    source = tl.load(order + at, mask=inside, other=0)
    tl.store(out + at, tl.load(local + source, mask=inside, other=0), mask=inside)
    if HAS_WEIGHTS:
        tl.store(weights_out + at, tl.load(weights + source, mask=inside, other=0.0), mask=inside)
    key = key_of(order, buckets, bags, at, inside, num_bags)
    before = key_of(order, buckets, bags, at - 1, inside & (at > 0), num_bags)
    after = key_of(order, buckets, bags, at + 1, at + 1 < n, num_bags)
    tl.store(firsts + key, at.to(tl.int32), mask=inside & ((at == 0) | (key != before)))
    tl.store(lasts + key, at.to(tl.int32) + 1, mask=inside & ((at == n - 1) | (key != after)))


@triton.jit(do_not_specialize=["batch", "n"])
def find_outside(values, offsets, slices, outside, batch, n, IDS: tl.constexpr):
    """Whether ids are outside of their rows; `slices`: rows of (first bag, rows), the second axis of the grid."""
    first, rows = tl.load(slices + tl.program_id(1) * 2), tl.load(slices + tl.program_id(1) * 2 + 1)
    i = tl.maximum(tl.load(offsets + first), 0) + tl.program_id(0).to(tl.int64) * IDS
    end = tl.minimum(tl.load(offsets + first + batch), n)
    while i < end:
        k = i + tl.arange(0, IDS)
        row = tl.load(values + k, mask=k < end, other=0).to(tl.int64)
        tl.store(outside + k * 0, 1, mask=(k < end) & ((row < 0) | (row >= rows)))  # all programs store 1
        i += tl.num_programs(0).to(tl.int64) * IDS


@triton.jit(do_not_specialize=["num_slices", "n"])
def write_ids(
    slices,  # rows of (ids before it, its first id, first word, first word of weights or -1, whether ids are wide)
    values,
    weights,
    words,
    num_slices,
    n,
    HAS_WEIGHTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The ids of slices in words of 32 bits, a wide one in two, and the bits of their weights."""
    k = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = k < n
    of_slice = slices + (count_below(slices, k + 1, num_slices, 5) - 1) * 5
    i = k - tl.load(of_slice, mask=inside, other=0)
    at = tl.load(of_slice + 1, mask=inside, other=0) + i
    wide = tl.load(of_slice + 4, mask=inside, other=0)
    row = tl.load(values + at, mask=inside, other=0).to(tl.int64)
    to = tl.load(of_slice + 2, mask=inside, other=0) + i * (1 + wide)
    tl.store(words + to, row.to(tl.int32), mask=inside)
    tl.store(words + to + 1, (row >> 32).to(tl.int32), mask=inside & (wide != 0))
    if HAS_WEIGHTS:
        more = tl.load(of_slice + 3, mask=inside, other=-1)
        weight = tl.load(weights + at, mask=inside & (more >= 0), other=0.0)
        tl.store(words + more + i, weight.to(tl.int32, bitcast=True), mask=inside & (more >= 0))


@triton.jit(do_not_specialize=["n"])
def find_distinct(values, segments, is_first, n, TILE: tl.constexpr):
    """Mark the first of equal ids, sorted by (segment, id)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside, has = at < n, (at < n) & (at > 0)
    value, before = tl.load(values + at, mask=inside, other=0), tl.load(values + at - 1, mask=has, other=0)
    segment, earlier = tl.load(segments + at, mask=inside, other=0), tl.load(segments + at - 1, mask=has, other=0)
    new = (at == 0) | (value != before) | (segment != earlier)
    tl.store(is_first + at, tl.where(new, 1, 0), mask=inside)


@triton.jit(do_not_specialize=["n"])
def write_distinct(values, order, numbers, distinct, firsts, inverse, n, TILE: tl.constexpr):
    """Distinct ids, the first place of each among the sorted ids, and each id's index among them. `numbers`: from 1."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    number = tl.load(numbers + at, mask=inside, other=1)
    first = inside & (number != tl.load(numbers + at - 1, mask=inside & (at > 0), other=0))
    tl.store(inverse + tl.load(order + at, mask=inside, other=0), number - 1, mask=inside)
    tl.store(distinct + number - 1, tl.load(values + at, mask=first, other=0), mask=first)
    tl.store(firsts + number - 1, at, mask=first)
    tl.store(firsts + number, at + 1, mask=at == n - 1)


@triton.jit(do_not_specialize=["batch", "n"])
def find_newer(values, offsets, features, ids, places, out, fault, batch, n, IDS: tl.constexpr):
    """Places of ids that are among the ascending `ids` of their table; an id outside its table becomes -1."""
    feature = features + tl.program_id(1) * 4
    source, rows, first, last = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2), tl.load(feature + 3)
    i = tl.maximum(tl.load(offsets + source * batch), 0) + tl.program_id(0).to(tl.int64) * IDS
    end = tl.minimum(tl.load(offsets + (source + 1) * batch), n)
    while i < end:
        k = i + tl.arange(0, IDS)
        has = k < end
        row = tl.load(values + k, mask=has, other=0).to(tl.int64)
        good = (row >= 0) & (row < rows)
        at = first + count_below(ids + first, row, last - first)
        known = has & good & (at < last)
        known = known & (tl.load(ids + at, mask=known, other=-1) == row)
        place = tl.load(places + at, mask=known, other=0)
        tl.store(out + k, tl.where(good, tl.where(known, place, row), -1), mask=has)
        tl.store(fault + k * 0, 1, mask=has & ~good)  # all programs store 1
        i += tl.num_programs(0).to(tl.int64) * IDS
