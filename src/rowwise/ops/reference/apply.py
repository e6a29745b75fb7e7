"""Merging the contributions to each row and updating it once."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.errors import GradientError
from rowwise.ops.layout import Mode, Rule, TableRow
from rowwise.ops.reference.lookup import Bags, inverse
from rowwise.ops.reference.sums import column_sum, merge


class Memory(NamedTuple):
    """What an update changes, and what it has to know of the tables."""

    arena: Tensor
    state: Tensor
    tables: Tensor
    hyper: Tensor


def update(memory: Memory, bags: Bags, grad: Tensor, per_id: bool) -> None:
    """Merge the contributions to each row and update it once; a row whose merged gradient is not finite stays."""
    features = bags.rows()
    # What each id contributes, feature after feature; this is what the kernels never hold in memory.
    grads = list(_gradients_of_ids(bags, grad) if per_id else _gradients_of_bags(bags, grad))
    bad: list[tuple[int, int]] = []
    for index, table in enumerate(TableRow.read(memory.tables)):
        mine = slice(table.first_feature, table.first_feature + table.num_features)
        ids_N = torch.cat([bags.ids(f) for f in features[mine]])
        samples_N = torch.cat([bags.samples(f) for f in features[mine]])
        if not len(ids_N):
            continue
        # Features follow each other in these lists, so a stable sort gives (sample, feature, position).
        order = torch.argsort(samples_N, stable=True)
        rows_M, merged_MD = merge(ids_N[order], samples_N[order], torch.cat(grads[mine])[order])
        # x * 0 is 0 unless x is infinite or NaN. Checked after merging, as sums of finite numbers may overflow.
        finite_M = (merged_MD * 0 == 0).all(1)
        bad += [(index, int(row)) for row in rows_M[~finite_M][:1]]
        _apply(memory, index, rows_M[finite_M], merged_MD[finite_M])
    if bad:
        raise GradientError(f"rowwise: the merged gradient of row {bad[0][1]} of table {bad[0][0]} is not finite")


def _gradients_of_bags(bags: Bags, grad: Tensor) -> Iterator[Tensor]:
    """For each feature, the gradient that each of its ids gets from its bag [n, D]."""
    for feature in bags.rows():
        grad_BD = grad[:, feature.column : feature.column + feature.dim]
        if feature.mode == Mode.MEAN:
            grad_BD = grad_BD * inverse(bags.bounds(feature).diff(), grad)
        yield bags.scale(feature, grad_BD[bags.samples(feature)])


def _gradients_of_ids(bags: Bags, grad: Tensor) -> Iterator[Tensor]:
    """For each feature, the gradients of its ids, cut from the flat gradient of a sequence lookup [n, D]."""
    at = 0
    for feature in bags.rows():
        floats = len(bags.ids(feature)) * feature.dim
        yield grad[at : at + floats].view(-1, feature.dim)
        at += floats


def _apply(memory: Memory, index: int, rows_M: Tensor, g_MD: Tensor) -> None:
    table = TableRow.read(memory.tables)[index]
    lr, eps, weight_decay, _ = memory.hyper[index].to(g_MD.device)
    # Views: the optimizers below write through them into the arena.
    w = memory.arena[table.base : table.base + table.rows * table.dim].view(table.rows, table.dim)
    s = memory.state[table.state_base : table.state_base + table.rows * table.state_width]
    # L2 in the gradient, before any statistic of it, as FBGEMM and torch do.
    if weight_decay != 0:
        g_MD = g_MD + w[rows_M] * weight_decay
    RULES[Rule(table.rule)](w, s.view(table.rows, table.state_width), rows_M, g_MD, lr, eps)


def _sgd(w: Tensor, s: Tensor, rows_M: Tensor, g_MD: Tensor, lr: Tensor, eps: Tensor) -> None:
    w[rows_M] = w[rows_M] - g_MD * lr


def _adagrad(w: Tensor, s: Tensor, rows_M: Tensor, g_MD: Tensor, lr: Tensor, eps: Tensor) -> None:
    s[rows_M] = s[rows_M] + g_MD * g_MD
    w[rows_M] = w[rows_M] - g_MD / (_root(s[rows_M]) + eps) * lr


def _rowwise_adagrad(w: Tensor, s: Tensor, rows_M: Tensor, g_MD: Tensor, lr: Tensor, eps: Tensor) -> None:
    s[rows_M, 0] = s[rows_M, 0] + column_sum(g_MD * g_MD) / w.shape[1]
    w[rows_M] = w[rows_M] - g_MD * (lr / (_root(s[rows_M, 0]) + eps)).unsqueeze(1)


def _root(x: Tensor) -> Tensor:
    """The correctly rounded square root: torch's own may come from a vector library that is a bit off."""
    return x.double().sqrt().to(x.dtype)


RULES: dict[Rule, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]] = {
    Rule.SGD: _sgd,
    Rule.ADAGRAD: _adagrad,
    Rule.ROWWISE_ADAGRAD: _rowwise_adagrad,
}
