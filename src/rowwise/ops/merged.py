"""Gradients of rows, merged and not yet applied: for updates that need something of other ranks in between.

Merging is the update of plain gradient descent on rows of zeros, with a rate of -1: the kernel that merges for every
optimizer, in its order. Applying is the update of a batch in which each row was looked up once. Both are exact. Gives
up: a pass more over the gradients than an update that does both at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowwise.ops.arena import Arena
from rowwise.ops.jagged import deduplicate
from rowwise.ops.layout import RULES, FeatureRow, Mode, TableRow
from rowwise.ops.lookup import StagedGradients
from rowwise.row_optimizers import KernelHyperparameters, Sgd


@dataclass(slots=True, kw_only=True)
class MergedGradients:
    """The rows of one piece of a table that were touched, and the sum of all that reached each."""

    rows_U: Tensor
    grad_UD: Tensor


def merge(staged: StagedGradients) -> list[MergedGradients]:
    """The gradients of each piece of the group, for the rows touched, ascending; NaN where they have no finite sum."""
    call, group = staged.call, staged.call.group
    batch = call.jagged.batch_size
    # The features of a piece side by side, in the group's order: its ids are then one segment.
    runs = [(0, source * batch, batch) for source in call.features_FC[:, 0].tolist()]
    kept: list[Tensor] = [] if staged.weights is None else [staged.weights]
    ids, lengths, weights, starts = torch.ops.rowwise.take(
        [call.jagged.values_N], [call.jagged.lengths_FB], kept, torch.tensor(runs, dtype=torch.int64)
    )
    tables = TableRow.read(group.tables_TC)
    bounds = torch.stack([*(starts[t.first_feature] for t in tables), starts[-1]])
    unique = deduplicate(ids, bounds)
    # Each id becomes the number of its row among those of its piece.
    numbers = unique.inverse_N - unique.bounds_S1[:-1].repeat_interleave(bounds.diff()).to(ids.device)
    counts = unique.bounds_S1.diff().tolist()
    sums, places = _zeros(tables, counts, ids.device)
    features = [
        f._replace(source=k, base=places[f.table].base, rows=places[f.table].rows, type=0, group=0)
        for k, f in enumerate(FeatureRow.read(group.features_FC))
    ]
    finite = True
    bags = _tensor(features), numbers, torch.ops.rowwise.offsets(lengths), weights if kept else None
    rate, keys = (
        torch.tensor([KernelHyperparameters(lr=-1.0)] * len(tables)),
        torch.zeros(len(tables), dtype=torch.int64),
    )
    no_state = torch.empty(0, device=ids.device)
    try:
        torch.ops.rowwise.update(sums, no_state, _tensor(places), rate, keys, *bags, staged.grad, batch, call.per_id)
    except (RuntimeError, ArithmeticError) as error:
        if "not finite" not in str(error):
            raise
        finite = False
    found: list[MergedGradients] = []
    for rows_U, place in zip(unique.values_U.split(counts), places, strict=True):
        grad_UD = sums.view(torch.float32)[place.base // 4 :][: len(rows_U) * place.dim].view(-1, place.dim)
        found.append(MergedGradients(rows_U=rows_U, grad_UD=grad_UD if finite else _marked(grad_UD)))
    return found


def merge_ids(ids_N: Tensor, offsets_B1: Tensor, grad_ND: Tensor, rows: int) -> Tensor:
    """The gradients [rows, D] of rows 0, 1, ... that one feature looked up, a vector for each id."""
    dim = grad_ND.shape[1]
    table = TableRow(0, max(1, rows), dim, 0, 0, RULES[Sgd], 0, 1, 0, 0, 0, 0)
    feature = FeatureRow(0, 0, 0, max(1, rows), dim, 0, Mode.SUM, 0, 0)
    sums = torch.full((max(1, rows), dim), -0.0, device=grad_ND.device)
    flat = sums.view(torch.uint8).flatten()
    rate, keys = torch.tensor([KernelHyperparameters(lr=-1.0)]), torch.zeros(1, dtype=torch.int64)
    no_state, batch = torch.empty(0, device=grad_ND.device), len(offsets_B1) - 1
    bags = _tensor([feature]), ids_N, offsets_B1.contiguous(), None
    try:
        torch.ops.rowwise.update(flat, no_state, _tensor([table]), rate, keys, *bags, grad_ND.reshape(-1), batch, True)
    except (RuntimeError, ArithmeticError) as error:
        if "not finite" not in str(error):
            raise
        _marked(sums)
    return sums[:rows]


def apply(
    arena: Arena, merged: Sequence[MergedGradients], tables: Sequence[TableRow], numbers: tuple[Tensor, Tensor]
) -> None:
    """Update each of these rows once, as `tables` and the numbers [T, 8] and keys [T] say."""
    hyper_TC, keys_T = numbers
    features = [FeatureRow(k, k, t.base, t.rows, t.dim, 0, Mode.SUM, t.type, t.group) for k, t in enumerate(tables)]
    own = [t._replace(first_feature=k, num_features=1) for k, t in enumerate(tables)]
    lengths = torch.tensor([len(m.rows_U) for m in merged], dtype=torch.int64)
    bags = _tensor(features), torch.cat([m.rows_U.long() for m in merged]), torch.ops.rowwise.offsets(lengths)
    if arena.touched is not None:  # see [Note: Touched rows]
        arena.touched.mark(arena.rows, *bags, 1)
    torch.ops.rowwise.update(
        arena.rows,
        arena.state,
        _tensor(own),
        hyper_TC,
        keys_T,
        *bags,
        None,
        torch.cat([m.grad_UD.reshape(-1) for m in merged]),
        1,  # a sample that holds them all
        True,
    )


def _zeros(tables: Sequence[TableRow], counts: Sequence[int], device: torch.device) -> tuple[Tensor, list[TableRow]]:
    """As many rows of minus zeros for each table, in floats, and at least one."""
    places: list[TableRow] = []
    at = 0
    for table, count in zip(tables, counts, strict=True):
        rows = max(1, count)
        plain = table._replace(base=at, rows=rows, state_base=0, state_width=0, rule=RULES[Sgd], type=0, group=0)
        places.append(plain)
        at += rows * table.dim * 4
    return torch.full((at // 4,), -0.0, device=device).view(torch.uint8), places


def _marked(grad_UD: Tensor) -> Tensor:
    """With NaN in rows that the kernel left as they were: a sum that is zero is not minus zero."""
    grad_UD[((grad_UD == 0) & grad_UD.signbit()).all(1)] = torch.nan
    return grad_UD


def _tensor(rows: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), -1)
