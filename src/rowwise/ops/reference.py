"""What every operator means, in plain torch: the definition that each kernel has to match bit for bit.

Arguments are those of the operators registered in `_cpp/bind.cpp`; `features`, `tables` and `hyper` are the
small CPU tensors of `layout`. Everything else may be on any device. Slow on purpose: clear steps over whole
tensors, in the order of [Note: Merge order] and [Note: Column sums] (see `_cpp/tables.h`, `_cpp/simd.h`).

Shapes: N ids, B samples, D columns of a table, S columns of the output, M merged rows.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.errors import GradientError, IdError
from rowwise.ops.layout import FeatureRow, Mode, Rule, TableRow

BLOCK = 256  # samples whose contributions to a row are summed one after the other


class Bags(NamedTuple):
    """A feature-major batch and the features that look rows up in it: arguments that go together."""

    features: Tensor
    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch: int

    def rows(self) -> list[FeatureRow]:
        """The features, read."""
        return FeatureRow.read(self.features)

    def bounds(self, feature: FeatureRow) -> Tensor:
        """Where each bag of the feature begins, and the end of the last [B + 1]."""
        return self.offsets[feature.source * self.batch : (feature.source + 1) * self.batch + 1]

    def span(self, feature: FeatureRow) -> slice:
        """The feature's part of `values` and `weights`."""
        bounds = self.bounds(feature)
        return slice(int(bounds[0]), int(bounds[-1]))

    def ids(self, feature: FeatureRow) -> Tensor:
        """The feature's ids, all of which have to be inside its table."""
        ids_N = self.values[self.span(feature)].long()
        if len(ids_N) and (int(ids_N.min()) < 0 or int(ids_N.max()) >= feature.rows):
            raise IdError(f"rowwise: an id of feature {feature.source} is outside its table of {feature.rows} rows")
        return ids_N

    def samples(self, feature: FeatureRow) -> Tensor:
        """The sample of each id."""
        # Empty bags repeat zero times, so they leave no trace here.
        counts_B = self.bounds(feature).diff()
        return torch.arange(self.batch, device=counts_B.device).repeat_interleave(counts_B)

    def scale(self, feature: FeatureRow, x_ND: Tensor) -> Tensor:
        """Times the weight of each id, where the feature is weighted."""
        if feature.mode != Mode.WEIGHTED or self.weights is None:
            return x_ND
        return x_ND * self.weights[self.span(feature)].unsqueeze(1)


def offsets(lengths: Tensor) -> Tensor:
    """Where each bag begins, and the end of the last."""
    zero = torch.zeros(1, dtype=torch.int64, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0, dtype=torch.int64)])


def pool(arena: Tensor, bags: Bags, columns: int) -> Tensor:
    """Rows of each bag summed in the order of its ids; a mean is the sum times 1 / count."""
    # Zeros also where a bag is empty, which is what a sum over nothing is.
    out_BS = arena.new_zeros(bags.batch, columns)
    for feature in bags.rows():
        bounds = bags.bounds(feature)
        # The product is rounded before it is added, here as in every kernel: no fused multiply-add.
        rows_ND = bags.scale(feature, _rows(arena, bags, feature))
        sums_BD = _sum_runs(rows_ND, bounds[:-1] - bounds[:1], bounds.diff())
        # Times the inverse rather than divided: the backward scales by the same float.
        if feature.mode == Mode.MEAN:
            sums_BD = sums_BD * _inverse(bounds.diff(), sums_BD)
        out_BS[:, feature.column : feature.column + feature.dim] = sums_BD
    return out_BS


def pool_weight_grad(arena: Tensor, bags: Bags, grad: Tensor) -> Tensor:
    """The gradient of an id's weight: its row times the gradient of its bag, summed over columns."""
    out_N = torch.zeros(len(bags.values), device=grad.device)
    for feature in bags.rows():
        if feature.mode == Mode.WEIGHTED:
            grad_BD = grad[:, feature.column : feature.column + feature.dim]
            # Every id of a bag meets the gradient of that bag.
            grad_ND = grad_BD[bags.samples(feature)]
            out_N[bags.span(feature)] = column_sum(_rows(arena, bags, feature) * grad_ND)
    return out_N


