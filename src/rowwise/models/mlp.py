"""The dense layers that models are built from: a linear layer with its ReLU, and a stack of them.

In inference, modules with packed layers (`PackedModule`) compute them in one native call.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import SpecError
from rowwise.tables.ops.linear import LinearLayer, PackedLayers, linear, pack_layers, padded_linear

Norm = Literal["batch", "layer"]


class PackedModule(nn.Module):
    """A module that computes its layers by a packed copy of their weights, within `inference_mode`."""

    frozen = False  # whether weights do not change, and rows keep their bits
    packed: PackedLayers | None = None  # also None if a module around this one has packed it

    def chain(self) -> Sequence[LinearLayer] | None:
        """The layers of the packed copy; None if they are packed one by one."""
        raise NotImplementedError

    def pack(self) -> bool:
        """Pack the layers as they are now; returns whether that was possible."""
        layers = self.chain()
        self.packed = None if layers is None else pack_layers(layers)
        return self.packed is not None


class Linear(PackedModule, nn.Linear):
    """nn.Linear through the faster matrix library (`tables/ops/linear.py`), optionally followed by a ReLU.

    Parameters, their initial values and the state dict are those of nn.Linear, so either can replace the other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        relu: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.relu = relu

    @property
    def layer(self) -> LinearLayer:
        return LinearLayer(self.weight, self.bias, self.relu)

    def chain(self) -> Sequence[LinearLayer]:
        return [self.layer]

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.packed is not None:
            return self.packed(input)
        multiply = padded_linear if self.frozen else linear
        return multiply(input, self.weight, self.bias, relu=self.relu)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"


def stack(layers: Iterable[nn.Module]) -> nn.Sequential:
    """The layers one after the other. Each is registered before the next is made, so that it can be sharded first."""
    sequence = nn.Sequential()
    for layer in layers:
        sequence.append(layer)
    return sequence


class Mlp(PackedModule):
    """Linear layers with ReLUs between them, and optional normalisation and dropout of the hidden layers.

    Names of weights do not depend on dropout, so that a warm start may change it.

    Args:
        sizes: of the input, of each hidden layer, and of the output.
        relu_last: whether the output is treated as a hidden layer: norm, ReLU and dropout.
        dropout: rate on the hidden layers.
        norm: "batch" or "layer" between a hidden layer and its ReLU; None for none.
    """

    def __init__(
        self, sizes: Sequence[int], *, relu_last: bool = False, dropout: float = 0.0, norm: Norm | None = None
    ) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise SpecError(f"an Mlp got sizes {tuple(sizes)}", "at least those of an input and an output, all >= 1")
        if not 0 <= dropout < 1:
            raise SpecError(f"dropout={dropout}", "at least 0 and less than 1")
        if norm is not None and norm not in NORMS:
            raise SpecError(f"norm={norm!r}", f"{' or '.join(map(repr, NORMS))}, or None")
        hidden = len(sizes) - 1 if relu_last else len(sizes) - 2
        self.layers = stack(
            Linear(sizes[k], sizes[k + 1], relu=k < hidden and norm is None) for k in range(len(sizes) - 1)
        )
        self.norms = nn.ModuleList(NORMS[norm](size) for size in sizes[1 : hidden + 1]) if norm else None
        self.hidden, self.dropout = hidden, dropout

    def chain(self) -> Sequence[LinearLayer] | None:
        layers = [layer.layer for layer in self.layers if isinstance(layer, Linear)]
        return layers if self.norms is None else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., sizes[0]] to [..., sizes[-1]]."""
        if self.packed is not None:
            return self.packed(x)
        if self.norms is None and not self.dropout:
            return self.layers(x)
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k < self.hidden:
                x = x if self.norms is None else self.norms[k](x).relu()
                x = F.dropout(x, self.dropout, self.training)
        return x


class BatchNorm(nn.BatchNorm1d):
    """nn.BatchNorm1d that takes a batch of one sample: without a variance, it uses the running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        """[B, width] to [B, width]."""
        if self.training and len(input) == 1:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(input)


NORMS: dict[str, type[nn.Module]] = {"batch": BatchNorm, "layer": nn.LayerNorm}
