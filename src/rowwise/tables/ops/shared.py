"""Pooled lookups of batches with shared bags: each distinct bag is pooled once, its vector copied to its samples.

The backward stages the ids of the expanded batch with one gradient per sample, so an update has the bits of the
expanded batch ([Note: Merge order]) and its cost. Sequences are expanded before they are looked up.

[Note: Merged bags] With `merge_shared` the gradients of a shared bag are summed first, in the order of samples, and
staged as the gradient of the bag's first sample. That is less work for the update and less to send between ranks; the
sums are in another order than those of the expanded batch, so rows agree to rounding only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowwise.tables.batch import Jagged, SharedBags
from rowwise.tables.ops.arena import Arena, KernelBags
from rowwise.tables.ops.halves import in_halves
from rowwise.tables.ops.layout import FeatureDescriptor, TableGroup
from rowwise.tables.ops.output_cache import empty_cached


class FeatureColumns(NamedTuple):
    """`width` columns from `source` of a feature subset's output are those from `target` of the whole output."""

    source: int
    target: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSubset:
    """A subset of a group's features, in its order, as a lookup of its own."""

    features_FC: Tensor
    full_output_FC: Tensor  # the same features with their columns in the group's output
    columns: int  # columns of the subset's output
    segments: tuple[FeatureColumns, ...]

    @classmethod
    def of(cls, group: TableGroup, features: tuple[str, ...]) -> "FeatureSubset":
        """The features of a group that are among `features`, those of a batch in its order."""
        rows: list[FeatureDescriptor] = []
        columns: list[FeatureColumns] = []
        at = 0
        for name, row in zip(group.feature_names, FeatureDescriptor.read(group.features_FC), strict=True):
            if name in features:
                rows.append(row._replace(source=features.index(name), column=at))
                columns.append(FeatureColumns(at, row.column, row.dim))
                at += row.dim
        full = [row._replace(column=column.target) for row, column in zip(rows, columns, strict=True)]
        features_FC, full_output_FC = (
            torch.tensor(x, dtype=torch.int64).view(-1, len(FeatureDescriptor._fields)) for x in (rows, full)
        )
        segments = merge_neighbours(columns)
        return cls(features_FC=features_FC, full_output_FC=full_output_FC, columns=at, segments=segments)

    def pool(self, jagged: Jagged, arena: Arena) -> Tensor:
        """The pooled vectors of the subset [B, columns]."""
        return self._pooled(self.features_FC, jagged, arena, self.columns)

    def pool_to_full_output(self, jagged: Jagged, arena: Arena, columns: int) -> Tensor:
        """The pooled vectors at their columns of the group's output; other columns are uninitialised."""
        return self._pooled(self.full_output_FC, jagged, arena, columns)

    def _pooled(self, features_FC: Tensor, jagged: Jagged, arena: Arena, columns: int) -> Tensor:
        def look_up(part: Jagged) -> Tensor:
            weights = None if part.weights_N is None else part.weights_N.detach().float()
            return arena.pool(_bags(features_FC, part), weights, columns)

        if not self.columns:
            return empty_cached((jagged.batch_size, columns), torch.empty(0, device=arena.rows.device))
        return in_halves(jagged, look_up)

    def gather(self, jagged: Jagged, arena: Arena) -> Tensor:
        """The rows of all ids, flat, feature after feature."""
        if not self.columns:
            return torch.empty(0, device=arena.rows.device)
        return in_halves(jagged, lambda part: arena.gather(_bags(self.features_FC, part)), self.features_FC)


def _bags(features_FC: Tensor, jagged: Jagged) -> KernelBags:
    offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
    return KernelBags(features_FC, jagged.values_N, offsets, jagged.batch_size)


def merge_vectors(parts: Sequence["FeatureVectors"], shared: SharedBags | None) -> Tensor:
    """The pooled output [B, S] of both bag sets: own features, and shared ones expanded from distinct samples."""
    own = parts[0]
    if shared is None or not parts[-1].vectors.shape[1]:
        return own.vectors
    out_BS = empty_cached((len(shared.inverse_B), sum(part.vectors.shape[1] for part in parts)), own.vectors)
    torch.ops.rowwise.spread(out_BS, own.vectors.contiguous(), None, _segments_tensor(own.segments))
    return write_shared_columns(out_BS, parts[1], shared.inverse_B)


def write_shared_columns(out_BS: Tensor, shared: "FeatureVectors", inverse_B: Tensor) -> Tensor:
    """Write the columns of shared features: each sample gets the vectors of its distinct sample."""
    segments_RC = _segments_tensor(shared.segments)
    torch.ops.rowwise.spread(out_BS, shared.vectors.contiguous(), inverse_B.contiguous(), segments_RC)
    return out_BS


