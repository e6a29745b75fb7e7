"""Draws batches of ids from access statistics: the length of each bag, and the rows of its ids.

A popularity rank is drawn by inverting the integral by which `perf.access` sums weights, which has a closed form:
measured ids have exactly the distribution that predictions assume. A fixed permutation scatters ranks over the rows of
a table, as hot rows are not neighbours. Ids of a bag are independent.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rowwise.planning.perf.access import Floats, Workload
from rowwise.tables.batch import Jagged

Ints = NDArray[np.int64]
GOLDEN = (math.sqrt(5) - 1) / 2
MAX_ROWS = 3_000_000_000  # products of two such numbers still fit into 64 bits
NEAR_ONE = 1e-6  # `a` this near to 1 counts as 1, as in `perf.access`


def draw_batch(workloads: Sequence[Workload], batch: int, rng: np.random.Generator) -> Jagged:
    """A batch of `batch` samples for all features of the tables, in order."""
    names: list[str] = []
    lengths: list[Ints] = []
    values: list[Ints] = []
    for workload in workloads:
        features = workload.table.feature_names
        for name in features:
            bags_B = draw_lengths(workload.access.pooling / len(features), batch, rng)
            names.append(name)
            lengths.append(bags_B)
            values.append(draw_rows(workload, int(bags_B.sum()), rng))
    return Jagged(
        features=tuple(names),
        values_N=torch.from_numpy(np.concatenate(values)),
        lengths_FB=torch.from_numpy(np.concatenate(lengths)),
    )


def draw_lengths(pooling: float, batch: int, rng: np.random.Generator) -> Ints:
    """Ids of each bag: always 1 if that is the mean, else Poisson distributed."""
    return np.ones(batch, dtype=np.int64) if pooling == 1 else rng.poisson(pooling, batch)


def draw_rows(workload: Workload, count: int, rng: np.random.Generator) -> Ints:
    rows, access = workload.table.rows, workload.access
    ranks_N = draw_ranks(access.zipf_a, access.zipf_q, min(access.active or rows, rows), rng.random(count))
    return scatter_ranks(ranks_N, rows)


def draw_ranks(a: float, q: float, active: int, fraction_N: Floats) -> Ints:
    """Popularity ranks, 0 the most frequent: for each fraction of the lookups, the first rank that reaches it."""
    if a == 0:
        return (fraction_N * active).astype(np.int64)
    power, first = (1 - a if abs(1 - a) >= NEAR_ONE else NEAR_ONE), 0.5 + q
    # The integral up to a rank, times power, plus 1; at fraction 1, that of all active ranks.
    grown_N = fraction_N * (math.pow((active + first) / first, power) - 1.0)
    grown_N += 1.0
    np.power(grown_N, 1 / power, out=grown_N)
    grown_N -= 1.0
    grown_N *= first
    return np.minimum(grown_N.astype(np.int64), active - 1)


def scatter_ranks(ranks_N: Ints, rows: int) -> Ints:
    """The row of each popularity rank, with neighbouring ranks far apart. Changes `ranks_N` in place."""
    assert rows < MAX_ROWS, f"{rows} rows"
    ranks_N *= _choose_stride(rows)
    ranks_N %= rows
    return ranks_N


def _choose_stride(rows: int) -> int:
    """A number near the golden section of `rows` that has no common divisor with it."""
    stride = max(1, round(rows * GOLDEN))
    while math.gcd(stride, rows) > 1:
        stride += 1
    return stride
