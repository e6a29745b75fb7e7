"""The hit rate of the row cache in closed form, for independent accesses of known frequencies.

A row's frequency is p_i, of all accesses. One set of C slots holds under LRU the rows that were accessed within the
last T accesses, where sum(1 - exp(-p_i T)) = C (Che's approximation); under LFU it holds the C most frequent rows.

A cache of S sets of 32 ways is a mixture of such caches. Rows are in random sets, so a row leaves when the 32nd other
row of its own set comes, and the number of all rows until then is S times a Gamma variate of shape 32: its mean is the
number of slots, its deviation 18 % of that. Three points stand for it. LFU keeps the newest row in whatever way it
took, so one way of each set is not held by a frequent row.

Accuracy: `tests/tables/store/test_hit_rate.py` compares it to the simulator over skews and capacities. Ignored: the
time that counts take to settle, changes of frequencies over time, and pinning, which matters where a batch has about as
many distinct rows as there are slots.
"""

import numpy as np
from numpy.typing import NDArray

from rowwise.tables.store.policy import WAYS, Policy

Floats = NDArray[np.float64]
HALVINGS = 48  # bisection steps
# Gauss's rule for a normal variate: points in deviations, and their weights.
POINTS = ((-(3.0**0.5), 1 / 6), (0.0, 2 / 3), (3.0**0.5, 1 / 6))


def hit_rate(policy: Policy, rows_NC: Floats, share_NC: Floats, slots_N: Floats) -> Floats:
    """The share of accesses that hit, for tables as cells of rows with equal frequency, the most frequent first.

    Args:
        policy: how a set chooses its victim.
        rows_NC: rows of each cell.
        share_NC: the share of the table's accesses that the cell gets.
        slots_N: rows that the cache holds.
    """
    ways = WAYS - 1 if policy == "lfu" else WAYS
    one_set = _most_frequent if policy == "lfu" else _least_recent
    mean_N = slots_N * (ways / WAYS)
    rate_N = np.zeros(len(slots_N))
    for deviations, weight in POINTS:
        rate_N += weight * one_set(rows_NC, share_NC, mean_N * (1 + deviations / ways**0.5))
    return rate_N


def cells_of_counts(count_R: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Rows with equal counts as cells of one table, the most frequent first."""
    count_C, rows_C = np.unique(count_R[count_R > 0], return_counts=True)
    rows_C, total_C = rows_C[::-1].astype(float), (count_C * rows_C)[::-1].astype(float)
    return rows_C[None], total_C[None] / max(total_C.sum(), 1)


def _most_frequent(rows_NC: Floats, share_NC: Floats, slots_N: Floats) -> Floats:
    before_NC = np.cumsum(rows_NC, axis=1) - rows_NC
    return (share_NC * np.clip((slots_N[:, None] - before_NC) / rows_NC, 0, 1)).sum(1)


def _least_recent(rows_NC: Floats, share_NC: Floats, slots_N: Floats) -> Floats:
    """Che's approximation, with its T by bisection of log T."""
    frequency_NC = share_NC / rows_NC
    low_N, high_N = np.zeros(len(slots_N)), np.full(len(slots_N), np.log(1e18))
    for _ in range(HALVINGS):
        middle_N = (low_N + high_N) / 2
        held_N = (rows_NC * -np.expm1(-frequency_NC * np.exp(middle_N)[:, None])).sum(1)
        low_N, high_N = np.where(held_N < slots_N, middle_N, low_N), np.where(held_N < slots_N, high_N, middle_N)
    rate_N = (share_NC * -np.expm1(-frequency_NC * np.exp(low_N)[:, None])).sum(1)
    return np.where(slots_N < 1, np.minimum(slots_N, 1.0) * rate_N, rate_N)
