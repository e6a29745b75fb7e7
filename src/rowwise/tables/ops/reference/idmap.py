"""Rows of ids by an id map, in plain torch. See [Note: Id maps] in `tables/ids/idmap.py`.

Each call decodes all sets and searches them.
"""

import enum
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
ROUNDS = 4
START_buckets, ZERO_words = 256, 64


class SectionKind(enum.IntEnum):
    """In the order of `KINDS` in `tables/ids/idmap.py`."""

    HASH = 0
    QUOTIENT = 1
    REMAINDER = 2
    EVERY = 3
    RANKED = 4
    LISTED = 5
    REST = 6


class SectionRow(NamedTuple):
    """A row of `sections`."""

    kind: int
    rows: int
    base: int
    column: int
    seed: int
    divisor: int
    at: int
    count: int
    low_bits: int
    entry_bits: int


class SetPlaces(NamedTuple):
    """Offsets of the arrays of a set, in words of the map. See [Note: Sets of ids]."""

    zeros: int
    marks: int
    mark_bits: int
    lows: int
    entries: int
    end: int

    @classmethod
    def of(cls, section: SectionRow, known: int) -> "SetPlaces":
        buckets = ((known - 1) >> section.low_bits) + 1
        mark_bits = section.count + buckets
        mark_words = -(-mark_bits // 64)
        zeros = section.at - (-buckets // START_buckets)
        marks = zeros - (-mark_words // ZERO_words)
        lows = marks + mark_words
        entries = lows - (-section.count * section.low_bits // 64)
        bits = section.entry_bits if section.kind == SectionKind.LISTED else 0
        return cls(zeros, marks, mark_bits, lows, entries, entries - (-section.count * bits // 64))


def half_bits(known: int) -> int:
    """The bits of the halves that an id is split into; see [Note: Scrambled ids]."""
    return max(1, -(-(known - 1).bit_length() // 2))


def map_ids(ids: Tensor, sections: Tensor, words: Tensor, known: int, columns: int) -> Tensor:
    """The rows [N, columns] of ids; -1 for none."""
    rows_NC = ids.new_full((ids.shape[0], columns), -1, dtype=torch.int64)
    ids_N = ids.long()
    is_known_N = (ids_N >= 0) & (ids_N < known)
    ids_N = torch.where(is_known_N, ids_N, 0)
    before_NC = torch.zeros_like(rows_NC)  # number of ids below each id in the sets so far
    for section in (SectionRow(*row) for row in sections.tolist()):
        place_N, number_N = _numbers(section, ids_N, before_NC[:, section.column], words, known)
        before_NC[:, section.column] += place_N
        has_N = is_known_N & (number_N >= 0) & (number_N < section.rows) & (rows_NC[:, section.column] < 0)
        rows_NC[has_N, section.column] = section.base + number_N[has_N]
    return rows_NC


def scramble(x_N: Tensor, seed: int) -> Tensor:
    """Mix words: each bit depends on all bits of a word. See [Note: Scrambled ids] in `tables/ids/idmap.py`."""
    return mix(x_N ^ mix(x_N.new_tensor(seed)))


def order(ids_N: Tensor, seed: int, known: int) -> Tensor:
    """The images of ids under a permutation of all ids."""
    half = half_bits(known)
    key, keys = ids_N.new_tensor(seed), list[Tensor]()
    for _ in range(ROUNDS):
        key = mix(key)
        keys.append(key)
    place_N, walking_N = ids_N.clone(), torch.ones_like(ids_N, dtype=torch.bool)
    while bool(walking_N.any()):
        a_N, b_N = place_N[walking_N] >> half, place_N[walking_N] & ((1 << half) - 1)
        for key in keys:
            a_N, b_N = b_N, a_N ^ (mix(b_N ^ key) & ((1 << half) - 1))
        place_N[walking_N] = a_N << half | b_N
        walking_N = place_N >= known
    return place_N


def mix(x: Tensor) -> Tensor:
    """SplitMix64 in int64, whose sums and products wrap around as those of words do; only the shifts differ."""
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _numbers(section: SectionRow, ids_N: Tensor, before_N: Tensor, words: Tensor, known: int) -> tuple[Tensor, Tensor]:
    """For each id, the number of ids of the section's set below it, and its row in the section; negative for none."""
    none_N = torch.zeros_like(ids_N)
    match section.kind:
        case SectionKind.HASH:
            x_N = scramble(ids_N, section.seed)
            # The unsigned remainder: words from 2**63 on are negative in int64.
            return none_N, (_shift(x_N, 1) % section.rows * 2 + (x_N & 1)) % section.rows
        case SectionKind.QUOTIENT:
            return none_N, order(ids_N, section.seed, known) // section.divisor
        case SectionKind.REMAINDER:
            return none_N, order(ids_N, section.seed, known) % section.divisor
        case SectionKind.EVERY:
            return none_N, _unpack(words[section.at :], ids_N, section.entry_bits)
        case SectionKind.REST:
            return none_N, ids_N - before_N
    if not section.count:
        return none_N, none_N - 1
    set_C, entries = _read_set(section, words, known)
    place_N = torch.searchsorted(set_C, ids_N)
    at_N = place_N.clamp(max=section.count - 1)
    number_N = _unpack(entries, at_N, section.entry_bits) if section.kind == SectionKind.LISTED else at_N
    return place_N, torch.where(set_C[at_N] == ids_N, number_N, -1)


def _read_set(section: SectionRow, words: Tensor, known: int) -> tuple[Tensor, Tensor]:
    """The ids of a set, and the words from its entries on. See [Note: Sets of ids]."""
    layout = SetPlaces.of(section, known)
    marked = words[layout.marks : layout.lows].unsqueeze(1) >> torch.arange(64, device=words.device) & 1
    place_C = torch.arange(section.count, device=words.device)
    bucket_C = marked.flatten().nonzero().flatten()[: section.count] - place_C
    low_C = _unpack(words[layout.lows :], place_C, section.low_bits)
    return bucket_C << section.low_bits | low_C, words[layout.entries :]


def _unpack(words: Tensor, at_N: Tensor, bits: int) -> Tensor:
    """Elements of a packed array of `bits`-bit integers."""
    if not bits:
        return torch.zeros_like(at_N)
    first_N, shift_N = at_N * bits >> 6, at_N * bits & 63
    low_N = words[first_N] >> shift_N & ~(-1 << (64 - shift_N).clamp(max=63))
    low_N = torch.where(shift_N == 0, words[first_N], low_N)
    crosses_N = shift_N + bits > 64
    next_N = words[torch.where(crosses_N, first_N + 1, first_N)]
    high_N = torch.where(crosses_N, next_N << (64 - shift_N).clamp(max=63), 0)
    return (low_N | high_N) & ((1 << bits) - 1)
