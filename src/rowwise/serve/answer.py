"""Predictions of rows: in the file of `rowwise predict`, and in the answers of `rowwise serve`.

Sizes: R rows, K tasks, P = 2 K numbers of a row, the logit and the probability of each task.
"""

from collections.abc import Sequence

import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional as F

WHOLE = 64  # numbers of which torch's loops leave no rest, in vectors of up to 512 bits


def prediction_names(tasks: Sequence[str]) -> list[str]:
    """The columns of each task: its logit and its probability."""
    return [f"{task}_{kind}" for task in tasks for kind in ("logit", "probability")]


def predictions_of(logits_RK: Tensor) -> Tensor:
    """The numbers [R, P] of each row, in 32 bits."""
    return torch.stack((logits_RK, _sigmoid(logits_RK)), 2).view(len(logits_RK), -1)


def prediction_columns(tasks: Sequence[str], predictions_RP: Tensor) -> dict[str, pa.Array]:
    """A column for each number."""
    values_PR = predictions_RP.numpy().T
    return {name: pa.array(values_R) for name, values_R in zip(prediction_names(tasks), values_PR, strict=True)}


def _sigmoid(logits_RK: Tensor) -> Tensor:
    """Probabilities, by torch's vector code for each number: it gives the last ones of a tensor other bits."""
    flat = logits_RK.reshape(-1)
    return F.pad(flat, (0, -len(flat) % WHOLE)).sigmoid()[: len(flat)].view(logits_RK.shape)
