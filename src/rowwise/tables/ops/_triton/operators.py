"""The operators' launches on a GPU, under the flat signatures that `native` registers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowwise.base.errors import BatchError
from rowwise.tables.ops import reference, shapes
from rowwise.tables.ops._triton import graph as graph_kernels
from rowwise.tables.ops._triton import interact as interact_kernels
from rowwise.tables.ops._triton import jagged, route, specialise
from rowwise.tables.ops._triton import lookup as lookup_kernels
from rowwise.tables.ops._triton import quantise as quantise_kernels
from rowwise.tables.ops._triton import update as update_kernels
from rowwise.tables.ops._triton.launch import (
    begin,
    capability_of,
    end,
    features_by_bucket,
    grown,
    on_device,
    over,
    programs_of,
    read_features,
    shared_programs,
    tables_by_bucket,
)
from rowwise.tables.ops._triton.specialise import Bucket
from rowwise.tables.ops.layout import FeatureDescriptor, Mode
from rowwise.tables.ops.pinned import copy_to

IDS_OF_PROGRAM = 16
MODE = FeatureDescriptor._fields.index("mode")
ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}


def constants_of(bucket: Bucket) -> dict[str, int]:
    return {
        "TYPE": bucket.type,
        "GROUP": bucket.scale_group,
        "BLOCK": bucket.block,
        "ALIGN": bucket.align,
        "DIVISOR": bucket.divisor,
        "num_warps": specialise.warps(bucket),
        # Each operation rounds once.
        "enable_fp_fusion": False,
    }


def pool(
    arena: Tensor, features: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None, batch: int, columns: int
) -> Tensor:
    device = arena.device
    fault, out = begin(device), torch.empty(batch, columns, device=device)
    pooling = values.shape[0] / max(1, offsets.shape[0] - 1)
    for launch in features_by_bucket(features, device):
        shape, weighted = specialise.lookup_shape(launch.bucket, pooling), weights is not None and launch.weighted
        lookup_kernels.pool[*over(batch, shape.tiles * shape.bags), len(launch.chosen)](
            arena, out, values, offsets, weights if weighted else out, on_device(features, device), launch.chosen,
            fault, batch, columns, OUT_ALIGN=specialise.align_of([columns], launch.columns), BAGS=shape.bags,
            IDS=shape.ids, TILES=shape.tiles, HAS_WEIGHTS=weighted, **constants_of(launch.bucket),
        )  # fmt: skip
    end(device)
    return out


def pool_weight_grad(
    arena: Tensor, features: Tensor, values: Tensor, offsets: Tensor, weights: Tensor, grad: Tensor, batch: int
) -> Tensor:
    device, columns = arena.device, grad.shape[1]
    fault, out = begin(device), torch.zeros(values.shape[0], device=device)
    weighted = features[features[:, MODE] == Mode.WEIGHTED]
    for launch in features_by_bucket(weighted, device):
        bags = specialise.lookup_shape(launch.bucket, 4.0).bags
        lookup_kernels.pool_weight_grad[*over(batch, bags), len(launch.chosen)](
            arena, out, values, offsets, grad, on_device(weighted, device), launch.chosen,
            fault, batch, columns, OUT_ALIGN=specialise.align_of([columns], launch.columns), BAGS=bags,
            **constants_of(launch.bucket),
        )  # fmt: skip
    end(device)
    return out


def gather(arena: Tensor, features: Tensor, values: Tensor, offsets: Tensor, batch: int) -> Tensor:
    device, descriptors = arena.device, read_features(features)
    if not descriptors:
        return torch.empty(0, device=device)
    fault, device_features = begin(device), on_device(features, device)
    floats_F, starts_F = route.float_starts(device_features, offsets, batch)
    dims = {d.dim for d in descriptors}
    is_complete = sorted(d.source for d in descriptors) == list(range((offsets.shape[0] - 1) // max(1, batch)))
    # With one dim and every id looked up, the size follows from the number of ids; else the host has to wait for it.
    size = values.shape[0] * dims.pop() if is_complete and len(dims) == 1 else int(floats_F.sum())
    out = torch.empty(size, device=device)
    align = specialise.align_of(d.dim for d in descriptors)
    for launch in features_by_bucket(features, device):
        shape = specialise.lookup_shape(launch.bucket, 1.0)
        programs = shared_programs(values.shape[0], shape.bags, device)
        lookup_kernels.gather[programs, len(launch.chosen)](
            arena, out, values, offsets, starts_F, device_features, launch.chosen, fault, batch,
            OUT_ALIGN=align, IDS=shape.bags, **constants_of(launch.bucket),
        )  # fmt: skip
    end(device)
    return out


def sum_sampled(
    vectors: Tensor, ids: Tensor, starts: Tensor, weights: Tensor, width: int, choice: int, rescaled: bool
) -> Tensor:
    device, (rows, dim), nodes = vectors.device, vectors.shape, starts.shape[0] - 1
    fault, out = begin(device), torch.empty(nodes, dim, device=device)
    if nodes:
        constants = specialise.sampled_constants(dim, min(width, ids.shape[0] / nodes))
        graph_kernels.sum_sampled[over(nodes, constants["NODES"])](
            vectors, out, ids, starts, weights, fault, nodes, rows, WIDTH=width, CHOICE=choice, RESCALED=rescaled,
            **constants,
        )  # fmt: skip
    end(device)
    return out


def mark(
    touched: Tensor, starts: Tensor, arena: Tensor, features: Tensor, values: Tensor, offsets: Tensor, batch: int
) -> None:
    device = touched.device
    programs = shared_programs(values.shape[0], IDS_OF_PROGRAM, device)
    if len(features):
        lookup_kernels.mark[programs, len(features)](
            touched, on_device(starts, device), values, offsets, on_device(features, device), batch,
            IDS=IDS_OF_PROGRAM, num_warps=1,
        )  # fmt: skip


def interact(dense: Tensor, pooled: Tensor) -> Tensor:
    samples, dim = dense.shape
    vectors = pooled.shape[1] // dim + 1
    shape = specialise.interact_shape(vectors, nvidia=capability_of(dense.device) > 0)
    if shape is None:
        return reference.interact(dense, pooled)
    out = torch.empty(samples, dim + vectors * (vectors - 1) // 2, device=dense.device)
    if samples:
        interact_kernels.interact[samples,](dense, pooled, out, vectors, dim, **shape)
    return out


def interact_grad(dense: Tensor, pooled: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    samples, dim = dense.shape
    vectors = pooled.shape[1] // dim + 1
    shape = specialise.interact_shape(vectors, nvidia=capability_of(dense.device) > 0)
    if shape is None:
        return reference.interact_grad(dense, pooled, grad)
    grads = torch.empty_like(dense), torch.empty_like(pooled)
    if samples:
        interact_kernels.interact_grad[samples,](dense, pooled, grad, *grads, vectors, dim, **shape)
    return grads


def pack(rows: Tensor, group: int) -> Tensor:
    width = rows.shape[1] + 3  # with the padding behind the last column
    return _convert(quantise_kernels.pack, rows, shapes.pack(rows, group), rows.shape[1], width, GROUP=group)


def unpack(packed: Tensor, dim: int, group: int) -> Tensor:
    return _convert(quantise_kernels.unpack, packed, shapes.unpack(packed, dim), dim, dim, GROUP=group)


def pack4(rows: Tensor) -> Tensor:
    width = max(8, rows.shape[1])  # with the padding behind the last column
    return _convert(quantise_kernels.pack4, rows, shapes.pack4(rows), rows.shape[1], width)


def unpack4(packed: Tensor, dim: int) -> Tensor:
    return _convert(quantise_kernels.unpack4, packed, shapes.unpack(packed, dim), dim, dim)


def _convert(kernel: Any, rows: Tensor, out: Tensor, dim: int, width: int, **constants: int) -> Tensor:
    """Rows in another format: one program of one warp for each row."""
    if len(rows):
        block = specialise.power_of_two(width)
        kernel[len(rows),](rows.contiguous(), out, dim, BLOCK=block, **constants, **ONE_WARP)
    return out


class UpdateTensors(NamedTuple):
    """The tensors that each launch of an update reads and writes."""

    arena: Tensor
    state: Tensor
    tables: Tensor
    hyper: Tensor
    keys: Tensor
    slot_rows: Tensor
    grad: Tensor


def update(
    arena: Tensor, state: Tensor, tables: Tensor, hyper: Tensor, keys: Tensor, features: Tensor, values: Tensor,
    offsets: Tensor, weights: Tensor | None, grad: Tensor, batch: int, per_id: bool, slot_rows: Tensor | None = None,
) -> None:  # fmt: skip
    device = arena.device
    if not values.shape[0] or not len(features):
        return
    fault = begin(device)
    buckets, order = tables_by_bucket(tables, device)
    device_tables, stride = on_device(tables, device), 0 if per_id else grad.stride(0)
    descriptors = read_features(features)
    device_batch = route.DeviceBatch(
        descriptors, on_device(features, device), values, offsets, weights, batch, stride, per_id
    )
    routed = route.route(device_batch, device_tables, order, fault)
    memory = UpdateTensors(
        arena=arena,
        state=state,
        tables=device_tables,
        hyper=on_device(hyper, device),
        keys=copy_to(keys, device),
        slot_rows=arena if slot_rows is None else slot_rows,
        grad=grad,
    )
    places = [d.dim for d in descriptors] if per_id else [stride, *(d.column for d in descriptors)]
    grad_align = specialise.align_of(places)
    if grad.numel() // grad_align >= 1 << 31:
        limit = (1 << 31) * grad_align
        raise BatchError(f"a gradient of {grad.numel():,} numbers", f"fewer than {limit:,}", hint="use a smaller batch")
    for number, bucket in enumerate(buckets):
        _update_bucket(memory, routed, (number, bucket), grad_align, fault)
    end(device)


def _update_bucket(
    memory: UpdateTensors, routed: route.Route, numbered: tuple[int, Bucket], grad_align: int, fault: Tensor
) -> None:
    (number, bucket), device = numbered, memory.arena.device
    programs, shared = programs_of(device), constants_of(bucket)
    partial = grown("partial", routed.unit_last_U.shape[0] * bucket.block, device)
    waiting = grown("waiting", programs * routed.levels * bucket.block, device)
    scaled = routed.scales_N is not None
    scales = routed.scales_N if scaled else memory.grad
    # `shared` without the row format, which sums of gradients do not depend on.
    unit_constants = {name: shared[name] for name in ("BLOCK", "DIVISOR", "num_warps", "enable_fp_fusion")}
    update_kernels.sum_units[programs,](
        memory.grad, routed.places_N, scales, routed.joins_N, routed.unit_first_U1, routed.unit_last_U,
        routed.unit_dims_U, routed.unit_bounds_K1[number:], waiting, partial, routed.levels,
        TERMS=specialise.TERMS_OF_UNIT, GRAD_ALIGN=grad_align, SCALED=scaled, **unit_constants,
    )  # fmt: skip
    has_slots = memory.slot_rows is not memory.arena
    capability = capability_of(device)
    ahead, registers = specialise.loads_ahead(bucket, capability), specialise.max_registers(bucket, capability)
    limit: dict[str, int] = {} if registers is None else {"maxnreg": registers}  # an option of NVIDIA's compiler only
    for units in (False, True):
        terms, joins = (partial, routed.unit_joins_U) if units else (memory.grad, routed.joins_N)
        records = routed.unit_records_U4 if units else routed.records_R4
        bounds_K1 = routed.unit_bounds_K1 if units else routed.row_bounds_K1
        update_kernels.apply[programs,](
            *memory[:-1], terms, routed.places_N, scales, joins, records, bounds_K1[number:], waiting, fault,
            routed.levels, RULE=bucket.rule, STATE_ALIGN=specialise.state_align(bucket), UNITS=units,
            SCALED=scaled and not units, HAS_SLOTS=has_slots, AHEAD=ahead and not units, TERMS=specialise.TERMS,
            GRAD_ALIGN=grad_align, **limit, **shared,
        )  # fmt: skip


LAUNCHES: dict[str, Callable[..., Any]] = {
    "pool": pool,
    "pool_weight_grad": pool_weight_grad,
    "gather": gather,
    "mark": mark,
    "sum_sampled": sum_sampled,
    "update": update,
    "interact": interact,
    "interact_grad": interact_grad,
    "pack": pack,
    "unpack": unpack,
    "pack4": pack4,
    "unpack4": unpack4,
    **jagged.LAUNCHES,
}
