"""Predicted beside observed rates: are a tenth of the rows with 10 % clicked, as the model says?

Rows are grouped by their probability into groups of about equal weight, from the histogram of logits that measures the
AUC. A bin is a thousandth of a logit wide, so its probability is known to a thousandth.
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
    """The groups of each task, the lowest probability first; equal probabilities are in one group."""
    bins = counts_K2M.shape[2]
    # As `BinnedAuc` numbers them; the first and the last have what is beyond the axis.
    logits_M = (torch.arange(bins, dtype=torch.float64) + 0.5 - bins / 2) * (2 * AXIS / (bins - 2))
    found: list[RateGroup] = []
    for task, counts_2M in zip(tasks, counts_K2M.double().cpu(), strict=True):
        weight_M = counts_2M.sum(0)
        middle_M = (weight_M.cumsum(0) - weight_M / 2) / weight_M.sum()
        group_M = (middle_M * GROUPS).nan_to_num().long().clamp(0, GROUPS - 1)
        sums_3G = torch.zeros(3, GROUPS, dtype=torch.float64)
        sums_3G.index_add_(1, group_M, torch.stack([weight_M, weight_M * logits_M.sigmoid(), counts_2M[1]]))
        found += [RateGroup(task, w, p / w, y / w) for w, p, y in sums_3G.T.tolist() if w > 0]
    return tuple(found)
