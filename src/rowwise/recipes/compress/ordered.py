"""Detects tables whose neighbouring ids are alike, for example numbered by frequency.

There, maps by ranges of ids would look better than they are, and get worse once ids are renumbered. All methods here
scramble ids first; the advice says for which tables that matters.
"""

import numpy as np
from numpy.typing import NDArray

CLEARLY, ERRORS = 0.1, 5.0  # least correlation, and least number of standard errors
TINY = 1e-12  # relative variance of constant values, from rounding


def neighbour_correlation(values_ND: NDArray[np.float32]) -> float:
    """The correlation of each row with the next one; about 0 in random order."""
    if len(values_ND) < 3:
        return 0.0
    exact_ND = values_ND.astype(np.float64)
    centred_ND = exact_ND - exact_ND.mean(0)
    spread = float((centred_ND**2).mean())
    if spread <= TINY * float((exact_ND**2).mean()):
        return 0.0
    return float((centred_ND[1:] * centred_ND[:-1]).mean()) / spread


def find_order(counts_N: NDArray[np.int64], vectors_ND: NDArray[np.float32] | None) -> float | None:
    """The larger neighbour correlation of frequencies and vectors, if significant; else None."""
    found = [neighbour_correlation(np.log1p(counts_N).astype(np.float32)[:, None])]
    if vectors_ND is not None:
        found.append(neighbour_correlation(vectors_ND[counts_N > 0]))
    most = max(found)
    return most if most > max(CLEARLY, ERRORS / max(len(counts_N), 1) ** 0.5) else None
