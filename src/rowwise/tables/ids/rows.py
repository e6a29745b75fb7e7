"""Maps ids to rows in numpy, for code that makes or checks maps without torch.

The operator `map_ids` gives the same rows many times faster. [Note: Id maps] and [Note: Scrambled ids] in `idmap`
define both.
"""

import numpy as np
from numpy.typing import NDArray

from rowwise.tables.ids.idmap import IdMap, MapSection
from rowwise.tables.ids.words import Ids, entry_chunks, read_set

GOLDEN = 0x9E3779B97F4A7C15
STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
ROUNDS = 4


def look_up_rows(id_map: IdMap, ids_N: NDArray[np.integer]) -> NDArray[np.int64]:
    """The rows [N, columns] of ids, numbered through all parts; -1 for no row, and for ids outside the map."""
    shape = id_map.shape
    rows_NC = np.full((len(ids_N), shape.columns), -1, np.int64)
    known_N = np.flatnonzero((ids_N >= 0) & (ids_N < shape.ids))
    ids = ids_N[known_N].astype(np.int64)
    below_NC = np.zeros((len(ids), shape.columns), np.int64)
    for section in shape.sections:
        row_N = _section_rows(section, id_map, ids, below_NC[:, section.column])
        has_row_N = (row_N >= 0) & (row_N < section.rows) & (rows_NC[known_N, section.column] < 0)
        rows_NC[known_N[has_row_N], section.column] = section.base + row_N[has_row_N]
    return rows_NC


def _section_rows(section: MapSection, id_map: IdMap, ids_N: Ids, below_N: Ids) -> Ids:
    """The row of each id, counted from the section's base; negative for none.

    `below_N` counts, for each id, the lower ids in the column's sets so far; sets add to it, and `rest` subtracts it.
    """
    ids = id_map.shape.ids
    match section.kind:
        case "hash":
            return (scramble(ids_N, section.seed) % np.uint64(section.rows)).view(np.int64)
        case "quotient":
            return permute(ids_N, section.seed, ids) // section.divisor
        case "remainder":
            return permute(ids_N, section.seed, ids) % section.divisor
        case "every":
            return np.concatenate(list(entry_chunks(section, id_map.words, ids)))[ids_N]
        case "rest":
            return ids_N - below_N
        case "ranked" | "listed":
            set_C = read_set(section, id_map.words, ids)
            assert set_C is not None
            index_N = np.searchsorted(set_C, ids_N)
            below_N += index_N
            index_N = np.minimum(index_N, len(set_C) - 1)
            is_in_N = set_C[index_N] == ids_N
            if section.kind == "listed":
                entries_C = np.concatenate(list(entry_chunks(section, id_map.words, ids)))
                return np.where(is_in_N, entries_C[index_N], -1)
            return np.where(is_in_N, index_N, -1)


def scramble(ids_N: Ids, seed: int) -> NDArray[np.uint64]:
    """A 64-bit hash of each id and the seed."""
    return _mix(ids_N.astype(np.uint64) ^ _mix(np.array([seed], np.uint64)))


def permute(ids_N: Ids, seed: int, ids: int) -> Ids:
    """The images of ids under a permutation of 0 to `ids` - 1."""
    half = max(1, -(-(ids - 1).bit_length() // 2))
    key, keys = np.array([seed], np.uint64), list[NDArray[np.uint64]]()
    for _ in range(ROUNDS):
        key = _mix(key)
        keys.append(key)
    image_N, shift, mask = ids_N.astype(np.uint64), np.uint64(half), np.uint64((1 << half) - 1)
    # The network permutes 0 to 4**half - 1: an image that is no id is mapped again, until it is one (cycle walking).
    outside_M = np.arange(len(ids_N))
    while len(outside_M):
        a_M, b_M = image_N[outside_M] >> shift, image_N[outside_M] & mask
        for key in keys:
            a_M, b_M = b_M, a_M ^ (_mix(b_M ^ key) & mask)
        image_N[outside_M] = a_M << shift | b_M
        outside_M = outside_M[image_N[outside_M] >= np.uint64(ids)]
    return image_N.view(np.int64)


def _mix(x_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z_N = x_N + np.uint64(GOLDEN)
    for shift, factor in STEPS:
        z_N = (z_N ^ (z_N >> np.uint64(shift))) * np.uint64(factor)
    return z_N ^ (z_N >> np.uint64(31))
