"""What runs where: the implementation of each operator on a GPU. On the CPU all are `native`."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from rowwise.errors import NativeError
from rowwise.ops.reference.operators import operators

# triton: kernels of `_triton`. torch: the reference, a few calls of torch. None waits for the device but to learn what
# the host has to know: `take`, `expand`, `deduplicate` and `pack_ids` wait once for their sizes, `in_range` for its
# answer, `lengths` for whether offsets ascend, and `gather` for its size where features have several dims.
ON_GPU = {
    "pool": "triton",
    "pool_weight_grad": "triton",
    "gather": "triton",
    "update": "triton",
    "mark": "triton",
    "interact": "triton",
    "interact_grad": "triton",
    "pack": "triton",
    "unpack": "triton",
    "pack4": "triton",
    "unpack4": "triton",
    "take": "triton",
    "expand": "triton",
    "bucketize": "triton",
    "pack_ids": "triton",
    "deduplicate": "triton",
    "map_ids": "triton",
    "find_newer": "triton",
    "in_range": "triton",
    "lengths": "torch",
    "offsets": "torch",
    "fill_uniform": "torch",
    "fill_uniform_rows": "torch",
    "relu_grad": "torch",
    "pair_sums": "torch",
    "pair_sums_grad": "torch",
    "dots": "torch",
    "place": "torch",
    "spread": "torch",
    "keep_largest": "torch",
}


def gpu_operators() -> dict[str, Callable[..., Any]]:
    """Each operator of `ON_GPU` as torch calls it for tensors on a GPU."""
    definitions = operators()
    return {
        name: functools.partial(_launch, name) if kind == "triton" else definitions[name]
        for name, kind in ON_GPU.items()
    }


def _launch(name: str, *args: Any) -> Any:
    # Here, not above: Triton takes seconds to import and is not installed beside a CPU build of torch.
    try:
        from rowwise.ops._triton.operators import OPERATORS
    except ImportError as error:
        raise NativeError(f"tensors on a GPU need Triton ({error}): install it with `pip install triton`") from error
    # Kernels are launched on the current GPU, which each thread has for itself.
    tensors = (x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, torch.Tensor))
    device = next((x.device for x in tensors if x.is_cuda), None)
    if device is None or device.index == torch.cuda.current_device():
        return OPERATORS[name](*args)
    with torch.cuda.device(device):
        return OPERATORS[name](*args)


def describe_gpu_operators() -> str:
    """Names of operators by implementation, for `rowwise doctor`."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, kind in ON_GPU.items():
        by_kind[kind].append(name)
    return "\n".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
