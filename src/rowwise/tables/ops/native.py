"""`load`: loads the native operators, and registers their shapes, gradients and other devices with torch.

The package `rowwise.tables.ops` calls it on import. `operators` says what runs on a GPU.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowwise.base.errors import NativeError
from rowwise.base.library import BUILD, find_library
from rowwise.tables.ops.operators import OPERATORS, gpu_operators
from rowwise.tables.row_optimizers import OPTIMIZERS
from rowwise.tables.spec import ROW_TYPES

LIBRARY = "librowwise_ops.so"
NAMES = (
    *OPERATORS, "touch", "rewrite", "crc32", "publish", "wait_for", "zeros", "empty_bytes", "kept_bytes", "drop_kept",
    "isa", "limit_isa", "row_types", "optimizers",
)  # fmt: skip


@functools.cache
def load() -> None:
    """Load the library, then register shapes for torch.compile, gradients, and other devices."""
    path = find_library(LIBRARY)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        version = f"torch {torch.__version__}"
        raise NativeError(f"{path} does not load under {version} (2.11 or later is needed): {error}") from error
    check_library(torch.ops.rowwise, path)
    for name, operator in OPERATORS.items():
        if operator.shapes is not None:
            torch.library.register_fake(f"rowwise::{name}", operator.shapes)
    _register_gradients()
    # Descriptors stay on the CPU; torch dispatches on the device of the large tensors.
    for name, function in gpu_operators().items():
        torch.library.impl(f"rowwise::{name}", "CUDA", function)


def check_library(operators: Any, path: Path) -> None:
    """Raise if the library was built from other sources; `operators`: the namespace that has each by name."""
    lead = f"{path} was built from other sources"
    missing = [name for name in NAMES if not hasattr(operators, name)]
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise NativeError(f"{lead}: it has no operator {names}; {BUILD}")
    for what, records in (("row_types", ROW_TYPES), ("optimizers", OPTIMIZERS)):
        got, expected = getattr(operators, what)(), ",".join(records)
        if got != expected:
            raise NativeError(f"{lead}: its {what} are {got}", expected, hint=BUILD)


def isa() -> str:
    """The instruction set in use: base, avx2 or avx512."""
    load()
    return str(torch.ops.rowwise.isa())


def _register_gradients() -> None:
    """In a lookup only per-id weights get gradients: rows are updated by `update`, never through autograd."""

    def setup_pool(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])

    def pool(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arena, features, values, offsets, weights = ctx.saved_tensors
        weight_grad = None
        if weights is not None:
            batch = grad.shape[0]
            weight_grad = torch.ops.rowwise.pool_weight_grad(
                arena, features, values, offsets, weights, grad.contiguous(), batch
            )
        return None, None, None, None, weight_grad, None, None

    def setup_interact(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def interact(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.rowwise.interact_grad(*ctx.saved_tensors, grad.contiguous())

    torch.library.register_autograd("rowwise::pool", pool, setup_context=setup_pool)

    def pair_sums(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.rowwise.pair_sums_grad(*ctx.saved_tensors, grad.contiguous())

    torch.library.register_autograd("rowwise::interact", interact, setup_context=setup_interact)
    torch.library.register_autograd("rowwise::pair_sums", pair_sums, setup_context=setup_interact)
