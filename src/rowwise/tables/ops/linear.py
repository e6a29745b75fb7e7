"""`linear`: F.linear on a CPU with the faster of torch's two GEMM libraries for this processor.

torch multiplies float32 matrices with the library it was built with (MKL on x86). On most AMD processors that is slower
than oneDNN, which is in the same torch; on others the two are equal. `base/processor.py` has the table of processors.
Within `float8_products`, layers multiply in 8 bits. All other cases (16 bits, other devices, empty batches) call
F.linear.

Layers whose weights do not change may be packed (`pack_layers`): one native call computes a chain of them, without
gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from rowwise.base.errors import NativeError, SpecError
from rowwise.base.processor import GemmLibrary, Processor, gemm_library_of, read_processor
from rowwise.tables.ops.float8 import fits_float8, float8_linear

BLOCK_ROWS = 16  # a row has the same bits in any multiple of this many rows; see [Note: Blocks of rows]
PANEL = 16  # outputs of packed weights side by side, see `_cpp/layers.h`
ALIGNED_COLUMNS = 8  # 16-bit products on a GPU are padded to a multiple of this


@dataclass(slots=True)
class _Choice:
    library: GemmLibrary | None = None  # None until the first use, which chooses by processor


_choice = _Choice()


def choose_library(library: GemmLibrary | None) -> None:
    """Use this library for all later products; None restores the default for this processor."""
    if library is not None and library not in get_args(GemmLibrary):
        raise SpecError(f"no library {library!r} for matrix products", f"one of {', '.join(get_args(GemmLibrary))}")
    if library == "onednn" and not has_onednn():
        raise NativeError(f"torch {torch.__version__} was built without oneDNN", "library 'torch', or None")
    _choice.library = library


def current_library() -> GemmLibrary:
    """The library in use: that of `choose_library`, else the one for this processor."""
    if _choice.library is None:
        _choice.library = library_for(read_processor())
    return _choice.library


def library_for(processor: Processor) -> GemmLibrary:
    """The faster library on a processor, of those that this torch has."""
    return gemm_library_of(processor) if has_onednn() else "torch"


def has_onednn() -> bool:
    """Whether this torch has oneDNN's fused linear operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """F.linear, followed by a ReLU with `relu`."""
    if fits_float8(x, weight_OI):
        out = float8_linear(x, weight_OI, bias_O)
        return out.relu_() if relu else out
    if _fits_onednn(x, weight_OI, bias_O) and current_library() == "onednn":
        x_BI = x.reshape(-1, x.shape[-1]).contiguous()
        if torch.is_grad_enabled():
            out_BO = _LinearFunction.apply(x_BI, weight_OI.contiguous(), bias_O, relu)
        else:  # without torch's bookkeeping of autograd functions, which takes longer than a small product
            out_BO = _forward(x_BI, weight_OI.contiguous(), bias_O, relu)
        return out_BO if x.dim() == 2 else out_BO.view(*x.shape[:-1], weight_OI.shape[0])
    out = F.linear(*_padded(x, weight_OI), bias_O)
    # In place: the gradient of a linear layer does not need its output.
    return out.relu_() if relu else out


