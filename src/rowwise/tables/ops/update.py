"""Applies staged gradients: each touched row is updated once, however often it was looked up.

Several staged batches (gradient accumulation) are concatenated in the order of their backwards, so accumulating k
batches gives the bits of one batch k times as large.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from rowwise.base.errors import GradientError
from rowwise.tables.batch import Jagged
from rowwise.tables.ops import check
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.bad_gradient import name_bad_gradient
from rowwise.tables.ops.hyper import hyper_tensor
from rowwise.tables.ops.jagged import concatenate, permute, split
from rowwise.tables.ops.layout import TableGroup
from rowwise.tables.ops.lookup import StagedGradients

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so step * GOLDEN does not repeat for 2**64 steps


def update(arena: Arena, staged: Sequence[StagedGradients]) -> None:
    """Merge and apply the gradients staged for one table group, in one kernel call."""
    if not staged:
        return
    combined = concat_staged(staged)
    call, group = combined.call, combined.call.group
    hyper_and_keys = next_step(arena, group)
    try:
        arena.update(call.bags, group.tables_TC, hyper_and_keys, combined.weights, combined.grad, per_id=call.per_id)
    except (RuntimeError, ArithmeticError) as error:
        # The lookup has checked the ids; only an id that was changed in place since then can be bad.
        check.check_ids(group, call.features_FC, call.jagged)
        if "not finite" not in str(error):
            raise
        raise name_bad_gradient(call, combined.grad, str(error)) from None


def run_all(updates: Iterable[Callable[[], None]]) -> None:
    """Run all updates, then raise the first `GradientError`: every rank still enters the collectives of later ones."""
    errors: list[GradientError] = []
    for run_update in updates:
        try:
            run_update()
        except GradientError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def next_step(arena: Arena, group: TableGroup) -> tuple[Tensor, Tensor]:
    """Advance the step of the group's tables; returns `hyper_TH` of that step and the keys [T] of its random bits."""
    steps_T = arena.steps_T[group.members_T] + 1
    arena.steps_T[group.members_T] = steps_T
    hyper_TH = group.hyper_TH
    if group.hyper_depends_on_step:
        hyper_TH = hyper_tensor((t.optimizer for t in group.tables), steps_T.tolist())
    if arena.learning_rates_T is not None:
        rates_T1 = arena.learning_rates_T[group.members_T].unsqueeze(1)
        hyper_TH = torch.cat([rates_T1, hyper_TH[:, 1:]], 1)  # `KernelHyperparameters.lr` is the first
    return hyper_TH, arena.keys_T[group.members_T] + steps_T * GOLDEN


def concat_staged(staged: Sequence[StagedGradients]) -> StagedGradients:
    """One staged batch with the samples of all, in order."""
    if len(staged) == 1:  # the common case, one backward per update, copies nothing
        return staged[0]
    group, per_id = staged[0].call.group, staged[0].call.per_id
    # Each feature once: column pieces of one table are looked up by the same feature.
    batch = concatenate([s.batch for s in staged], tuple(dict.fromkeys(group.feature_names)))
    grad = _sequence_gradients(group, staged) if per_id else torch.cat([s.grad for s in staged])
    return staged[0].of_batch(batch, grad)


def split_staged(staged: StagedGradients) -> list[StagedGradients]:
    """A staged batch that was concatenated from one batch per rank, split into these (`call.samples_W`)."""
    call, group = staged.call, staged.call.group
    batches_W = split(permute(staged.batch, tuple(dict.fromkeys(group.feature_names))), call.samples_W)
    if call.per_id:
        floats = [floats_of_group(group, batch) for batch in batches_W]
        blocks = iter(staged.grad.split([n for rank_floats in zip(*floats, strict=True) for n in rank_floats]))
        by_feature = [[next(blocks) for _ in batches_W] for _ in group.feature_names]
        grads = [torch.cat(parts) for parts in zip(*by_feature, strict=True)]
    else:
        grads = list(staged.grad.split(call.samples_W))
    return [staged.of_batch(batch, grad) for batch, grad in zip(batches_W, grads, strict=True)]


def reorder_by_rank(staged: Sequence[StagedGradients], calls: int) -> list[StagedGradients]:
    """Staged batches in the order of the global batch, where each batch was looked up by `calls` forward calls.

    Each call has a part of every rank's batch; the result has all parts of rank 0 in order, then those of rank 1.
    """
    if calls == 1:
        return list(staged)
    ordered: list[StagedGradients] = []
    for first in range(0, len(staged), calls):
        parts = [split_staged(s) for s in staged[first : first + calls]]
        ordered += [part for rank_parts in zip(*parts, strict=True) for part in rank_parts]
    return ordered


def _sequence_gradients(group: TableGroup, staged: Sequence[StagedGradients]) -> Tensor:
    """The flat gradients of all batches, reordered from batch-major to feature-major."""
    parts = [s.grad.split(floats_of_group(group, s.call.jagged)) for s in staged]
    return torch.cat([part for feature_parts in zip(*parts, strict=True) for part in feature_parts])


def floats_of_group(group: TableGroup, jagged: Jagged) -> list[int]:
    """Floats of each feature's per-id vectors."""
    lengths_FB = jagged.lengths_FB.view(len(jagged.features), -1)
    counts = [int(lengths_FB[jagged.features.index(name)].sum()) for name in group.feature_names]
    return [count * group.table_of(index).dim for index, count in enumerate(counts)]
