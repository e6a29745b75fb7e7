"""Predictions of rows: in the file of `rowwise predict`, and in the answers of `rowwise serve`.

Sizes: R rows, K tasks, P = 2 K numbers per row: logit and probability of each task, or the output of the model and its
amount (`models/link.py`).
"""

from collections.abc import Callable, Sequence

import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional as F

from rowwise.models.link import AmountLink

VECTOR = 64  # a multiple of the unrolled vector loops of torch, up to 512 bits


def prediction_names(tasks: Sequence[str], link: AmountLink | None) -> list[str]:
    """Column names per task: logit and probability, or output and amount."""
    kinds = ("logit", "probability") if link is None else ("output", "amount")
    return [f"{task}_{kind}" for task in tasks for kind in kinds]


def predictions_of(logits_RK: Tensor, link: AmountLink | None) -> Tensor:
    """Predictions [R, P] in float32."""
    scores_RK = _apply_padded(logits_RK, torch.sigmoid if link is None else link.amounts)
    return torch.stack((logits_RK, scores_RK), 2).flatten(1)


def prediction_columns(tasks: Sequence[str], link: AmountLink | None, predictions_RP: Tensor) -> dict[str, pa.Array]:
    """Predictions as Arrow columns by name."""
    values_PR = predictions_RP.numpy().T
    names = prediction_names(tasks, link)
    return {name: pa.array(values_R) for name, values_R in zip(names, values_PR, strict=True)}


def _apply_padded(logits_RK: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to padded logits, as the scalar tail loop of torch rounds differently from its vector code."""
    padded = F.pad(logits_RK, (0, 0, 0, -len(logits_RK) % VECTOR))
    return function(padded)[: len(logits_RK)]
