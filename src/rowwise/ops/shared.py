"""Pooled lookups of batches whose samples share bags: each distinct bag once, its vector spread over the samples late.

What is staged is what the expanded batch would stage, to the bit: ids are spread when the gradients arrive, which are
one for each sample (see [Note: Merge order], which goes by samples). So nothing after a backward knows of sharing.
Known limits: an update costs what it costs without sharing; sequences, which are expanded before they are looked up.

[Note: Merged bags] That is what `merge_shared` is for: the gradients of a bag that samples share are added up first, in
the order of samples, and staged as of the first of them. An update has as much less to do as samples repeat, and less
travels; its sums are in another order than those of the expanded batch, so rows agree to rounding only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowwise.batch import Jagged, Shared
from rowwise.ops.layout import FeatureRow, TableGroup
from rowwise.ops.output_cache import empty_cached


class FeatureColumns(NamedTuple):
    """Neighbouring columns of a lookup of some features, and where they are in that of all."""

    source: int
    target: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSubset:
    """A subset of a group's features, in its order, as a lookup of its own."""

    features_FC: Tensor
    placed_FC: Tensor  # with the columns that they have among those of all
    columns: int
    runs: tuple[FeatureColumns, ...]

    @classmethod
    def of(cls, group: TableGroup, features: tuple[str, ...]) -> "FeatureSubset":
        """Those of a group that a batch has, which holds its features in this order."""
        rows: list[FeatureRow] = []
        places: list[FeatureColumns] = []
        at = 0
        for name, row in zip(group.feature_names, FeatureRow.read(group.features_FC), strict=True):
            if name in features:
                rows.append(row._replace(source=features.index(name), column=at))
                places.append(FeatureColumns(at, row.column, row.dim))
                at += row.dim
        placed = [row._replace(column=place.target) for row, place in zip(rows, places, strict=True)]
        features_FC, placed_FC = (torch.tensor(x, dtype=torch.int64).view(-1, 9) for x in (rows, placed))
        return cls(features_FC=features_FC, placed_FC=placed_FC, columns=at, runs=join_neighbours(places))

    def pool(self, jagged: Jagged, arena_rows: Tensor) -> Tensor:
        """The vectors of the bags of a batch [B, columns]."""
        return self._pooled(self.features_FC, jagged, arena_rows, self.columns)

    def pool_placed(self, jagged: Jagged, arena_rows: Tensor, columns: int) -> Tensor:
        """The same where they belong among the columns of all features; the others hold anything."""
        return self._pooled(self.placed_FC, jagged, arena_rows, columns)

    def _pooled(self, features_FC: Tensor, jagged: Jagged, arena_rows: Tensor, columns: int) -> Tensor:
        batch, weights = jagged.batch_size, jagged.weights_N
        if not self.columns:
            return empty_cached((batch, columns), torch.empty(0, device=arena_rows.device))
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        weights = None if weights is None else weights.detach().float()
        return torch.ops.rowwise.pool(arena_rows, features_FC, jagged.values_N, offsets, weights, batch, columns)

    def gather(self, jagged: Jagged, arena_rows: Tensor) -> Tensor:
        """The rows of all ids, feature after feature."""
        if not self.columns:
            return torch.empty(0, device=arena_rows.device)
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        return torch.ops.rowwise.gather(arena_rows, self.features_FC, jagged.values_N, offsets, jagged.batch_size)


def spread_to_samples(parts: Sequence["FeatureVectors"], shared: Shared | None) -> Tensor:
    """All columns [B, S]: those of own features, and those of the distinct sample that each sample has."""
    own = parts[0]
    if shared is None or not parts[-1].vectors.shape[1]:
        return own.vectors
    out_BS = empty_cached((len(shared.inverse_B), sum(part.vectors.shape[1] for part in parts)), own.vectors)
    torch.ops.rowwise.spread(out_BS, own.vectors.contiguous(), None, _runs(own.runs))
    return spread_into(out_BS, parts[1], shared.inverse_B)


def spread_into(out_BS: Tensor, shared: "FeatureVectors", inverse_B: Tensor) -> Tensor:
    """Its columns written, of the distinct sample that each sample has."""
    torch.ops.rowwise.spread(out_BS, shared.vectors.contiguous(), inverse_B.contiguous(), _runs(shared.runs))
    return out_BS