def expand_bags(jagged: Jagged, features: Sequence[str], *, narrow: bool = False) -> Jagged:
    """The expanded batch of these features, in this order; weights are detached float32.

    `narrow`: all ids fit 32 bits, and are returned as int32.
    """
    jaggeds, samples = [jagged], [torch.arange(jagged.batch_size, device=jagged.lengths_FB.device)]
    if jagged.shared is not None:
        jaggeds, samples = [jagged, jagged.shared.jagged], [*samples, jagged.shared.inverse_B]
    first_bags = {
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
        torch.tensor([first_bags[name] for name in features], dtype=torch.int64).view(-1, 2),
        narrow,
    )
    weights_N = weights_N if weights else None
    return Jagged(features=tuple(features), values_N=values_N, lengths_FB=lengths_FB, weights_N=weights_N)


def select_columns(grad_BS: Tensor, segments: Sequence[FeatureColumns]) -> Tensor:
    """The columns of a feature subset in a gradient of the whole output."""
    return torch.cat([grad_BS[:, :0], *(grad_BS[:, target : target + width] for _, target, width in segments)], 1)


def sum_over_samples(grad_BS: Tensor, shared: SharedBags) -> Tensor:
    """The gradients of distinct bags [U, S]: the sum over the samples of each, in their order."""
    sums_US = grad_BS.new_zeros((shared.jagged.batch_size, grad_BS.shape[1]))
    return sums_US.index_add_(0, shared.inverse_B, grad_BS)


def assign_to_first_samples(jagged: Jagged, shared: SharedBags) -> Jagged:
    """A batch without sharing: each shared bag belongs to its first sample, and is empty in the others."""
    distinct, batch = shared.jagged, jagged.batch_size
    lengths_FB = distinct.lengths_FB.new_zeros((len(distinct.features), batch))
    lengths_FB[:, first_samples(shared)] = distinct.lengths_FB.view(len(distinct.features), distinct.batch_size)
    weights = [w for w in (jagged.weights_N, distinct.weights_N) if w is not None]
    return Jagged(
        features=jagged.all_features,
        values_N=torch.cat([jagged.values_N, distinct.values_N]),
        lengths_FB=torch.cat([jagged.lengths_FB, lengths_FB.flatten()]),
        weights_N=torch.cat(weights) if weights else None,
    )


def first_samples(shared: SharedBags) -> Tensor:
    """The first sample of each distinct sample [U]."""
    numbers_U = torch.arange(shared.jagged.batch_size, device=shared.inverse_B.device)
    return torch.searchsorted(shared.inverse_B.long(), numbers_U)


def gradient_of_first_samples(
    own: "FeatureVectors", distinct: "FeatureVectors", shared: SharedBags, columns: int
) -> Tensor:
    """The gradients [B, columns] of `assign_to_first_samples`, from those of own features and of distinct bags."""
    first_U = first_samples(shared)
    grad_BS = own.vectors.new_zeros((len(shared.inverse_B), columns))
    for source, target, width in own.segments:
        grad_BS[:, target : target + width] = own.vectors[:, source : source + width]
    for source, target, width in distinct.segments:
        grad_BS[first_U, target : target + width] = distinct.vectors[:, source : source + width]
    return grad_BS


class FeatureVectors(NamedTuple):
    """Vectors of a feature subset, and their columns in the whole output."""

    vectors: Tensor
    segments: tuple[FeatureColumns, ...]


def stage_gradient(anchor: Tensor, look_up: Callable[[], Tensor], stage: Callable[[Tensor], object]) -> Tensor:
    """`look_up()`, with a backward that calls `stage(gradient)`; `anchor`: any tensor that requires a gradient."""
    return _StageGradientFunction.apply(anchor, look_up, stage) if torch.is_grad_enabled() else look_up()


class _StageGradientFunction(torch.autograd.Function):
    """The autograd function of `stage_gradient`; see [Note: Staging]."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, _anchor, look_up, stage = args
        ctx.set_materialize_grads(False)  # without a loss on the output: None, and nothing is staged
        ctx.stage = stage
        return look_up()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        if grad_outputs[0] is not None:
            ctx.stage(grad_outputs[0].contiguous())
        return None, None, None


def _segments_tensor(columns: Sequence[FeatureColumns]) -> Tensor:
    return torch.tensor(columns, dtype=torch.int64).view(-1, 3)


def merge_neighbours(columns: Sequence[FeatureColumns]) -> tuple[FeatureColumns, ...]:
    """Merge columns that are adjacent both in the subset and in the whole output."""
    segments = (list(segment) for _, segment in groupby(columns, lambda column: column.target - column.source))
    return tuple(FeatureColumns(x[0].source, x[0].target, sum(column.width for column in x)) for x in segments)
