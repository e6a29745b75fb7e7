"""How fast the machine was from moment to moment: what a shared processor does to measurements, told apart from costs.

A machine that others use, too, is a few percent faster or slower for seconds at a time. Where sets that were measured
shortly before and after one took more than predicted, that one probably did, too, whatever its tables are. So the
speed at each measurement is the mean residual of its neighbours on the same rank, near ones counting more, itself
never. Sets that are held out are nobody's neighbours, so nothing is learned from them. Known limits: speeds that
change faster than sets are measured.
"""

import numpy as np
from numpy.typing import NDArray

from rowwise.perf.access import Floats

REACH = 3  # measurements after which a neighbour counts a third
FAR = 4  # times that far, it does not count


def slowness(residual_S: Floats, rank_S: NDArray[np.int64], known_S: NDArray[np.bool_]) -> Floats:
    """The logarithm of how much longer things took at each measurement; 0 on average over those that are known.

    Measurements of a rank are in the order in which they were made.
    """
    found_S = np.zeros(len(residual_S))
    weights = np.exp(-np.abs(np.arange(-FAR * REACH, FAR * REACH + 1)) / REACH)
    weights[FAR * REACH] = 0.0
    for rank in np.unique(rank_S):
        at = np.flatnonzero(rank_S == rank)
        known = known_S[at].astype(float)
        total = np.convolve(residual_S[at] * known, weights, mode="full")[FAR * REACH : FAR * REACH + len(at)]
        count = np.convolve(known, weights, mode="full")[FAR * REACH : FAR * REACH + len(at)]
        found_S[at] = np.divide(total, count, out=np.zeros(len(at)), where=count > 0)
    return found_S - (found_S[known_S].mean() if known_S.any() else 0.0)
