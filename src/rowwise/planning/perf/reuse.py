"""Repetition of rows in a batch: NeuroShard's 17 bins, a feature of learned cost models.

Bin k is the share of a batch's distinct rows that are looked up more than 2**(k-1) and at most 2**k times; the last has
all above. Values are expectations for independent ids with the statistics of `access`; measured histograms are not
used.
"""

import functools
import math

import numpy as np

from rowwise.planning.perf.access import Curves, Floats

BINS = 17
RATES = 512  # rates that are tabulated, even on a logarithmic scale
MIN_RATE, MAX_RATE = 1e-9, 1e9


def reuse_bins(curves: Curves, share: float = 1.0) -> Floats:
    """Shares (T, 17) of distinct rows by how often each is looked up, in a share of the batch; computed once."""
    if share not in curves.reuse_cache:
        curves.reuse_cache[share] = _bins_of(curves, share)
    return curves.reuse_cache[share]


def _bins_of(curves: Curves, share: float) -> Floats:
    rows_TC, share_TC = curves.cells
    ids_T = curves.pooling_T * curves.batch * share
    rate_TC = np.clip(ids_T[:, None] * share_TC / np.maximum(rows_TC, 1e-300), MIN_RATE, MAX_RATE)
    table_RB = _bin_chances()
    place_TC = (np.log(rate_TC) - math.log(MIN_RATE)) / (math.log(MAX_RATE) - math.log(MIN_RATE)) * (RATES - 1)
    low_TC = np.minimum(place_TC.astype(np.int64), RATES - 2)
    part_TC1 = (place_TC - low_TC)[..., None]
    chance_TCB = table_RB[low_TC] * (1 - part_TC1) + table_RB[low_TC + 1] * part_TC1
    counts_TB = (rows_TC[..., None] * chance_TCB).sum(1)
    return counts_TB / np.maximum(counts_TB.sum(1, keepdims=True), 1e-300)


@functools.cache
def _bin_chances() -> Floats:
    """For rows with a mean number of lookups (R), the probability (R, B) of each bin; the rest is no lookup at all."""
    rates_R = np.exp(np.linspace(math.log(MIN_RATE), math.log(MAX_RATE), RATES))
    max_B = np.concatenate([2.0 ** np.arange(BINS - 1), [np.inf]])
    below_RB = np.array([[_poisson_cdf(count, rate) for count in max_B] for rate in rates_R])
    absent_R1 = np.exp(-rates_R)[:, None]
    return np.maximum(np.diff(np.concatenate([absent_R1, below_RB], axis=1), axis=1), 0.0)


def _poisson_cdf(count: float, rate: float) -> float:
    """P(X <= count) for a Poisson variable: exact for small counts, else the Wilson-Hilferty approximation."""
    if math.isinf(count):
        return 1.0
    if count <= 32:
        if rate > 700:
            return 0.0
        terms = (math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) for k in range(int(count) + 1))
        return min(1.0, math.fsum(terms))
    n = count + 1
    z = (1 - 1 / (9 * n) - (rate / n) ** (1 / 3)) * 3 * math.sqrt(n)
    return 0.5 * math.erfc(-z / math.sqrt(2))