def _padded(x: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors, zero-padded for 16 bits on a GPU to a multiple of 8 columns: others take 3 times as long."""
    missing = -x.shape[-1] % ALIGNED_COLUMNS
    if not missing or not x.is_cuda or not torch.is_autocast_enabled("cuda"):
        return x, weight_OI
    half = torch.get_autocast_dtype("cuda")
    return F.pad(x.to(half), (0, missing)), F.pad(weight_OI.to(half), (0, missing))


class LinearLayer(NamedTuple):
    """A linear layer and whether a ReLU follows."""

    weight_OI: Tensor
    bias_O: Tensor | None
    relu: bool


class PackedLayers(NamedTuple):
    """Layers, one after the other, as `_cpp/layers.h` reads them. A row has the same bits in any batch."""

    layers_LC: Tensor  # inputs, outputs and whether a ReLU follows
    weights: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        if x.dim() == 2:
            return torch.ops.rowwise.layers(x.contiguous(), self.layers_LC, self.weights)
        x_BI = x.reshape(-1, x.shape[-1]).contiguous()
        out_BO = torch.ops.rowwise.layers(x_BI, self.layers_LC, self.weights)
        return out_BO.view(*x.shape[:-1], out_BO.shape[1])

    def around_pairs(self, x_BI: Tensor, pooled_BS: Tensor, first: int) -> Tensor:
        """The first layers, the interaction of their outputs with pooled vectors (`interact`), and the other layers."""
        return torch.ops.rowwise.layers(x_BI.contiguous(), self.layers_LC, self.weights, pooled_BS.contiguous(), first)


def pack_layers(layers: Sequence[LinearLayer]) -> PackedLayers | None:
    """A packed copy of layers as they are now; None unless they are computed in float32 on a CPU."""
    if torch.is_autocast_enabled("cpu"):
        return None
    parts: list[Tensor] = []
    for weight_OI, bias_O, _ in layers:
        if weight_OI.device.type != "cpu" or weight_OI.dtype is not torch.float32:
            return None
        lines = torch.zeros(-(-weight_OI.shape[0] // PANEL) * PANEL, 1 + weight_OI.shape[1])
        lines[: len(weight_OI), 1:] = weight_OI.detach()
        if bias_O is not None:
            lines[: len(weight_OI), 0] = bias_O.detach()
        parts.append(lines.view(-1, PANEL, lines.shape[1]).transpose(1, 2).flatten())
    facts = [(layer.weight_OI.shape[1], layer.weight_OI.shape[0], int(layer.relu)) for layer in layers]
    return PackedLayers(torch.tensor(facts), torch.cat(parts))


def padded_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, relu: bool) -> Tensor:
    """`linear` with padded rows, for layers that are not packed: see [Note: Blocks of rows]."""
    x_BI = x.reshape(-1, x.shape[-1])
    rows = len(x_BI)
    padding = -rows % BLOCK_ROWS if rows else BLOCK_ROWS
    if padding:
        x_BI = F.pad(x_BI, (0, 0, 0, padding))
    out_BO = linear(x_BI, weight_OI, bias_O, relu=relu)
    out_BO = out_BO[:rows] if padding else out_BO
    return out_BO if x.dim() == 2 else out_BO.view(*x.shape[:-1], out_BO.shape[1])


def _fits_onednn(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Whether the tensors are float32 on a CPU, with valid shapes; in 16 bits torch uses oneDNN anyway."""
    tensors = [x, weight_OI] if bias_O is None else [x, weight_OI, bias_O]
    plain = all(t.device.type == "cpu" and t.dtype is torch.float32 for t in tensors)
    # Wrong shapes go to torch, whose errors name them.
    fits = x.dim() > 1 and x.shape[-1] == weight_OI.shape[-1] and x.numel() > 0 and weight_OI.numel() > 0
    return plain and fits and not torch.is_autocast_enabled("cpu")


@torch.library.custom_op("rowwise::onednn_product", mutates_args=())
def _onednn_product(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """One operator for torch's compiler, which does not support oneDNN's in training."""
    return torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, bias_N, "none", [], "")


@_onednn_product.register_fake
def _(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0])


def _product(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        return _onednn_product(a_MK, b_NK, bias_N)
    return torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, bias_N, "none", [], "")


def _forward(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, relu: bool) -> Tensor:
    out_BO = _product(x_BI, weight_OI, bias_O)
    # Not oneDNN's own ReLU, which turns NaN into 0: a diverged run would look healthy.
    return out_BO.relu_() if relu else out_BO


class _LinearFunction(torch.autograd.Function):
    """A layer whose three products are oneDNN's; transposed views are as fast there as copies."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_BI, weight_OI, _, relu = inputs
        ctx.save_for_backward(x_BI, weight_OI, output if relu else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, weight_OI, out_BO = ctx.saved_tensors
        # A gradient that is an expanded scalar (of a sum, say) has no memory of its own to read.
        grad_BO = grads[0].contiguous()
        # For a gradient of the gradient torch has to see what it can differentiate.
        differentiable = torch.is_grad_enabled()
        product: Callable[[Tensor, Tensor], Tensor] = F.linear if differentiable else _product
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        narrow = x_BI.shape[1] * 4 < grad_BO.shape[1]  # the longer side belongs in the SIMD lanes
        grad_OB = grad_BO.t()
        if out_BO is not None and wants_weight and not (differentiable or narrow):
            grad_BO, grad_OB = torch.ops.rowwise.relu_grad(grad_BO, out_BO)
        elif out_BO is not None:
            grad_BO = torch.ops.aten.threshold_backward(grad_BO, out_BO, 0)
            grad_OB = grad_BO.t()
        x_grad = product(grad_BO, weight_OI.t()) if wants_x else None
        weight_grad = None
        if wants_weight and narrow:
            weight_grad = product(x_BI.t(), grad_OB).t()
        elif wants_weight:
            weight_grad = product(grad_OB, x_BI.t())
        return x_grad, weight_grad, grad_BO.sum(0) if wants_bias else None, None
