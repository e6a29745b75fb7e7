"""Scored samples: logits, labels and weights, checked once and shared by all metrics of a step.

A sample of weight 0 counts nowhere; a sample without a label for a task has weight 0 there.

Letters: N samples, K tasks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowwise.base.errors import BatchError


@dataclass(frozen=True, slots=True)
class Samples:
    """Logits (may be infinite), labels 0 and 1, and weights (all 1 if None), in float64."""

    logits_NK: Tensor
    labels_NK: Tensor
    weights_NK: Tensor | None

    @classmethod
    def of(
        cls, logits: Tensor, labels: Tensor, weights: Tensor | None = None, *, check: bool = True, amounts: bool = False
    ) -> "Samples":
        """From logits [N] or [N, K], labels of the same shape, and weights of that shape or [N].

        `check` copies values from the device. Without it nothing waits for a GPU, a NaN logit results in a NaN log
        loss, and labels other than 0 and 1 in meaningless metrics. `amounts`: labels may be any finite numbers.
        """
        _check_shapes(logits, labels, weights)
        if weights is not None and weights.dim() < logits.dim():
            weights = weights.unsqueeze(1).expand(logits.shape)
        if check:
            _check_values(logits, labels, weights, amounts=amounts)
        return cls(_widen(logits), _widen(labels), None if weights is None else _widen(weights))

    @property
    def tasks(self) -> int:
        return self.logits_NK.shape[1]

    def masses(self) -> tuple[Tensor, Tensor]:
        """The weight of each sample as a positive and as a negative, [N, K] each; one of the two is 0."""
        if self.weights_NK is None:
            return self.labels_NK, 1 - self.labels_NK
        positive_NK = self.weights_NK * self.labels_NK
        return positive_NK, self.weights_NK - positive_NK

    def __len__(self) -> int:
        return len(self.logits_NK)

    def check_tasks(self, tasks: int) -> None:
        if self.tasks != tasks:
            raise BatchError(f"got logits of {self.tasks} tasks", f"{tasks}, as the metric was made with tasks={tasks}")


def concatenate(batches: Sequence[Samples]) -> Samples:
    """The samples of all batches, in order."""
    if len(batches) == 1:
        return batches[0]
    logits_NK = torch.cat([batch.logits_NK for batch in batches])
    weights_NK = None
    if any(batch.weights_NK is not None for batch in batches):
        weights_NK = torch.cat([torch.ones_like(b.logits_NK) if (w := b.weights_NK) is None else w for b in batches])
    return Samples(logits_NK, torch.cat([batch.labels_NK for batch in batches]), weights_NK)


def _widen(tensor: Tensor) -> Tensor:
    wide = tensor.detach().to(torch.float64)
    return wide if wide.dim() == 2 else wide.unsqueeze(1)


def _check_shapes(logits: Tensor, labels: Tensor, weights: Tensor | None) -> None:
    if not logits.is_floating_point() or logits.dim() not in (1, 2):
        raise BatchError(
            f"logits: got {logits.dtype} {tuple(logits.shape)}", "floats of shape [samples] or [samples, tasks]"
        )
    # [N, 1] beside [N] would broadcast to [N, N] silently.
    if labels.shape != logits.shape:
        raise BatchError(
            f"labels: got shape {tuple(labels.shape)} beside logits {tuple(logits.shape)}",
            "the same shape",
            hint="squeeze or stack one of them",
        )
    if weights is not None and weights.shape not in (logits.shape, logits.shape[:1]):
        raise BatchError(
            f"weights: got shape {tuple(weights.shape)} beside logits {tuple(logits.shape)}",
            "one weight for each sample, or for each sample and task",
        )
    for name, tensor in (("labels", labels), ("weights", weights)):
        if tensor is not None and tensor.device != logits.device:
            raise BatchError(
                f"{name}: got {tensor.device} beside logits on {logits.device}",
                "one device for both",
                hint="move one of them with .to()",
            )


def _check_values(logits: Tensor, labels: Tensor, weights: Tensor | None, *, amounts: bool) -> None:
    """A fast check of all values; only if it fails, a slow check that finds the first invalid value."""
    if _pass_fast_check(logits, labels, weights, amounts=amounts):
        return
    invalid = {
        "logit": (logits, logits.isnan(), "a number; look for an overflow in the model or a NaN in its inputs"),
        "label": (labels, (labels != 0) & (labels != 1), "0 or 1; where there is no label, give 0 with weight 0"),
    }
    if amounts:
        invalid["label"] = (labels, ~labels.isfinite(), "a finite number")
    if weights is not None:
        finite = (weights >= 0) & (weights < math.inf)
        invalid["weight"] = (weights, ~finite, "a finite number that is not negative")
    for name, (tensor, mask, expected) in invalid.items():
        if mask.any():
            first = tuple(mask.nonzero()[0].tolist())
            where = f"sample {first[0]}" + (f", task {first[1]}" if len(first) > 1 else "")
            more = f" (and {int(mask.sum()) - 1} more)" if int(mask.sum()) > 1 else ""
            raise BatchError(f"{name} of {where} is {tensor[first].item()}{more}", expected)


def _pass_fast_check(logits: Tensor, labels: Tensor, weights: Tensor | None, *, amounts: bool) -> bool:
    """Whether all values are certainly valid, in few passes; may be False for valid logits of both infinities."""
    if math.isnan(float(logits.detach().sum())):
        return False
    if not (labels.isfinite().all() if amounts else torch.equal(labels.bool().to(labels.dtype), labels)):
        return False
    return weights is None or (bool((weights >= 0).all()) and math.isfinite(float(weights.detach().sum())))
