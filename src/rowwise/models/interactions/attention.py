"""Self-attention over a sample's vectors, the layer of a transformer's encoder: Y = W encoder(X).

    encoder: Z = LayerNorm(X + attention(X)), LayerNorm(Z + feed_forward(Z))

(Vaswani et al. 2017, arXiv 1706.03762; as a part of DHEN: Zhang et al. 2022, arXiv 2203.11014.)
"""

from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import SpecError
from rowwise.models.interactions.linear import LinearInteraction
from rowwise.models.mlp import Linear, Mlp


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V of each head side by side; Q, K and V are linear maps of the vectors.

    Args:
        dim: of a vector.
        heads: attention heads, each with an equal part of a vector.
        out: dim of an output vector, by default `dim`.
        bias: whether Q, K and V have one.
    """

    def __init__(self, dim: int, heads: int, out: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        out = dim if out is None else out
        if heads < 1 or out % heads:
            raise SpecError(f"heads={heads}", f"a divisor of {out}, the size of a vector")
        self.heads = heads
        self.maps = Linear(dim, 3 * out, bias=bias)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, dim] to [B, M, out]."""
        heads = [part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.maps(x_BMD).chunk(3, 2)]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class AttentionInteraction(nn.Module):
    """Y = W encoder(X), a transformer's encoder layer without dropout.

    Args:
        vectors: M, input vectors of a sample.
        out: L, output vectors.
        dim: of a vector.
        heads: attention heads, each with an equal part of a vector.
        ffn_ratio: width of the feed-forward hidden layer, in dims.
    """

    def __init__(self, vectors: int, out: int, dim: int, *, heads: int = 1, ffn_ratio: int = 4) -> None:
        super().__init__()
        self.attention, self.project = Attention(dim, heads), Linear(dim, dim)
        self.feed_forward = Mlp((dim, ffn_ratio * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.mix = LinearInteraction(vectors, out, dim)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, L, D]."""
        z_BMD = self.norms[0](x_BMD + self.project(self.attention(x_BMD)))
        return self.mix(self.norms[1](z_BMD + self.feed_forward(z_BMD)))
