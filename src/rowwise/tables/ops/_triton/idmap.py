"""The kernel of id maps, a launch for each section.

See [Note: Id maps] and [Note: Sets of ids] in `tables/ids/idmap.py`.

Words are untrusted: reads are masked by the ends of a section's arrays.
"""

import triton
import triton.language as tl

from rowwise.tables.ops._triton import rows as rows_of
from rowwise.tables.ops._triton.contributions import count_below
from rowwise.tables.ops.reference.idmap import ROUNDS, SectionKind, SectionRow, ZERO_words

LAYOUT = tl.constexpr(len(SectionRow._fields))
GROUP = tl.constexpr(ZERO_words)
HASH, QUOTIENT, REMAINDER, EVERY, RANKED, LISTED, REST = (tl.constexpr(int(kind)) for kind in SectionKind)
KEYS = tl.constexpr(ROUNDS)


@triton.jit
def mix(x):
    return rows_of.mix(x + 0x9E3779B97F4A7C15)


@triton.jit
def ones(x):
    """The number of set bits of each word (popcount)."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int64)


@triton.jit
def select(word, k):
    """The position of the set bit of each word with k set bits below it: a binary search by popcount of halves."""
    place = k * 0
    for half in tl.static_range(6):
        count = ones((word >> place.to(tl.uint64)) & ((1 << (32 >> half)) - 1))
        above = k >= count
        place, k = tl.where(above, place + (32 >> half), place), tl.where(above, k - count, k)
    return place


@triton.jit
def unpack(words, at, count, bits, has):
    """Elements of a packed array of `count` integers of `bits` bits; 0 for those out of range."""
    has = has & (at >= 0) & (at < count) & (bits > 0)
    first, shift = at * bits >> 6, at * bits & 63
    crosses = has & (shift + bits > 64)
    low = tl.load(words + first, mask=has, other=0).to(tl.uint64, bitcast=True) >> shift.to(tl.uint64)
    next_word = tl.load(words + first + 1, mask=crosses, other=0).to(tl.uint64, bitcast=True)
    high = tl.where(crosses, next_word << (64 - shift & 63).to(tl.uint64), 0)
    return (low | high).to(tl.int64, bitcast=True) & ((at * 0 + 1 << bits) - 1)


@triton.jit
def bit_of(words, layout, bucket, has):
    """The bit of `marks` at which each bucket begins: behind the zero that ends the bucket before it (select)."""
    zeros, marks, mark_bits, lows = tl.load(layout), tl.load(layout + 1), tl.load(layout + 2), tl.load(layout + 3)
    # `zeros` names the group of words with the wanted zero; the loop counts zeros word by word until it is reached.
    group = tl.maximum(count_below(words + zeros, bucket, marks - zeros) - 1, 0)
    wanted = tl.maximum(bucket - tl.load(words + zeros + group, mask=has, other=0), 1)
    w = marks + group * GROUP
    looking = has & (bucket > 0)
    word, found = (bucket * 0).to(tl.uint64), has & (bucket < 0)
    left = tl.max(looking.to(tl.int32), 0)
    while left > 0:
        inside = looking & (w < lows)
        here = (-1 - tl.load(words + w, mask=inside, other=-1)).to(tl.uint64, bitcast=True)  # ones for zeros
        count = ones(here)
        now = inside & (count >= wanted)
        word, found = tl.where(now, here, word), found | now
        looking = inside & (count < wanted)
        wanted, w = tl.where(looking, wanted - count, wanted), tl.where(looking, w + 1, w)
        left = tl.max(looking.to(tl.int32), 0)
    place = tl.where(found, 64 * (w - marks) + select(word, wanted - 1) + 1, mark_bits)
    return tl.where(bucket > 0, tl.minimum(place, mark_bits), 0)


@triton.jit
def place_in_set(words, section, layout, row, has):
    """The number of ids of a set below each id, and whether the set has it."""
    count, low_bits = tl.load(section + 7), tl.load(section + 8)
    lows = words + tl.load(layout + 3)
    bucket = row >> low_bits
    begin, end = bit_of(words, layout, bucket, has), bit_of(words, layout, bucket + 1, has)
    first = tl.minimum(tl.maximum(begin - bucket, 0), count)
    last = tl.minimum(tl.maximum(end - 1 - bucket, first), count)
    # The ids of the bucket are `first` to `last` of the set: a binary search among their low bits.
    low = row & ((row * 0 + 1 << low_bits) - 1)
    place, high = first, last
    width = tl.max(last - first, 0)
    while width > 0:
        middle = place + (high - place) // 2
        wide = place < high
        less = wide & (unpack(lows, middle, count, low_bits, has) < low)
        place, high = tl.where(less, middle + 1, place), tl.where(wide & ~less, middle, high)
        width //= 2
    return place, has & (place < last) & (unpack(lows, place, count, low_bits, has) == low)


@triton.jit
def permute(row, seed, known, half, has):
    """The images of ids under a permutation of all ids; see [Note: Scrambled ids]."""
    mask = (row.to(tl.uint64) * 0 + 1 << half.to(tl.uint64)) - 1
    place, walking = row.to(tl.uint64), has
    left = tl.max(walking.to(tl.int32), 0)
    while left > 0:
        key, a, b = seed, place >> half.to(tl.uint64), place & mask
        for _ in tl.static_range(KEYS):
            key = mix(key)
            c = a ^ (mix(b ^ key) & mask)
            a, b = b, c
        place = tl.where(walking, a << half.to(tl.uint64) | b, place)
        walking = walking & (place >= known.to(tl.uint64))
        left = tl.max(walking.to(tl.int32), 0)
    return place.to(tl.int64)


@triton.jit(do_not_specialize=["columns", "n"])
def map_section(
    ids,
    section,  # a row of `sections`, its `SetPlaces`, the map's number of ids, and the bits of half an id
    words,
    rows,  # of the sections so far; -1: none
    before,  # by id and column, the number of ids below it in the sets so far
    columns,
    n,
    KIND: tl.constexpr,
    IDS: tl.constexpr,
):
    """Rows for the ids without one from an earlier section of the column."""
    limit, base, column = tl.load(section + 1), tl.load(section + 2), tl.load(section + 3)
    seed, divisor = tl.load(section + 4).to(tl.uint64, bitcast=True), tl.load(section + 5).to(tl.uint64)
    layout = section + LAYOUT
    known, half = tl.load(layout + 6), tl.load(layout + 7)
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    row = tl.load(ids + at, mask=at < n, other=-1).to(tl.int64)
    to = at * columns + column
    has = (at < n) & (row >= 0) & (row < known)
    has = has & (tl.load(rows + to, mask=has, other=0) < 0)
    row = tl.where(has, row, 0)
    if KIND == HASH:
        number = (mix(row.to(tl.uint64) ^ mix(seed)) % limit.to(tl.uint64)).to(tl.int64)
    elif KIND == QUOTIENT:
        number = (permute(row, seed, known, half, has).to(tl.uint64) // divisor).to(tl.int64)
    elif KIND == REMAINDER:
        number = (permute(row, seed, known, half, has).to(tl.uint64) % divisor).to(tl.int64)
    elif KIND == EVERY:
        number = unpack(words + tl.load(section + 6), row, known, tl.load(section + 9), has)
    elif KIND == REST:
        number = row - tl.load(before + to, mask=has, other=0)
    else:
        number, is_in = place_in_set(words, section, layout, row, has)
        tl.store(before + to, tl.load(before + to, mask=has, other=0) + number, mask=has)
        if KIND == LISTED:
            entries = words + tl.load(layout + 4)
            number = unpack(entries, number, tl.load(section + 7), tl.load(section + 9), is_in)
        has = has & is_in
    tl.store(rows + to, base + number, mask=has & (number >= 0) & (number < limit))
