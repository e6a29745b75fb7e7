"""Reference of updates: merge the contributions to each row, then update it once by its optimizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.base.errors import GradientError
from rowwise.tables.ops.layout import Mode, TableDescriptor
from rowwise.tables.ops.reference.lookup import FeatureBags, inverse
from rowwise.tables.ops.reference.random import row_bits
from rowwise.tables.ops.reference.rowtype import read_rows, write_rows
from rowwise.tables.ops.reference.sums import column_sum, merge
from rowwise.tables.row_optimizers import OPTIMIZERS, Adagrad, Adam, Ftrl, Lamb, RowWiseAdagrad, RowWiseAdam, Sgd


class UpdateMemory(NamedTuple):
    """The arena and optimizer state that an update changes, and the kernel tensors that describe them."""

    arena: Tensor
    state: Tensor
    tables: Tensor
    hyper: Tensor
    keys: Tensor
    slot_rows: Tensor | None = None  # of tables on disk


def update(memory: UpdateMemory, bags: FeatureBags, grad: Tensor, per_id: bool) -> None:
    """Update each touched row once; a row with a merged gradient that is not finite is kept, and raises at the end."""
    features = bags.rows()
    # One gradient per id, feature after feature; the kernels never hold these in memory.
    grads = list(_gradients_of_ids(bags, grad) if per_id else _gradients_of_bags(bags, grad))
    bad: list[tuple[int, int]] = []
    for index, table in enumerate(TableDescriptor.read(memory.tables)):
        span = slice(table.first_feature, table.first_feature + table.num_features)
        ids_N = torch.cat([bags.ids(f) for f in features[span]])
        samples_N = torch.cat([bags.samples(f) for f in features[span]])
        if not len(ids_N):
            continue
        # Features follow each other in these lists, so a stable sort gives (sample, feature, position).
        order = torch.argsort(samples_N, stable=True)
        rows_M, merged_MD = merge(ids_N[order], samples_N[order], torch.cat(grads[span])[order])
        # x * 0 is 0 unless x is infinite or NaN. Checked after merging, as sums of finite numbers may overflow.
        finite_M = (merged_MD * 0 == 0).all(1)
        bad += [(index, int(row)) for row in _rows_of_slots(memory, table, rows_M)[~finite_M][:1]]
        _apply(memory, index, rows_M[finite_M], merged_MD[finite_M])
    if bad:
        raise GradientError(f"rowwise: the merged gradient of row {bad[0][1]} of table {bad[0][0]} is not finite")


def _gradients_of_bags(bags: FeatureBags, grad: Tensor) -> Iterator[Tensor]:
    """For each feature, the gradient that each of its ids gets from its bag [n, D]."""
    for feature in bags.rows():
        grad_BD = grad[:, feature.column : feature.column + feature.dim]
        if feature.mode == Mode.MEAN:
            grad_BD = grad_BD * inverse(bags.bounds(feature).diff(), grad)
        yield bags.scale(feature, grad_BD[bags.samples(feature)])


def _gradients_of_ids(bags: FeatureBags, grad: Tensor) -> Iterator[Tensor]:
    """For each feature, the gradients of its ids, cut from the flat gradient of a sequence lookup [n, D]."""
    at = 0
    for feature in bags.rows():
        floats = len(bags.ids(feature)) * feature.dim
        yield grad[at : at + floats].view(-1, feature.dim)
        at += floats


def _apply(memory: UpdateMemory, index: int, rows_M: Tensor, g_MD: Tensor) -> None:
    table = TableDescriptor.read(memory.tables)[index]
    hyper = memory.hyper[index].to(g_MD.device)
    _, _, weight_decay, clip, *_ = hyper
    packed = memory.arena[table.base : table.base + table.rows * table.format.bytes].view(table.rows, -1)
    state = memory.state[table.state_base : table.state_base + table.rows * table.state_width]
    state = state.view(table.rows, table.state_width)
    w_MD = read_rows(packed[rows_M], table.format)
    if clip > 0:
        length_M = root(column_sum(g_MD * g_MD))
        g_MD = g_MD * torch.where(length_M > clip, clip / length_M, 1.0).unsqueeze(1)
    rule = REFERENCE[list(OPTIMIZERS.values())[table.rule]]
    # L2 in the gradient, before any statistic of it, as FBGEMM and torch do.
    if weight_decay != 0 and rule.decays_gradient:
        g_MD = g_MD + w_MD * weight_decay
    w_MD, s_MW = rule.change(w_MD, state[rows_M], g_MD, hyper)
    state[rows_M] = s_MW
    columns = range(table.first_column, table.first_column + table.dim)
    full_rows_M = _rows_of_slots(memory, table, rows_M) + table.first_row
    random_MD = row_bits(memory.keys[index], full_rows_M, columns)
    packed[rows_M] = write_rows(w_MD, table.format, random_MD)


def _rows_of_slots(memory: UpdateMemory, table: TableDescriptor, slots_M: Tensor) -> Tensor:
    if table.slot_rows < 0:
        return slots_M
    assert memory.slot_rows is not None
    return memory.slot_rows[table.slot_rows :][slots_M]


# New weights [M, D] and state [M, W].
Change = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRule:
    """An optimizer that updates each column independently."""

    change: Callable[[Tensor, Tensor, Tensor, Tensor], Change]  # (weights, state, gradients, hyper)
    decays_gradient: bool = False  # weight decay is added to the gradient


class RowTerms(NamedTuple):
    """Values [M, D, n] to sum over the columns of each row, and the state and gradients after the rule's first half."""

    values_MDn: Tensor
    s_MW: Tensor
    g_MD: Tensor


