"""Merging and applying gradients in two steps, for updates that need other ranks in between.

Both steps are the update kernel, so both have its bits. Merging is SGD with a learning rate of -1 on rows of zeros.
Applying is the update of a batch in which each row was looked up once. It costs one more pass over the gradients than
an update in one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowwise.tables.ops.arena import Arena, KernelBags
from rowwise.tables.ops.jagged import deduplicate
from rowwise.tables.ops.layout import RULES, SOURCE, FeatureDescriptor, Mode, TableDescriptor
from rowwise.tables.ops.lookup import StagedGradients
from rowwise.tables.ops.pinned import copy_to
from rowwise.tables.row_optimizers import KernelHyperparameters, Sgd


@dataclass(slots=True, kw_only=True)
class MergedGradients:
    """The touched rows of one table piece, ascending, and the sum of the contributions to each."""

    rows_U: Tensor
    grad_UD: Tensor


def merge_staged(staged: StagedGradients) -> list[MergedGradients]:
    """The merged gradients of each piece of the group; NaN in rows whose sum is not finite."""
    call, group = staged.call, staged.call.group
    batch = call.jagged.batch_size
    # Reordered so that the features of a piece are neighbours: its ids are then one segment to deduplicate.
    segments = [(0, source * batch, batch) for source in call.features_FC[:, SOURCE].tolist()]
    batch_weights: list[Tensor] = [] if staged.weights is None else [staged.weights]
    ids, lengths, weights, starts = torch.ops.rowwise.take(
        [call.jagged.values_N], [call.jagged.lengths_FB], batch_weights, torch.tensor(segments, dtype=torch.int64)
    )
    tables = TableDescriptor.read(group.tables_TC)
    bounds = torch.stack([*(starts[t.first_feature] for t in tables), starts[-1]])
    unique = deduplicate(ids, bounds)
    # Each id becomes the index of its row among the touched rows of its piece: the ids of a small table of sums.
    numbers = unique.inverse_N - copy_to(unique.bounds_S1[:-1].repeat_interleave(bounds.diff()), ids.device)
    counts = unique.bounds_S1.diff().tolist()
    sums, sum_tables = _negative_zero_rows(tables, counts, ids.device)
    features = [
        f._replace(source=k, base=sum_tables[f.table].base, rows=sum_tables[f.table].rows, type=0, scale_group=0)
        for k, f in enumerate(FeatureDescriptor.read(group.features_FC))
    ]
    bags = KernelBags(_int_matrix(features), numbers, torch.ops.rowwise.offsets(lengths), batch)
    finite = _add_up(sums, sum_tables, bags, weights if batch_weights else None, staged.grad, per_id=call.per_id)
    finite &= ids.device.type == "cpu"  # kernels of a GPU raise a step later
    merged: list[MergedGradients] = []
    for rows_U, table in zip(unique.values_U.split(counts), sum_tables, strict=True):
        grad_UD = sums.view(torch.float32)[table.base // 4 :][: len(rows_U) * table.dim].view(-1, table.dim)
        merged.append(MergedGradients(rows_U=rows_U, grad_UD=grad_UD if finite else _mark_nan(grad_UD)))
    return merged


def merge_ids(ids_N: Tensor, offsets_B1: Tensor, grad_ND: Tensor, rows: int) -> Tensor:
    """The merged gradients [rows, D] of rows 0, 1, ... that one sequence feature looked up."""
    dim = grad_ND.shape[1]
    table = TableDescriptor(0, max(1, rows), dim, 0, 0, RULES[Sgd], 0, 1, 0, 0, 0, 0)
    feature = FeatureDescriptor(0, 0, 0, max(1, rows), dim, 0, Mode.SUM, 0, 0)
    sums = torch.full((max(1, rows), dim), -0.0, device=grad_ND.device)
    bags = KernelBags(_int_matrix([feature]), ids_N, offsets_B1.contiguous(), len(offsets_B1) - 1)
    if not _add_up(sums.view(torch.uint8).flatten(), [table], bags, None, grad_ND.reshape(-1), per_id=True):
        _mark_nan(sums)
    return sums[:rows]


def apply_merged(
    arena: Arena,
    merged: Sequence[MergedGradients],
    tables: Sequence[TableDescriptor],
    hyper_and_keys: tuple[Tensor, Tensor],
) -> None:
    """Update each of these rows once; `tables` and `hyper_and_keys` (see `next_step`) have an entry per piece."""
    stored = [(t.base, t.rows, t.dim, 0, Mode.SUM, t.type, t.scale_group) for t in tables]
    features_FC = _int_matrix([FeatureDescriptor(k, k, *fields) for k, fields in enumerate(stored)])
    own = [t._replace(first_feature=k, num_features=1) for k, t in enumerate(tables)]
    lengths = torch.tensor([len(m.rows_U) for m in merged], dtype=torch.int64, device=arena.rows.device)
    # One sample, whose bag of each feature holds all the feature's rows.
    bags = KernelBags(features_FC, torch.cat([m.rows_U.long() for m in merged]), torch.ops.rowwise.offsets(lengths), 1)
    grad = torch.cat([m.grad_UD.reshape(-1) for m in merged])
    arena.update(bags, _int_matrix(own), hyper_and_keys, None, grad, per_id=True)


def _add_up(
    sums: Tensor, tables: Sequence[TableDescriptor], bags: KernelBags, weights: Tensor | None, grad: Tensor, *,
    per_id: bool,
) -> bool:  # fmt: skip
    """Add contributions to rows of `sums`, except to rows whose sum is not finite; returns whether all were finite."""
    rate = torch.tensor([KernelHyperparameters(lr=-1.0)] * len(tables))
    keys, no_state = torch.zeros(len(tables), dtype=torch.int64), torch.empty(0, device=sums.device)
    features_FC, values_N, offsets, batch = bags
    try:
        torch.ops.rowwise.update(
            sums, no_state, _int_matrix(tables), rate, keys, features_FC, values_N, offsets, weights, grad, batch,
            per_id,
        )  # fmt: skip
    except (RuntimeError, ArithmeticError) as error:
        if "not finite" not in str(error):
            raise
        return False
    return True


def _negative_zero_rows(
    tables: Sequence[TableDescriptor], counts: Sequence[int], device: torch.device
) -> tuple[Tensor, list[TableDescriptor]]:
    """Float rows of -0.0, `counts` for each table and at least one, and descriptors of these tables.

    -0.0 + x is x for every x, and no merged sum is -0.0: a row that still is was skipped by the kernel.
    """
    sum_tables: list[TableDescriptor] = []
    at = 0  # first byte of the next table
    for table, count in zip(tables, counts, strict=True):
        rows = max(1, count)
        plain = table._replace(base=at, rows=rows, state_base=0, state_width=0, rule=RULES[Sgd], type=0, scale_group=0)
        sum_tables.append(plain._replace(slot_rows=-1))
        at += rows * table.dim * 4
    return torch.full((at // 4,), -0.0, device=device).view(torch.uint8), sum_tables


def _mark_nan(grad_UD: Tensor) -> Tensor:
    """NaN in rows that the kernel skipped, which are still all -0.0."""
    grad_UD[((grad_UD == 0) & grad_UD.signbit()).all(1)] = torch.nan
    return grad_UD


def _int_matrix(rows: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), -1)
