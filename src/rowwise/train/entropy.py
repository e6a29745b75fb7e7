"""Log loss, normalised entropy, calibration and base rate, from five sums over samples.

    NE          = log loss / entropy of the base rate: 1 is the score of always predicting the base rate
    calibration = sum of predictions / sum of labels: 1.1 is 10 % too high
    base rate   = sum of labels / sum of weights

Large logits are safe: the loss is computed from the logit, not from a probability that has rounded to 0 or 1.
Undefined values (no samples; for NE a base rate of 0 or 1; for calibration no positives) are NaN.

Sums are fixed-point (see `exact.py`), so they have the same bits for any batches and any number of ranks. The terms of
a sample do not depend on its position in the batch.

Letters: N samples, K tasks, 5 sums (samples, weights, labels, predictions, losses), R rows of sums, B batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rowwise.tables.ops.threads import one_thread
from rowwise.train.exact import PARTS, UNITS, carry, parts_of, to_float64
from rowwise.train.samples import Samples
from rowwise.train.state import State, read_tensor

SUMS = 5
VECTORS = 64  # numbers: a multiple of the vector width of any processor


@dataclass(frozen=True, slots=True)
class EntropyValue:
    """Log loss, calibration and NE of one task."""

    count: int  # samples of a weight above 0
    weight: float  # sum of their weights
    base_rate: float
    log_loss: float
    ne: float
    calibration: float


def add_rows(parts_35R: Tensor, samples: Samples, row_NK: Tensor) -> Tensor:
    """Sums of rows plus the terms of samples; `row_NK` is the row of each sample and task."""
    terms_35N = parts_of(torch.stack(_measures(samples)).flatten(1))
    rows_35N = row_NK.reshape(1, 1, -1).expand(PARTS, SUMS, -1)
    return carry(parts_35R.to(terms_35N.device).scatter_add(2, rows_35N, terms_35N))


def sums_state(parts: Tensor) -> State:
    """The state of sums [..., 3, 5, K]."""
    return {"tasks": parts.shape[-1], "totals": to_float64(parts.movedim(-3, 0)), "parts": parts}


def read_sums(state: Mapping[str, object], shape: Sequence[int | None]) -> Tensor:
    """The sums that `sums_state` saved, with totals of this shape; older versions saved no parts."""
    parts = parts_of(read_tensor(state, "totals", shape)).movedim(0, -3)
    return read_tensor(state, "parts", parts.shape) if "parts" in state else parts


def totals(samples: Samples, sizes: Sequence[int]) -> list[Tensor]:
    """The five sums of each batch, as parts [3, 5, K]; `sizes` splits the samples into batches."""
    if samples.weights_NK is not None:
        parts_35NK = parts_of(torch.stack(_measures(samples)))
        return [batch_35NK.sum(2) for batch_35NK in parts_35NK.split(list(sizes), 2)]
    # Without weights the first three sums are counts, which the first part holds exactly.
    logits_NK, labels_NK = samples.logits_NK, samples.labels_NK
    loss_NK, predicted_NK = _loss_and_prediction(logits_NK, labels_NK)
    parts_B35K = logits_NK.new_zeros(len(sizes), PARTS, SUMS, samples.tasks)
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
    """Log loss and prediction of each sample, with bits that do not depend on the sample's position.

    Torch computes the last elements of a tensor, and of each thread's part, by scalar code, which may round
    differently from vector code. So the tensor is padded to whole vectors and computed on one thread.
    """
    size = logits_NK.numel()
    # log(1 + exp(-z)), z negated for label 0; z * label would be NaN for an infinite z.
    signed = torch.where(labels_NK != 0, logits_NK, -logits_NK)
    padded = F.pad(torch.stack([signed, logits_NK]).view(2, -1), (0, -size % VECTORS))
    with one_thread():
        loss, predicted = -F.logsigmoid(padded[0]), padded[1].sigmoid()
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
