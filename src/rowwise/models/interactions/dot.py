"""Dot products of all pairs of vectors, then an MLP, as in DLRM: Y = MLP([x_i . x_j for j < i]).

The paper of DHEN (Zhang et al. 2022, arXiv 2203.11014) has this part of "AdvancedDLRM"; the rest of that production
model was not published.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.mlp import Mlp
from rowwise.tables.ops.interact import interact


class DotInteraction(nn.Module):
    """Y = MLP([x_i . x_j for j < i]).

    Args:
        vectors: M, input vectors of a sample; at least 2.
        out: L, output vectors.
        dim: of a vector.
        hidden: sizes of the MLP's hidden layers.
    """

    def __init__(self, vectors: int, out: int, dim: int, hidden: Sequence[int] = (128,)) -> None:
        super().__init__()
        if vectors < 2:
            raise SpecError(f"a dot interaction of {vectors} vectors", "at least 2")
        self.out, self.dim = out, dim
        self.mlp = Mlp((vectors * (vectors - 1) // 2, *hidden, out * dim))

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, L, D]."""
        dots_BP = interact(x_BMD[:, 0], x_BMD[:, 1:].flatten(1))[:, self.dim :]
        return self.mlp(dots_BP).view(x_BMD.shape[0], self.out, self.dim)
