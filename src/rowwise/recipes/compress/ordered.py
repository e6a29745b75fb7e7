"""Whether ids of a table that stand next to each other are alike, as where they were numbered by how often they come.

Then a rule that cuts ids by their number (the quotient, or ranges) would look better than it is for ids in any order,
and would stop to be when they are numbered anew. All rules here scramble ids first; this says when it matters.
"""

import numpy as np
from numpy.typing import NDArray

CLEARLY, ERRORS = 0.1, 5.0  # a correlation, and how many of its standard errors
TINY = 1e-12  # of values that are all the same, but for rounding


def neighbour_similarity(values_ND: NDArray[np.float32]) -> float:
    """How much rows are like the next ones, less than 0 to 1; about 0 in an order by chance."""
    if len(values_ND) < 3:
        return 0.0
    exact_ND = values_ND.astype(np.float64)
    centred_ND = exact_ND - exact_ND.mean(0)
    spread = float((centred_ND**2).mean())
    if spread <= TINY * float((exact_ND**2).mean()):
        return 0.0
    return float((centred_ND[1:] * centred_ND[:-1]).mean()) / spread


def is_ordered(counts_N: NDArray[np.int64], vectors_ND: NDArray[np.float32] | None) -> float | None:
    """By how much neighbours are alike, if they clearly are: by how often they come, or by what was learned of them."""
    found = [neighbour_similarity(np.log1p(counts_N).astype(np.float32)[:, None])]
    if vectors_ND is not None:
        found.append(neighbour_similarity(vectors_ND[counts_N > 0]))
    most = max(found)
    return most if most > max(CLEARLY, ERRORS / max(len(counts_N), 1) ** 0.5) else None
