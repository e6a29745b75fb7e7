"""`compile_dense`: torch.compile for the layers of a model's dense side, in place; lookups and exchanges do not change.

A layer is what FSDP would gather at once, or smaller: see `dense_parallel.find_units`. Its `forward` is compiled: names
of parameters, hooks and the order of collectives do not change. Layers of equal shapes share code.

The code is for batches of one size, that of all steps but an epoch's last. Torch splits sums by the size that it
compiles for. Code for all sizes would depend on the first batch, and a resumed run may begin with a shorter one. Other
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

VARIANTS = 4  # of a layer: with autocast or not, with gradients of its inputs or not


def compile_dense(model: nn.Module, samples: int) -> None:
    """Compile each layer at its first batch of so many samples."""
    check_compiler()
    current_library()  # reads the processor's name from a file, which compiled code cannot
    units = find_units(model, least=1)
    limits = torch._dynamo.config  # torch counts code of all layers together, and would silently stop at 8
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS * len(units))
    for unit in units if samples else ():
        unit.forward = _compile(unit.forward, samples)


def _compile(forward: Callable[..., Tensor], samples: int) -> Callable[..., Tensor]:
    compiled = torch.compile(forward, dynamic=False)

    @wraps(forward)
    def compiled_if_usual(*inputs: Any, **options: Any) -> Tensor:
        tensors = not options and all(isinstance(x, Tensor) and x.dim() > 0 for x in inputs)
        is_usual = tensors and torch.is_grad_enabled() and all(len(x) == samples for x in inputs)
        return (compiled if is_usual else forward)(*inputs, **options)

    return compiled_if_usual


def check_compiler() -> None:
    """Raise unless there are a C++ compiler and Python's headers, which code for a CPU is compiled with."""
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
