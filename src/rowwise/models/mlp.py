"""The dense layers that models are built from: a linear layer with its ReLU, and a stack of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowwise.errors import SpecError
from rowwise.ops.linear import linear


class Linear(nn.Linear):
    """nn.Linear through the faster matrix library (see `rowwise.ops.linear`), with a ReLU behind it if asked for.

    Parameters, their initial values and the state dict are those of nn.Linear, so one can replace the other.
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

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return linear(input, self.weight, self.bias, relu=self.relu)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"


class Mlp(nn.Module):
    """Linear layers with ReLUs between them.

    Args:
        sizes: of the input, of each hidden layer, and of the output.
        relu_last: whether the output passes through a ReLU, too.
    """

    def __init__(self, sizes: Sequence[int], *, relu_last: bool = False) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise SpecError(f"an Mlp got sizes {tuple(sizes)}; want at least those of an input and an output, all >= 1")
        last = len(sizes) - 2
        self.layers = nn.Sequential(
            *(Linear(sizes[k], sizes[k + 1], relu=k < last or relu_last) for k in range(last + 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., sizes[0]] to [..., sizes[-1]]."""
        return self.layers(x)
