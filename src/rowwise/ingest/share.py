"""A share of the rows, chosen by a hash of each row's place: the same rows in every epoch, and in every run.

So one file can hold the rows to train on and those to test on, without being written anew or read ahead.
"""

import numpy as np

from rowwise.errors import SpecError
from rowwise.ingest.bags import Ints
from rowwise.ingest.mix import mix
from rowwise.spec import Value


class Share(Value, frozen=True):
    """The rows whose hash, as a number in [0, 1), is at least `begin` and less than `end`."""

    begin: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= 1:
            raise SpecError(f"a share of rows from {self.begin} to {self.end}: want 0 <= begin < end <= 1")

    def select(self, order_R: Ints | None, rows: int, split: int) -> Ints | None:
        """Those rows of an order (None: as they are) of a split that belong to the share."""
        if (self.begin, self.end) == (0, 1):
            return order_R
        order_R = np.arange(rows) if order_R is None else order_R
        place_R = order_R.astype(np.uint64) + mix(np.array([split], np.uint64))
        at_R = (mix(place_R) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return order_R[(at_R >= self.begin) & (at_R < self.end)]
