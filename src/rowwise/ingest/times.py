"""Whether rows that are near in time are alike, and the times at which the last tenths of the rows begin.

The evidence comes from a uniform sample of rows, sorted by time and cut into `BINS` bins. If two rows of one bin share
an id, or a label, more often than two rows of the whole sample, a random test share has near duplicates of training
rows.
"""

import datetime
from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from rowwise.ingest.bags import int64
from rowwise.ingest.block import Ints
from rowwise.ingest.evidence import Labels, weigh
from rowwise.ingest.kinds import is_list, is_text, is_time
from rowwise.ingest.mix import Words, mix
from rowwise.ingest.survey import hash_any
from rowwise.tables.spec import Value

MAX_ROWS = 1 << 15
FEWEST_ROWS = 1000
BINS = 32
RATIO, DEVIATIONS = 1.5, 5.0  # minimum `Nearness`
LABEL_nats = 2e-3  # minimum gain in log loss by predicting labels from the bin
MIN_SHARE = 0.02  # of validation rows, and of test rows
NO_ID = np.uint64(0)


class TimeBorders(Value, frozen=True):
    """Rows before `valid_from` are for training, rows from `test_from` on for testing, rows between for validation."""

    column: str
    valid_from: int | str
    test_from: int | str
    formats: tuple[str, ...] = ()  # of times in text


class Nearness(NamedTuple):
    """How much more often two rows of one bin share an id than two rows of the sample."""

    ratio: float
    deviations: float

    @property
    def is_near(self) -> bool:
        """Whether the ratio is large and significant."""
        return self.ratio >= RATIO and self.deviations >= DEVIATIONS


