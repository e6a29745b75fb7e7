"""Inputs of learned cost models for pieces of tables: shape, ids and rows of a step, and how rows repeat.

Training on measured sets and planning call the same functions. Besides features there is *nominal work*: five amounts
for each stage, in seconds of a nominal device, which are right up to a factor; see `network`.
"""

import numpy as np

from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.cost import AccessCounts, Shards
from rowwise.planning.perf.reuse import BINS, reuse_bins

NOMINAL_Bps, NOMINAL_s = 8e9, 5e-9  # rate of memory; seconds of one lookup
FLOAT_bytes, LINE_bytes = 4, 64


FEATURES, WORK = 10 + BINS, 5  # columns of `piece_features` and `nominal_work`


def piece_features(shards: Shards, curves: Curves) -> Floats:
    """Features (N, F) of pieces, most of them logarithms; the last 17 are the reuse bins."""
    n, u, written, bags = AccessCounts.of(shards, curves)
    touched = u * (shards.row_bytes_N + shards.state_bytes_N)
    amounts = (
        shards.rows_N, shards.dim_N, n, bags, u, shards.row_bytes_N, shards.state_bytes_N, touched,
        n / np.maximum(bags, 1e-9), n / np.maximum(written, 1e-9),
    )  # fmt: skip
    bins_TB = reuse_bins(curves, shards.share)
    return np.concatenate([np.log1p(np.stack(amounts, axis=1)), bins_TB[shards.table_N]], axis=1)


def nominal_work(stage: str, shards: Shards, curves: Curves) -> Floats:
    """Nominal seconds (N, 5) of a stage by kind of work.

    For "lookup": ids gathered, distinct rows, pooled vectors, ids issued, bags; for "update": ids merged, distinct
    rows, gradients, rows issued, the sort.
    """
    n, u, written, bags = AccessCounts.of(shards, curves)
    lines = np.ceil(shards.row_bytes_N / LINE_bytes) * LINE_bytes
    state = np.ceil(shards.state_bytes_N / LINE_bytes) * LINE_bytes
    vectors = bags * shards.dim_N * FLOAT_bytes
    if stage == "lookup":
        parts = (
            n * lines / NOMINAL_Bps,
            u * lines / NOMINAL_Bps,
            vectors / NOMINAL_Bps,
            n * NOMINAL_s,
            bags * NOMINAL_s,
        )
    else:
        gathered = n * shards.dim_N * FLOAT_bytes / NOMINAL_Bps
        rows = 2 * written * (lines + state) / NOMINAL_Bps
        order = n * np.log2(np.maximum(n, 2)) * NOMINAL_s / 8
        parts = (gathered, rows, vectors / NOMINAL_Bps, written * NOMINAL_s, order)
    return np.stack(parts, axis=1)
