"""What an update needs of a batch's ids: contributions sorted by row, a record for each row, parts of hot rows.

Plain torch on tensors whose sizes follow from other sizes, so that nothing waits for the device. A gradient is not
needed: a route can be made while the dense layers compute.

Axes: B samples, F features, T tables, K buckets, N contributions (sorted), R rows (as many as there can be), U units.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.ops.layout import FeatureDescriptor, Mode

BLOCK_SHIFT = 8  # [Note: Merge order]
LONG_ROW, UNIT = 128, 64  # contributions: of a row that is cut, and of a part of it on average


class Contributions(NamedTuple):
    """What each id adds to its row: N is the largest number that the sizes allow; the surplus comes last."""

    key_N: Tensor  # row in the order of `TableOrder`
    place_N: Tensor  # first float of the gradient
    scale_N: Tensor | None
    sample_N: Tensor


class TableOrder(NamedTuple):
    """Tables in the order of their buckets."""

    order_T: Tensor
    first_T: Tensor  # number of the first row of each table
    starts_T1: Tensor  # the same in this order, and the number of rows
    starts_K1: Tensor  # of each bucket
    rows: int  # known on the host


class Route(NamedTuple):
    """Places in memory and spans [first, last) on the device, for the kernels of `update`."""

    places_N: Tensor
    scales_N: Tensor | None
    joins_N: Tensor
    short: Tensor  # records of rows
    long: Tensor  # records of rows that are cut into units
    unit_first: Tensor
    unit_last: Tensor
    unit_joins: Tensor
    unit_dims: Tensor
    short_spans_K2: Tensor
    long_spans_K2: Tensor
    unit_spans_K2: Tensor
    levels: int


class DeviceBatch(NamedTuple):
    """The ids of a batch, the features that look them up, and where their gradients are."""

    features_FC: Tensor  # on the host
    device_features_FC: Tensor
    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch: int
    stride: int  # columns of the gradient; 0: a gradient for each id, feature after feature


def contributions(batch: DeviceBatch, order: TableOrder, fault: Tensor) -> Contributions:
    """Contributions sorted by row, those to a row by (sample, feature, position)."""
    features, descriptors = batch.device_features_FC, FeatureDescriptor.read(batch.features_FC)
    num_features, device = len(descriptors), batch.values.device
    sources = [d.source for d in descriptors]
    n = batch.values.shape[0] * max(sources.count(s) for s in set(sources))
    counts_FB = batch.offsets.diff().view(-1, batch.batch)[features[:, 0]]
    begins_FB = batch.offsets[:-1].view(-1, batch.batch)[features[:, 0]]
    counts, begins = counts_FB.t().reshape(-1), begins_FB.t().reshape(-1)
    ends = counts.cumsum(0)
    index_N = torch.arange(n, device=device)
    bag_N = torch.searchsorted(ends, index_N, right=True).clamp(max=ends.shape[0] - 1)
    at_N = (index_N - (ends - counts)[bag_N] + begins[bag_N]).clamp(max=batch.values.shape[0] - 1)
    sample_N, feature_N = bag_N // num_features, bag_N % num_features
    row_N, used_N = batch.values[at_N].long(), index_N < ends[-1]
    known_N = (row_N >= 0) & (row_N < features[feature_N, 3])
    fault[0].bitwise_or_((used_N & ~known_N).any())
    key_N = order.first_T[features[feature_N, 1]] + row_N
    key_N = torch.where(used_N & known_N, key_N, order.rows)
    narrow = order.rows < 2**31 - 1  # half of the passes of a radix sort
    key_N, sort_N = torch.sort(key_N.to(torch.int32) if narrow else key_N, stable=True)
    bag_N, feature_N, sample_N = bag_N[sort_N], feature_N[sort_N], sample_N[sort_N]
    if batch.stride:
        place_N = sample_N * batch.stride + features[feature_N, 5]
    else:
        floats_F = counts_FB.sum(1) * features[:, 4]
        first_F = (floats_F.cumsum(0) - floats_F)[feature_N]
        position_N = at_N[sort_N] - begins_FB[:, 0][feature_N]
        place_N = first_F + position_N * features[feature_N, 4]
    return Contributions(key_N.long(), place_N, _scales(batch, descriptors, (bag_N, feature_N, at_N[sort_N])), sample_N)


def _scales(
    batch: DeviceBatch, descriptors: list[FeatureDescriptor], sorted_N: tuple[Tensor, Tensor, Tensor]
) -> Tensor | None:
    """The factor of each contribution, None if all are 1."""
    bag_N, feature_N, at_N = sorted_N
    modes = {d.mode for d in descriptors}
    weights = batch.weights if Mode.WEIGHTED in modes else None
    if not batch.stride or (Mode.MEAN not in modes and weights is None):
        return None
    mode_N = batch.device_features_FC[feature_N, 6]
    scale_N = torch.ones(len(bag_N), device=bag_N.device)
    if Mode.MEAN in modes:
        counts = batch.offsets.diff().view(-1, batch.batch)[batch.device_features_FC[:, 0]].t().reshape(-1)
        scale_N = torch.where(mode_N == Mode.MEAN, 1.0 / counts.clamp(min=1).float()[bag_N], scale_N)
    if weights is not None:
        scale_N = torch.where(mode_N == Mode.WEIGHTED, weights[at_N], scale_N)
    return scale_N


class SortedRows(NamedTuple):
    """The distinct rows of sorted contributions."""

    row_of_N: Tensor
    first_R: Tensor
    last_R: Tensor
    count: Tensor
    new_N: Tensor  # whether a contribution is the first of its row


def sorted_rows(key_N: Tensor) -> SortedRows:
    new_N = torch.ones_like(key_N, dtype=torch.bool)
    new_N[1:] = key_N[1:] != key_N[:-1]
    first, row_of_N = _starts(new_N, len(key_N))
    return SortedRows(row_of_N, first[:-1], first[1:], row_of_N[-1] + 1, new_N)


def route(batch: DeviceBatch, tables: Tensor, order: TableOrder, fault: Tensor) -> Route:
    """`tables`: `tables_TC` on the device; `fault`: a word that is set if an id is outside its table."""
    key_N, place_N, scale_N, sample_N = contributions(batch, order, fault)
    rows, n, device = sorted_rows(key_N), len(key_N), key_N.device
    block_N = sample_N >> BLOCK_SHIFT
    join_N = torch.where(rows.new_N, 0, _bits(block_N ^ torch.cat([block_N[:1], block_N[:-1]])))
    blocks = max(1, -(-batch.batch >> BLOCK_SHIFT))
    levels = max(1, (blocks - 1).bit_length())
    # A hot row is cut at the lowest level whose nodes would hold UNIT contributions, were these spread evenly.
    count_R = rows.last_R - rows.first_R
    long_R = count_R >= LONG_ROW
    level_R = _bits((UNIT * blocks - 1) // count_R.clamp(min=1)).clamp(max=levels)
    new_unit_N = long_R[rows.row_of_N] & (rows.new_N | (join_N > level_R[rows.row_of_N]))
    unit_first, unit_of_N = _starts(new_unit_N, n // UNIT + n // LONG_ROW + 2)
    unit_first = unit_first[:-1]
    at_U = unit_first.clamp(max=n - 1)
    row_of_U = rows.row_of_N[at_U]
    following = torch.cat([unit_first[1:], unit_first.new_full((1,), n)])
    at_R = rows.first_R.clamp(max=n - 1)
    rank_R = torch.searchsorted(order.starts_T1, key_N[at_R], right=True) - 1
    rank_R = rank_R.clamp(max=len(order.order_T) - 1)
    table_R = order.order_T[rank_R]
    name_R = (table_R << 48) | (key_N[at_R] - order.starts_T1[rank_R])
    # Buckets are ranges of keys, so ranges of rows and of units.
    at_K = torch.searchsorted(key_N, order.starts_K1)
    row_bounds = torch.where(at_K < n, rows.row_of_N[at_K.clamp(max=n - 1)], rows.count)
    is_row_R = torch.arange(n, device=device) < rows.count
    unit_R = unit_of_N[at_R]
    units_R = unit_of_N[(rows.last_R - 1).clamp(min=0)] + 1 - unit_R
    short, short_bounds = _records(
        is_row_R & ~long_R, row_bounds, n, [(rows.first_R << 32) | count_R, name_R, place_N[at_R]]
    )
    long, long_bounds = _records(
        is_row_R & long_R, row_bounds, n // LONG_ROW + 1, [(unit_R << 32) | units_R, name_R, name_R]
    )
    return Route(
        places_N=place_N,
        scales_N=scale_N,
        joins_N=join_N.to(torch.int8),
        short=short,
        long=long,
        unit_first=unit_first,
        unit_last=torch.minimum(following, rows.last_R[row_of_U]),
        unit_joins=join_N[at_U].to(torch.int8),
        unit_dims=tables[table_R[row_of_U], 2].to(torch.int32),
        short_spans_K2=_pairs(short_bounds),
        long_spans_K2=_pairs(long_bounds),
        unit_spans_K2=_pairs(_number_before(new_unit_N, at_K)),
        levels=levels,
    )


def _starts(flags_N: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The places of the flags [most + 1], the rest N; and for each element the number of its last flag."""
    flags_so_far_N = flags_N.cumsum(0)
    wanted = torch.arange(1, most + 2, device=flags_N.device)
    return torch.searchsorted(flags_so_far_N, wanted), flags_so_far_N - 1


def _records(flags_R: Tensor, bounds: Tensor, most: int, columns: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The records of flagged rows, one more at the end, and the first record of each range of rows."""
    at, _ = _starts(flags_R, most)
    fields = torch.stack([*columns, columns[0]], 1)  # the fourth is padding
    return fields[at.clamp(max=len(flags_R) - 1)], _number_before(flags_R, bounds)


def _number_before(flags: Tensor, at: Tensor) -> Tensor:
    """The number of flags before each place."""
    return torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0)])[at]


def _pairs(bounds: Tensor) -> Tensor:
    return torch.stack([bounds[:-1], bounds[1:]], 1).contiguous()


def _bits(x: Tensor) -> Tensor:
    """The number of bits of each number below 2**53."""
    return torch.frexp(x.double()).exponent.long()
