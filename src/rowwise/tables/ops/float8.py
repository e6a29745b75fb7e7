"""`float8_linear`: a linear layer whose three products have inputs of 8 bits, for GPUs that multiply these.

Inputs and weights are float8_e4m3fn, gradients float8_e5m2. Each matrix has one scale, a power of two, which brings its
largest magnitude into the upper half of what its type holds, anew in each step. Sums are in float32, biases are added
after them. A CPU has no such products: it multiplies the rounded numbers in float32, which is slower than without
rounding, and measures without a GPU what 8 bits cost in quality.

Not verified on any GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rowwise.base.errors import NativeError

MULTIPLE = 16  # GPUs need sides of matrices that are multiples of this
CAPABILITY = (8, 9)  # least compute capability with such products
VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2

_enabled: ContextVar[bool] = ContextVar("float8_products", default=False)


@contextmanager
def float8_products(device: torch.device) -> Iterator[None]:
    """`ops.linear` multiplies in 8 bits where `fits_float8` holds."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        version = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise NativeError(
            f"precision fp8: {device} has compute capability {version}", "8.9 or later, or precision bf16"
        )
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


def fits_float8(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether 8 bits are enabled and both widths of a layer are multiples of 16; other layers keep their precision."""
    # Compilers cannot read context variables; settings refuse both together.
    if torch.compiler.is_compiling() or not _enabled.get():
        return False
    widths = weight_OI.shape if weight_OI.dim() == 2 else (1,)
    return (
        x.is_floating_point()
        and x.dim() > 1
        and x.numel() > 0
        and x.shape[-1] == widths[-1]
        and all(width and width % MULTIPLE == 0 for width in widths)
    )


def float8_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """F.linear in 8 bits."""
    kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    out_BO = _Float8Function.apply(x.reshape(-1, x.shape[-1]), weight_OI, kind)
    out_BO = out_BO if bias_O is None else out_BO + bias_O.to(kind)
    return out_BO.view(*x.shape[:-1], weight_OI.shape[0])


def product_float8(a_MK: Tensor, b_NK: Tensor, kind: torch.dtype, *, a: torch.dtype = VALUES) -> Tensor:
    """The product of a matrix and the transpose of another, both rounded to 8 bits."""
    padding = -a_MK.shape[1] % MULTIPLE  # of the batch, in the gradient of weights
    rounded_a_MK, scale_a = round_float8(F.pad(a_MK, (0, padding)), a)
    rounded_b_NK, scale_b = round_float8(F.pad(b_NK, (0, padding)), VALUES)
    if a_MK.device.type == "cpu":
        return (F.linear(rounded_a_MK.float(), rounded_b_NK.float()) * (scale_a * scale_b)).to(kind)
    return scaled_product(rounded_a_MK, scale_a, rounded_b_NK, scale_b, kind)


def scaled_product(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor, kind: torch.dtype) -> Tensor:
    """The product as GPUs compute it."""
    per_tensor = F.ScalingType.TensorWise
    return F.scaled_mm(a_MK, b_NK.t(), scale_a, per_tensor, scale_b, per_tensor, output_dtype=kind)


def round_float8(x_MK: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, and the scale to multiply it by; a NaN or an infinity makes all numbers NaN."""
    x_MK = x_MK.float()
    largest = x_MK.abs().amax()
    _, exponent = torch.frexp(largest / torch.finfo(kind).max)
    scale = torch.where(largest.isfinite(), torch.exp2(exponent.float()), torch.nan)
    return (x_MK / scale).to(kind).contiguous(), scale


class _Float8Function(torch.autograd.Function):
    """Products of a layer without its bias."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        return product_float8(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        x_grad = product_float8(grads[0], weight_OI.t(), x_BI.dtype, a=GRADIENTS) if wants_x else None
        weight_grad = product_float8(grads[0].t(), x_BI.t(), weight_OI.dtype, a=GRADIENTS) if wants_weight else None
        return x_grad, weight_grad, None
