"""The factorization machine block of Wukong (Zhang et al. 2024, arXiv 2403.02545).

FM(X) = X (X^T P)                     the dots of all pairs, projected on K learned directions P of M x K
Y     = MLP(LayerNorm(flatten FM(X)))
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.mlp import Mlp


class FactorizationInteraction(nn.Module):
    """Y = MLP(LayerNorm(X (X^T P))).

    Args:
        vectors: M, input vectors of a sample.
        out: L, output vectors.
        dim: of a vector.
        rank: K, the columns of P.
        hidden: sizes of the MLP's hidden layers.
    """

    def __init__(self, vectors: int, out: int, dim: int, *, rank: int = 8, hidden: Sequence[int] = (128,)) -> None:
        super().__init__()
        if rank < 1:
            raise SpecError(f"rank={rank}", "at least 1")
        self.out, self.dim = out, dim
        self.directions = nn.Parameter(torch.randn(vectors, rank) / vectors**0.5)
        self.norm = nn.LayerNorm(vectors * rank)
        self.mlp = Mlp((vectors * rank, *hidden, out * dim))

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, L, D]."""
        projected_BMK = x_BMD @ (x_BMD.transpose(1, 2) @ self.directions)
        return self.mlp(self.norm(projected_BMK.flatten(1))).view(x_BMD.shape[0], self.out, self.dim)
