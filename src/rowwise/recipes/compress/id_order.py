"""Detects tables whose neighbouring ids are alike, for example because ids are numbered by frequency.

A map by ranges of ids would exploit that, and fail once ids are renumbered. All methods here scramble ids first; the
advice names the tables for which that matters.
"""

import numpy as np
from numpy.typing import NDArray

MIN_CORRELATION, STANDARD_ERRORS = 0.1, 5.0  # a significant correlation is above both
ROUNDING_VARIANCE = 1e-12  # relative variance of constant values, from rounding


def neighbour_correlation(values_ND: NDArray[np.float32]) -> float:
    """The correlation of each row with the next one; about 0 in random order."""
    if len(values_ND) < 3:
        return 0.0
    exact_ND = values_ND.astype(np.float64)
    centred_ND = exact_ND - exact_ND.mean(0)
    variance = float((centred_ND**2).mean())
    if variance <= ROUNDING_VARIANCE * float((exact_ND**2).mean()):
        return 0.0
    return float((centred_ND[1:] * centred_ND[:-1]).mean()) / variance


def find_id_order(counts_N: NDArray[np.int64], vectors_ND: NDArray[np.float32] | None) -> float | None:
    """The neighbour correlation of counts or of vectors, whichever is larger; None if it is not significant."""
    correlations = [neighbour_correlation(np.log1p(counts_N).astype(np.float32)[:, None])]
    if vectors_ND is not None:
        correlations.append(neighbour_correlation(vectors_ND[counts_N > 0]))
    threshold = max(MIN_CORRELATION, STANDARD_ERRORS / max(len(counts_N), 1) ** 0.5)
    return max(correlations) if max(correlations) > threshold else None
