"""Ids that a sequence repeats are sent once: their vectors come once, and their gradients go merged.

Within blocks of 256 samples only, as gradients are merged block by block anyway (see [Note: Merge order]): the result
is the same, to the bit where the batches of all ranks are whole blocks; a batch that is not is sent as it is. The
distinct ids of a block stand in its first bag, so those who hold the rows know nothing of it. Known limits: repeats
between blocks, and between features of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.ops import check
from rowwise.ops.jagged import deduplicate
from rowwise.ops.merged import merge_ids
from rowwise.ops.reference.sums import BLOCK
from rowwise.spec import Pooling, Table

WORTH = 0.8  # distinct ids among all; above this the search costs more than it saves


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctIds:
    """The distinct ids of one feature, the index of each id among them, and the offsets of its bags."""

    inverse_N: Tensor
    offsets_B1: Tensor
    distinct: int

    def expand(self, rows_UD: Tensor) -> Tensor:
        """The vectors of all ids."""
        return rows_UD.index_select(0, self.inverse_N)

    def merge(self, grad_ND: Tensor) -> Tensor:
        """The gradients of the distinct ids."""
        return merge_ids(self.inverse_N, self.offsets_B1, grad_ND, self.distinct)


def can_repeat(tables: Sequence[Table]) -> list[str]:
    """The features this is for: of sequences, and alone in their table, whose merge order mixes its features."""
    alone = [table for table in tables if table.pooling is Pooling.SEQUENCE and len(table.feature_names) == 1]
    return [feature for table in alone for feature in table.feature_names]


def distinct_ids(jagged: Jagged, features: Sequence[str]) -> tuple[Jagged, dict[str, DistinctIds]]:
    """The batch with each id once in each block, for those of these features where that is worth it."""
    found: dict[str, DistinctIds] = {}
    batch = jagged.batch_size
    if not features or not batch or batch % BLOCK:
        return jagged, found
    check.check_lengths(jagged)  # the batch that is made here has lengths that fit, whatever these do
    offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
    bounds = offsets[:: max(1, batch)].tolist()
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    for at, name in enumerate(jagged.features):
        ids, bags = jagged.values_N[bounds[at] : bounds[at + 1]], jagged.lengths_FB[at * batch : (at + 1) * batch]
        if name in features and len(ids):
            offsets_B1 = offsets[at * batch : (at + 1) * batch + 1] - bounds[at]
            unique = deduplicate(ids, torch.cat([offsets_B1[:-1:BLOCK], offsets_B1[-1:]]))
            if len(unique.values_U) <= WORTH * len(ids):
                repeats = DistinctIds(inverse_N=unique.inverse_N, offsets_B1=offsets_B1, distinct=len(unique.values_U))
                found[name] = repeats
                ids, bags = unique.values_U, torch.zeros_like(bags)
                bags[::BLOCK] = unique.bounds_S1.diff()
        values.append(ids)
        lengths.append(bags)
    if not found:
        return jagged, found
    return replace(jagged, values_N=torch.cat(values), lengths_FB=torch.cat(lengths), weights_N=None), found
