"""Pieces of tables on one device: their memory, their lookup, what was staged for them, and their update.

What `Embeddings` and its sharded counterpart have in common. It knows neither modules nor ranks: a batch holds whatever
features its pieces are looked up by, wherever their ids came from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from rowwise.batch import Jagged, Shared
from rowwise.errors import BatchError, GradientError, IdError
from rowwise.ops import check
from rowwise.ops.arena import Arena
from rowwise.ops.bad_gradient import find_bad_gradient
from rowwise.ops.layout import TableGroup, TablePiece, make_group
from rowwise.ops.lookup import LookupCall, StagedGradients, lookup
from rowwise.ops.shared import (
    FeatureSubset,
    FeatureVectors,
    expand_bags,
    grad_of_first_bags,
    keep_first_bags,
    lookup_with_staging,
    pick_columns,
    spread_into,
    sum_over_samples,
)
from rowwise.ops.unknown import map_unknown
from rowwise.ops.update import run_all, update
from rowwise.spec import Pooling, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOutput:
    """The pooled features of a batch side by side [B, S], and the rows of its sequences one after the other."""

    matrix_BS: Tensor
    flat: Tensor
    floats: list[int]  # of each sequence feature in `flat`


@final
class Tiles:
    """Whole tables, or rectangles of some."""

    def __init__(
        self, tables: Sequence[Table | TablePiece], device: torch.device, *, merge_shared: bool = False
    ) -> None:
        """Zeroed memory; `arena.fill` fills it. `merge_shared`: see [Note: Merged bags]."""
        self.merge_shared = merge_shared
        self.arena = Arena.allocate(tables, device)
        # Counted rather than kept: a log of every unknown id would grow without end.
        self.unknown_ids: dict[str, int] = {}  # by feature, for tables whose last row stands for unknown ids
        # Two groups, because a call either pools or does not; a group without tables is never called.
        self.pooled, self.sequence = self._group(False), self._group(True)
        names = tuple(dict.fromkeys(self.pooled.feature_names))
        self._in_order = names, self.pooled.for_sources(names)
        self.staged: list[StagedGradients] = []
        # Autograd only runs a backward that leads to something requiring a gradient, and rows do not.
        self._anchor = torch.empty(0, requires_grad=True)
        # By the order in which batches hold their features: in practice one entry.
        self._feature_tensors: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self._known_some: dict[
            tuple[str, ...], FeatureSubset
        ] = {}  # the same, of batches that hold some of the features

    def look_up(self, jagged: Jagged) -> LookupOutput:
        """Look a batch up; with gradients enabled, each backward stages what `update` will apply."""
        if jagged.shared is not None:
            return self._look_up_shared(jagged, jagged.shared)
        # The jagged batch is taken as it is; what differs between batches is where the features stand in it.
        pooled_features, sequence_features = self.features_for(jagged)
        try:
            offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
            matrix = self._lookup(LookupCall(self.pooled, pooled_features, jagged, offsets, False))
            flat = self._lookup(LookupCall(self.sequence, sequence_features, jagged, offsets, True))
        except RuntimeError:
            # The operators said that something is wrong; if it is the lengths, say which.
            check.check_lengths(jagged)
            raise
        return LookupOutput(matrix_BS=matrix, flat=flat, floats=self._floats(sequence_features, jagged, offsets))

    def pool(self, jagged: Jagged) -> Tensor:
        """The pooled vectors [B, columns] of those features that a batch has of its own; no gradients."""
        return self._some(jagged.features).pool(jagged, self.arena.rows)

    def gather(self, jagged: Jagged) -> Tensor:
        """The rows of all ids of the same, feature after feature."""
        return self._some(jagged.features).gather(jagged, self.arena.rows)

    def look_up_sequences(self, jagged: Jagged, parts: tuple[int, ...] = ()) -> LookupOutput:
        """The sequences of a batch alone, none of which is shared.

        `parts`: how many samples each of the batches has that this one was put together from.
        """
        no_columns = torch.empty((jagged.batch_size, 0), device=self.arena.rows.device)
        if not self.sequence.tables:
            return LookupOutput(matrix_BS=no_columns, flat=no_columns.flatten(), floats=[])
        plain = replace(jagged, shared=None)
        offsets = torch.ops.rowwise.offsets(plain.lengths_FB)
        features = self.sequence.for_sources(plain.features)
        flat = self._lookup(LookupCall(self.sequence, features, plain, offsets, True, parts))
        return LookupOutput(matrix_BS=no_columns, flat=flat, floats=self._floats(features, plain, offsets))

    def stage_pooled(self, jagged: Jagged, grads: Sequence[Tensor], parts: tuple[int, ...] = ()) -> StagedGradients:
        """Stage gradients of pooled features: of all samples, or those of own features and of distinct bags.

        See [Note: Merged bags] for the latter; else bags that samples share are spread now.
        """
        grad_BS, shared = grads[0], jagged.shared
        if len(grads) > 1 and shared is not None:
            own, common = (self._some(batch.features).runs for batch in (jagged, shared.jagged))
            grad_BS = grad_of_first_bags(
                FeatureVectors(grads[0], own), FeatureVectors(grads[1], common), shared, self.pooled.columns
            )
            jagged = keep_first_bags(jagged, shared)
        if jagged.shared is None or not self.pooled.tables:
            jagged = jagged.expanded().contiguous()
            features = self.features_for(jagged)[0]
        else:  # of features that are looked up; their ids have rows, and most rows can be told in 32 bits
            names, features = self._in_order
            jagged = expand_bags(jagged.contiguous(), names, narrow=all(t.rows <= 1 << 31 for t in self.pooled.tables))
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        weights = None if jagged.weights_N is None else jagged.weights_N.detach().float()
        call = LookupCall(self.pooled, features, jagged, offsets, False, parts)
        staged = StagedGradients(call=call, weights=weights, grad=grad_BS)
        if self.pooled.tables:
            self.append_staged(staged)
        return staged

    def columns_of(self, features: tuple[str, ...]) -> int:
        """How many columns the pooled vectors of those features have that a batch holds."""
        return self._some(features).columns

    def _stage_shared(self, jagged: Jagged, grad_BS: Tensor) -> None:
        shared, grads = jagged.shared, [grad_BS]
        if self.merge_shared and shared is not None:
            own_BS, common_BS = (pick_columns(grad_BS, self._some(b.features).runs) for b in (jagged, shared.jagged))
            grads = [own_BS, sum_over_samples(common_BS, shared)]
        self.stage_pooled(jagged, grads)

    def split(self, looked: LookupOutput) -> dict[str, Tensor]:
        """The rows [N, D] of each sequence."""
        # The operator returns one flat tensor, as dims differ between features; here it is cut up again.
        parts = looked.flat.split(looked.floats) if looked.floats else ()
        named = zip(self.sequence.feature_names, parts, strict=True)
        return {name: part.view(-1, self.sequence.table_of(k).dim) for k, (name, part) in enumerate(named)}

    @torch.no_grad()
    def update(self) -> None:
        """Apply what the backwards since the last update staged: each touched row changes once."""
        staged = self.staged
        self.discard()  # first: should the update raise, the same gradients must not come again
        groups = ([s for s in staged if s.call.per_id == per_id] for per_id in (False, True))
        run_all(partial(update, self.arena, group) for group in groups)

    def check_staged(self) -> float:
        """Raise if a staged gradient is not finite, while no row has changed; `update` keeps only bad rows as they are.

        Gradients that are finite one by one and not together are left to `update`. Returns a bound for their sums.
        """
        bounds: list[float] = []
        for staged in self.staged:
            # One pass that writes nothing. What belongs to no id reaches no row: only a suspect pays for the search.
            largest = _largest(staged.grad)
            if not math.isfinite(largest):
                found = find_bad_gradient(staged.call, staged.grad)
                if found is not None:
                    raise GradientError(f"{found}. No row was updated")
            # An id adds to its row at most once, with its weight or less than 1.
            weight = 1.0 if staged.weights is None else max(1.0, _largest(staged.weights))
            bounds.append(largest * weight * len(staged.call.jagged.values_N))
        return sum(bounds)

    def discard(self) -> None:
        """Forget what was staged."""
        self.staged = []

    def features_for(self, jagged: Jagged) -> tuple[Tensor, Tensor]:
        """The kernels' feature tensors, of pooled features and of sequences, for a batch's order of features."""
        known = self._feature_tensors.get(jagged.features)
        # Checked once for each order of features that is met, not for every batch.
        if known is None:
            self._check_features(jagged.features)
            known = self.pooled.for_sources(jagged.features), self.sequence.for_sources(jagged.features)
            self._feature_tensors[jagged.features] = known
        check_weights([piece.whole for piece in self.arena.pieces], jagged)
        return known

    def _look_up_shared(self, jagged: Jagged, shared: Shared) -> LookupOutput:
        """The same, each bag that samples share once; see `ops/shared.py`."""
        if per_id_weights_require_grad(jagged) or set(shared.jagged.features) & set(self.sequence.feature_names):
            # A weight of a shared bag has a gradient of its own for each sample; a sequence has rows for each id.
            only = shared.jagged.features if per_id_weights_require_grad(jagged) else self.sequence.feature_names
            return self.look_up(jagged.owning(only))
        self._check_features(jagged.all_features)
        check_weights([piece.whole for piece in self.arena.pieces], jagged)
        own, common = self._some(jagged.features), self._some(shared.jagged.features)
        try:
            shared.check()
            placed_BS = own.pool_placed(jagged, self.arena.rows, self.pooled.columns)
            part = FeatureVectors(common.pool(shared.jagged, self.arena.rows), common.runs)
        except (RuntimeError, IdError, BatchError):
            # What is wrong is told of samples, not of distinct ones; and it may be allowed.
            return self.look_up(jagged.expanded())
        found = self.look_up_sequences(jagged)
        matrix_BS = lookup_with_staging(
            self._anchor,
            lambda: spread_into(placed_BS, part, shared.inverse_B),
            partial(self._stage_shared, jagged),
        )
        return replace(found, matrix_BS=matrix_BS)

    def _some(self, features: tuple[str, ...]) -> FeatureSubset:
        if features not in self._known_some:
            self._known_some[features] = FeatureSubset.of(self.pooled, features)
        return self._known_some[features]

    def _check_features(self, features: tuple[str, ...]) -> None:
        missing = set(self.pooled.feature_names + self.sequence.feature_names) - set(features)
        if missing:
            raise BatchError(f"the batch lacks {', '.join(sorted(missing))}; it holds {', '.join(features)}")

    def _group(self, sequences: bool) -> TableGroup:
        pieces = self.arena.pieces
        chosen = [i for i, piece in enumerate(pieces) if (piece.table.pooling is Pooling.SEQUENCE) == sequences]
        return make_group(pieces, self.arena.places, chosen)

    def _lookup(self, call: LookupCall) -> Tensor:
        if not call.group.tables:
            return torch.empty(0 if call.per_id else (call.jagged.batch_size, 0), device=self.arena.rows.device)
        try:
            return lookup(call, self.arena.rows, self._anchor, self.append_staged)
        except IdError:  # the rare case pays: look up once more, if the tables allow it
            return lookup(map_unknown(call, self.unknown_ids), self.arena.rows, self._anchor, self.append_staged)

    def append_staged(self, staged: StagedGradients) -> None:
        """A backward leaves this."""
        self.staged.append(staged)

    def _floats(self, features: Tensor, jagged: Jagged, offsets: Tensor) -> list[int]:
        if not self.sequence.tables:
            return []
        begins = (features[:, 0] * jagged.batch_size).to(offsets.device)
        counts = (offsets[begins + jagged.batch_size] - offsets[begins]).tolist()
        return [count * dim for count, dim in zip(counts, features[:, 4].tolist(), strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: everything but what is staged, which belongs to one module's graph."""
        return {**self.__dict__, "staged": []}


def _largest(x: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return max(-float(low), float(high))


def per_id_weights_require_grad(jagged: Jagged) -> bool:
    """Whether per-id weights get a gradient."""
    weights = (jagged.weights_N, None if jagged.shared is None else jagged.shared.jagged.weights_N)
    return torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in weights)


def check_weights(tables: Sequence[Table], jagged: Jagged) -> None:
    """Weighted tables need weights."""
    if jagged.weights_N is None and any(t.pooling is Pooling.WEIGHTED for t in tables):
        names = ", ".join(t.name for t in tables if t.pooling is Pooling.WEIGHTED)
        raise BatchError(f"the batch has no weights, which tables {names} (pooling 'weighted') need")