def expand_bags(jagged: Jagged, features: Sequence[str], *, narrow: bool = False) -> Jagged:
    """The bags of all samples of these features, in this order, and no gradients; weights are floats of 32 bits.

    `narrow`: ids are known to fit 32 bits, and are given so.
    """
    jaggeds, samples = [jagged], [torch.arange(jagged.batch_size, device=jagged.lengths_FB.device)]
    if jagged.shared is not None:
        jaggeds, samples = [jagged, jagged.shared.jagged], [*samples, jagged.shared.inverse_B]
    places = {
        name: (source, at * batch.batch_size)
        for source, batch in enumerate(jaggeds)
        for at, name in enumerate(batch.features)
    }
    weights = [w.detach().float().contiguous() for w in (j.weights_N for j in jaggeds) if w is not None]
    values_N, lengths_FB, weights_N = torch.ops.rowwise.expand(
        [j.values_N for j in jaggeds],
        [j.lengths_FB for j in jaggeds],
        weights,
        samples,
        torch.tensor([places[name] for name in features], dtype=torch.int64).view(-1, 2),
        narrow,
    )
    return Jagged(
        features=tuple(features),
        values_N=values_N,
        lengths_FB=lengths_FB,
        weights_N=weights_N if weights else None,
    )


def pick_columns(grad_BS: Tensor, runs: Sequence[FeatureColumns]) -> Tensor:
    """Columns of all, as a lookup of some features has them."""
    return torch.cat([grad_BS[:, :0], *(grad_BS[:, target : target + width] for _, target, width in runs)], 1)


def sum_over_samples(grad_BS: Tensor, shared: Shared) -> Tensor:
    """The gradients of distinct bags [U, S]: of each, those of its samples, in their order."""
    sums_US = grad_BS.new_zeros((shared.jagged.batch_size, grad_BS.shape[1]))
    return sums_US.index_add_(0, shared.inverse_B, grad_BS)


def keep_first_bags(jagged: Jagged, shared: Shared) -> Jagged:
    """A plain batch, where a bag that samples share is the first one's, and the others have none."""
    once, batch = shared.jagged, jagged.batch_size
    lengths_FB = once.lengths_FB.new_zeros((len(once.features), batch))
    lengths_FB[:, first_samples(shared)] = once.lengths_FB.view(len(once.features), once.batch_size)
    weights = [w for w in (jagged.weights_N, once.weights_N) if w is not None]
    return Jagged(
        features=jagged.all_features,
        values_N=torch.cat([jagged.values_N, once.values_N]),
        lengths_FB=torch.cat([jagged.lengths_FB, lengths_FB.flatten()]),
        weights_N=torch.cat(weights) if weights else None,
    )


def first_samples(shared: Shared) -> Tensor:
    """Of each distinct one [U]."""
    numbers_U = torch.arange(shared.jagged.batch_size, device=shared.inverse_B.device)
    return torch.searchsorted(shared.inverse_B.long(), numbers_U)


def grad_of_first_bags(own: "FeatureVectors", common: "FeatureVectors", shared: Shared, columns: int) -> Tensor:
    """The gradients [B, columns] that belong to such a batch, of own features [B, S'] and of distinct bags [U, S'']."""
    first_U = first_samples(shared)
    grad_BS = own.vectors.new_zeros((len(shared.inverse_B), columns))
    for source, target, width in own.runs:
        grad_BS[:, target : target + width] = own.vectors[:, source : source + width]
    for source, target, width in common.runs:
        grad_BS[first_U, target : target + width] = common.vectors[:, source : source + width]
    return grad_BS


class FeatureVectors(NamedTuple):
    """Vectors of some features side by side, and where their columns are among those of all."""

    vectors: Tensor
    runs: tuple[FeatureColumns, ...]


def lookup_with_staging(anchor: Tensor, look_up: Callable[[], Tensor], stage: Callable[[Tensor], object]) -> Tensor:
    """What `look_up` gives; the backward stages its gradient. `anchor` is any tensor that requires a gradient."""
    return _LateFunction.apply(anchor, look_up, stage) if torch.is_grad_enabled() else look_up()


class _LateFunction(torch.autograd.Function):
    """The autograd function of shared bags; see [Note: Staging]."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, _anchor, look_up, stage = args
        ctx.set_materialize_grads(False)  # what nothing depends on has no gradient, and is not updated
        ctx.stage = stage
        return look_up()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        if grad_outputs[0] is not None:
            ctx.stage(grad_outputs[0].contiguous())
        return None, None, None


def _runs(columns: Sequence[FeatureColumns]) -> Tensor:
    return torch.tensor(columns, dtype=torch.int64).view(-1, 3)


def join_neighbours(places: Sequence[FeatureColumns]) -> tuple[FeatureColumns, ...]:
    """Neighbours here and there as one."""
    runs = (list(run) for _, run in groupby(places, lambda place: place.target - place.source))
    return tuple(FeatureColumns(run[0].source, run[0].target, sum(place.width for place in run)) for run in runs)
