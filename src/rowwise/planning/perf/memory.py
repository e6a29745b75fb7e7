"""Bytes of pieces of tables in each tier: rows, optimizer state, and a step's ids and vectors.

Memory is a limit, not a cost: all cost models share this count.
"""

import numpy as np

from rowwise.parallel.plan import TIERS
from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.cost import Shards
from rowwise.tables.store.sizes import HEADER_bytes, cache_bytes_of, disk_bytes_of

ID_bytes = 8
FLOAT_bytes = 4


def memory_bytes(shards: Shards, curves: Curves, buffers: bool) -> Floats:
    """Bytes (N, tiers) of each piece on its rank; with `buffers`, also ids and vectors of a step, both ways.

    Rows below the device have copies in their cache tier, with their state.
    """
    row_N = shards.row_bytes_N + shards.state_bytes_N
    taken_NM = np.zeros((len(row_N), len(TIERS)))
    own, above = TIERS.index(shards.tier), TIERS.index(shards.cache_tier)
    cached_N = np.ceil(shards.cached * shards.rows_N)
    if shards.tier == "disk":
        record_N = row_N + HEADER_bytes
        taken_NM[:, own] = disk_bytes_of(record_N, shards.rows_N)
        taken_NM[:, above] = cache_bytes_of(record_N, shards.rows_N, cached_N)
    else:
        taken_NM[:, own] = shards.rows_N * row_N
        taken_NM[:, above] += cached_N * row_N
    if buffers:
        samples = curves.batch * shards.share
        ids_N = curves.pooling_T[shards.table_N] * samples / shards.row_parts
        vectors_N = shards.bags_N * samples * shards.dim_N * FLOAT_bytes
        taken_NM[:, 0] += 2 * (ids_N * ID_bytes + vectors_N)
    return np.ceil(taken_NM)
