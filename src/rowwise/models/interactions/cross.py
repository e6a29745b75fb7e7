"""A cross layer over all numbers of a sample: y = x * (W x + b), then Y = V y if L differs from M.

DHEN's paper (Zhang et al. 2022, arXiv 2203.11014) prints W (X X^T) + b, which is not a layer of DCN and does not have
the shape of X. This is the cross of DCN-v2 (Wang et al. 2021, arXiv 2008.13535) with x_0 = x, without its shortcut, as
the layer around it has one.
"""

from torch import Tensor, nn

from rowwise.models.dcn import cross_map
from rowwise.models.interactions.linear import LinearInteraction


class CrossInteraction(nn.Module):
    """y = x * (W x + b), then Y = V y if L differs from M.

    Args:
        vectors: M, input vectors of a sample.
        out: L, output vectors.
        dim: of a vector.
        rank: of W as the product of two thin matrices; None for a full matrix.
    """

    def __init__(self, vectors: int, out: int, dim: int, rank: int | None = None) -> None:
        super().__init__()
        self.map = cross_map(vectors * dim, rank)
        self.mix = nn.Identity() if out == vectors else LinearInteraction(vectors, out, dim)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, L, D]."""
        return self.mix(x_BMD * self.map(x_BMD.flatten(1)).view_as(x_BMD))
