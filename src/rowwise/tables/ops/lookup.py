"""Lookups as autograd functions whose backward stages the gradient instead of changing rows.

[Note: Staging] The backward of a lookup changes nothing: it appends (batch, gradient) to a list. `update`
later merges what was staged and changes each touched row once. Between the two a trainer can check, clip or
drop gradients; no gradient of the size of a table is ever made. Staging refers to the batch and to autograd's
gradient without copying them: changing those in place before the update changes the update.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from rowwise.tables.batch import Jagged
from rowwise.tables.ops import check
from rowwise.tables.ops.arena import Arena, KernelBags
from rowwise.tables.ops.halves import in_halves
from rowwise.tables.ops.layout import SOURCE, TableGroup


@dataclass(frozen=True, slots=True)
class LookupCall:
    """A batch looked up in one group of tables."""

    group: TableGroup
    features_FC: Tensor
    jagged: Jagged
    offsets: Tensor
    per_id: bool  # one vector for each id (sequences), not for each bag
    samples_W: tuple[int, ...] = ()  # samples of each rank, if the batch is a concatenation of several ranks' batches

    @classmethod
    def of(cls, group: TableGroup, jagged: Jagged, *, per_id: bool, samples_W: tuple[int, ...] = ()) -> Self:
        """The features of the group in the batch's order."""
        offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
        return cls(group, group.for_sources(jagged.features), jagged, offsets, per_id, samples_W)

    def of_batch(self, jagged: Jagged) -> Self:
        """The lookup of another batch in the same tables."""
        return type(self).of(self.group, jagged, per_id=self.per_id)

    @property
    def bags(self) -> KernelBags:
        return KernelBags(self.features_FC, self.jagged.values_N, self.offsets, self.jagged.batch_size)

    def rows(self, arena: Arena, weights: Tensor | None) -> Tensor:
        """Pooled vectors [B, S], or the flat rows of all ids; raises an `IdError` for an id outside its table."""
        try:
            return arena.gather(self.bags) if self.per_id else arena.pool(self.bags, weights, self.group.columns)
        except RuntimeError:
            # Lengths first: wrong ones shift every id after them.
            check.check_lengths(self.jagged)
            check.check_ids(self.group, self.features_FC, self.jagged)
            raise

    def weight_grad(self, arena: Arena, weights: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the per-id weights."""
        total: Tensor | None = None
        # Column pieces of one table are looked up by the same ids, and each adds to the gradients of their weights.
        # The kernel writes a weight's gradient once per call, so each call has a batch feature only once.
        with arena.pinned(self.bags) as values_N:
            for features_FC in _distinct_sources(self.features_FC):
                part = torch.ops.rowwise.pool_weight_grad(
                    arena.rows, features_FC, values_N, self.offsets, weights, grad, self.jagged.batch_size
                )
                total = part if total is None else total + part
        return torch.zeros_like(weights) if total is None else total


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedGradients:
    """A batch, and the gradient of its lookup, kept by a backward for `update`. See [Note: Staging]."""

    call: LookupCall
    weights: Tensor | None  # per-id weights, detached
    grad: Tensor  # [B, S], or flat for a lookup per id

    @property
    def batch(self) -> Jagged:
        """The batch with the staged weights."""
        return replace(self.call.jagged, weights_N=self.weights)

    def of_batch(self, batch: Jagged, grad: Tensor) -> Self:
        """Gradients of another batch, looked up in the same tables."""
        return replace(self, call=self.call.of_batch(batch), weights=batch.weights_N, grad=grad)


def _distinct_sources(features_FC: Tensor) -> list[Tensor]:
    """The features in rounds in which no two have the same source; nearly always one round."""
    rounds: list[list[int]] = []
    last_round: dict[int, int] = {}
    for number, source in enumerate(features_FC[:, SOURCE].tolist()):
        index = last_round[source] = last_round.get(source, -1) + 1
        if index == len(rounds):
            rounds.append([])
        rounds[index].append(number)
    return [features_FC] if len(rounds) == 1 else [features_FC[numbers] for numbers in rounds]


StageGradients = Callable[[StagedGradients], None]


def lookup(call: LookupCall, arena: Arena, anchor: Tensor, stage: StageGradients) -> Tensor:
    """The rows of a batch, differentiable; `anchor`: any tensor that requires a gradient, so that the backward runs."""
    weights = call.jagged.weights_N
    # Weights computed under autocast come in 16 bits; outside the function, so that the cast has a gradient.
    if weights is not None:
        weights = weights.float()
    # Without gradients (evaluation) nothing is staged and nothing is kept alive.
    if not torch.is_grad_enabled():
        batch = call.jagged if weights is call.jagged.weights_N else replace(call.jagged, weights_N=weights)

        def look_up(part: Jagged) -> Tensor:
            return (call if part is batch else call.of_batch(part)).rows(arena, part.weights_N)

        return in_halves(batch, look_up, call.features_FC if call.per_id else None)
    return _LookupFunction.apply(anchor, weights, call, arena, stage)


class _LookupFunction(torch.autograd.Function):
    """The autograd function of a lookup; see [Note: Staging]."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, _anchor, weights, call, arena, stage = args
        ctx.set_materialize_grads(False)  # without a loss on the output: None, and nothing is staged
        # Detached: the staged weights must not keep the graph that made them alive.
        ctx.staged = (call, arena, None if weights is None else weights.detach(), stage)
        return call.rows(arena, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        call, arena, weights, stage = ctx.staged
        if grad_outputs[0] is None:
            return (None,) * 5
        # A gradient that is an expanded scalar (of a sum, say) has no memory of its own to read.
        grad = grad_outputs[0].contiguous()
        stage(StagedGradients(call=call, weights=weights, grad=grad))
        weight_grad = None
        if weights is not None and ctx.needs_input_grad[1] and not call.per_id:
            weight_grad = call.weight_grad(arena, weights, grad)
        return None, weight_grad, None, None, None
