"""Amounts as labels, such as prices, seconds and counts: their losses, predictions and metrics.

With z the output of the model, m and s the `mean` and `scale` of a label:

    squared   prediction m + s z      loss (z - (y - m) / s)**2
    poisson   prediction m exp(z)     loss exp(z) - z y / m

So losses have the same size whatever the unit of an amount, and z = 0 predicts the mean.

    rmse, mae          of prediction and label, in the unit of the label
    r2                 1 - sum (y - prediction)**2 / sum (y - mean of y)**2
    poisson_deviance   mean of 2 (y log(y / prediction) - y + prediction), with poisson only
    calibration        sum of predictions / sum of labels
    base_rate          mean of labels

Sums are fixed-point, in the label's own unit (y - m) / s, so they have the same bits for any batches and any number of
ranks. Letters: N samples, K labels, S sums.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from rowwise.tables.ops.threads import one_thread
from rowwise.train.exact import RunSums, parts_of, to_float64
from rowwise.train.loss_settings import AmountLoss, Poisson
from rowwise.train.samples import Samples
from rowwise.train.state import State, read_tensor

SUMS = 9  # samples, weights, labels, predictions, squares of labels, of errors, errors, losses, deviances
VECTORS = 64  # numbers: a multiple of the vector width of any processor
Values = dict[str, float]


def amount_loss(loss: AmountLoss, outputs_BK: Tensor, labels_BK: Tensor) -> Tensor:
    """The loss [B, K] of outputs."""
    targets_BK = loss.link.targets(labels_BK)
    if isinstance(loss, Poisson):
        return outputs_BK.exp() - targets_BK * outputs_BK
    return (outputs_BK - targets_BK) ** 2


@dataclass(frozen=True, slots=True)
class AmountValues:
    """The metrics of one label, of all samples and of the newest batches."""

    all: Values
    recent: Values


class AmountMetrics:
    """Metrics of amounts, over all batches and over the newest `window` batches."""

    __slots__ = ("_loss", "_sums", "_tasks")

    def __init__(self, tasks: Sequence[str], window: int, loss: AmountLoss) -> None:
        self._tasks, self._loss = tuple(tasks), loss
        self._sums = RunSums(window, SUMS, len(tasks))

    def add(self, samples: Samples) -> None:
        """Count samples; their `logits_NK` are outputs of the model."""
        samples.check_tasks(len(self._tasks))
        self._sums.add(parts_of(torch.stack(_measures(self._loss, samples))).sum(2))

    def rates(self) -> tuple[()]:
        """Amounts have no rates of clicks."""
        return ()

    def merge_state(self, state: Mapping[str, object]) -> None:
        """Add the counts of another rank."""
        self._sums.merge(self.restored(state)._sums)

    def value(self) -> dict[str, AmountValues]:
        """The metrics of each label, by its name."""
        totals = (_values(self._loss, parts) for parts in (self._sums.all_3SK, self._sums.recent()))
        return {task: AmountValues(*values) for task, *values in zip(self._tasks, *totals, strict=True)}

    def state(self) -> State:
        return {"amounts.all": self._sums.all_3SK, "amounts.recent": self._sums.newest()}

    def restored(self, state: Mapping[str, object]) -> Self:
        """Metrics with these settings and the counts that `state` saved."""
        metrics, shape = type(self)(self._tasks, self._sums.window, self._loss), self._sums.all_3SK.shape
        recent = read_tensor(state, "amounts.recent", (None, *shape))
        metrics._sums.restore(read_tensor(state, "amounts.all", shape), recent)
        return metrics


def _measures(loss: AmountLoss, samples: Samples) -> tuple[Tensor, ...]:
    """The terms of the sums, [N, K] each; terms do not depend on a sample's position, see `entropy.py`."""
    outputs_NK, labels_NK, weights_NK = samples.logits_NK, samples.labels_NK, samples.weights_NK
    targets_NK = loss.link.targets(labels_NK)
    zero_NK = torch.zeros_like(targets_NK)
    if isinstance(loss, Poisson):
        predicted_NK = _apply_in_vectors(outputs_NK, torch.exp)
        losses_NK = predicted_NK - targets_NK * outputs_NK
        logs_NK = _apply_in_vectors(targets_NK.clamp(min=torch.finfo(torch.float64).tiny), torch.log)
        deviance_NK = 2 * (targets_NK * (logs_NK - outputs_NK) - targets_NK + predicted_NK)
    else:
        predicted_NK, deviance_NK = outputs_NK, zero_NK
        losses_NK = (outputs_NK - targets_NK) ** 2
    errors_NK = predicted_NK - targets_NK
    counted_NK = zero_NK + 1 if weights_NK is None else (weights_NK > 0).double()
    weights_NK = counted_NK if weights_NK is None else weights_NK
    terms = (targets_NK, predicted_NK, targets_NK**2, errors_NK**2, errors_NK.abs(), losses_NK, deviance_NK)
    # `where`, as infinity times a weight of 0 is NaN.
    return counted_NK, weights_NK, *(torch.where(weights_NK > 0, term * weights_NK, 0.0) for term in terms)


def _apply_in_vectors(x_NK: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function elementwise, with vector instructions only: see `entropy.py`."""
    size = x_NK.numel()
    with one_thread():
        padded = F.pad(x_NK.reshape(-1), (0, -size % VECTORS), value=1.0)
        return function(padded)[:size].view(x_NK.shape)


def _values(loss: AmountLoss, parts_3SK: Tensor) -> list[Values]:
    links = zip(loss.link.offset, loss.link.unit, strict=True)
    return [_value(loss, *link, *sums) for link, sums in zip(links, to_float64(parts_3SK).T.tolist(), strict=True)]


def _value(  # noqa: PLR0913 - the sums
    loss: AmountLoss, offset: float, unit: float, count: float, weight: float, label: float, predicted: float,
    squares: float, squared: float, absolute: float, losses: float, deviance: float,
) -> Values:  # fmt: skip
    if not weight > 0:
        return dict.fromkeys(metric_names(loss), math.nan) | {"count": count}
    label_sum, prediction_sum = (offset * weight + unit * total for total in (label, predicted))
    spread = squares - label**2 / weight
    values = {
        "loss": losses / weight,
        "rmse": unit * math.sqrt(squared / weight),
        "mae": unit * absolute / weight,
        "r2": 1 - squared / spread if spread > 0 else math.nan,
        "calibration": prediction_sum / label_sum if label_sum else math.nan,
        "base_rate": label_sum / weight,
        "count": count,
    }
    return values | ({"poisson_deviance": unit * deviance / weight} if isinstance(loss, Poisson) else {})


def metric_names(loss: AmountLoss) -> tuple[str, ...]:
    """Names of the metrics of amounts with this loss."""
    names = ("loss", "rmse", "mae", "r2", "calibration", "base_rate", "count")
    return (*names, "poisson_deviance") if isinstance(loss, Poisson) else names
