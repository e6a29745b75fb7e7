"""Maps ids to rows in numpy, for code that makes or checks maps without torch.

Apart from `words`, which knows what is stored: here is what it means. The operator `map_ids` does the same many times
faster; [Note: Id maps] and [Note: Scrambled ids] in `idmap` define both.
"""

import numpy as np
from numpy.typing import NDArray

from rowwise.hashing.idmap import IdMap, MapSection
from rowwise.hashing.words import Ids, each_entries, read_set

GOLDEN = 0x9E3779B97F4A7C15
STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
ROUNDS = 4


def rows_of(id_map: IdMap, ids_N: NDArray[np.integer]) -> NDArray[np.int64]:
    """The rows [N, columns] of ids, numbered through all parts; -1: none, or an id that the map does not know."""
    shape = id_map.shape
    rows_NC = np.full((len(ids_N), shape.columns), -1, np.int64)
    known_N = np.flatnonzero((ids_N >= 0) & (ids_N < shape.ids))
    ids = ids_N[known_N].astype(np.int64)
    before_NC = np.zeros((len(ids), shape.columns), np.int64)
    for section in shape.sections:
        number_N = _numbers(section, id_map, ids, before_NC[:, section.column])
        has_N = (number_N >= 0) & (number_N < section.rows) & (rows_NC[known_N, section.column] < 0)
        rows_NC[known_N[has_N], section.column] = section.base + number_N[has_N]
    return rows_NC


def _numbers(section: MapSection, id_map: IdMap, ids_N: Ids, before_N: Ids) -> Ids:
    """The section's number of each id, negative for none; `before_N` counts ids of its set below each id."""
    ids = id_map.shape.ids
    match section.kind:
        case "hash":
            return (scramble(ids_N, section.seed) % np.uint64(section.rows)).view(np.int64)
        case "quotient":
            return order(ids_N, section.seed, ids) // section.divisor
        case "remainder":
            return order(ids_N, section.seed, ids) % section.divisor
        case "every":
            return np.concatenate(list(each_entries(section, id_map.words, ids)))[ids_N]
        case "rest":
            return ids_N - before_N
        case "ranked" | "listed":
            set_C = read_set(section, id_map.words, ids)
            assert set_C is not None
            place_N = np.searchsorted(set_C, ids_N)
            before_N += place_N
            is_in_N = set_C[np.minimum(place_N, len(set_C) - 1)] == ids_N
            if section.kind == "listed":
                entries_C = np.concatenate(list(each_entries(section, id_map.words, ids)))
                place_N = entries_C[np.minimum(place_N, len(set_C) - 1)]
            return np.where(is_in_N, place_N, -1)


def scramble(ids_N: Ids, seed: int) -> NDArray[np.uint64]:
    """A 64-bit word for each id, every bit of which depends on all of the id and the seed."""
    return _mix(ids_N.astype(np.uint64) ^ _mix(np.array([seed], np.uint64)))


def order(ids_N: Ids, seed: int, ids: int) -> Ids:
    """The places of ids in a permutation of 0 to `ids` - 1."""
    half = max(1, -(-(ids - 1).bit_length() // 2))
    key, keys = np.array([seed], np.uint64), list[NDArray[np.uint64]]()
    for _ in range(ROUNDS):
        key = _mix(key)
        keys.append(key)
    place_N, shift, mask = ids_N.astype(np.uint64), np.uint64(half), np.uint64((1 << half) - 1)
    walking_N = np.arange(len(ids_N))
    while len(walking_N):
        a_N, b_N = place_N[walking_N] >> shift, place_N[walking_N] & mask
        for key in keys:
            a_N, b_N = b_N, a_N ^ (_mix(b_N ^ key) & mask)
        place_N[walking_N] = a_N << shift | b_N
        walking_N = walking_N[place_N[walking_N] >= np.uint64(ids)]
    return place_N.view(np.int64)


def _mix(x_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z_N = x_N + np.uint64(GOLDEN)
    for shift, factor in STEPS:
        z_N = (z_N ^ (z_N >> np.uint64(shift))) * np.uint64(factor)
    return z_N ^ (z_N >> np.uint64(31))
