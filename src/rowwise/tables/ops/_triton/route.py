"""Routes the ids of a batch to rows, for an update: sorted contributions, a record for each row, units of hot rows.

The kernels of `contributions` around torch's sort and sums. Sizes follow from other sizes, so nothing waits for the
device. A gradient is not needed: a route can be made while the dense layers compute.

Axes: B samples, F features, L bags (sample after sample), T tables, K buckets, N contributions (an upper
bound; unused ones have the key `rows` and come last), R rows, U units, which are parts of hot rows.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.base.errors import BatchError
from rowwise.tables.ops._triton import contributions as kernels
from rowwise.tables.ops._triton import specialise
from rowwise.tables.ops._triton.launch import TILED, TableOrder, empty_numbers, over
from rowwise.tables.ops.layout import DIM, FeatureDescriptor, Mode

MAX_CONTRIBUTIONS = 1 << 30  # kernels count them in 32 bits


class Route(NamedTuple):
    """Places in memory and spans on the device, for the kernels of `update`."""

    places_N: Tensor  # first float of each contribution's gradient
    scales_N: Tensor | None  # factors; None: all are 1
    joins_N: Tensor  # tree level at which a contribution joins those before it
    records_R4: Tensor
    unit_records_U4: Tensor  # of hot rows, each at its first unit
    unit_first_U1: Tensor
    unit_last_U: Tensor  # where the unit's row ends
    unit_joins_U: Tensor
    unit_dims_U: Tensor
    row_bounds_K1: Tensor
    unit_bounds_K1: Tensor
    levels: int


class DeviceBatch(NamedTuple):
    """The ids of a batch, the features that look them up, and where their gradients are."""

    descriptors: tuple[FeatureDescriptor, ...]
    features_FC: Tensor
    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch: int
    stride: int  # floats from a sample's gradient to the next
    per_id: bool  # a gradient for each id, feature after feature


def float_starts(features_FC: Tensor, offsets: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """The floats of each feature if every id has a row of its own, and the first of them; on the device."""
    floats_F = offsets[:: max(1, batch)].diff()[features_FC[:, 0]] * features_FC[:, DIM]
    return floats_F, floats_F.cumsum(0) - floats_F


def route(batch: DeviceBatch, tables: Tensor, order: TableOrder, fault: Tensor) -> Route:
    """`tables`: `tables_TC` on the device; `fault`: a word that is set if an id is outside its table.

    Where k features look up the ids of one source, memory is reserved for k contributions of every id of the batch, as
    the host does not know which ids are of that source.
    """
    features, num_features = batch.features_FC, len(batch.descriptors)
    sources, modes = Counter(d.source for d in batch.descriptors), {d.mode for d in batch.descriptors}
    has_weights = batch.weights is not None and Mode.WEIGHTED in modes
    scaled = not batch.per_id and (Mode.MEAN in modes or has_weights)
    n = batch.values.shape[0] * max(sources.values())
    if n >= MAX_CONTRIBUTIONS:
        raise BatchError(
            f"an update of {n:,} contributions", f"fewer than {MAX_CONTRIBUTIONS:,}", hint="use a smaller batch"
        )
    num_bags, device = batch.batch * num_features, batch.values.device
    key_type = torch.int32 if order.rows < 2**31 - 1 else torch.int64  # half of the passes of a radix sort
    bags_of_program, ids = specialise.expand_shape(batch.values.shape[0] / (batch.offsets.shape[0] - 1))

    numbers = partial(empty_numbers, device)
    counts_L, bags_N = numbers(num_bags), numbers(n)
    kernels.count_ids[over(num_bags)](features, batch.offsets, counts_L, batch.batch, num_features, **TILED)
    ends_L = counts_L.cumsum(0, dtype=torch.int32)
    keys_N = torch.full((n,), order.rows, dtype=key_type, device=device)
    kernels.expand[over(num_bags, bags_of_program)](
        features, order.first_T, batch.values, batch.offsets, ends_L, keys_N, bags_N, fault, batch.batch, num_features,
        order.rows, BAGS=bags_of_program, IDS=ids, num_warps=specialise.TILE_WARPS,
    )  # fmt: skip
    keys_N, order_N = torch.sort(keys_N, stable=True)
    places_N, joins_N, is_first_N = numbers(n, torch.int64), numbers(n, torch.int8), numbers(n)
    scales_N = numbers(n, torch.float32) if scaled else None
    # Kernels take any tensor as an argument that they do not read.
    starts_F = float_starts(features, batch.offsets, batch.batch)[1] if batch.per_id else ends_L
    kernels.locate[over(n)](
        keys_N, order_N, bags_N, ends_L, features, starts_F, batch.offsets, batch.weights if has_weights else places_N,
        places_N, places_N if scales_N is None else scales_N, joins_N, is_first_N, batch.batch, num_features,
        batch.stride, order.rows, n, PER_ID=batch.per_id, SCALED=scaled, HAS_WEIGHTS=has_weights, **TILED,
    )  # fmt: skip
    row_numbers_N, firsts_R1 = is_first_N.cumsum(0, dtype=torch.int32), numbers(n + 1)
    kernels.find_rows[over(n)](row_numbers_N, firsts_R1, n, **TILED)
    blocks = max(1, -(-batch.batch >> kernels.BLOCK_SHIFT.value))
    levels = max(1, (blocks - 1).bit_length())
    kernels.cut[over(n)](keys_N, row_numbers_N, firsts_R1, joins_N, is_first_N, order.rows, blocks, levels, n, **TILED)
    unit_numbers_N = is_first_N.cumsum(0, dtype=torch.int32)
    max_units, bounds = n // kernels.UNIT.value + n // kernels.LONG_ROW.value + 2, len(order.starts_K1)
    result = Route(
        places_N=places_N,
        scales_N=scales_N,
        joins_N=joins_N,
        records_R4=numbers(4 * (n + 1), torch.int64),
        unit_records_U4=numbers(4 * (max_units + 1), torch.int64),
        unit_first_U1=numbers(max_units + 1),
        unit_last_U=numbers(max_units),
        unit_joins_U=numbers(max_units, torch.int8),
        unit_dims_U=numbers(max_units),
        row_bounds_K1=numbers(bounds),
        unit_bounds_K1=numbers(bounds),
        levels=levels,
    )
    kernels.write_records[over(n)](
        keys_N, order_N, bags_N, features, tables, order.first_T, row_numbers_N, firsts_R1, unit_numbers_N, places_N,
        joins_N, result.records_R4, result.unit_records_U4, result.unit_first_U1, result.unit_last_U,
        result.unit_joins_U, result.unit_dims_U, num_features, order.rows, n, **TILED,
    )  # fmt: skip
    kernels.find_bounds[over(bounds, specialise.BOUNDS)](
        keys_N, order.starts_K1, row_numbers_N, unit_numbers_N, result.row_bounds_K1, result.unit_bounds_K1, bounds, n,
        BOUNDS=specialise.BOUNDS, num_warps=1,
    )  # fmt: skip
    return result
