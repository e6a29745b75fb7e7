"""A sketch of distinct values with their frequencies, labels and times, in bounded memory.

Every value is hashed, and only those whose hash is below a threshold are counted. The threshold starts above all
hashes, so small columns are counted exactly; it is halved whenever the sketch is full. Then the sketch holds a uniform
sample of the distinct values, each with its exact count. Source: Wegman's adaptive sampling (Flajolet 1990). Known
limits: once the sketch is full, the share of the most frequent values is estimated from the sample.
"""

import math
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rowwise.ingest.mix import Words

MAX_VALUES = 1 << 16
NO_SPAN = np.array([np.iinfo(np.int64).max, np.iinfo(np.int64).min])  # first and last time of no rows
OFTEN = 5  # rows of a value, below which it is no evidence on the label
SURE = 10  # rows of the rarer label, below which flawless guesses may be chance


class Guess(NamedTuple):
    """Wrong guesses of the label: from the column (leave-one-out), and `blind`, without it."""

    wrong: float
    blind: int

    @property
    def error(self) -> float:
        """Upper confidence bound of wrong guesses, relative to guessing without the column."""
        bound = self.wrong + 2 * math.sqrt(self.wrong) + (0 if self.wrong or self.blind >= SURE else self.blind)
        return bound / self.blind if self.blind else 1.0

    @property
    def gain(self) -> float:
        """Share of the wrong guesses without the column that the column corrects."""
        return max(1 - self.wrong / self.blind, 0.0) if self.blind else 0.0


class Repeats(NamedTuple):
    """Counts of the values with several rows."""

    values: int
    rows: int  # with these values
    guess: Guess  # of the label, from other rows of the same value


@final
class Sketch:
    """Counts of values by their hash, and of positive labels among them."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self._shift = 0  # only hashes whose first `shift` bits are 0 are kept
        self._hash_U: Words = np.empty(0, np.uint64)
        self._counts_UC: NDArray[np.int64] = np.empty((0, 2), np.int64)  # rows, positive rows
        self._times_UC: NDArray[np.int64] = np.empty((0, 2), np.int64)  # first and last time

    def add(self, hash_N: Words, positive_N: NDArray[np.bool_], time_N: NDArray[np.int64] | None = None) -> None:
        """Add values, each with the label and the time of its row."""
        kept_N = self._low(hash_N)
        hash_U, at_N = np.unique(hash_N[kept_N], return_inverse=True)
        rows_U = np.bincount(at_N, minlength=len(hash_U))
        positive_U = np.bincount(at_N, positive_N[kept_N], len(hash_U)).astype(np.int64)
        times_UC = np.zeros((len(hash_U), 2), np.int64)
        if time_N is not None:
            times_UC[:] = NO_SPAN
            np.minimum.at(times_UC[:, 0], at_N, time_N[kept_N])
            np.maximum.at(times_UC[:, 1], at_N, time_N[kept_N])
        self._merge(hash_U, np.stack([rows_U, positive_U], 1), times_UC)

    @property
    def exact(self) -> bool:
        """Whether all values are counted, none sampled."""
        return self._shift == 0

    @property
    def distinct(self) -> int:
        """The number of distinct values, exact or to within `error`."""
        return len(self._hash_U) << self._shift

    @property
    def error(self) -> float:
        """The relative standard error of `distinct`; 0 if exact."""
        return 0.0 if self.exact else 1 / math.sqrt(max(len(self._hash_U), 1))

    def top_share(self, part: float = 0.01) -> float:
        """The share of all occurrences that the most frequent values have: `part` of the values, at least one."""
        rows_U = np.sort(self._counts_UC[:, 0])[::-1]
        top = max(1, round(part * len(rows_U)))
        return float(rows_U[:top].sum() / rows_U.sum()) if len(rows_U) else 0.0

    def repeats(self, least: int = OFTEN) -> Repeats:
        """Values of at least `least` rows; each label is guessed from the other rows of its value."""
        rows_U, positive_U = self._counts_UC[self._counts_UC[:, 0] >= least].T
        rows, positive = int(rows_U.sum()), int(positive_U.sum())
        others_U = rows_U - positive_U
        # Majority vote of the other rows: without the row itself its label has one vote less; a tie is half right.
        wrong_U = _wrong(positive_U, others_U) + _wrong(others_U, positive_U)
        return Repeats(len(rows_U), rows, Guess(float(wrong_U.sum()), min(positive, rows - positive)))

    def unseen(self, rest: float) -> float:
        """Expected occurrences whose value has no other row in training; `rest`: share of rows outside training."""
        rows_U = self._counts_UC[:, 0].astype(np.float64)
        return float((rows_U * rest ** (rows_U - 1)).sum()) * (1 << self._shift)

    def unseen_before(self, seen: int, begin: int) -> float:
        """Estimated occurrences from time `begin` on of values that do not occur before time `seen`.

        Assumes that the occurrences of a value are spread evenly between its first and its last time.
        """
        rows_U, (first_U, last_U) = self._counts_UC[:, 0].astype(np.float64), self._times_UC.astype(np.float64).T
        between_U = np.clip((last_U - begin) / np.maximum(last_U - first_U, 1.0), 0.0, 1.0)
        late_U = np.where(first_U >= begin, rows_U, np.where(last_U >= begin, 1 + (rows_U - 2) * between_U, 0.0))
        return float(late_U[first_U >= seen].sum()) * (1 << self._shift)

    def _low(self, hash_N: Words) -> NDArray[np.bool_]:
        return hash_N <= np.uint64((1 << (64 - self._shift)) - 1)

    def _merge(self, hash_U: Words, counts_UC: NDArray[np.int64], times_UC: NDArray[np.int64]) -> None:
        hashes, before = np.concatenate([self._hash_U, hash_U]), len(self._hash_U)
        self._hash_U, at_N = np.unique(hashes, return_inverse=True)
        merged_UC, spans_UC = np.zeros((2, len(self._hash_U), 2), np.int64)
        spans_UC[:] = NO_SPAN
        # Values are distinct on either side, so `+=` by index adds each once.
        for at_M, counts_MC, times_MC in (
            (at_N[:before], self._counts_UC, self._times_UC),
            (at_N[before:], counts_UC, times_UC),
        ):
            merged_UC[at_M] += counts_MC
            spans_UC[at_M, 0] = np.minimum(spans_UC[at_M, 0], times_MC[:, 0])
            spans_UC[at_M, 1] = np.maximum(spans_UC[at_M, 1], times_MC[:, 1])
        self._counts_UC, self._times_UC = merged_UC, spans_UC
        while len(self._hash_U) > self._max_values:
            self._shift += 1
            low_U = self._low(self._hash_U)
            self._hash_U = self._hash_U[low_U]
            self._counts_UC, self._times_UC = self._counts_UC[low_U], self._times_UC[low_U]


def _wrong(same_U: NDArray[np.int64], others_U: NDArray[np.int64]) -> NDArray[np.float64]:
    left_U = same_U - 1
    each_U = np.where(left_U < others_U, 1.0, np.where(left_U == others_U, 0.5, 0.0))
    return same_U.astype(np.float64) * each_U
