"""Batches of ids as access statistics describe them: how many ids a bag has, and which rows they are.

Ranks are drawn by the inverse of the integral by which `perf.access` adds weights up, which has a closed form: what is
drawn is what predictions are made of. A fixed map spreads ranks over the rows of a table, as hot rows are not
neighbours.

Known limits: what the ids of a bag have to do with each other.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rowwise.batch import Jagged
from rowwise.perf.access import Floats, Workload

Ints = NDArray[np.int64]
GOLDEN = (math.sqrt(5) - 1) / 2
MOST_ROWS = 3_000_000_000  # of which products still are 64 bits wide
LOGARITHM = 1e-6  # how near to 1 `a` is taken for 1, as predictions do


def ids_of(workloads: Sequence[Workload], batch: int, rng: np.random.Generator) -> Jagged:
    """A batch of so many samples, for all features of the tables in order."""
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
    """Ids of each bag: one where that is the mean, else of a Poisson distribution."""
    return np.ones(batch, dtype=np.int64) if pooling == 1 else rng.poisson(pooling, batch)


def draw_rows(workload: Workload, count: int, rng: np.random.Generator) -> Ints:
    """So many rows of a table, as it is asked for them."""
    rows, access = workload.table.rows, workload.access
    ranks_N = draw_ranks(access.zipf_a, access.zipf_q, min(access.active or rows, rows), rng.random(count))
    return spread(ranks_N, rows)


def draw_ranks(a: float, q: float, active: int, share_N: Floats) -> Ints:
    """Ranks from 0, the most asked for first: each the first by which so much of all lookups is reached."""
    if a == 0:
        return (share_N * active).astype(np.int64)
    power, first = (1 - a if abs(1 - a) >= LOGARITHM else LOGARITHM), 0.5 + q
    # power * (mass up to a rank) + 1, of which the mass of all ranks is the largest.
    grown_N = share_N * (math.pow((active + first) / first, power) - 1.0)
    grown_N += 1.0
    np.power(grown_N, 1 / power, out=grown_N)
    grown_N -= 1.0
    grown_N *= first
    return np.minimum(grown_N.astype(np.int64), active - 1)


def spread(ranks_N: Ints, rows: int) -> Ints:
    """Where rows of these ranks are in a table: another row for each, and neighbours far apart."""
    assert rows < MOST_ROWS, f"{rows} rows"
    ranks_N *= _stride(rows)
    ranks_N %= rows
    return ranks_N


def _stride(rows: int) -> int:
    """About the golden part of the rows, and without a divisor of theirs."""
    stride = max(1, round(rows * GOLDEN))
    while math.gcd(stride, rows) > 1:
        stride += 1
    return stride
