"""Which rows of a split repeat the row before them in a group of features: those of one session, say.

The definition, in numpy: the kernel `mark_changes` of `native.py` does the same for rows that are picked in any order.
Neighbours only, so one pass and no table of hashes; whoever writes the data puts rows of a session next to each other.
Its own file because nothing else of a split is asked: values one after another, and where each row's begin.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import DataError

Ints = NDArray[np.int64]


class Rows(Protocol):
    """The bags of one feature, as `Bags` has them."""

    @property
    def values_N(self) -> Ints:
        """The ids of all rows."""
        ...

    @property
    def offsets_R1(self) -> Ints | None:
        """Where those of each row begin, and the end of the last; None: each row has one."""
        ...


def adjacent(bags: Sequence[Rows]) -> Ints:
    """The distinct row [R] that each row is, counted from 0: a row is that before it if all of its bags are equal."""
    if not bags:
        raise DataError("no features to find repeated rows by; expected at least one")
    counts = {len(one.values_N) if one.offsets_R1 is None else len(one.offsets_R1) - 1 for one in bags}
    if len(counts) > 1:
        raise DataError(f"features of {', '.join(map(str, sorted(counts)))} rows; expected as many rows in each")
    begins_R = np.zeros(counts.pop(), np.bool_)
    for one in bags:
        begins_R[1:] |= _differs(one)
    return np.cumsum(begins_R, dtype=np.int64)


def _differs(bags: Rows) -> NDArray[np.bool_]:
    """Of each row but the first, whether its bag is another than that before it."""
    values_N, offsets_R1 = bags.values_N, bags.offsets_R1
    if offsets_R1 is None:
        return values_N[1:] != values_N[:-1]
    lengths_R = np.diff(offsets_R1)
    differs_R = lengths_R[1:] != lengths_R[:-1]
    # Only bags as long as the one before are compared id by id: each with that as far before it as its bag is long.
    alike_R = ~differs_R
    lengths_L = lengths_R[1:][alike_R]
    row_N = np.repeat(np.flatnonzero(alike_R), lengths_L)
    first_L = offsets_R1[1:-1][alike_R]
    at_N = np.arange(len(row_N)) + np.repeat(first_L - (np.cumsum(lengths_L) - lengths_L), lengths_L)
    unequal_N = values_N[at_N] != values_N[at_N - np.repeat(lengths_L, lengths_L)]
    differs_R[row_N[unequal_N]] = True
    return differs_R
