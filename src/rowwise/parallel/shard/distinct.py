"""Removes repeated ids of sequences before they are sent: one vector per distinct id, and one merged gradient.

Within blocks of 256 samples only, as gradients are merged block by block anyway ([Note: Merge order] in
`tables/ops/_cpp/tables.h`): the result has the same bits if the batches of all ranks are full blocks. Any other batch
is sent unchanged. The distinct ids of a block are sent as its first bag, looked up like any other. Repeats between
blocks, or between the features of a table, are sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from rowwise.tables.batch import Jagged
from rowwise.tables.ops import check
from rowwise.tables.ops.jagged import deduplicate
from rowwise.tables.ops.merged import merge_ids
from rowwise.tables.ops.reference.sums import BLOCK
from rowwise.tables.spec import Pooling, Table

MAX_DISTINCT = 0.8  # share of distinct ids; above it the batch is sent as it is, as expanding costs more than it saves


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctIds:
    """For one feature: the index of each id among the distinct ids, and where each bag begins."""

    inverse_N: Tensor
    offsets_B1: Tensor
    distinct: int

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "DistinctIds":
        return replace(self, inverse_N=change(self.inverse_N), offsets_B1=change(self.offsets_B1))

    def expand(self, rows_UD: Tensor) -> Tensor:
        """The vectors of all ids from those of the distinct ids."""
        return rows_UD.index_select(0, self.inverse_N)

    def merge(self, grad_ND: Tensor) -> Tensor:
        """The gradients of the distinct ids from those of all ids."""
        return merge_ids(self.inverse_N, self.offsets_B1, grad_ND, self.distinct)


def repeatable_features(tables: Sequence[Table]) -> list[str]:
    """Features of sequence tables that have no other feature: merging mixes the features of a table."""
    alone = [table for table in tables if table.pooling is Pooling.SEQUENCE and len(table.feature_names) == 1]
    return [feature for table in alone for feature in table.feature_names]


def deduplicate_sequences(jagged: Jagged, features: Sequence[str]) -> tuple[Jagged, dict[str, DistinctIds]]:
    """The batch with each id of a feature once per block, if its distinct ids are at most `MAX_DISTINCT` of all."""
    repeats: dict[str, DistinctIds] = {}
    batch = jagged.batch_size
    if not features or not batch or batch % BLOCK:
        return jagged, repeats
    check.check_lengths(jagged)  # before the new batch, whose lengths are valid even if these are not
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    for name, (begin, end) in jagged.id_ranges().items():
        ids, bags = jagged.values_N[begin:end], jagged.lengths_of(name)
        if name in features and len(ids):
            offsets_B1 = torch.ops.rowwise.offsets(bags)
            unique = deduplicate(ids, torch.cat([offsets_B1[:-1:BLOCK], offsets_B1[-1:]]))
            if len(unique.values_U) <= MAX_DISTINCT * len(ids):
                distinct = len(unique.values_U)
                repeats[name] = DistinctIds(inverse_N=unique.inverse_N, offsets_B1=offsets_B1, distinct=distinct)
                ids, bags = unique.values_U, torch.zeros_like(bags)
                bags[::BLOCK] = unique.bounds_S1.diff()
        values.append(ids)
        lengths.append(bags)
    if not repeats:
        return jagged, repeats
    return replace(jagged, values_N=torch.cat(values), lengths_FB=torch.cat(lengths), weights_N=None), repeats
