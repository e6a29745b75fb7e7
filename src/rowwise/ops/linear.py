"""Linear layers on a CPU, by whichever of torch's two libraries for matrix products is faster on this processor.

torch multiplies float32 matrices with the library it was built with (MKL on x86), which on some processors reaches
less than half of their speed where oneDNN, which is in the same torch, reaches nearly all; on others the two are
equal. So it is measured: once a process, when a layer first needs to know. oneDNN is taken where it is clearly
faster, by a factor that noise does not reach, since the two round differently and a run should not depend on chance.

Everything that oneDNN is not asked to do (16 bits, other devices, empty batches, compiled code) goes the ordinary way.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from rowwise.errors import NativeError, SpecError

Library = Literal["torch", "onednn"]

CLEARLY = 1.3  # times as fast, to be taken
SHAPES = (256, 256), (256, 256), (256, 256)  # of input, weight and gradient, to find out
REPEATS = 7


@dataclass(slots=True)
class _Choice:
    library: Library | None = None  # None: measure when it is first needed
    measuring: threading.Lock = field(default_factory=threading.Lock)  # two at once would measure each other


_choice = _Choice()


def choose(library: Library | None) -> None:
    """Multiply with this library from now on; None measures again when it is next needed."""
    if library is not None and library not in get_args(Library):
        raise SpecError(f"no library {library!r} for matrix products; choose one of {', '.join(get_args(Library))}")
    if library == "onednn" and not has_onednn():
        raise NativeError(f"torch {torch.__version__} was built without oneDNN; choose 'torch', or None")
    _choice.library = library


def chosen() -> Library:
    """The library in use: what `choose` was given, else what was measured to be faster, which is then kept."""
    if _choice.library is None:
        with _choice.measuring:
            if _choice.library is None:
                _choice.library = "onednn" if has_onednn() and speedup() >= CLEARLY else "torch"
    return _choice.library


def has_onednn() -> bool:
    """Whether this torch has the fused operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """F.linear, and a ReLU behind it if asked for."""
    # What is compiled is the compiler's: torch's has no place for this operator in training.
    if not torch.compiler.is_compiling() and _suits(x, weight_OI, bias_O) and chosen() == "onednn":
        out_BO = _Linear.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight_OI.contiguous(), bias_O, relu)
        return out_BO.view(*x.shape[:-1], weight_OI.shape[0])
    out = F.linear(x, weight_OI, bias_O)
    # In place: the gradient of a linear layer does not need its output.
    return out.relu_() if relu else out


def speedup() -> float:
    """How many times as fast as torch's default oneDNN is at the three products of a layer's step, on one thread.

    On one, because several wait for each other: where others use the cores too, that is what would be measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _time_products()
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _time_products() -> float:
    generator = torch.Generator().manual_seed(0)
    x_BI, weight_OI, grad_BO = (torch.randn(n, k, generator=generator) for n, k in SHAPES)
    best = {F.linear: float("inf"), _product: float("inf")}
    for repeat in range(REPEATS + 1):
        for product in best:
            begin = time.perf_counter()
            product(x_BI, weight_OI)
            product(grad_BO, weight_OI.t())
            product(grad_BO.t(), x_BI.t())
            if repeat:  # the first round warms up
                best[product] = min(best[product], time.perf_counter() - begin)
    return best[F.linear] / best[_product]


def _suits(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Whether oneDNN would be asked. In 16 bits torch uses it anyway."""
    tensors = [x, weight_OI] if bias_O is None else [x, weight_OI, bias_O]
    plain = all(t.device.type == "cpu" and t.dtype is torch.float32 for t in tensors)
    # Wrong shapes go to torch too, whose errors name them.
    fits = x.dim() > 1 and x.shape[-1] == weight_OI.shape[-1] and x.numel() > 0 and weight_OI.numel() > 0
    return plain and fits and not torch.is_autocast_enabled("cpu")


def _product(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, bias_N, "none", [], "")


class _Linear(torch.autograd.Function):
    """A layer whose three products are oneDNN's; transposed views are as fast there as copies."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        x_BI, weight_OI, bias_O, relu = args
        out_BO = _product(x_BI, weight_OI, bias_O)
        # Not oneDNN's own ReLU, which turns NaN into 0: a run that has gone wrong would look healthy.
        return out_BO.relu_() if relu else out_BO

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_BI, weight_OI, _, relu = inputs
        ctx.save_for_backward(x_BI, weight_OI, output if relu else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, weight_OI, out_BO = ctx.saved_tensors
        # A gradient that is an expanded scalar (of a sum, say) has no memory of its own to read.
        grad_BO = grads[0].contiguous()
        if out_BO is not None:
            grad_BO = torch.ops.aten.threshold_backward(grad_BO, out_BO, 0)
        # For a gradient of the gradient torch has to see products that it can differentiate.
        product: Callable[[Tensor, Tensor], Tensor] = F.linear if torch.is_grad_enabled() else _product
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        x_grad = product(grad_BO, weight_OI.t()) if wants_x else None
        weight_grad = None
        if wants_weight and x_BI.shape[1] * 4 < grad_BO.shape[1]:  # the longer side belongs in the lanes
            weight_grad = product(x_BI.t(), grad_BO.t()).t()
        elif wants_weight:
            weight_grad = product(grad_BO.t(), x_BI.t())
        return x_grad, weight_grad, grad_BO.sum(0) if wants_bias else None, None
