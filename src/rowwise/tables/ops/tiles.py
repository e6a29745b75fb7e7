"""`Tiles`: pieces of tables on one device with their memory, lookup, staged gradients and update.

`Embeddings` and `ShardedEmbeddings` are both made of it. It communicates with no rank: a batch may have the ids of this
rank, or those of all ranks, joined.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, GradientError, IdError, SpecError
from rowwise.tables.batch import Jagged, SharedBags
from rowwise.tables.ops import check
from rowwise.tables.ops.arena import Arena, KernelBags
from rowwise.tables.ops.bad_gradient import find_bad_gradient
from rowwise.tables.ops.halves import floats_by_feature
from rowwise.tables.ops.host_rows import HostRows
from rowwise.tables.ops.layout import TableGroup, TablePiece, make_group
from rowwise.tables.ops.lookup import LookupCall, StagedGradients, lookup
from rowwise.tables.ops.shared import (
    FeatureSubset,
    FeatureVectors,
    assign_to_first_samples,
    expand_bags,
    gradient_of_first_samples,
    select_columns,
    stage_gradient,
    sum_over_samples,
    write_shared_columns,
)
from rowwise.tables.ops.unknown import count_unknown, map_unknown
from rowwise.tables.ops.update import reorder_by_rank, run_all, update
from rowwise.tables.spec import Pooling, Table
from rowwise.tables.store.row_store import OpenStore


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOutput:
    """The pooled and sequence vectors of a batch."""

    matrix_BS: Tensor  # pooled features side by side
    flat: Tensor  # rows of sequences, feature after feature
    floats: list[int]  # floats of each sequence feature in `flat`

    def to(self, device: torch.device) -> "LookupOutput":
        return replace(self, matrix_BS=self.matrix_BS.to(device), flat=self.flat.to(device))


@final
class Tiles:
    """Whole tables, or rectangles of tables, in one arena."""

    def __init__(
        self,
        tables: Sequence[Table | TablePiece],
        device: torch.device,
        *,
        merge_shared: bool = False,
        open_store: OpenStore | None = None,
    ) -> None:
        """Allocate zeroed memory; `arena.fill` initialises it. `merge_shared`: see [Note: Merged bags].

        `open_store`: opens the store of tables with slots.
        """
        self.merge_shared = merge_shared
        self.arena = Arena.allocate(tables, device, open_store)
        self.unknown_ids: dict[str, int] = {}  # counts by feature, of tables whose last row stands for unknown ids
        # Two groups, as a kernel call either pools or does not; a group without tables is never called.
        self.pooled, self.sequence = self._group_of(False), self._group_of(True)
        names = tuple(dict.fromkeys(self.pooled.feature_names))
        self._unique_features = names, self.pooled.for_sources(names)
        self.staged: list[StagedGradients] = []
        self._untrainable = next((t for t in self.arena.tables if not t.row_type.facts.trained), None)
        # Autograd only runs a backward that leads to a tensor that requires a gradient, and rows do not.
        self._anchor = torch.empty(0, requires_grad=True)
        # Memos by the features of a batch, in its order: in practice one entry each.
        self._feature_tensors: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self._subsets: dict[tuple[str, ...], FeatureSubset] = {}

    def cached_on(self, device: torch.device, pieces: Sequence[TablePiece]) -> "Tiles":
        """The pieces on a device; rows of those with `cache_rows` stay in this arena, cached there."""
        tiles = Tiles(pieces, device, merge_shared=self.merge_shared, open_store=HostRows.opener(self.arena))
        tiles.arena.copy_uncached(self.arena)
        return tiles

    def look_up(self, jagged: Jagged) -> LookupOutput:
        """Look a batch up; with gradients enabled, each backward stages what `update` will apply."""
        if jagged.shared is not None:
            return self._look_up_shared(jagged, jagged.shared)
        pooled_features, sequence_features = self.features_for(jagged)
        try:
            offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
            matrix = self._lookup(LookupCall(self.pooled, pooled_features, jagged, offsets, False))
            flat = self._lookup(LookupCall(self.sequence, sequence_features, jagged, offsets, True))
        except RuntimeError:
            # The operator does not know names; if the lengths are wrong, name the first.
            check.check_lengths(jagged)
            raise
        return LookupOutput(matrix_BS=matrix, flat=flat, floats=self._floats(sequence_features, jagged, offsets))

    def read_ahead(self, jagged: Jagged) -> None:
        """Prefetch the rows of a store that a lookup of this batch needs, if the batch has all features."""
        names = set(self.pooled.feature_names + self.sequence.feature_names)
        if self.arena.store is None or not names <= set(jagged.features):
            return
        features_FC = torch.cat([group.for_sources(jagged.features) for group in (self.pooled, self.sequence)])
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        self.arena.read_ahead(KernelBags(features_FC, jagged.values_N, offsets, jagged.batch_size))

    def pool(self, jagged: Jagged) -> Tensor:
        """The pooled vectors [B, columns] of a batch's own (not shared) features; stages nothing."""
        return self._subset(jagged.features).pool(jagged, self.arena)

    def gather(self, jagged: Jagged) -> Tensor:
        """The rows of all ids of a batch's own features, flat, feature after feature; stages nothing."""
        return self._subset(jagged.features).gather(jagged, self.arena)

    def look_up_sequences(self, jagged: Jagged, samples_W: tuple[int, ...] = ()) -> LookupOutput:
        """The sequences of a batch, which are own features; `samples_W` as in `LookupCall`."""
        no_columns = torch.empty((jagged.batch_size, 0), device=self.arena.rows.device)
        if not self.sequence.tables:
            return LookupOutput(matrix_BS=no_columns, flat=no_columns.flatten(), floats=[])
        unshared = replace(jagged, shared=None)
        call = LookupCall.of(self.sequence, unshared, per_id=True, samples_W=samples_W)
        floats = self._floats(call.features_FC, unshared, call.offsets)
        return LookupOutput(matrix_BS=no_columns, flat=self._lookup(call), floats=floats)

    def stage_pooled(self, jagged: Jagged, grads: Sequence[Tensor], samples_W: tuple[int, ...] = ()) -> StagedGradients:
        """Stage gradients of pooled features: one matrix of all samples, for which shared bags are expanded now.

        Or two matrices, of own features and of distinct bags: see [Note: Merged bags].
        """
        grad_BS, shared = grads[0], jagged.shared
        if len(grads) > 1 and shared is not None:
            own, distinct = (self._subset(batch.features).segments for batch in (jagged, shared.jagged))
            grad_BS = gradient_of_first_samples(
                FeatureVectors(grads[0], own), FeatureVectors(grads[1], distinct), shared, self.pooled.columns
            )
            jagged = assign_to_first_samples(jagged, shared)
        if jagged.shared is None or not self.pooled.tables:
            jagged = jagged.expanded().contiguous()
            features = self.features_for(jagged)[0]
        else:  # only features with a table, whose ids were checked: those of at most 2**31 rows fit 32 bits
            names, features = self._unique_features
            jagged = expand_bags(jagged.contiguous(), names, narrow=all(t.rows <= 1 << 31 for t in self.pooled.tables))
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        weights = None if jagged.weights_N is None else jagged.weights_N.detach().float()
        call = LookupCall(self.pooled, features, jagged, offsets, False, samples_W)
        staged = StagedGradients(call=call, weights=weights, grad=grad_BS)
        if self.pooled.tables:
            self.append_staged(staged)
        return staged

    def columns_of(self, features: tuple[str, ...]) -> int:
        """Columns of the pooled vectors of these features; features without a table here have none."""
        return self._subset(features).columns

    def _stage_shared(self, jagged: Jagged, grad_BS: Tensor) -> None:
        shared, grads = jagged.shared, [grad_BS]
        if self.merge_shared and shared is not None:
            own_BS, shared_BS = (
                select_columns(grad_BS, self._subset(b.features).segments) for b in (jagged, shared.jagged)
            )
            grads = [own_BS, sum_over_samples(shared_BS, shared)]
        self.stage_pooled(jagged, grads)

    def split(self, output: LookupOutput) -> dict[str, Tensor]:
        """The rows [N, D] of each sequence by feature."""
        # The operator returns one flat tensor, as dims differ between features.
        parts = output.flat.split(output.floats) if output.floats else ()
        named = zip(self.sequence.feature_names, parts, strict=True)
        return {name: part.view(-1, self.sequence.table_of(k).dim) for k, (name, part) in enumerate(named)}

    @torch.no_grad()
    def update(self, calls: int = 1) -> None:
        """Apply the gradients staged since the last update: each touched row changes once.

        `calls`: forward calls per batch of several ranks.
        """
        kinds = self.take_kinds()
        if any(kinds) and self._untrainable is not None:
            got = f"table {self._untrainable.name!r} has rows of {self._untrainable.row_type}, which are only looked up"
            raise SpecError(
                got, hint=f"train another row type, and store the trained rows as {self._untrainable.row_type}"
            )
        run_all(partial(update, self.arena, reorder_by_rank(kind, calls)) for kind in kinds)

    def check_staged(self) -> float:
        """Raise if a staged gradient is not finite, before any row changes (`update` changes all but the bad rows).

        Finite gradients whose sum overflows are left to `update`. Returns an upper bound of the sums' absolute values.
        """
        bounds: list[float] = []
        for staged in self.staged:
            # One pass that writes nothing. Gradients of empty bags reach no row, so a suspect still has to be located.
            largest = max_abs(staged.grad)
            if not math.isfinite(largest):
                fault = find_bad_gradient(staged.call, staged.grad)
                if fault is not None:
                    raise GradientError(f"{fault}. No row was updated")
            # Each id contributes to its row once, times its weight, or at most 1 for sums and means.
            weight = 1.0 if staged.weights is None else max(1.0, max_abs(staged.weights))
            bounds.append(largest * weight * len(staged.call.jagged.values_N))
        return sum(bounds)

    def discard(self) -> None:
        """Drop the staged gradients."""
        self.staged = []

    def take_staged(self) -> list[StagedGradients]:
        """Remove the staged gradients."""
        staged = self.staged
        self.discard()
        return staged

    def take_kinds(self) -> tuple[list[StagedGradients], list[StagedGradients]]:
        """Remove the staged gradients, of pooled features and of sequences.

        Called before an update: if that raises, its gradients must not be applied again.
        """
        staged = self.take_staged()
        return [s for s in staged if not s.call.per_id], [s for s in staged if s.call.per_id]

    def features_for(self, jagged: Jagged) -> tuple[Tensor, Tensor]:
        """`features_FC` of the pooled and of the sequence group for a batch's order of features."""
        known = self._feature_tensors.get(jagged.features)
        if known is None:  # features are checked once per order, not for every batch
            self._check_features(jagged.features)
            known = self.pooled.for_sources(jagged.features), self.sequence.for_sources(jagged.features)
            self._feature_tensors[jagged.features] = known
        check_weights([piece.full_table for piece in self.arena.pieces], jagged)
        return known

    def _look_up_shared(self, jagged: Jagged, shared: SharedBags) -> LookupOutput:
        """`look_up` that reads each shared bag once; see `tables/ops/shared.py`."""
        if per_id_weights_require_grad(jagged) or set(shared.jagged.features) & set(self.sequence.feature_names):
            # Unsupported: the weight of a shared bag has a gradient per sample, and a sequence has rows per id.
            expanding = shared.jagged.features if per_id_weights_require_grad(jagged) else self.sequence.feature_names
            return self.look_up(jagged.expand_features(expanding))
        self._check_features(jagged.all_features)
        check_weights([piece.full_table for piece in self.arena.pieces], jagged)
        own, distinct = self._subset(jagged.features), self._subset(shared.jagged.features)
        try:
            shared.check()
            own_BS = own.pool_to_full_output(jagged, self.arena, self.pooled.columns)
            part = FeatureVectors(distinct.pool(shared.jagged, self.arena), distinct.segments)
        except (RuntimeError, IdError, BatchError):
            # Errors name a sample of this batch, and unknown ids may be allowed: both need the expanded batch.
            return self.look_up(jagged.expanded())
        output = self.look_up_sequences(jagged)
        matrix_BS = stage_gradient(
            self._anchor,
            lambda: write_shared_columns(own_BS, part, shared.inverse_B),
            partial(self._stage_shared, jagged),
        )
        return replace(output, matrix_BS=matrix_BS)

    def _subset(self, features: tuple[str, ...]) -> FeatureSubset:
        if features not in self._subsets:
            self._subsets[features] = FeatureSubset.of(self.pooled, features)
        return self._subsets[features]

    def _check_features(self, features: tuple[str, ...]) -> None:
        check.check_features(features, self.pooled.feature_names + self.sequence.feature_names)

    def _group_of(self, sequences: bool) -> TableGroup:
        pieces = self.arena.pieces
        chosen = [i for i, piece in enumerate(pieces) if (piece.table.pooling is Pooling.SEQUENCE) == sequences]
        return make_group(pieces, self.arena.offsets, chosen, self.arena.first_slots)

    def _lookup(self, call: LookupCall) -> Tensor:
        if not call.group.tables:
            return torch.empty(0 if call.per_id else (call.jagged.batch_size, 0), device=self.arena.rows.device)
        try:
            return lookup(call, self.arena, self._anchor, self.append_staged)
        except IdError:  # slow path: map unknown ids if their table allows it, and look up again
            tables = {name: call.group.table_of(index) for index, name in enumerate(call.group.feature_names)}
            jagged, unknown = map_unknown(call.jagged, tables)
            count_unknown(self.unknown_ids, unknown)
            return lookup(replace(call, jagged=jagged), self.arena, self._anchor, self.append_staged)

    def append_staged(self, staged: StagedGradients) -> None:
        """Callback of a lookup's backward; see [Note: Staging]."""
        self.staged.append(staged)

    def _floats(self, features_FC: Tensor, jagged: Jagged, offsets: Tensor) -> list[int]:
        return floats_by_feature(jagged, features_FC, offsets) if self.sequence.tables else []

    def __getstate__(self) -> dict[str, Any]:
        """Everything but staged gradients, which belong to the graph of the module that was copied."""
        return {**self.__dict__, "staged": []}


def max_abs(x: Tensor) -> float:
    """The largest absolute value; NaN if any value is NaN."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return max(-float(low), float(high))


def per_id_weights_require_grad(jagged: Jagged) -> bool:
    """Whether per-id weights, own or of shared bags, get a gradient now."""
    weights = (jagged.weights_N, None if jagged.shared is None else jagged.shared.jagged.weights_N)
    return torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in weights)


def check_weights(tables: Sequence[Table], jagged: Jagged) -> None:
    """Raise if a table pools by weights and the batch has none."""
    if jagged.weights_N is None and any(t.pooling is Pooling.WEIGHTED for t in tables):
        names = ", ".join(t.name for t in tables if t.pooling is Pooling.WEIGHTED)
        raise BatchError(
            f"the batch has no weights, which tables {names} (pooling 'weighted') need", "Jagged.weights_N"
        )
