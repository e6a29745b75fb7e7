"""A share of the rows, chosen by a hash of each row's number or group: the same rows in every run.

So train and test rows can come from one file, without copying it or reading it beforehand.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.block import Ints
from rowwise.ingest.mix import Words, mix, unit
from rowwise.ingest.survey import hash_any
from rowwise.tables.spec import Value


class Share(Value, frozen=True):
    """The rows whose hash, scaled to [0, 1), is at least `begin` and less than `end`."""

    begin: float = 0.0
    end: float = 1.0
    group: str | None = None  # column whose equal values stay in one share; a null is a group of its own

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= 1:
            raise SpecError(f"share of rows: begin={self.begin}, end={self.end}", "0 <= begin < end <= 1")

    def select(self, order_R: Ints | None, rows: int, split: int) -> Ints | None:
        """The rows of split number `split` that belong to the share, in an order; None for all rows in table order."""
        if self.is_whole or self.group is not None:
            return order_R
        order_R = np.arange(rows) if order_R is None else order_R
        return order_R[self._holds(_place_keys(order_R, split))]

    def holds(self, groups: pa.ChunkedArray, split: int) -> NDArray[np.bool_]:
        """Mask of the rows of split number `split` that belong to the share, by their groups."""
        array = combine_chunks(groups)
        key_R = _place_keys(np.arange(len(array)), split)
        key_R[array.is_valid().to_numpy(zero_copy_only=False)] = hash_any(array.drop_null())
        return self._holds(key_R)

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows."""
        return (self.begin, self.end) == (0, 1)

    def _holds(self, key_R: Words) -> NDArray[np.bool_]:
        hash_R = unit(mix(key_R))
        return (hash_R >= self.begin) & (hash_R < self.end)


def _place_keys(row_R: Ints, split: int) -> Words:
    return row_R.astype(np.uint64) + mix(np.array([split], np.uint64))
