"""Estimates the drift of a machine's speed over time, to separate it from costs.

A shared machine is a few percent faster or slower for seconds at a time. A set whose neighbours in time took longer
than predicted probably did, too. So the drift at a measurement is the mean residual of its neighbours on the same rank,
weighted by nearness, without its own. Held-out sets are never neighbours, so nothing is learned from them. Changes
within one measurement are not seen.
"""

import numpy as np
from numpy.typing import NDArray

from rowwise.planning.perf.access import Floats

REACH = 3  # measurements after which the weight of a neighbour has fallen to 1/e
FAR = 4  # multiples of REACH beyond which the weight is 0


def estimate_slowness(residual_S: Floats, rank_S: NDArray[np.int64], known_S: NDArray[np.bool_]) -> Floats:
    """The log of the factor by which drift slowed each measurement; its mean over known ones is 0.

    Measurements of a rank are in order of time.
    """
    slowness_S = np.zeros(len(residual_S))
    weights = np.exp(-np.abs(np.arange(-FAR * REACH, FAR * REACH + 1)) / REACH)
    weights[FAR * REACH] = 0.0
    for rank in np.unique(rank_S):
        at = np.flatnonzero(rank_S == rank)
        known = known_S[at].astype(float)
        total = np.convolve(residual_S[at] * known, weights, mode="full")[FAR * REACH : FAR * REACH + len(at)]
        count = np.convolve(known, weights, mode="full")[FAR * REACH : FAR * REACH + len(at)]
        slowness_S[at] = np.divide(total, count, out=np.zeros(len(at)), where=count > 0)
    return slowness_S - (slowness_S[known_S].mean() if known_S.any() else 0.0)
