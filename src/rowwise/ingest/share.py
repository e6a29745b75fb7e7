"""A share of the rows, chosen by a hash of each row's number: the same rows in every epoch and every run.

Train and test rows can so lie in one file, without copying it or reading it beforehand.
"""

import numpy as np

from rowwise.errors import SpecError
from rowwise.ingest.block import Ints
from rowwise.ingest.mix import mix
from rowwise.spec import Value


class Share(Value, frozen=True):
    """The rows whose hash, scaled to [0, 1), is at least `begin` and less than `end`."""

    begin: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= 1:
            raise SpecError(f"share of rows: begin={self.begin}, end={self.end}: want 0 <= begin < end <= 1")

    def select(self, order_R: Ints | None, rows: int, split: int) -> Ints | None:
        """The rows of an order (None: all as they are) of split number `split` that belong to the share."""
        if (self.begin, self.end) == (0, 1):
            return order_R
        order_R = np.arange(rows) if order_R is None else order_R
        key_R = order_R.astype(np.uint64) + mix(np.array([split], np.uint64))
        hash_R = (mix(key_R) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # the 53 bits that a double holds
        return order_R[(hash_R >= self.begin) & (hash_R < self.end)]
