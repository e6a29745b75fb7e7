"""Splits the ids of a feature into the parts of an id map, and combines the vectors of its parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.hashing.mapped import MappedTable
from rowwise.spec import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBags:
    """The rows of one part for one feature."""

    name: str  # of the feature, as the stored table calls it
    rows_M: Tensor
    lengths_B: Tensor
    weights_M: Tensor | None
    ids_M: Tensor | None  # which id each row is of; None: each id has as many


def combine_parts(
    mapped: MappedTable, jagged: Jagged, feature: str, vectors: Mapping[str, Tensor], places: Mapping[str, PartBags]
) -> Tensor:
    """The vectors of a feature at its table's dim, from those of its parts; `places`: the rows that were looked up."""
    table = mapped.table
    place = table.feature_names.index(feature)
    names = [stored.feature_names[place] for stored in mapped.stored]
    if not mapped.per_id:
        summed = mapped.project_all([vectors[name] for name in names])
        return _mean(summed, jagged, feature) if table.pooling is Pooling.MEAN else summed
    parts = [mapped.project(index, vectors[name]) for index, name in enumerate(names)]
    at = jagged.features.index(feature)
    size = jagged.lengths_FB.numel() // len(jagged.features)
    lengths_B = jagged.lengths_FB[at * size : (at + 1) * size].long()
    count = int(lengths_B.sum())
    each = [
        _per_id(part, places[name], count, len(here.columns))
        for part, name, here in zip(parts, names, mapped.parts, strict=True)
    ]
    whole_ND = _product(each) if mapped.map.shape.combine == "product" else _sum(each)
    if table.pooling is Pooling.SEQUENCE:
        return whole_ND
    if table.pooling is Pooling.WEIGHTED:
        assert jagged.weights_N is not None
        begin = int(jagged.lengths_FB[: at * size].sum())
        whole_ND = whole_ND * jagged.weights_N[begin : begin + count].unsqueeze(1)
    bags_N = torch.arange(size, device=lengths_B.device).repeat_interleave(lengths_B, output_size=count)
    pooled = whole_ND.new_zeros(size, table.dim).index_add(0, bags_N, whole_ND)
    return _mean(pooled, jagged, feature) if table.pooling is Pooling.MEAN else pooled


def all_rows(name: str, rows_NK: Tensor, lengths_B: Tensor, weights_N: Tensor | None) -> PartBags:
    """Every id has all of its rows."""
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


def some_rows(name: str, rows_NK: Tensor, lengths_B: Tensor, weights_N: Tensor | None) -> PartBags:
    """Some ids have none, or not all."""
    there_NK = rows_NK >= 0
    ends_N1 = torch.cat([lengths_B.new_zeros(1, dtype=torch.int64), there_NK.sum(1).cumsum(0)])
    ends_B = lengths_B.cumsum(0)
    ids_M = there_NK.nonzero()[:, 0]
    return PartBags(
        name=name,
        rows_M=rows_NK[there_NK],
        lengths_B=(ends_N1[ends_B] - ends_N1[ends_B - lengths_B]).to(lengths_B.dtype),
        weights_M=None if weights_N is None else weights_N[ids_M],
        ids_M=ids_M,
    )


def _per_id(rows_MD: Tensor, bags: PartBags, count: int, columns: int) -> Tensor:
    """The sum [N, D] of the rows that each id has in a part."""
    if bags.ids_M is None:
        return rows_MD if columns == 1 else rows_MD.view(count, columns, rows_MD.shape[1]).sum(1)
    return rows_MD.new_zeros(count, rows_MD.shape[1]).index_add(0, bags.ids_M, rows_MD)


def _sum(vectors: Sequence[Tensor]) -> Tensor:
    total = vectors[0]
    for more in vectors[1:]:
        total = total + more
    return total


def _mean(summed_BD: Tensor, jagged: Jagged, feature: str) -> Tensor:
    return summed_BD / jagged.lengths_of(feature).clamp(min=1).unsqueeze(1)


def _product(vectors: Sequence[Tensor]) -> Tensor:
    whole = vectors[0]
    for more in vectors[1:]:
        whole = whole * more
    return whole