@final
class TimeSample:
    """A uniform sample of rows (times, labels and ids) in bounded memory."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows, self._shift, self._rows = max_rows, 0, 0
        self._key_S: Words = np.empty(0, np.uint64)
        self.time_S: Ints = np.empty(0, np.int64)
        self.positive_S: Labels = np.empty(0, np.bool_)
        self.ids: dict[str, Words] = {}  # hashes by column; NO_ID for a missing id

    def add(self, time_R: Ints, positive_R: Labels, columns: Mapping[str, pa.Array]) -> None:
        """Add rows; `columns` are the candidates for ids, the same in each call."""
        key_R = mix(np.arange(self._rows, self._rows + len(time_R), dtype=np.uint64))
        self._rows += len(time_R)
        at_N = np.flatnonzero(self._low(key_R))
        self._key_S = np.concatenate([self._key_S, key_R[at_N]])
        self.time_S = np.concatenate([self.time_S, time_R[at_N]])
        self.positive_S = np.concatenate([self.positive_S, positive_R[at_N]])
        sampled = pa.array(at_N)
        for name, array in columns.items():
            before_S = self.ids.get(name, np.empty(0, np.uint64))
            self.ids[name] = np.concatenate([before_S, _hash_with_missing(array.take(sampled))])
        while len(self._key_S) > self._max_rows:
            self._shift += 1
            self._keep(self._low(self._key_S))

    def label_nats(self) -> float:
        """Gain in log loss by predicting labels from the bin."""
        evidence = weigh(self._bins(), self.positive_S) if len(self.time_S) >= FEWEST_ROWS else None
        return 0.0 if evidence is None else evidence.base - evidence.ids

    def nearness(self, name: str) -> Nearness:
        """The nearness of rows by a column of ids, without its missing ids."""
        known_S = self.ids[name] != NO_ID
        return nearness(self.ids[name][known_S], self._bins()[known_S])

    def borders(self, share: float) -> tuple[int, int] | None:
        """The first times of validation and test rows, or None if there are too few distinct times."""
        if not len(self.time_S):
            return None
        valid, test = (first_time(self.time_S, part) for part in (2 * share, share))
        if valid is None or test is None:
            return None
        tested_S = self.time_S >= test
        validated_S = (self.time_S >= valid) & ~tested_S
        enough = 2 * (tested_S.sum() + validated_S.sum()) <= len(tested_S)
        both = all(len(np.unique(self.positive_S[part_S])) == 2 for part_S in (tested_S, validated_S))
        large = min(tested_S.mean(), validated_S.mean()) >= MIN_SHARE
        return (valid, test) if enough and both and large else None

    def _bins(self) -> Ints:
        """The bin of each row, with equally many rows per bin. Rows of equal time are in random order."""
        order_S = np.lexsort((self._key_S, self.time_S))
        bin_S = np.empty(len(order_S), np.int64)
        bin_S[order_S] = np.arange(len(order_S)) * BINS // max(len(order_S), 1)
        return bin_S

    def _low(self, key_R: Words) -> NDArray[np.bool_]:
        return key_R <= np.uint64((1 << (64 - self._shift)) - 1)

    def _keep(self, kept_S: NDArray[np.bool_]) -> None:
        self._key_S, self.time_S = self._key_S[kept_S], self.time_S[kept_S]
        self.positive_S = self.positive_S[kept_S]
        self.ids = {name: hash_S[kept_S] for name, hash_S in self.ids.items()}


def nearness(hash_S: Words, bin_S: Ints) -> Nearness:
    """How much more often rows of one bin share an id than any rows do."""
    _, code_S = np.unique(hash_S, return_inverse=True)
    same = _pairs(np.bincount(code_S))
    near = _pairs(np.unique(code_S * BINS + bin_S, return_counts=True)[1])
    rows = len(hash_S)
    expected = same * _pairs(np.bincount(bin_S)) / max(rows * (rows - 1) / 2, 1.0)
    if not expected:
        return Nearness(1.0, 0.0)
    # Pairs of rows are nearly independent, so their count is about Poisson: its variance is the mean.
    return Nearness(near / expected, float((near - expected) / np.sqrt(expected)))


def first_time(time_S: Ints, share: float) -> int | None:
    """The time from which on rows are about this share of all, or None if all rows have one time."""
    ordered_S = np.sort(time_S)
    at = ordered_S[min(int(len(ordered_S) * (1 - share)), len(ordered_S) - 1)]
    later_S = ordered_S[ordered_S > at]
    near = [int(time) for time in (at, *later_S[:1]) if time > ordered_S[0]]
    return min(near, key=lambda time: abs(float((ordered_S >= time).mean()) - share), default=None)


def is_ordered(kind: pa.DataType) -> bool:
    """Whether rows can be divided by columns of this type: times, and numbers since 1970."""
    return bool(is_time(kind) or types.is_integer(kind) or types.is_floating(kind))


def may_be_ids(kind: pa.DataType) -> bool:
    """Whether this is a type of single ids."""
    return not is_list(kind) and bool(types.is_integer(kind) or is_text(kind) or types.is_dictionary(kind))


def times_of(array: pa.Array) -> Ints:
    """Times in microseconds, numbers rounded down; 0 for missing values."""
    if types.is_floating(array.type):
        x_R = np.asarray(array.fill_null(0.0).to_numpy(zero_copy_only=False), np.float64)
        return np.where(np.abs(x_R) < 2.0**63, np.floor(x_R), 0).astype(np.int64)
    plain = array if types.is_integer(array.type) else array.cast(pa.timestamp("us"), safe=False)
    return int64(plain.fill_null(0) if types.is_integer(plain.type) else plain.cast(pa.int64()).fill_null(0))


def time_text(time: int, kind: pa.DataType) -> int | str:
    """A time of `times_of` as a value of a row filter."""
    if not is_time(kind):
        return time
    when = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=time)
    return when.date().isoformat() if types.is_date32(kind) else when.replace(tzinfo=None).isoformat()


def _pairs(counts: Ints) -> float:
    return float((counts.astype(np.float64) * (counts - 1) / 2).sum())


def _hash_with_missing(array: pa.Array) -> Words:
    hash_S = np.full(len(array), NO_ID)
    known_S = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    hash_S[known_S] = hash_any(array.drop_null())
    return hash_S
