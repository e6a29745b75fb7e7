"""The ids of one feature, one or many in a row: out of an Arrow column, and into another order of rows.

Lists and single values are the same to everything that follows: values one after another, and where each row's begin.
What is missing is left out here and nowhere else.
"""

from dataclasses import dataclass
from typing import Self, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc

from rowwise.ingest.columns import is_list

Ints = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """Row r has values_N[offsets_R1[r]:offsets_R1[r + 1]]; without offsets every row has one value, values_N[r]."""

    values_N: Ints
    offsets_R1: Ints | None

    def reordered(self, order_R: Ints | None) -> Self:
        """The same rows in another order, some left out maybe; None: as they are."""
        if order_R is None:
            return self
        offsets_R1 = self.offsets_R1
        if offsets_R1 is None:
            return type(self)(values_N=self.values_N.take(order_R), offsets_R1=None)
        lengths_R = np.diff(offsets_R1)[order_R]
        moved_R1 = _running_sum(lengths_R)
        # The n-th id of the output is the n-th of its bag, counted from where the bag was.
        at_N = np.arange(moved_R1[-1]) + np.repeat(offsets_R1[order_R] - moved_R1[:-1], lengths_R)
        return type(self)(values_N=self.values_N.take(at_N), offsets_R1=moved_R1)


def flat(array: pa.Array, first: int | None) -> tuple[pa.Array, Ints | None]:
    """The ids one after another without what is missing, and where each row's begin."""
    if not is_list(array.type):
        if array.null_count == 0:
            return array, None
        return array.drop_null(), _running_sum(array.is_valid().to_numpy(zero_copy_only=False))
    lengths_R = pc.fill_null(pc.call_function("list_value_length", [array]), 0).to_numpy(zero_copy_only=False)
    offsets_R1 = _running_sum(lengths_R)
    ids = array.flatten()  # unlike .values, without what a slice or a missing list hides
    if ids.null_count:
        offsets_R1 = _running_sum(ids.is_valid().to_numpy(zero_copy_only=False))[offsets_R1]
        ids = ids.drop_null()
    if first is not None:
        lengths_R = np.diff(offsets_R1)
        used_N = np.arange(len(ids)) - np.repeat(offsets_R1[:-1], lengths_R) < first
        ids, offsets_R1 = ids.filter(pa.array(used_N)), _running_sum(np.minimum(lengths_R, first))
    return ids, offsets_R1


def _running_sum(counts_R: NDArray[np.generic]) -> Ints:
    sums_R1 = np.zeros(len(counts_R) + 1, np.int64)
    np.cumsum(counts_R, out=sums_R1[1:])
    return sums_R1
