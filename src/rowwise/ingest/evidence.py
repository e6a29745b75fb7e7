"""Whether the whole numbers of a column are ids or amounts, by what each reading tells of the label.

Rows are split into `FOLDS` parts at random, and each is predicted from the others in both readings: as ids, every value
has the mean label of its rows, drawn towards the mean of all; as amounts, values fall into bins of equally many rows
whose mean labels rise or fall throughout. Fewer folds would leave ids too few rows of each value. The reading with the
smaller log loss is right if the difference is more than chance. If it is not, the values decide: ids come again, and
fill their range evenly or regardless of neighbours.
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
PRIOR_ROWS = 4.0  # rows of the mean label that every value and every bin begins with
BINS = 32
DEVIATIONS = 3.0  # a larger difference of log losses is no chance
SMALLEST_GAIN = 2e-3  # nats a row; a smaller difference decides nothing, however certain it is
FILLED, EVEN = 0.5, 0.5  # share of the range that is taken; taken values of its upper half over those of its lower half
AGAIN = 4.0  # rows of a value, on average
ROUGH = 4.0  # counts of neighbours differ by so many times as much as chance does
MAX_ALIKE = 5  # so few values are rarer or not by chance
SEPARATORS = "|;,"
LISTED, RECURRING = 0.25, 0.5  # of distinct texts: least share with a separator, most words between separators


class Evidence(NamedTuple):
    """Log losses in nats a row, on rows that were not used to predict them."""

    base: float  # of the mean label
    ids: float
    amounts: float
    error: float  # standard error of `ids` - `amounts`

    @property
    def reading(self) -> Literal["ids", "amounts"] | None:
        """The reading that tells something of the label, and more than the other by more than chance."""
        gain = self.amounts - self.ids
        least = max(DEVIATIONS * self.error, SMALLEST_GAIN)
        if abs(gain) < least or self.base - min(self.ids, self.amounts) < SMALLEST_GAIN:
            return None
        return "ids" if gain > 0 else "amounts"


class Shape(NamedTuple):
    """How values lie in their range."""

    filled: float  # values over whole numbers of the range
    even: float  # values in the upper half of the range over those in the lower half
    repeats: float  # rows of a value
    rough: float  # 1 if neighbouring whole numbers come about equally often, as amounts do; ids do not
    peaked: float  # 1 if numbers are the rarer, the farther from the most frequent one, as counts are; ids: 0

    @property
    def is_of_ids(self) -> bool:
        """Values come again, and fill their range evenly or regardless of their neighbours."""
        even = self.filled >= FILLED and self.even >= EVEN
        return self.repeats >= AGAIN and (even or self.rough >= ROUGH)


def weigh(x_N: Ints, positive_N: Labels, seed: int = 0) -> Evidence | None:
    """Log losses of both readings; None where labels are all alike."""
    if not positive_N.any() or positive_N.all():
        return None
    fold_N = np.random.default_rng(seed).permutation(len(x_N)) % FOLDS
    ids_N, amounts_N, base_N = np.empty(len(x_N)), np.empty(len(x_N)), np.empty(len(x_N))
    for fold in range(min(FOLDS, len(x_N))):
        seen_N = fold_N != fold
        x, positive, others = x_N[seen_N], positive_N[seen_N], x_N[~seen_N]
        mean = _smooth_means(positive.sum(keepdims=True), np.array([len(positive)]), 0.5)[0]
        base_N[~seen_N] = mean
        ids_N[~seen_N] = _predict_by_value(x, positive, others, mean)
        amounts_N[~seen_N] = _predict_by_bin(x, positive, others, mean)
    base, ids, amounts = (_log_losses(p_N, positive_N) for p_N in (base_N, ids_N, amounts_N))
    error = float(np.std(amounts - ids) / np.sqrt(len(x_N)))
    return Evidence(float(base.mean()), float(ids.mean()), float(amounts.mean()), error)


def shape_of(x_N: Ints) -> Shape:
    """The shape of at least one value."""
    values, counts = np.unique(x_N, return_counts=True)
    low, high = int(values[0]), int(values[-1])
    upper = int((values > low + (high - low) // 2).sum())
    # Counts of a smooth density differ by chance from those of the next number: half the mean square is their mean.
    rows = counts.astype(np.float64)
    next_door = np.diff(values.view(np.uint64)) == 1
    squares = np.where(next_door, (rows[1:] - rows[:-1]) ** 2, rows[1:] ** 2 + rows[:-1] ** 2)
    rough = float(squares.sum() / (2 * rows.sum())) if len(values) > 1 else 1.0
    filled, even = len(values) / (high - low + 1), upper / max(len(values) - upper, 1)
    return Shape(filled, even, len(x_N) / len(values), rough, _peaked(values, counts))


def _peaked(values: Ints, counts: Ints) -> float:
    """The rank correlation of how rare a value is and how far it is from the most frequent one."""
    if len(values) < MAX_ALIKE:
        return 0.0
    far = np.abs(values.astype(np.float64) - values[counts.argmax()])
    ranks = [np.unique(x, return_inverse=True)[1].astype(np.float64) for x in (far, -counts)]
    spread = float(ranks[0].std() * ranks[1].std())
    return float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean()) / spread if spread else 0.0


def find_separator(texts: pa.Array) -> str:
    """The separator of lists in text: it is in many values, and the words between recur; empty: there is none."""
    values = texts.unique().cast(pa.large_string())
    for separator in SEPARATORS:
        cut = pc.call_function("split_pattern", [values], pc.SplitPatternOptions(separator))
        listed = pc.call_function("greater", [pc.call_function("list_value_length", [cut]), 1]).true_count
        words = len(pc.call_function("utf8_trim_whitespace", [cut.flatten()]).unique())
        if listed >= LISTED * len(values) and words <= RECURRING * len(values) and words > 1:
            return separator
    return ""


def _predict_by_value(x: Ints, positive: Labels, others: Ints, mean: float) -> Doubles:
    values, at = np.unique(x, return_inverse=True)
    means = _smooth_means(np.bincount(at, positive), np.bincount(at), mean)
    place = np.minimum(np.searchsorted(values, others), len(values) - 1)
    return np.where(values[place] == others, means[place], mean)


def _predict_by_bin(x: Ints, positive: Labels, others: Ints, mean: float) -> Doubles:
    borders = np.unique(np.quantile(x, np.linspace(0, 1, BINS + 1)[1:-1]))
    at = np.searchsorted(borders, x, side="right")
    rows = np.bincount(at, minlength=len(borders) + 1)
    means = _smooth_means(np.bincount(at, positive, len(borders) + 1), rows, mean)
    weights = rows.astype(np.float64) + PRIOR_ROWS
    rising, falling = _monotone(means, weights), -_monotone(-means, weights)
    errors = [float((rows * (fit - means) ** 2).sum()) for fit in (rising, falling)]
    return (rising if errors[0] <= errors[1] else falling)[np.searchsorted(borders, others, side="right")]


def _smooth_means(positives: Doubles | Ints, rows: Ints, mean: float) -> Doubles:
    return (positives + PRIOR_ROWS * mean) / (rows + PRIOR_ROWS)


def _monotone(means: Doubles, weights: Doubles) -> Doubles:
    """The nearest means that never fall: neighbours that do are pooled."""
    pools: list[tuple[float, float, int]] = []
    for mean, weight in zip(means.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] >= mean:
            other, other_weight, others = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + others
        pools.append((mean, weight, count))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])


def _log_losses(p_N: Doubles, positive_N: Labels) -> Doubles:
    return -np.log(np.where(positive_N, p_N, 1 - p_N))
