"""Log loss, normalised entropy, calibration and base rate, from five sums over samples.

    NE          = log loss / entropy of the base rate: 1 is what always predicting the base rate would score
    calibration = sum of predictions / sum of labels: 1.1 is 10 % too high
    base rate   = sum of labels / sum of weights

Large logits are safe: the loss is computed from the logit, not from a probability that has rounded to 0 or 1.
Undefined values (no samples; for NE a base rate of 0 or 1; for calibration no positives) are NaN.

Sums are fixed-point (see `exact.py`), so they have the same bits for any batches and any number of ranks. The terms of
a sample do not depend on its place in the batch.

Letters: N samples, K tasks, 5 sums (samples, weights, labels, predictions, losses), R rows of sums.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from rowwise.ops.threads import one_thread
from rowwise.train.exact import PARTS, UNITS, carry, parts_of, to_float64
from rowwise.train.samples import Samples
from rowwise.train.state import State, check_alike, check_positive, merge_newest, read_int, read_tensor

VECTORS = 64  # numbers: a multiple of the vector width of any processor


@dataclass(frozen=True, slots=True)
class EntropyValue:
    """Log loss, calibration and NE of one task."""

    count: int  # samples of a weight above 0
    weight: float  # their weights' sum
    base_rate: float
    log_loss: float
    ne: float
    calibration: float


class Entropy:
    """Log loss, NE and calibration over all samples."""

    __slots__ = ("_parts_35K",)

    def __init__(self, tasks: int = 1) -> None:
        self._parts_35K = torch.zeros(PARTS, 5, check_positive("tasks", tasks), dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        self.add(Samples.of(logits, labels, weights))

    def add(self, samples: Samples) -> None:
        """Count samples that were checked when they were made."""
        samples.check_tasks(self._parts_35K.shape[2])
        self.add_totals(totals(samples, [len(samples)])[0])

    def add_totals(self, parts_35K: Tensor) -> None:
        """Count a batch by its `totals`."""
        # Not in place: `state` and `totals` return this tensor.
        self._parts_35K = carry(self._parts_35K.to(parts_35K.device) + parts_35K)

    def add_rows(self, samples: Samples, row_NK: Tensor) -> None:
        """Count each sample and task under a row of its own choice, where a plain update counts task k under row k."""
        parts_35R = parts_of(torch.stack(_measures(samples)).flatten(1))
        rows_35R = row_NK.reshape(1, 1, -1).expand(PARTS, 5, -1)
        self._parts_35K = carry(self._parts_35K.to(parts_35R.device).scatter_add(2, rows_35R, parts_35R))

    def merge(self, other: "Entropy") -> None:
        check_alike("tasks", self._parts_35K.shape[2], other._parts_35K.shape[2])
        self._parts_35K = carry(self._parts_35K + other._parts_35K.to(self._parts_35K.device))

    def totals(self) -> Tensor:
        """The sums, in parts [3, 5, K]."""
        return self._parts_35K

    def value(self) -> tuple[EntropyValue, ...]:
        """One fit for each task."""
        return fits(self._parts_35K)

    def state(self) -> State:
        parts_35K = self._parts_35K
        return {"tasks": parts_35K.shape[2], "totals": to_float64(parts_35K), "parts": parts_35K}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metric that `state` saved, with the same bits; older versions saved `totals` without `parts`."""
        made = cls(read_int(state, "tasks"))
        parts_35K = parts_of(read_tensor(state, "totals", made._parts_35K.shape[1:]))
        made._parts_35K = read_tensor(state, "parts", parts_35K.shape) if "parts" in state else parts_35K
        return made


class RecentEntropy:
    """Log loss, NE and calibration over the newest batches.

    Windows of several ranks merge batch by batch, newest with newest: those belong to the same step.
    """

    __slots__ = ("_batches", "_tasks")

    def __init__(self, batches: int, tasks: int = 1) -> None:
        self._tasks = check_positive("tasks", tasks)
        self._batches: deque[Tensor] = deque(maxlen=check_positive("batches", batches))

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Count a batch and forget the oldest, once there are more than fit."""
        self.add(Samples.of(logits, labels, weights))

    def add(self, samples: Samples) -> None:
        """Count samples that were checked when they were made."""
        samples.check_tasks(self._tasks)
        self.add_totals(totals(samples, [len(samples)])[0])

    def add_totals(self, parts_35K: Tensor) -> None:
        """Count a batch by its `totals`."""
        self._batches.append(parts_35K)

    def merge(self, other: "RecentEntropy") -> None:
        check_alike("tasks", self._tasks, other._tasks)
        check_alike("batches", self._batches.maxlen, other._batches.maxlen)
        merged = merge_newest(list(self._batches), list(other._batches), lambda a, b: carry(a + b.to(a.device)))
        self._batches = deque(merged, maxlen=self._batches.maxlen)

    def value(self) -> tuple[EntropyValue, ...]:
        """One fit for each task."""
        return fits(carry(self._stack().sum(0)))

    def state(self) -> State:
        parts_B35K = self._stack()
        totals_B5K = to_float64(parts_B35K.transpose(0, 1))
        settings: State = {"tasks": self._tasks, "batches": self._batches.maxlen or 0}
        return {**settings, "totals": totals_B5K, "parts": parts_B35K}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metric that `state` saved, with the same bits."""
        made = cls(read_int(state, "batches"), read_int(state, "tasks"))
        parts_B35K = parts_of(read_tensor(state, "totals", (None, 5, made._tasks))).transpose(0, 1)
        if "parts" in state:  # older versions saved `totals` only
            parts_B35K = read_tensor(state, "parts", parts_B35K.shape)
        made._batches.extend(parts_B35K)
        return made

    def _stack(self) -> Tensor:
        if not self._batches:
            return torch.zeros(0, PARTS, 5, self._tasks, dtype=torch.float64)
        device = self._batches[-1].device  # a resumed window is on the CPU until its first new batch
        return torch.stack([t.to(device) for t in self._batches])


