"""Applying staged gradients: every touched row is updated once, however often and wherever it was looked up.

Several staged batches (gradient accumulation) become one batch of all their samples, in the order of their
backwards, so accumulating k batches gives the bits of one batch k times as large.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rowwise.ops import check
from rowwise.ops.arena import Arena
from rowwise.ops.hyper import hyper_tensor
from rowwise.ops.jagged import concatenate
from rowwise.ops.layout import Group
from rowwise.ops.lookup import Call, Staged

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: steps lead to every key before one comes again


def update(arena: Arena, staged: Sequence[Staged]) -> None:
    """Merge and apply the gradients staged for one group of tables."""
    if not staged:
        return
    # The common case, one backward per update, copies nothing.
    one = staged[0] if len(staged) == 1 else join(staged)
    call, group = one.call, one.call.group
    hyper_T8, keys_T = next_step(arena, group)
    try:
        torch.ops.rowwise.update(
            arena.rows,
            arena.state,
            group.tables_T10,
            hyper_T8,
            keys_T,
            call.features_F9,
            call.jagged.values_N,
            call.offsets,
            one.weights,
            one.grad,
            call.jagged.batch_size,
            call.per_id,
        )
    except (RuntimeError, ArithmeticError) as error:
        # Ids were checked by the lookup; only one changed in place since then can be bad here.
        check.check_ids(group, call.features_F9, call.jagged)
        if "not finite" not in str(error):
            raise
        raise check.name_bad_gradient(group, call.jagged, one.grad, call.per_id) from None


def next_step(arena: Arena, group: Group) -> tuple[Tensor, Tensor]:
    """Count an update of the group's tables; gives its numbers [T, 8] and the keys of its random bits [T]."""
    steps_T = arena.steps_T[group.members_T] + 1
    arena.steps_T[group.members_T] = steps_T
    hyper_T8 = group.hyper_T8
    if group.hyper_moves:
        hyper_T8 = hyper_tensor((t.optimizer for t in group.tables), steps_T.tolist())
    return hyper_T8, arena.keys_T[group.members_T] + steps_T * GOLDEN


def join(staged: Sequence[Staged]) -> Staged:
    """One batch holding the samples of all."""
    group, per_id = staged[0].call.group, staged[0].call.per_id
    jaggeds = [dataclasses.replace(s.call.jagged, weights_N=s.weights) for s in staged]
    jagged = concatenate(jaggeds, group.feature_names)
    return Staged(
        call=Call(
            group=group,
            features_F9=group.features_F9,
            jagged=jagged,
            offsets=torch.ops.rowwise.offsets(jagged.lengths_FB),
            per_id=per_id,
        ),
        weights=jagged.weights_N,
        grad=_sequence_gradients(group, staged) if per_id else torch.cat([s.grad for s in staged]),
    )


def _sequence_gradients(group: Group, staged: Sequence[Staged]) -> Tensor:
    """Flat gradients of sequences, feature by feature instead of batch by batch."""
    split: list[Sequence[Tensor]] = []
    for s in staged:
        floats: list[int] = []
        for index, name in enumerate(group.feature_names):
            jagged = s.call.jagged
            lengths_FB = jagged.lengths_FB.view(len(jagged.features), -1)
            floats.append(int(lengths_FB[jagged.features.index(name)].sum()) * group.table_of(index).dim)
        split.append(s.grad.split(floats))
    return torch.cat([part for parts in zip(*split, strict=True) for part in parts])