def gather(arena: Tensor, bags: Bags) -> Tensor:
    """The row of every id, feature after feature, as one flat tensor."""
    rows = [_rows(arena, bags, feature).reshape(-1) for feature in bags.rows()]
    return torch.cat(rows) if rows else arena.new_empty(0)


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


def fill_uniform(out: Tensor, key: int, start: int, low: float, high: float) -> None:
    """out[i] is low + u * (high - low), u from a hash of (key, start + i) alone."""
    # The steps of SplitMix64 in int64, whose products wrap around as uint64's do; only the shifts differ.
    index = torch.arange(start + 1, start + 1 + out.numel(), dtype=torch.int64, device=out.device)
    x = key + index * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    # The upper 24 bits are as many as a float holds exactly, so low + u * span has one rounding each.
    bits = _shift(x ^ _shift(x, 31), 40)
    low_, high_ = (torch.tensor(v, dtype=torch.float32, device=out.device) for v in (low, high))
    out.copy_(low_ + bits.float() * 2.0**-24 * (high_ - low_))


def merge(rows_N: Tensor, samples_N: Tensor, grads_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Sum contributions by row: in order within blocks of samples, then by a pairwise tree over blocks."""
    # Level 0 sums inside blocks. Each level above joins neighbours: a parent has at most two children, in
    # order, so summing its run is left + right, and a child without a sibling is passed up as it is.
    blocks_N = samples_N // BLOCK
    for level in range(int(blocks_N.max()).bit_length() + 1):
        if level:
            blocks_N = blocks_N // 2
        # Equal (row, block) pairs become neighbours and keep their order.
        key_N = rows_N * (int(blocks_N.max()) + 1) + blocks_N
        order = torch.argsort(key_N, stable=True)
        _, counts = torch.unique_consecutive(key_N[order], return_counts=True)
        first = counts.cumsum(0) - counts
        grads_ND = _sum_runs(grads_ND[order], first, counts)
        rows_N, blocks_N = rows_N[order][first], blocks_N[order][first]
    return rows_N, grads_ND


def column_sum(x_ND: Tensor) -> Tensor:
    """The sum over columns as a pairwise tree over neighbours; missing columns count as zero."""
    # Halving neighbours until one is left is the tree over blocks of four, and the blocks are its two lowest levels.
    while x_ND.shape[1] > 1:
        if x_ND.shape[1] % 2:
            x_ND = torch.nn.functional.pad(x_ND, (0, 1))
        x_ND = x_ND[:, 0::2] + x_ND[:, 1::2]
    return x_ND[:, 0]


def _sum_runs(x_ND: Tensor, first_M: Tensor, counts_M: Tensor) -> Tensor:
    """Sum each run x[first : first + count], one element after the other; an empty run gives zeros."""
    sums_MD = x_ND.new_zeros(len(counts_M), x_ND.shape[1])
    # Position by position over all runs at once: each run is summed strictly from its first element to its last.
    for position in range(int(counts_M.max()) if len(counts_M) else 0):
        has = counts_M > position
        term = x_ND[first_M[has] + position]
        sums_MD[has] = sums_MD[has] + term if position else term
    return sums_MD


def _rows(arena: Tensor, bags: Bags, feature: FeatureRow) -> Tensor:
    table = arena[feature.base : feature.base + feature.rows * feature.dim].view(feature.rows, feature.dim)
    return table[bags.ids(feature)]


def _inverse(counts_B: Tensor, like: Tensor) -> Tensor:
    return (1.0 / counts_B.clamp(min=1).to(like.dtype)).unsqueeze(1)


def _gradients_of_bags(bags: Bags, grad: Tensor) -> Iterator[Tensor]:
    """For each feature, the gradient that each of its ids gets from its bag [n, D]."""
    for feature in bags.rows():
        grad_BD = grad[:, feature.column : feature.column + feature.dim]
        if feature.mode == Mode.MEAN:
            grad_BD = grad_BD * _inverse(bags.bounds(feature).diff(), grad)
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


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