class PlainStep(NamedTuple):
    """The rest of an update once the sums are known: w -= lr * (g + weight_decay * w)."""

    s_MW: Tensor
    g_MD: Tensor
    lr: float | Tensor = 1.0
    weight_decay: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """An optimizer that needs sums over the columns of a row, in two parts: columns may be on several ranks.

    Args:
        terms: (weights, state, gradients, hyper) -> `RowTerms`; weights are a function, as few rules read them.
        finish: (state, gradients, sums [M, n], columns of the row, hyper) -> `PlainStep`.
        decays_gradient: weight decay is added to the gradient.
    """

    terms: Callable[[Callable[[], Tensor], Tensor, Tensor, Tensor], RowTerms]
    finish: Callable[[Tensor, Tensor, Tensor, int, Tensor], PlainStep]
    decays_gradient: bool = False

    def change(self, w_MD: Tensor, s_MW: Tensor, g_MD: Tensor, hyper: Tensor) -> Change:
        """New weights and state, if all columns are on this rank."""
        values_MDn, s_MW, g_MD = self.terms(lambda: w_MD, s_MW, g_MD, hyper)
        sums_Mn = torch.stack([column_sum(values_MD) for values_MD in values_MDn.unbind(2)], 1)
        s_MW, g_MD, lr, weight_decay = self.finish(s_MW, g_MD, sums_Mn, w_MD.shape[1], hyper)
        return w_MD - (g_MD if weight_decay is None else g_MD + w_MD * weight_decay) * lr, s_MW


def _sgd(w_MD: Tensor, s_MW: Tensor, g_MD: Tensor, hyper: Tensor) -> Change:
    lr, *_ = hyper
    return w_MD - g_MD * lr, s_MW


def _adagrad(w_MD: Tensor, s_MW: Tensor, g_MD: Tensor, hyper: Tensor) -> Change:
    lr, eps, *_ = hyper
    s_MW = s_MW + g_MD * g_MD
    return w_MD - g_MD / (root(s_MW) + eps) * lr, s_MW


def _squares(_: Callable[[], Tensor], s_MW: Tensor, g_MD: Tensor, hyper: Tensor) -> RowTerms:
    return RowTerms((g_MD * g_MD).unsqueeze(2), s_MW, g_MD)


def _rowwise_adagrad(s_M1: Tensor, g_MD: Tensor, sums_M1: Tensor, dim: int, hyper: Tensor) -> PlainStep:
    lr, eps, *_ = hyper
    s_M1 = s_M1 + sums_M1 / dim
    return PlainStep(s_M1, g_MD * (lr / (root(s_M1) + eps)))


