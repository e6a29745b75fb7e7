"""Predicted and observed rates: are 10 % of the rows with a prediction of 10 % clicked?

Rows are grouped by quantiles of their probability, from the logit histogram of the AUC. A bin is a thousandth of a
logit wide, so its probability is known to a thousandth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowwise.train.auc import AXIS

GROUPS = 10


@dataclass(frozen=True, slots=True)
class RateGroup:
    """A line of reliability.csv: rows of similar probability."""

    task: str
    count: float  # weight of the rows
    predicted: float  # mean probability
    observed: float  # mean label


def rate_groups(tasks: Sequence[str], counts_K2M: Tensor) -> tuple[RateGroup, ...]:
    """The groups of each task, in ascending probability; equal probabilities share a group."""
    bins = counts_K2M.shape[2]
    # Centres of the bins of `BinnedAuc`; the first and the last bin also hold logits beyond the axis.
    logits_M = (torch.arange(bins, dtype=torch.float64) + 0.5 - bins / 2) * (2 * AXIS / (bins - 2))
    groups: list[RateGroup] = []
    for task, counts_2M in zip(tasks, counts_K2M.double().cpu(), strict=True):
        weight_M = counts_2M.sum(0)
        middle_M = (weight_M.cumsum(0) - weight_M / 2) / weight_M.sum()
        group_M = (middle_M * GROUPS).nan_to_num().long().clamp(0, GROUPS - 1)
        sums_3G = torch.zeros(3, GROUPS, dtype=torch.float64)
        sums_3G.index_add_(1, group_M, torch.stack([weight_M, weight_M * logits_M.sigmoid(), counts_2M[1]]))
        groups += [RateGroup(task, w, p / w, y / w) for w, p, y in sums_3G.T.tolist() if w > 0]
    return tuple(groups)
