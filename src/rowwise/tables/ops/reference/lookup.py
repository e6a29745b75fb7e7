"""Reference of lookups: pooled rows, rows per id, and the gradient of per-id weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.base.errors import IdError
from rowwise.tables.ops.layout import FeatureDescriptor, Mode
from rowwise.tables.ops.reference.rowtype import read_rows
from rowwise.tables.ops.reference.sums import column_sum, sum_segments


class FeatureBags(NamedTuple):
    """A feature-major batch and the features that look rows up in it."""

    features: Tensor
    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch: int

    def rows(self) -> list[FeatureDescriptor]:
        return FeatureDescriptor.read(self.features)

    def bounds(self, feature: FeatureDescriptor) -> Tensor:
        """Offsets of the feature's bags, and the end of the last [B + 1]."""
        return self.offsets[feature.source * self.batch : (feature.source + 1) * self.batch + 1]

    def span(self, feature: FeatureDescriptor) -> slice:
        """The feature's part of `values` and `weights`."""
        bounds = self.bounds(feature)
        return slice(int(bounds[0]), int(bounds[-1]))

    def ids(self, feature: FeatureDescriptor) -> Tensor:
        """The feature's ids; raises if one is outside its table."""
        ids_N = self.values[self.span(feature)].long()
        if len(ids_N) and (int(ids_N.min()) < 0 or int(ids_N.max()) >= feature.rows):
            raise IdError(f"rowwise: an id of feature {feature.source} is outside its table of {feature.rows} rows")
        return ids_N

    def samples(self, feature: FeatureDescriptor) -> Tensor:
        """The sample of each id."""
        counts_B = self.bounds(feature).diff()
        return torch.arange(self.batch, device=counts_B.device).repeat_interleave(counts_B)

    def scale(self, feature: FeatureDescriptor, x_ND: Tensor) -> Tensor:
        """`x_ND` times the weight of each id if the feature is weighted."""
        if feature.mode != Mode.WEIGHTED or self.weights is None:
            return x_ND
        return x_ND * self.weights[self.span(feature)].unsqueeze(1)


def offsets(lengths: Tensor) -> Tensor:
    """First id of each bag, and the number of ids."""
    zero = torch.zeros(1, dtype=torch.int64, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0, dtype=torch.int64)])


def pool(arena: Tensor, bags: FeatureBags, columns: int) -> Tensor:
    """Rows of each bag summed in the order of its ids; a mean is the sum times 1 / count."""
    out_BS = torch.zeros(bags.batch, columns, device=arena.device)
    for feature in bags.rows():
        bounds = bags.bounds(feature)
        # The product is rounded before it is added, here as in every kernel: no fused multiply-add.
        rows_ND = bags.scale(feature, _rows(arena, bags, feature))
        sums_BD = sum_segments(rows_ND, bounds[:-1] - bounds[:1], bounds.diff())
        # Multiplied by the inverse, not divided: the backward scales by the same float.
        if feature.mode == Mode.MEAN:
            sums_BD = sums_BD * inverse(bounds.diff(), sums_BD)
        out_BS[:, feature.column : feature.column + feature.dim] = sums_BD
    return out_BS


def pool_weight_grad(arena: Tensor, bags: FeatureBags, grad: Tensor) -> Tensor:
    """The gradient of an id's weight: its row times the gradient of its bag, summed over columns."""
    out_N = torch.zeros(len(bags.values), device=grad.device)
    for feature in bags.rows():
        if feature.mode == Mode.WEIGHTED:
            grad_BD = grad[:, feature.column : feature.column + feature.dim]
            grad_ND = grad_BD[bags.samples(feature)]
            out_N[bags.span(feature)] = column_sum(_rows(arena, bags, feature) * grad_ND)
    return out_N


def gather(arena: Tensor, bags: FeatureBags) -> Tensor:
    """The row of every id, feature after feature, as one flat tensor."""
    rows = [_rows(arena, bags, feature).reshape(-1) for feature in bags.rows()]
    return torch.cat(rows) if rows else torch.empty(0, device=arena.device)


def mark(touched: Tensor, starts: Tensor, bags: FeatureBags) -> None:
    """Set the byte of each row that is looked up; ids outside their table are skipped."""
    for start, feature in zip(starts.tolist(), bags.rows(), strict=True):
        ids_N = bags.values[bags.span(feature)].long()
        touched[start + ids_N[(ids_N >= 0) & (ids_N < feature.rows)]] = 1


def _rows(arena: Tensor, bags: FeatureBags, feature: FeatureDescriptor) -> Tensor:
    form = feature.format
    packed_RP = arena[feature.base : feature.base + feature.rows * form.bytes].view(feature.rows, form.bytes)
    return read_rows(packed_RP[bags.ids(feature)], form)


def inverse(counts_B: Tensor, like: Tensor) -> Tensor:
    """1 / number of ids of each bag [B, 1]; 1 for an empty bag."""
    return (1.0 / counts_B.clamp(min=1).to(like.dtype)).unsqueeze(1)
