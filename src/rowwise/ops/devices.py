"""What runs where: the implementation of each operator on a GPU. On the CPU all are `native`."""

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from rowwise.errors import NativeError
from rowwise.ops.reference.operators import operators

# triton: a kernel of `_triton`. torch: the reference, which is a few calls of torch that do not wait for the device.
# reference: the reference, exact and slow, as there is no kernel yet.
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
    "lengths": "reference",
    "in_range": "reference",
    "find_newer": "reference",
    "pack4": "reference",
    "unpack4": "reference",
    "take": "reference",
    "bucketize": "reference",
    "expand": "reference",
    "deduplicate": "reference",
    "pack_ids": "reference",
    "map_ids": "reference",
}


def gpu_operators() -> dict[str, Callable[..., Any]]:
    """Each operator of `ON_GPU` as torch calls it for tensors on a GPU."""
    definitions = operators()
    calls = {"triton": _launch, "reference": functools.partial(_run_reference, definitions)}
    return {
        name: functools.partial(calls[kind], name) if kind in calls else definitions[name]
        for name, kind in ON_GPU.items()
    }


def _run_reference(definitions: dict[str, Callable[..., Any]], name: str, *args: Any) -> Any:
    _warn_of_reference(name)
    return definitions[name](*args)


@functools.cache  # once for each operator
def _warn_of_reference(name: str) -> None:
    warnings.warn(
        f"operator {name!r} has no kernel for GPUs: its reference runs there, which is exact, slow and waits for the "
        f"device; `rowwise doctor` lists such operators",
        stacklevel=2,
    )


def _launch(name: str, *args: Any) -> Any:
    # Here, not above: Triton takes seconds to import and is not installed beside a CPU build of torch.
    try:
        from rowwise.ops._triton.operators import OPERATORS
    except ImportError as error:
        raise NativeError(f"tensors on a GPU need Triton ({error}): install it with `pip install triton`") from error
    return OPERATORS[name](*args)


def describe_gpu_operators() -> str:
    """Names of operators by implementation, for `rowwise doctor`."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, kind in ON_GPU.items():
        by_kind[kind].append(name)
    return "\n".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
