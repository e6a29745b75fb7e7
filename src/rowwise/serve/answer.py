"""Predictions as columns: of the file of `rowwise predict`, and of the answers of `rowwise serve`."""

from collections.abc import Sequence

import pyarrow as pa
from torch import Tensor
from torch.nn import functional as F

WHOLE = 64  # numbers of which torch's loops leave no rest, in vectors of up to 512 bits


def prediction_names(tasks: Sequence[str]) -> list[str]:
    """The columns of each task: its logit and its probability."""
    return [f"{task}_{kind}" for task in tasks for kind in ("logit", "probability")]


def prediction_columns(tasks: Sequence[str], logits_RK: Tensor) -> dict[str, pa.Array]:
    """The logits and probabilities of each task, in 32 bits."""
    both = zip(logits_RK.unbind(1), _sigmoid(logits_RK).unbind(1), strict=True)
    columns = [values_R for pair in both for values_R in pair]
    names = prediction_names(tasks)
    return {name: pa.array(values_R.numpy()) for name, values_R in zip(names, columns, strict=True)}


def _sigmoid(logits_RK: Tensor) -> Tensor:
    """Probabilities, by torch's vector code for each number: it gives the last ones of a tensor other bits."""
    flat = logits_RK.reshape(-1)
    return F.pad(flat, (0, -len(flat) % WHOLE)).sigmoid()[: len(flat)].view(logits_RK.shape)
