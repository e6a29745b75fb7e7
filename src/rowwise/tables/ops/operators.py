"""`OPERATORS`: implementations by device: `native` on the CPU, kernels of `_triton` or the reference on a GPU."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from rowwise.base.errors import NativeError
from rowwise.tables.ops import reference, shapes
from rowwise.tables.ops.reference import flat


class Operator(NamedTuple):
    """Implementation on a GPU, reference and shapes of an operator."""

    # triton: kernels of `_triton`. torch: the reference, a few calls of torch. None waits for the device, except for
    # what the host has to know: `take`, `expand`, `deduplicate` and `pack_ids` wait once for their sizes, `in_range`
    # for its answer, `lengths` for whether offsets ascend, and `gather` for its size where features have several dims.
    on_gpu: Literal["triton", "torch"]
    reference: Callable[..., Any]  # takes the arguments that are registered with torch
    shapes: Callable[..., Any] | None = None  # for torch.compile; None if the operator cannot be compiled


OPERATORS: dict[str, Operator] = {
    "pool": Operator("triton", flat.pool, shapes.pool),
    "pool_weight_grad": Operator("triton", flat.pool_weight_grad, shapes.pool_weight_grad),
    "gather": Operator("triton", flat.gather, shapes.gather),
    "update": Operator("triton", flat.update, shapes.nothing),
    "mark": Operator("triton", flat.mark, shapes.nothing),
    "sum_sampled": Operator("triton", reference.sum_sampled, shapes.sum_sampled),
    "interact": Operator("triton", reference.interact, shapes.interact),
    "interact_grad": Operator("triton", reference.interact_grad, shapes.pair_grads),
    "pack": Operator("triton", reference.pack, shapes.pack),
    "unpack": Operator("triton", reference.unpack, shapes.unpack),
    "pack4": Operator("triton", reference.pack4, shapes.pack4),
    "unpack4": Operator("triton", reference.unpack4, shapes.unpack),
    "take": Operator("triton", reference.take, shapes.take),
    "expand": Operator("triton", reference.expand, shapes.expand),
    "bucketize": Operator("triton", reference.bucketize, shapes.bucketize),
    "pack_ids": Operator("triton", reference.pack_ids),
    "deduplicate": Operator("triton", reference.deduplicate, shapes.deduplicate),
    "map_ids": Operator("triton", reference.map_ids, shapes.map_ids),
    "find_newer": Operator("triton", reference.find_newer, shapes.find_newer),
    "in_range": Operator("triton", reference.in_range),
    "lengths": Operator("torch", reference.lengths, shapes.lengths),
    "offsets": Operator("torch", reference.offsets, shapes.offsets),
    "fill_uniform": Operator("torch", reference.fill_uniform, shapes.nothing),
    "fill_uniform_rows": Operator("torch", reference.fill_uniform_rows, shapes.nothing),
    "relu_grad": Operator("torch", reference.relu_grad, shapes.relu_grad),
    "pair_sums": Operator("torch", reference.pair_sums, shapes.pair_sums),
    "pair_sums_grad": Operator("torch", reference.pair_sums_grad, shapes.pair_grads),
    "dots": Operator("torch", reference.dots, shapes.dots),
    "layers": Operator("torch", reference.layers),
    "place": Operator("torch", reference.place),
    "spread": Operator("torch", reference.spread, shapes.nothing),
    "keep_largest": Operator("torch", reference.keep_largest, shapes.keep_largest),
}


def gpu_operators() -> dict[str, Callable[..., Any]]:
    """Each operator as torch calls it for tensors on a GPU."""
    return {
        name: functools.partial(_launch, name) if operator.on_gpu == "triton" else operator.reference
        for name, operator in OPERATORS.items()
    }


def _launch(name: str, *args: Any) -> Any:
    # Here, not above: Triton takes seconds to import and is not installed beside a CPU build of torch.
    try:
        from rowwise.tables.ops._triton.operators import LAUNCHES
    except ImportError as error:
        raise NativeError(f"tensors on a GPU need Triton ({error}): install it with `pip install triton`") from error
    # Kernels are launched on the current GPU, which each thread has for itself.
    tensors = (x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, torch.Tensor))
    device = next((x.device for x in tensors if x.is_cuda), None)
    if device is None or device.index == torch.cuda.current_device():
        return LAUNCHES[name](*args)
    with torch.cuda.device(device):
        return LAUNCHES[name](*args)


def describe_gpu_operators() -> str:
    """Names of operators by implementation, for `rowwise doctor`."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, operator in OPERATORS.items():
        by_kind[operator.on_gpu].append(name)
    return "\n".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
