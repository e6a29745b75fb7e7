"""Whether the whole numbers of a column are ids or amounts, by how well each reading predicts the label.

Cross-validation in `FOLDS` random folds, in both readings: as ids, the prediction is the mean label of the value's
rows, shrunk towards the mean of all; as amounts, an isotonic regression (rising or falling) on bins of equally many
rows. Fewer folds would leave ids too few rows of each value. The reading with the smaller log loss wins if the
difference is significant. Else the values decide: ids repeat, and fill their range evenly or regardless of neighbours.
"""

from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc

from rowwise.ingest.block import Ints

Doubles = NDArray[np.float64]
Labels = NDArray[np.bool_]
FOLDS = 5
PRIOR_ROWS = 4.0  # pseudo-rows with the mean label, for every value and every bin
BINS = 32
DEVIATIONS = 3.0  # standard errors above which a difference of log losses is significant
SMALLEST_GAIN = 2e-3  # nats a row; a smaller difference is irrelevant, however significant
FILLED, EVEN = 0.5, 0.5  # minimum `Shape.filled` and `Shape.even` of ids
AGAIN = 4.0  # minimum mean rows per value of ids
ROUGH = 4.0  # minimum `Shape.rough` of ids
MAX_ALIKE = 5  # with fewer values, a rank correlation is chance
SEPARATORS = "|;,"
LISTED, RECURRING = 0.25, 0.5  # per distinct text: minimum share with a separator, maximum distinct words


class Evidence(NamedTuple):
    """Cross-validated log losses in nats a row."""

    base: float  # of predicting the mean label
    ids: float
    amounts: float
    error: float  # standard error of `ids` - `amounts`

    @property
    def reading(self) -> Literal["ids", "amounts"] | None:
        """The reading that predicts the label significantly better than the mean and the other reading; or None."""
        gain = self.amounts - self.ids
        threshold = max(DEVIATIONS * self.error, SMALLEST_GAIN)
        if abs(gain) < threshold or self.base - min(self.ids, self.amounts) < SMALLEST_GAIN:
            return None
        return "ids" if gain > 0 else "amounts"


class Shape(NamedTuple):
    """The distribution of values over their range."""

    filled: float  # distinct values / whole numbers in the range
    even: float  # distinct values in the upper half of the range / those in the lower half
    repeats: float  # mean rows per value
    rough: float  # roughness of the counts of neighbouring whole numbers relative to chance; about 1 for amounts
    peaked: float  # rank correlation of rarity and distance from the mode; about 1 for counts, 0 for ids

    @property
    def is_of_ids(self) -> bool:
        """Whether values repeat, and fill their range evenly or regardless of their neighbours."""
        even = self.filled >= FILLED and self.even >= EVEN
        return self.repeats >= AGAIN and (even or self.rough >= ROUGH)


def weigh(x_N: Ints, positive_N: Labels, seed: int = 0) -> Evidence | None:
    """Log losses of both readings; None if all labels are equal."""
    if not positive_N.any() or positive_N.all():
        return None
    fold_N = np.random.default_rng(seed).permutation(len(x_N)) % FOLDS
    ids_N, amounts_N, base_N = np.empty(len(x_N)), np.empty(len(x_N)), np.empty(len(x_N))
    for fold in range(min(FOLDS, len(x_N))):
        train_N = fold_N != fold
        x, positive, test_x = x_N[train_N], positive_N[train_N], x_N[~train_N]
        mean = _smooth_means(positive.sum(keepdims=True), np.array([len(positive)]), 0.5)[0]
        base_N[~train_N] = mean
        ids_N[~train_N] = _predict_by_value(x, positive, test_x, mean)
        amounts_N[~train_N] = _predict_by_bin(x, positive, test_x, mean)
    base, ids, amounts = (_log_losses(p_N, positive_N) for p_N in (base_N, ids_N, amounts_N))
    error = float(np.std(amounts - ids) / np.sqrt(len(x_N)))
    return Evidence(float(base.mean()), float(ids.mean()), float(amounts.mean()), error)


