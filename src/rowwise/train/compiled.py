"""`compile_dense`: torch.compile for the layers of a model's dense side, in place; lookups and exchanges do not change.

A layer is an FSDP unit or smaller: see `dense_parallel.find_units`. Only its `forward` is compiled: names of
parameters, hooks and the order of collectives do not change. Layers of equal shapes share code.

The code is for one batch size, that of all steps but an epoch's last: torch splits sums by the size that it compiles
for. Code for dynamic sizes would depend on the first batch, and a resumed run may begin with a shorter batch. Other
batches, evaluations and layers over histories are not compiled.
"""

import sysconfig
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rowwise.base.errors import NativeError
from rowwise.tables.ops.linear import current_library
from rowwise.train.dense_parallel import find_units

VARIANTS = 4  # compiled per layer: with or without autocast, with or without gradients of its inputs


def compile_dense(model: nn.Module, samples: int) -> None:
    """Compile each layer for batches of `samples`, lazily at its first such batch."""
    check_compiler()
    current_library()  # reads the processor's name from a file, which compiled code cannot
    units = find_units(model, min_parameters=1)
    limits = torch._dynamo.config  # torch counts code of all layers together, and would silently stop at 8
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS * len(units))
    for unit in units if samples else ():
        unit.forward = _compile(unit.forward, samples)


def _compile(forward: Callable[..., Tensor], samples: int) -> Callable[..., Tensor]:
    compiled = torch.compile(forward, dynamic=False)

    @wraps(forward)
    def dispatch(*inputs: Any, **options: Any) -> Tensor:
        tensors = not options and all(isinstance(x, Tensor) and x.dim() > 0 for x in inputs)
        is_full_batch = tensors and torch.is_grad_enabled() and all(len(x) == samples for x in inputs)
        return (compiled if is_full_batch else forward)(*inputs, **options)

    return dispatch


def check_compiler() -> None:
    """Raise unless a C++ compiler and Python's headers are installed, as torch.compile needs both on a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise NativeError(
            "train.compile=true: no C++ compiler", hint="install g++, set CXX to a compiler, or set train.compile=false"
        ) from None
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise NativeError(
            f"train.compile=true: no {header}", hint="install Python's headers, or set train.compile=false"
        )
