"""Packs the entries and the sets of ids of a map into 64-bit words. See [Note: Sets of ids] in `idmap`.

64 numbers of b bits take b words, so numbers are packed in groups of 64, with one vectorised step for each index in a
group.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowwise.tables.ids.idmap import MapSection, Words

Ids = NDArray[np.int64]
GROUP = 64  # numbers
GROUPS = 1 << 14  # groups packed at once: few enough for the caches
START_buckets, ZERO_words = 256, 64


class SetLayout(NamedTuple):
    """The offsets of a set's arrays, in words, and its size."""

    buckets: int
    zeros: int
    marks: int
    lows: int
    entries: int
    end: int


def bits_for(numbers: int) -> int:
    """The fewest bits that hold the numbers 0 to `numbers` - 1."""
    return max(0, numbers - 1).bit_length()


def words_for(count: int, bits: int) -> int:
    return -(-count * bits // 64)


def low_bits_for(count: int, ids: int) -> int:
    """The number of low bits per id that minimises the size of a set."""
    return (ids // count).bit_length() - 1


def layout(count: int, ids: int, low_bits: int, entry_bits: int) -> SetLayout:
    """The layout of a set of `count` of the ids 0 to `ids` - 1."""
    buckets = ((ids - 1) >> low_bits) + 1
    mark_words = words_for(count + buckets, 1)
    zeros = -(-buckets // START_buckets)
    marks = zeros - (-mark_words // ZERO_words)
    lows = marks + mark_words
    entries = lows + words_for(count, low_bits)
    return SetLayout(buckets, zeros, marks, lows, entries, entries + words_for(count, entry_bits))


def set_words(count: int, ids: int, entry_bits: int = 0) -> int:
    """The number of words of a set of `count` of `ids` ids, with entries of `entry_bits`."""
    return layout(count, ids, low_bits_for(count, ids), entry_bits).end if count else 0


def pack(numbers_N: NDArray[np.integer], bits: int) -> Words:
    """Numbers of `bits` bits, packed without gaps."""
    words = np.zeros(words_for(len(numbers_N), bits), np.uint64)
    for at in range(0, len(numbers_N) if bits else 0, GROUP * GROUPS):
        chunk = numbers_N[at : at + GROUP * GROUPS]
        groups = -(-len(chunk) // GROUP)
        numbers_GN = np.zeros((groups, GROUP), np.uint64)
        numbers_GN.reshape(-1)[: len(chunk)] = chunk
        words_GB = np.zeros((groups, bits), np.uint64)
        for index in range(GROUP):
            word, shift = divmod(index * bits, 64)
            words_GB[:, word] |= numbers_GN[:, index] << np.uint64(shift)
            if shift + bits > 64:  # the number crosses into the next word
                words_GB[:, word + 1] |= numbers_GN[:, index] >> np.uint64(64 - shift)
        first = at // GROUP * bits
        words[first : first + groups * bits] = words_GB.reshape(-1)[: len(words) - first]
    return words.view(np.int64)


def unpack(words: Words, count: int, bits: int) -> Ids:
    """The first `count` numbers of `bits` bits."""
    return np.concatenate([np.empty(0, np.int64), *unpack_chunks(words, count, bits)])


def unpack_chunks(words: Words, count: int, bits: int) -> Iterator[Ids]:
    for at in range(0, count, GROUP * GROUPS):
        size = min(count - at, GROUP * GROUPS)
        groups, first = -(-size // GROUP), at // GROUP * bits
        words_GB = np.zeros((groups, bits), np.uint64)
        chunk = words[first : first + words_for(size, bits)].view(np.uint64)
        words_GB.reshape(-1)[: len(chunk)] = chunk
        numbers_GN = np.zeros((groups, GROUP), np.uint64)
        for index in range(GROUP if bits else 0):
            word, shift = divmod(index * bits, 64)
            numbers_GN[:, index] = words_GB[:, word] >> np.uint64(shift)
            if shift + bits > 64:
                numbers_GN[:, index] |= words_GB[:, word + 1] << np.uint64(64 - shift)
        numbers_GN &= np.uint64((1 << bits) - 1)
        yield numbers_GN.reshape(-1)[:size].view(np.int64)


def write_set(set_C: Ids, ids: int, entries_C: NDArray[np.integer] | None = None, entry_bits: int = 0) -> Words:
    """The words of an ascending, non-empty set, with an entry for each of its ids."""
    count = len(set_C)
    low_bits = low_bits_for(count, ids)
    offsets = layout(count, ids, low_bits, entry_bits)
    words = np.zeros(offsets.end, np.int64)
    bucket_C = set_C >> low_bits
    starts_K = np.arange(0, offsets.buckets, START_buckets)
    words[: offsets.zeros] = starts_K + np.searchsorted(bucket_C, starts_K)
    # The mark (one) of the i-th id follows i ones and the zeros of all earlier buckets.
    mark_C = bucket_C
    mark_C += np.arange(count)
    zeros_K = np.arange(offsets.marks - offsets.zeros) * (64 * ZERO_words)
    words[offsets.zeros : offsets.marks] = zeros_K - np.searchsorted(mark_C, zeros_K)
    is_mark = np.zeros((offsets.lows - offsets.marks) * 64, np.bool_)
    is_mark[mark_C] = True
    words[offsets.marks : offsets.lows] = np.packbits(is_mark, bitorder="little").view("<i8")
    words[offsets.lows : offsets.entries] = pack(set_C & ((1 << low_bits) - 1), low_bits)
    if entries_C is not None:
        words[offsets.entries :] = pack(entries_C, entry_bits)
    return words


def read_set(section: MapSection, words: Words, ids: int) -> Ids | None:
    """The ids of a set, ascending; None if its words are damaged."""
    offsets = layout(section.count, ids, section.low_bits, section.entry_bits)
    words = words[section.at : section.at + offsets.end]
    is_mark = np.unpackbits(words[offsets.marks : offsets.lows].astype("<i8").view(np.uint8), bitorder="little")
    mark_C = np.flatnonzero(is_mark)
    if len(mark_C) != section.count:
        return None
    starts_K = np.arange(0, offsets.buckets, START_buckets)
    bucket_C = mark_C - np.arange(section.count)
    zeros_K = np.arange(offsets.marks - offsets.zeros) * (64 * ZERO_words)
    valid = np.array_equal(words[: offsets.zeros], starts_K + np.searchsorted(bucket_C, starts_K))
    valid = valid and np.array_equal(words[offsets.zeros : offsets.marks], zeros_K - np.searchsorted(mark_C, zeros_K))
    set_C = bucket_C << section.low_bits | unpack(words[offsets.lows :], section.count, section.low_bits)
    valid = valid and bool((np.diff(set_C) > 0).all()) and int(set_C[0]) >= 0 and int(set_C[-1]) < ids
    return set_C if valid else None


def entry_chunks(section: MapSection, words: Words, ids: int) -> Iterator[Ids]:
    """The entries of a section of kind `every` or `listed`, in chunks."""
    if section.kind == "every":
        return unpack_chunks(words[section.at :], ids, section.entry_bits)
    offsets = layout(section.count, ids, section.low_bits, section.entry_bits)
    return unpack_chunks(words[section.at + offsets.entries :], section.count, section.entry_bits)


def words_needed(section: MapSection, ids: int) -> int:
    """The number of words that the section reads from `at` on."""
    if section.kind == "every":
        return words_for(ids, section.entry_bits)
    if section.kind not in ("ranked", "listed"):
        return 0
    return layout(section.count, ids, section.low_bits, section.entry_bits if section.kind == "listed" else 0).end
