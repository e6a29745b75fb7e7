"""Predictions of rows: in the file of `rowwise predict`, and in the answers of `rowwise serve`.

Sizes: R rows, K tasks, P = 2 K numbers of a row: the logit and the probability of each task, or the output of the
model and the amount that it means (`models/link.py`).
"""

from collections.abc import Callable, Sequence

import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional as F

from rowwise.models.link import AmountLink

WHOLE = 64  # numbers of which torch's loops leave no rest, in vectors of up to 512 bits


def prediction_names(tasks: Sequence[str], link: AmountLink | None) -> list[str]:
    """The columns of each task: its logit and its probability, or the output and the amount."""
    kinds = ("logit", "probability") if link is None else ("output", "amount")
    return [f"{task}_{kind}" for task in tasks for kind in kinds]


def predictions_of(logits_RK: Tensor, link: AmountLink | None) -> Tensor:
    """The numbers [R, P] of each row, in 32 bits."""
    scores_RK = _at_any_place(logits_RK, torch.sigmoid if link is None else link.amounts)
    return torch.stack((logits_RK, scores_RK), 2).flatten(1)


def prediction_columns(tasks: Sequence[str], link: AmountLink | None, predictions_RP: Tensor) -> dict[str, pa.Array]:
    """A column for each number."""
    values_PR = predictions_RP.numpy().T
    names = prediction_names(tasks, link)
    return {name: pa.array(values_R) for name, values_R in zip(names, values_PR, strict=True)}


def _at_any_place(logits_RK: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Scores by torch's vector code for each number: it gives the last ones of a tensor other bits."""
    padded = F.pad(logits_RK, (0, 0, 0, -len(logits_RK) % WHOLE))
    return function(padded)[: len(logits_RK)]