def totals(samples: Samples, sizes: Sequence[int]) -> list[Tensor]:
    """The five sums of each batch of these sizes, in parts [3, 5, K]."""
    if samples.weights_NK is not None:
        parts_35NK = parts_of(torch.stack(_measures(samples)))
        return [batch_35NK.sum(2) for batch_35NK in parts_35NK.split(list(sizes), 2)]
    # Without weights the first three sums are counts, which the first part holds exactly.
    logits_NK, labels_NK = samples.logits_NK, samples.labels_NK
    loss_NK, predicted_NK = _loss_and_prediction(logits_NK, labels_NK)
    parts_B35K = logits_NK.new_zeros(len(sizes), PARTS, 5, samples.tasks)
    parts_32NK = parts_of(torch.stack([predicted_NK, loss_NK]))
    for parts_35K, label_NK, batch_32NK in zip(
        parts_B35K, labels_NK.split(list(sizes)), parts_32NK.split(list(sizes), 2), strict=True
    ):
        parts_35K[0, :2] = len(label_NK) / UNITS[0]
        parts_35K[0, 2] = label_NK.sum(0) / UNITS[0]
        parts_35K[:, 3:] = batch_32NK.sum(2)
    return list(parts_B35K)


def _measures(samples: Samples) -> tuple[Tensor, ...]:
    """The terms of the five sums, [N, K] each."""
    logits_NK, labels_NK, weights_NK = samples.logits_NK, samples.labels_NK, samples.weights_NK
    loss_NK, predicted_NK = _loss_and_prediction(logits_NK, labels_NK)
    if weights_NK is None:
        ones_NK = torch.ones_like(labels_NK)
        return ones_NK, ones_NK, labels_NK, predicted_NK, loss_NK
    counted_NK = weights_NK > 0
    # `where`, as a loss may be infinite, and infinity times a weight of 0 is NaN.
    loss_NK = torch.where(counted_NK, loss_NK * weights_NK, 0.0)
    return counted_NK.double(), weights_NK, weights_NK * labels_NK, weights_NK * predicted_NK, loss_NK


def _loss_and_prediction(logits_NK: Tensor, labels_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Log loss and prediction of each sample, with bits that do not depend on the sample's place.

    Torch computes the last few numbers of a tensor, and of each thread's part, by scalar code, which may round
    differently from vector code. So the tensor is padded to whole vectors and computed on one thread.
    """
    size = logits_NK.numel()
    # log(1 + exp(-z)), z negated for label 0; z * label would be NaN for an infinite z.
    signed = torch.where(labels_NK != 0, logits_NK, -logits_NK)
    both = F.pad(torch.stack([signed, logits_NK]).view(2, -1), (0, -size % VECTORS))
    with one_thread():
        loss, predicted = -F.logsigmoid(both[0]), both[1].sigmoid()
    return loss[:size].view(logits_NK.shape), predicted[:size].view(logits_NK.shape)


def fits(parts_35K: Tensor) -> tuple[EntropyValue, ...]:
    """The values of each task, from its sums."""
    return tuple(_fit(*sums) for sums in to_float64(parts_35K).T.tolist())


def _fit(count: float, weight: float, positive: float, predicted: float, loss: float) -> EntropyValue:
    base_rate = positive / weight if weight > 0 else math.nan
    log_loss = loss / weight if weight > 0 else math.nan
    ne = math.nan
    if 0 < base_rate < 1:
        ne = log_loss / -(base_rate * math.log(base_rate) + (1 - base_rate) * math.log1p(-base_rate))
    calibration = predicted / positive if positive > 0 else math.nan
    return EntropyValue(int(count), weight, base_rate, log_loss, ne, calibration)
