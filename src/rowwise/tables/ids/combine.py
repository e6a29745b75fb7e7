"""Splits the rows of a feature by the parts of an id map, and combines the vectors of its parts."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add, mul

import torch
from torch import Tensor

from rowwise.tables.batch import Jagged
from rowwise.tables.ids.mapped import MappedTable
from rowwise.tables.spec import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBags:
    """The rows of one part for one feature."""

    name: str  # of the feature in the stored table
    rows_M: Tensor
    lengths_B: Tensor
    weights_M: Tensor | None
    ids_M: Tensor | None  # index of each row's id; None if all ids have the same number of rows

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "PartBags":
        """A copy with `change` applied to each tensor."""
        return PartBags(
            name=self.name,
            rows_M=change(self.rows_M),
            lengths_B=change(self.lengths_B),
            weights_M=None if self.weights_M is None else change(self.weights_M),
            ids_M=None if self.ids_M is None else change(self.ids_M),
        )


def combine_parts(
    mapped: MappedTable, jagged: Jagged, feature: str, vectors: Mapping[str, Tensor], bags: Mapping[str, PartBags]
) -> Tensor:
    """The vectors of a feature at its table's dim, from the vectors and the bags of its parts."""
    table = mapped.table
    number = table.feature_names.index(feature)
    names = [stored.feature_names[number] for stored in mapped.stored]
    if not mapped.per_id:
        pooled_BD = mapped.project_all([vectors[name] for name in names])
        return _divide_by_lengths(pooled_BD, jagged, feature) if table.pooling is Pooling.MEAN else pooled_BD
    size, lengths_B = jagged.batch_size, jagged.lengths_of(feature).long()
    begin, end = jagged.id_ranges()[feature]
    count = end - begin
    factors = [
        _sum_by_id(mapped.project(part, vectors[name]), bags[name], count, len(part_rows.columns))
        for part, (name, part_rows) in enumerate(zip(names, mapped.parts, strict=True))
    ]
    vectors_ND = functools.reduce(mul if mapped.map.shape.combine == "product" else add, factors)
    if table.pooling is Pooling.SEQUENCE:
        return vectors_ND
    if table.pooling is Pooling.WEIGHTED:
        assert jagged.weights_N is not None
        vectors_ND = vectors_ND * jagged.weights_N[begin:end].unsqueeze(1)
    bags_N = torch.arange(size, device=lengths_B.device).repeat_interleave(lengths_B, output_size=count)
    pooled_BD = vectors_ND.new_zeros(size, table.dim).index_add(0, bags_N, vectors_ND)
    return _divide_by_lengths(pooled_BD, jagged, feature) if table.pooling is Pooling.MEAN else pooled_BD


def complete_bags(name: str, rows_NK: Tensor, lengths_B: Tensor, weights_N: Tensor | None) -> PartBags:
    """Bags of a part in which every id has a row in each of its columns."""
    count = rows_NK.shape[1]
    if weights_N is not None and count > 1:
        weights_N = weights_N.repeat_interleave(count)
    return PartBags(
        name=name,
        rows_M=rows_NK.reshape(-1),
        lengths_B=lengths_B * count if count > 1 else lengths_B,
        weights_M=weights_N,
        ids_M=None,
    )


def partial_bags(name: str, rows_NK: Tensor, lengths_B: Tensor, weights_N: Tensor | None) -> PartBags:
    """Bags of a part in which ids may lack rows, which are -1."""
    has_row_NK = rows_NK >= 0
    running = torch.cat([lengths_B.new_zeros(1, dtype=torch.int64), has_row_NK.sum(1).cumsum(0)])
    ends_B = lengths_B.cumsum(0)
    ids_M = has_row_NK.nonzero()[:, 0]
    return PartBags(
        name=name,
        rows_M=rows_NK[has_row_NK],
        lengths_B=(running[ends_B] - running[ends_B - lengths_B]).to(lengths_B.dtype),
        weights_M=None if weights_N is None else weights_N[ids_M],
        ids_M=ids_M,
    )


def _sum_by_id(rows_MD: Tensor, bags: PartBags, count: int, columns: int) -> Tensor:
    """The sum [N, D] of the rows that each id has in a part."""
    if bags.ids_M is None:
        return rows_MD if columns == 1 else rows_MD.view(count, columns, rows_MD.shape[1]).sum(1)
    return rows_MD.new_zeros(count, rows_MD.shape[1]).index_add(0, bags.ids_M, rows_MD)


def _divide_by_lengths(sums_BD: Tensor, jagged: Jagged, feature: str) -> Tensor:
    return sums_BD / jagged.lengths_of(feature).clamp(min=1).unsqueeze(1)