def _adam_step(s_MW: Tensor, g_MD: Tensor, hyper: Tensor) -> Change:
    """Adam's step [M, D] and the new moments."""
    _, eps, _, _, beta1, beta2, inverse1, inverse2 = hyper
    m_MD, v_MD = s_MW.chunk(2, 1)
    m_MD = m_MD * beta1 + g_MD * (1 - beta1)
    v_MD = v_MD * beta2 + g_MD * g_MD * (1 - beta2)
    return m_MD * inverse1 / (root(v_MD * inverse2) + eps), torch.cat([m_MD, v_MD], 1)


def _adam(w_MD: Tensor, s_MW: Tensor, g_MD: Tensor, hyper: Tensor) -> Change:
    lr, _, weight_decay, *_ = hyper
    step_MD, s_MW = _adam_step(s_MW, g_MD, hyper)
    return w_MD - (step_MD + w_MD * weight_decay) * lr, s_MW


def _rowwise_adam(s_MW: Tensor, g_MD: Tensor, sums_M1: Tensor, dim: int, hyper: Tensor) -> PlainStep:
    lr, eps, weight_decay, _, beta1, beta2, inverse1, inverse2 = hyper
    m_MD, v_M1 = s_MW[:, :-1], s_MW[:, -1:]
    m_MD = m_MD * beta1 + g_MD * (1 - beta1)
    v_M1 = v_M1 * beta2 + sums_M1 / dim * (1 - beta2)
    step_MD = m_MD * inverse1 * (1 / (root(v_M1 * inverse2) + eps))
    return PlainStep(torch.cat([m_MD, v_M1], 1), step_MD, lr, weight_decay)


def _lamb_terms(weights: Callable[[], Tensor], s_MW: Tensor, g_MD: Tensor, hyper: Tensor) -> RowTerms:
    _, _, weight_decay, *_ = hyper
    w_MD = weights()
    step_MD, s_MW = _adam_step(s_MW, g_MD, hyper)
    step_MD = step_MD + w_MD * weight_decay
    return RowTerms(torch.stack([w_MD * w_MD, step_MD * step_MD], 2), s_MW, step_MD)


def _lamb(s_MW: Tensor, step_MD: Tensor, sums_Mn: Tensor, dim: int, hyper: Tensor) -> PlainStep:
    lr, *_ = hyper
    length_M, size_M = root(sums_Mn).unbind(1)
    usable_M = (length_M > 0) & (size_M > 0) & length_M.isfinite() & size_M.isfinite()
    trust_M = torch.where(usable_M, length_M / size_M, 1.0)
    return PlainStep(s_MW, step_MD * (lr * trust_M).unsqueeze(1))


def _ftrl(w_MD: Tensor, s_MW: Tensor, g_MD: Tensor, hyper: Tensor) -> Change:
    lr, _, _, _, l1, l2, beta, _ = hyper
    z_MD, n_MD = s_MW.chunk(2, 1)
    sum_MD = (n_MD + g_MD * g_MD).clamp(max=torch.finfo(torch.float32).max)  # an infinite sum would have no rate
    after_MD = root(sum_MD)
    z_MD = z_MD + g_MD - (after_MD - root(n_MD)) / lr * w_MD
    shrunk_MD = torch.where(z_MD > l1, z_MD - l1, torch.where(z_MD < -l1, z_MD + l1, 0.0))
    return 0 - shrunk_MD / ((after_MD + beta) / lr + l2), torch.cat([z_MD, sum_MD], 1)


def root(x: Tensor) -> Tensor:
    """The correctly rounded square root: torch's own may come from a vector library that is a bit off."""
    return x.double().sqrt().to(x.dtype)


REFERENCE: dict[type, ColumnRule | RowRule] = {
    Sgd: ColumnRule(change=_sgd, decays_gradient=True),
    Adagrad: ColumnRule(change=_adagrad, decays_gradient=True),
    RowWiseAdagrad: RowRule(terms=_squares, finish=_rowwise_adagrad, decays_gradient=True),
    Adam: ColumnRule(change=_adam),
    RowWiseAdam: RowRule(terms=_squares, finish=_rowwise_adam),
    Lamb: RowRule(terms=_lamb_terms, finish=_lamb),
    Ftrl: ColumnRule(change=_ftrl),
}
