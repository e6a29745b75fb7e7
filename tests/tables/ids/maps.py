"""Id maps of every kind for a number of ids, and what they mean written out: a vector for each id."""

import numpy as np

from rowwise.tables.ids.arrays import add_maps, entry_map, ranked_map
from rowwise.tables.ids.idmap import IdMap, MapPart, MapSection, MapShape
from rowwise.tables.ids.rules import double_hash_map, hash_map, quotient_remainder_map


def direct(ids):
    """Each id has a row of its own, in their order."""
    return IdMap(shape=MapShape(ids=ids, parts=(MapPart(rows=ids),), sections=(MapSection(kind="rest", rows=ids),)))


def make_maps(ids, seed=0):
    """One of each kind that so many ids allow, by name."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(ids)
    third = max(1, ids // 3)
    head, middle = np.sort(order[:third]), np.sort(order[third : 2 * third])
    rows_N = generator.integers(0, 3, ids)
    some_N = np.where(generator.random(ids) < 0.5, rows_N, -1)
    least = 2 * (int(ids**0.5) + 2)
    return {
        "direct": direct(ids),
        "hash": hash_map(ids, max(1, ids // 4), seed),
        "double_hash": double_hash_map(ids, max(1, ids // 4), seed),
        "three hashes": double_hash_map(ids, max(1, ids // 3), seed, 3),
        "quotient_remainder": quotient_remainder_map(ids, least, seed),
        "product": quotient_remainder_map(ids, least, seed, "product"),
        "frequency": ranked_map(ids, [head], 2, seed=seed),
        "own rows for all": ranked_map(ids, [head, middle], "own"),
        "mixed": ranked_map(ids, [head, middle], "own" if ids > 2 * third else 1, dims=[None, 2, 1]),
        "mixed, rare ids nowhere": ranked_map(ids, [head, middle], 0, dims=[None, 2]),
        "every": entry_map(ids, rows_N, 3),
        "listed": entry_map(ids, some_N, 3, unseen_rows=2, seed=seed),
        "listed, others nowhere": entry_map(ids, some_N, 3, unseen_rows=0) if (some_N >= 0).any() else direct(ids),
        "clusters and own rows": add_maps(entry_map(ids, rows_N, 3), ranked_map(ids, [head], 0, dims=[1])),
        "clusters and a hash": add_maps(entry_map(ids, some_N, 3), hash_map(ids, 5, seed)),
    }
