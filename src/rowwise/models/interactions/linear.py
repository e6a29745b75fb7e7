"""Linear combinations of a sample's vectors: Y = W X, W of L x M (Zhang et al. 2022, arXiv 2203.11014)."""

from torch import Tensor, nn

from rowwise.models.mlp import Linear


class LinearInteraction(nn.Module):
    """Y = W X: each new vector is a weighted sum of the vectors.

    Args:
        vectors: M, input vectors of a sample.
        out: L, output vectors.
        dim: of a vector; unused.
    """

    def __init__(self, vectors: int, out: int, dim: int) -> None:
        super().__init__()
        self.map = Linear(vectors, out, bias=False)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, L, D]."""
        return self.map(x_BMD.transpose(1, 2)).transpose(1, 2)
