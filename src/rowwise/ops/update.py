"""Applying staged gradients: every touched row is updated once, however often and wherever it was looked up.

Several staged batches (gradient accumulation) become one batch of all their samples, in the order of their
backwards, so accumulating k batches gives the bits of one batch k times as large.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.errors import GradientError
from rowwise.ops import check
from rowwise.ops.arena import Arena
from rowwise.ops.bad_gradient import name_bad_gradient
from rowwise.ops.hyper import hyper_tensor
from rowwise.ops.jagged import concatenate, permute, split
from rowwise.ops.layout import TableGroup
from rowwise.ops.lookup import LookupCall, StagedGradients

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: steps lead to every key before one comes again


def update(arena: Arena, staged: Sequence[StagedGradients]) -> None:
    """Merge and apply the gradients staged for one group of tables."""
    if not staged:
        return
    one = join_staged(staged)
    call, group = one.call, one.call.group
    hyper_TC, keys_T = next_step(arena, group)
    jagged = call.jagged
    if arena.touched is not None:  # see [Note: Touched rows]
        arena.touched.mark(arena.rows, call.features_FC, jagged.values_N, call.offsets, jagged.batch_size)
    try:
        torch.ops.rowwise.update(
            arena.rows,
            arena.state,
            group.tables_TC,
            hyper_TC,
            keys_T,
            call.features_FC,
            jagged.values_N,
            call.offsets,
            one.weights,
            one.grad,
            jagged.batch_size,
            call.per_id,
        )
    except (RuntimeError, ArithmeticError) as error:
        # Ids were checked by the lookup; only one changed in place since then can be bad here.
        check.check_ids(group, call.features_FC, jagged)
        if "not finite" not in str(error):
            raise
        raise name_bad_gradient(call, one.grad, str(error)) from None


def run_all(updates: Iterable[Callable[[], None]]) -> None:
    """Do each, whatever another met: a bad row costs no other row its step, and no rank a call that others wait for."""
    errors: list[GradientError] = []
    for update_some in updates:
        try:
            update_some()
        except GradientError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def next_step(arena: Arena, group: TableGroup) -> tuple[Tensor, Tensor]:
    """Count an update of the group's tables; gives its numbers [T, 8] and the keys of its random bits [T]."""
    steps_T = arena.steps_T[group.members_T] + 1
    arena.steps_T[group.members_T] = steps_T
    hyper_TC = group.hyper_TC
    if group.hyper_moves:
        hyper_TC = hyper_tensor((t.optimizer for t in group.tables), steps_T.tolist())
    return hyper_TC, arena.keys_T[group.members_T] + steps_T * GOLDEN


def join_staged(staged: Sequence[StagedGradients]) -> StagedGradients:
    """One batch holding the samples of all."""
    if len(staged) == 1:  # the common case, one backward per update, copies nothing
        return staged[0]
    group, per_id = staged[0].call.group, staged[0].call.per_id
    jaggeds = [dataclasses.replace(s.call.jagged, weights_N=s.weights) for s in staged]
    # Once each: pieces of a table that share their rows are looked up by the same ids.
    jagged = concatenate(jaggeds, tuple(dict.fromkeys(group.feature_names)))
    return StagedGradients(
        call=LookupCall(
            group, group.for_sources(jagged.features), jagged, torch.ops.rowwise.offsets(jagged.lengths_FB), per_id
        ),
        weights=jagged.weights_N,
        grad=_sequence_gradients(group, staged) if per_id else torch.cat([s.grad for s in staged]),
    )


def split_staged(staged: StagedGradients) -> list[StagedGradients]:
    """What was staged for a batch that was put together from several, by those."""
    call, group = staged.call, staged.call.group
    jagged = dataclasses.replace(call.jagged, weights_N=staged.weights)
    pieces = split(permute(jagged, tuple(dict.fromkeys(group.feature_names))), call.parts)
    if call.per_id:
        floats = [_floats(group, piece) for piece in pieces]
        blocks = iter(staged.grad.split([n for by_piece in zip(*floats, strict=True) for n in by_piece]))
        by_feature = [[next(blocks) for _ in pieces] for _ in group.feature_names]
        grads = [torch.cat(mine) for mine in zip(*by_feature, strict=True)]
    else:
        grads = list(staged.grad.split(call.parts))
    return [
        StagedGradients(
            call=LookupCall(
                group, group.for_sources(p.features), p, torch.ops.rowwise.offsets(p.lengths_FB), call.per_id
            ),
            weights=p.weights_N,
            grad=grad,
        )
        for p, grad in zip(pieces, grads, strict=True)
    ]


def join_parts(staged: Sequence[StagedGradients], calls: int) -> list[StagedGradients]:
    """So many calls, one after the other, looked up one batch in pieces: its samples in order again.

    Each call holds a piece of the batch of every rank; here all pieces of the first rank come first, in order.
    """
    ordered: list[StagedGradients] = []
    for first in range(0, len(staged), calls):
        pieces = [split_staged(s) for s in staged[first : first + calls]]
        ordered += [piece for by_rank in zip(*pieces, strict=True) for piece in by_rank]
    return ordered


def _sequence_gradients(group: TableGroup, staged: Sequence[StagedGradients]) -> Tensor:
    """Flat gradients of sequences, feature by feature instead of batch by batch."""
    parts = [s.grad.split(_floats(group, s.call.jagged)) for s in staged]
    return torch.cat([part for of_feature in zip(*parts, strict=True) for part in of_feature])


def _floats(group: TableGroup, jagged: Jagged) -> list[int]:
    """How many floats the vectors of all ids of each feature are."""
    lengths_FB = jagged.lengths_FB.view(len(jagged.features), -1)
    counts = [int(lengths_FB[jagged.features.index(name)].sum()) for name in group.feature_names]
    return [count * group.table_of(index).dim for index, count in enumerate(counts)]
