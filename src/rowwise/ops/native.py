"""Loads the native operators and tells torch what it needs to know about them.

Its own file because loading is the one thing here with a side effect. `load` is called by the package
`rowwise.ops` and works once a process. On a device without native kernels (CUDA, for now) the same operators
run as `reference` says: exact, and slower.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

import rowwise
from rowwise.errors import NativeError
from rowwise.ops import reference

LIBRARY = "librowwise_ops.so"


def find_library() -> Path:
    """The built library: beside the package, installed or not."""
    for folder in rowwise.__path__:
        path = Path(folder) / "_lib" / LIBRARY
        if path.exists():
            return path
    raise NativeError(f"{LIBRARY} is not beside {rowwise.__path__[0]}: build it with `make build` or `pip install .`")


@functools.cache
def load() -> None:
    """Load the library, then register shapes for torch.compile, gradients, and other devices."""
    path = find_library()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise NativeError(f"{path} does not load under torch {torch.__version__} (2.11 or later is needed): {error}") from error
    _register_shapes()
    _register_gradients()
    _register_devices()


def isa() -> str:
    """The instruction set in use: base, avx2 or avx512."""
    load()
    return str(torch.ops.rowwise.isa())


def _register_shapes() -> None:
    fake = torch.library.register_fake

    @fake("rowwise::offsets")
    def _(lengths: Tensor) -> Tensor:
        return lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64)

    @fake("rowwise::pool")
    def _(arena: Tensor, features: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None, batch: int, columns: int) -> Tensor:  # fmt: skip
        return arena.new_empty((batch, columns))

    @fake("rowwise::pool_weight_grad")
    def _(arena: Tensor, features: Tensor, values: Tensor, offsets: Tensor, weights: Tensor, grad: Tensor, batch: int) -> Tensor:  # fmt: skip
        return weights.new_empty(weights.shape)

    @fake("rowwise::gather")
    def _(arena: Tensor, features: Tensor, values: Tensor, offsets: Tensor, batch: int) -> Tensor:
        return arena.new_empty(torch.library.get_ctx().new_dynamic_size())

    @fake("rowwise::update")
    def _(*_: object) -> None:
        return None

    @fake("rowwise::fill_uniform")
    def _(*_: object) -> None:
        return None


def _register_gradients() -> None:
    """Only per-id weights get a gradient: rows are updated by `update`, never through autograd."""

    def setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])

    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        arena, features, values, offsets, weights = ctx.saved_tensors  # pyrefly: ignore[missing-attribute] torch's own stub lacks it
        weight_grad = None
        if weights is not None:
            weight_grad = torch.ops.rowwise.pool_weight_grad(
                arena, features, values, offsets, weights, grad.contiguous(), grad.shape[0]
            )
        return None, None, None, None, weight_grad, None, None

    torch.library.register_autograd("rowwise::pool", backward, setup_context=setup)


def _register_devices() -> None:
    for name in ("offsets", "pool", "pool_weight_grad", "gather", "update", "fill_uniform"):
        torch.library.impl(f"rowwise::{name}", "CUDA", getattr(reference, name))
