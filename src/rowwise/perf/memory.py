"""What pieces of tables take of each tier of memory: rows, their optimizer state, and what a step needs beside them."""

import numpy as np

from rowwise.perf.access import Curves, Floats
from rowwise.perf.cost import Shards
from rowwise.plan import TIERS

ID_bytes = 8
FLOAT_bytes = 4


def memory_bytes(shards: Shards, curves: Curves, buffers: bool) -> Floats:
    """Bytes (N, tiers) of each piece on its rank; with `buffers`, also ids and vectors of a step, both ways.

    A tier above the one where rows live holds copies of some of them, state and all, not the only ones.
    """
    row_N = shards.row_bytes_N + shards.state_bytes_N
    taken_NM = np.zeros((len(row_N), len(TIERS)))
    lives = TIERS.index(shards.tier)
    taken_NM[:, lives] = shards.rows_N * row_N
    if lives:
        taken_NM[:, lives - 1] += np.ceil(shards.cached * shards.rows_N) * row_N
    if buffers:
        samples = curves.batch * shards.share
        ids_N = curves.pooling_T[shards.table_N] * samples / shards.row_parts
        vectors_N = shards.bags_N * samples * shards.dim_N * FLOAT_bytes
        taken_NM[:, 0] += 2 * (ids_N * ID_bytes + vectors_N)
    return np.ceil(taken_NM)
