"""Dense layers of TorchRec's models by our kernels: the same parameters, names and results up to float rounding.

Only `forward` of a layer changes, and only that of `nn.Linear`, `LowRankCrossNet` and DLRM's `InteractionArch`
themselves: a subclass keeps its own.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet

from rowwise.tables.ops.interact import interact
from rowwise.tables.ops.linear import linear

FEW = 512  # samples below which torch's own kernels are as fast: their bits are TorchRec's


def use_our_kernels(module: nn.Module) -> None:
    """Replace `forward` of the layers that we have a kernel for."""
    for child in module.modules():
        if type(child) is nn.Linear:
            _set_forward(child, _linear)
        elif type(child) is LowRankCrossNet:
            _set_forward(child, _cross)
        elif type(child) is InteractionArch:
            _set_forward(child, _interact)


def _set_forward(layer: Any, forward: Callable[..., Tensor]) -> None:
    layer.forward = MethodType(forward, layer)


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    return product(input, layer.weight, layer.bias)


@torch.fx.wrap
def product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear`, into which `torch.fx` does not look."""
    if x.shape[0] < FEW:
        return F.linear(x, weight_OI, bias_O)
    return linear(x, weight_OI, bias_O)


def _cross(net: Any, input: Tensor) -> Tensor:
    """The layers of DCN-v2 with weights of low rank: x + x_0 * (W V x + b)."""
    x = input
    for narrow, wide, bias in zip(net.V_kernels, net.W_kernels, net.bias, strict=True):
        x = input * (product(product(x, narrow), wide) + bias) + x
    return x


def _interact(layer: Any, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
    return upper_pairs(dense_features, sparse_features, layer.triu_indices)


@torch.fx.wrap
def upper_pairs(dense_BD: Tensor, sparse_BFD: Tensor, pairs_2P: Tensor) -> Tensor:
    """The dense vector, then the dot products of pairs in TorchRec's order; `torch.fx` does not look inside."""
    if not pairs_2P.numel():
        return dense_BD
    low_P, high_P = pairs_2P
    if len(dense_BD) < FEW:
        vectors_BFD = torch.cat([dense_BD.unsqueeze(1), sparse_BFD], 1)
        dots_BFF = torch.bmm(vectors_BFD, vectors_BFD.transpose(1, 2))
        return torch.cat([dense_BD, dots_BFF[:, low_P, high_P]], 1)
    dim = dense_BD.shape[1]
    # Ours have the dense vector, too, and then pair (high, low) at high * (high - 1) / 2 + low.
    order_S = torch.cat([torch.arange(dim, device=low_P.device), dim + high_P * (high_P - 1) // 2 + low_P])
    return _Reordered.apply(interact(dense_BD, sparse_BFD.flatten(1)), order_S)


class _Reordered(torch.autograd.Function):
    """Columns in another order: each once, so that the gradient is a gather, too."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, x_BS, order_S = args
        ctx.save_for_backward(order_S)
        return x_BS.index_select(1, order_S)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (order_S,) = ctx.saved_tensors
        return grad_outputs[0].index_select(1, order_S.argsort()), None