def shape_of(x_N: Ints) -> Shape:
    """The shape of at least one value."""
    values, counts = np.unique(x_N, return_counts=True)
    low, high = int(values[0]), int(values[-1])
    upper = int((values > low + (high - low) // 2).sum())
    # Counts of a smooth density are Poisson: half the mean square of differences between neighbours is their mean.
    rows = counts.astype(np.float64)
    adjacent = np.diff(values.view(np.uint64)) == 1
    squares = np.where(adjacent, (rows[1:] - rows[:-1]) ** 2, rows[1:] ** 2 + rows[:-1] ** 2)
    rough = float(squares.sum() / (2 * rows.sum())) if len(values) > 1 else 1.0
    filled, even = len(values) / (high - low + 1), upper / max(len(values) - upper, 1)
    return Shape(filled, even, len(x_N) / len(values), rough, _peaked(values, counts))


def _peaked(values: Ints, counts: Ints) -> float:
    """The rank correlation of a value's rarity and its distance from the mode."""
    if len(values) < MAX_ALIKE:
        return 0.0
    distance = np.abs(values.astype(np.float64) - values[counts.argmax()])
    ranks = [np.unique(x, return_inverse=True)[1].astype(np.float64) for x in (distance, -counts)]
    spread = float(ranks[0].std() * ranks[1].std())
    return float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean()) / spread if spread else 0.0


def find_separator(texts: pa.Array) -> str:
    """The separator of lists in text: in many values, with recurring words in between; empty if there is none."""
    values = texts.unique().cast(pa.large_string())
    for separator in SEPARATORS:
        cut = pc.call_function("split_pattern", [values], pc.SplitPatternOptions(separator))
        listed = pc.call_function("greater", [pc.call_function("list_value_length", [cut]), 1]).true_count
        words = len(pc.call_function("utf8_trim_whitespace", [cut.flatten()]).unique())
        if listed >= LISTED * len(values) and words <= RECURRING * len(values) and words > 1:
            return separator
    return ""


def _predict_by_value(x: Ints, positive: Labels, test_x: Ints, mean: float) -> Doubles:
    values, at = np.unique(x, return_inverse=True)
    means = _smooth_means(np.bincount(at, positive), np.bincount(at), mean)
    place = np.minimum(np.searchsorted(values, test_x), len(values) - 1)
    return np.where(values[place] == test_x, means[place], mean)


def _predict_by_bin(x: Ints, positive: Labels, test_x: Ints, mean: float) -> Doubles:
    borders = np.unique(np.quantile(x, np.linspace(0, 1, BINS + 1)[1:-1]))
    at = np.searchsorted(borders, x, side="right")
    rows = np.bincount(at, minlength=len(borders) + 1)
    means = _smooth_means(np.bincount(at, positive, len(borders) + 1), rows, mean)
    weights = rows.astype(np.float64) + PRIOR_ROWS
    rising, falling = _monotone(means, weights), -_monotone(-means, weights)
    errors = [float((rows * (fit - means) ** 2).sum()) for fit in (rising, falling)]
    return (rising if errors[0] <= errors[1] else falling)[np.searchsorted(borders, test_x, side="right")]


def _smooth_means(positives: Doubles | Ints, rows: Ints, mean: float) -> Doubles:
    return (positives + PRIOR_ROWS * mean) / (rows + PRIOR_ROWS)


def _monotone(means: Doubles, weights: Doubles) -> Doubles:
    """The nearest non-decreasing means: pool adjacent violators."""
    pools: list[tuple[float, float, int]] = []
    for mean, weight in zip(means.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] >= mean:
            last_mean, last_weight, last_count = pools.pop()
            mean = (mean * weight + last_mean * last_weight) / (weight + last_weight)
            weight, count = weight + last_weight, count + last_count
        pools.append((mean, weight, count))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])


def _log_losses(p_N: Doubles, positive_N: Labels) -> Doubles:
    return -np.log(np.where(positive_N, p_N, 1 - p_N))
