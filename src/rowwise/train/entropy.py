"""Log loss, normalised entropy, calibration and base rate: what five sums over samples tell.

    NE          = log loss / entropy of the base rate: 1 is what always predicting the base rate would score
    calibration = sum of predictions / sum of labels: 1.1 is 10 % too high
    base rate   = sum of labels / sum of weights

Its own file because sums are all it keeps: a merge is an addition and a window costs five numbers a batch and task,
whatever the batch's size. Both ends of the logit axis are safe: the loss is computed from the logit, not from a
probability that has rounded to 0 or 1. What is undefined (no samples; for NE a base rate of 0 or 1; for calibration
no positives) is NaN.

Letters: N samples, K tasks, 5 sums (samples, weights, labels, predictions, losses), R rows of sums.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from rowwise.train.samples import Samples
from rowwise.train.state import State, at_least_one, check_alike, merge_newest, read_int, read_tensor


@dataclass(frozen=True, slots=True)
class Fit:
    """How well one task's predictions fit its labels."""

    count: int  # samples of a weight above 0
    weight: float  # their weights' sum
    base_rate: float
    log_loss: float
    ne: float
    calibration: float


class Entropy:
    """The fit over all samples given."""

    __slots__ = ("_totals_5K",)

    def __init__(self, tasks: int = 1) -> None:
        self._totals_5K = torch.zeros(5, at_least_one("tasks", tasks), dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Count a batch."""
        self.add(Samples.of(logits, labels, weights))

    def add(self, samples: Samples) -> None:
        """Count a batch that is checked already."""
        samples.check_tasks(self._totals_5K.shape[1])
        self.add_totals(totals(samples))

    def add_totals(self, totals_5K: Tensor) -> None:
        """Count a batch that is summed already."""
        # Never in place: a state that was handed out stays what it was.
        self._totals_5K = self._totals_5K.to(totals_5K.device) + totals_5K

    def add_rows(self, samples: Samples, row_NK: Tensor) -> None:
        """Count each sample and task under a row of its own choice, where a plain update counts task k under row k."""
        parts_5R = torch.stack(_measures(samples)).flatten(1)
        rows_5R = row_NK.reshape(1, -1).expand(5, -1)
        self._totals_5K = self._totals_5K.to(parts_5R.device).scatter_add(1, rows_5R, parts_5R)

    def merge(self, other: "Entropy") -> None:
        """Count what another has counted."""
        check_alike("tasks", self._totals_5K.shape[1], other._totals_5K.shape[1])
        self._totals_5K = self._totals_5K + other._totals_5K.to(self._totals_5K.device)

    def totals(self) -> Tensor:
        """The sums, [5, K]."""
        return self._totals_5K

    def value(self) -> tuple[Fit, ...]:
        """One fit for each task."""
        return fits(self._totals_5K)

    def state(self) -> State:
        """All that is kept."""
        return {"tasks": self._totals_5K.shape[1], "totals": self._totals_5K}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """What `state` returned, to go on with the same bits."""
        made = cls(read_int(state, "tasks"))
        made._totals_5K = read_tensor(state, "totals", made._totals_5K.shape)
        return made


class RecentEntropy:
    """The fit over the newest batches.

    Windows of several ranks merge batch by batch, newest with newest, as those were one step.
    """

    __slots__ = ("_batches", "_tasks")

    def __init__(self, batches: int, tasks: int = 1) -> None:
        self._tasks = at_least_one("tasks", tasks)
        self._batches: deque[Tensor] = deque(maxlen=at_least_one("batches", batches))

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Count a batch and forget the oldest, once there are more than fit."""
        self.add(Samples.of(logits, labels, weights))

    def add(self, samples: Samples) -> None:
        """Count a batch that is checked already."""
        samples.check_tasks(self._tasks)
        self.add_totals(totals(samples))

    def add_totals(self, totals_5K: Tensor) -> None:
        """Count a batch that is summed already."""
        self._batches.append(totals_5K)

    def merge(self, other: "RecentEntropy") -> None:
        """Count what another has counted."""
        check_alike("tasks", self._tasks, other._tasks)
        check_alike("batches", self._batches.maxlen, other._batches.maxlen)
        merged = merge_newest(list(self._batches), list(other._batches), lambda a, b: a + b.to(a.device))
        self._batches = deque(merged, maxlen=self._batches.maxlen)

    def value(self) -> tuple[Fit, ...]:
        """One fit for each task."""
        return fits(self._stacked().sum(0))

    def state(self) -> State:
        """All that is kept."""
        return {"tasks": self._tasks, "batches": self._batches.maxlen or 0, "totals": self._stacked()}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """What `state` returned, to go on with the same bits."""
        made = cls(read_int(state, "batches"), read_int(state, "tasks"))
        made._batches.extend(read_tensor(state, "totals", (None, 5, made._tasks)))
        return made

    def _stacked(self) -> Tensor:
        if not self._batches:
            return torch.zeros(0, 5, self._tasks, dtype=torch.float64)
        device = self._batches[-1].device  # a resumed window is on the CPU until its first new batch
        return torch.stack([t.to(device) for t in self._batches])


def totals(samples: Samples) -> Tensor:
    """The five sums of a batch, [5, K]."""
    return torch.stack(_measures(samples)).sum(1)


def _measures(samples: Samples) -> tuple[Tensor, ...]:
    """What the five sums add, [N, K] each."""
    logits_NK, labels_NK, weights_NK = samples.logits_NK, samples.labels_NK, samples.weights_NK
    # log(1 + exp(-z)) with the sign that the label asks for: exact where z * label would be infinity times 0.
    loss_NK = -F.logsigmoid(torch.where(labels_NK != 0, logits_NK, -logits_NK))
    predicted_NK = logits_NK.sigmoid()
    if weights_NK is None:
        ones_NK = torch.ones_like(labels_NK)
        return ones_NK, ones_NK, labels_NK, predicted_NK, loss_NK
    counted_NK = weights_NK > 0
    # A loss can be infinite, and infinity times a weight of 0 is not 0.
    loss_NK = torch.where(counted_NK, loss_NK * weights_NK, 0.0)
    return counted_NK.double(), weights_NK, weights_NK * labels_NK, weights_NK * predicted_NK, loss_NK


def fits(totals_5K: Tensor) -> tuple[Fit, ...]:
    """What the sums of each task tell."""
    return tuple(_fit(*sums) for sums in totals_5K.T.tolist())


def _fit(count: float, weight: float, positive: float, predicted: float, loss: float) -> Fit:
    base_rate = positive / weight if weight > 0 else math.nan
    log_loss = loss / weight if weight > 0 else math.nan
    ne = math.nan
    if 0 < base_rate < 1:
        ne = log_loss / -(base_rate * math.log(base_rate) + (1 - base_rate) * math.log1p(-base_rate))
    calibration = predicted / positive if positive > 0 else math.nan
    return Fit(int(count), weight, base_rate, log_loss, ne, calibration)
