"""Statistics of one column, split by split: counts, ranges, lengths, a sketch of its values, and a labelled sample.

The streaming half of `inspect`: memory does not grow with the rows.
"""

from typing import final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest.bags import as_float32, flatten_lists, floats, hash_ids, int64
from rowwise.ingest.block import Floats
from rowwise.ingest.evidence import Evidence, Labels, Shape, shape_of, weigh
from rowwise.ingest.kinds import is_list, is_text
from rowwise.ingest.mix import mix
from rowwise.ingest.sketch import OFTEN, Guess, Sketch
from rowwise.ingest.vocabulary import IdCounter

SAMPLE_ROWS = 1 << 16
FEW_TEXTS = 1000
BUCKETS = 16
DIGITS = 6  # significant digits of a border


@final
class ColumnSurvey:
    """Counts, range and a sample of a column, taken split by split."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self._counter = IdCounter()
        self.rows = self.nulls = self.values = self.positive = 0
        self.empty = self.empty_positive = 0  # rows without an id, and with a positive label among them
        self.longest = 0
        self.least, self.most = np.inf, -np.inf  # of finite numbers
        self.infinite = 0  # numbers that are infinite in 32 bits
        self.words = 0.0  # mean words of a text, in the first rows
        self.texts: list[str] = []  # of the first rows
        self.sketch = Sketch()
        self._sample: list[tuple[Floats, NDArray[np.bool_]]] = []
        self._whole: list[tuple[NDArray[np.int64], Labels]] = []
        self._sampled = 0

    @property
    def is_number(self) -> bool:
        """Whether the values have a meaningful order."""
        return not is_list(self.kind) and (types.is_floating(self.kind) or types.is_integer(self.kind))

    def add(self, array: pa.Array, positive_R: NDArray[np.bool_], time_R: NDArray[np.int64] | None = None) -> None:
        """Add rows with their labels and times."""
        array = _nan_is_null(array)
        self.rows += len(array)
        self.positive += int(positive_R.sum())
        self.nulls += array.null_count
        ids, offsets_R1 = flatten_lists(array)
        self.values += len(ids)
        positive_N, time_N = positive_R, time_R
        if offsets_R1 is not None:
            lengths_R = np.diff(offsets_R1)
            positive_N = np.repeat(positive_R, lengths_R)
            time_N = None if time_R is None else np.repeat(time_R, lengths_R)
            self.empty += int((lengths_R == 0).sum())
            self.empty_positive += int(positive_R[lengths_R == 0].sum())
            if len(lengths_R):
                self.longest = max(self.longest, int(lengths_R.max()))
        self.sketch.add(hash_any(ids), positive_N, time_N)
        self._counter.add(ids)
        if self.is_number and len(ids):
            self._range(ids, positive_N)
        if is_text(self.kind) and not self.texts and len(ids):
            self.texts = [text for text in ids.slice(0, FEW_TEXTS).to_pylist() if isinstance(text, str)]
            self.words = sum(len(text.split()) for text in self.texts) / max(len(self.texts), 1)

    def auc(self) -> float | None:
        """The AUC of the number alone on the first rows; None without numbers or with a single label."""
        if not self._sample:
            return None
        x_N, positive_N = (np.concatenate(part) for part in zip(*self._sample, strict=True))
        _, rank_N, count_U = np.unique(x_N, return_inverse=True, return_counts=True)
        # Equal numbers share the mean of their ranks.
        middle_U = np.cumsum(count_U) - (count_U - 1) / 2
        positives = int(positive_N.sum())
        negatives = len(positive_N) - positives
        if not positives or not negatives:
            return None
        return float((middle_U[rank_N][positive_N].sum() - positives * (positives + 1) / 2) / (positives * negatives))

    def missing_guess(self) -> Guess:
        """Guesses of the label from whether the value is missing."""
        full, full_positive = self.rows - self.empty, self.positive - self.empty_positive
        if min(self.empty, full) < OFTEN:
            return Guess(0, 0)
        wrong = min(self.empty_positive, self.empty - self.empty_positive) + min(full_positive, full - full_positive)
        return Guess(wrong, min(self.positive, self.rows - self.positive))

    def evidence(self) -> tuple[Evidence | None, Shape] | None:
        """Evidence for ids or amounts from the first rows; None without whole numbers."""
        if not self._whole:
            return None
        x_N, positive_N = (np.concatenate(part) for part in zip(*self._whole, strict=True))
        return weigh(x_N, positive_N), shape_of(x_N)

    def numbers(self) -> Floats:
        """The finite numbers of the first rows, sorted."""
        x_N = np.concatenate([x_N for x_N, _ in self._sample]) if self._sample else np.empty(0, np.float32)
        return np.sort(x_N[np.isfinite(x_N)])

    def ids(self) -> list[str] | None:
        """Ids for a vocabulary, most frequent first; None if the column has to be hashed."""
        return self._counter.ids()

    def _range(self, ids: pa.Array, positive_N: NDArray[np.bool_]) -> None:
        if types.is_floating(ids.type):
            finite = pc.call_function("is_finite", [as_float32(ids)])
            self.infinite += len(ids) - finite.true_count
            ids, positive_N = ids.filter(finite), positive_N[finite.to_numpy(zero_copy_only=False)]
        x_N = ids.to_numpy(zero_copy_only=False)
        if not len(x_N):
            return
        self.least, self.most = min(self.least, float(x_N.min())), max(self.most, float(x_N.max()))
        room = SAMPLE_ROWS - self._sampled
        if room > 0:
            self._sample.append((floats(ids)[:room], positive_N[:room]))
            if types.is_integer(ids.type):
                self._whole.append((int64(ids)[:room], positive_N[:room]))
            self._sampled += min(room, len(x_N))


def count_infinite(array: pa.Array) -> int:
    """The number of values that are infinite in 32 bits."""
    if not types.is_floating(array.type):
        return 0
    return pc.call_function("is_inf", [as_float32(array)]).true_count


def _nan_is_null(array: pa.Array) -> pa.Array:
    if not types.is_floating(array.type):
        return array
    nan = pc.call_function("is_nan", [array])
    return pc.call_function("if_else", [nan, pa.scalar(None, array.type), array])


def borders_of(x_N: Floats, buckets: int = BUCKETS) -> tuple[float, ...]:
    """Quantiles of the numbers, as borders of buckets; a frequent number has a bucket of its own."""
    value_U, count_U = np.unique(x_N, return_counts=True)
    borders: list[float] = []
    # Greedy: a bucket is full once it has its share of the numbers that remain for the remaining buckets.
    left, filled = len(x_N), 0
    for value, count in zip(value_U[:-1].tolist(), count_U[:-1].tolist(), strict=True):
        filled += count
        if filled * (buckets - len(borders)) >= left and len(borders) < buckets - 1:
            borders.append(float(f"{value:.{DIGITS}g}"))
            left, filled = left - filled, 0
    return tuple(sorted(set(borders)))


def hash_any(ids: pa.Array) -> NDArray[np.uint64]:
    """Hashes of values of any type, not only of ids."""
    if types.is_integer(ids.type) or is_text(ids.type) or types.is_dictionary(ids.type):
        return hash_ids(ids)
    if types.is_timestamp(ids.type) or types.is_date(ids.type):
        return mix(int64(ids.cast(pa.timestamp("us"), safe=False)).view(np.uint64))
    if types.is_floating(ids.type) or types.is_boolean(ids.type) or types.is_decimal(ids.type):
        return mix(floats(ids).view(np.uint32).astype(np.uint64))
    try:
        return hash_ids(ids.cast(pa.large_string()))
    except pa.ArrowNotImplementedError:  # structs and the like, which no model takes: slow will do
        return hash_ids(pa.array([str(value) for value in ids.to_pylist()], pa.large_string()))
