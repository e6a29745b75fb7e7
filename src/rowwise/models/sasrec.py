"""SASRec: self-attention over a history, each item over those before it.

The encoder of "Self-Attentive Sequential Recommendation" (Kang & McAuley 2018, arXiv 1808.09781):

    X_0     = dropout(sqrt(D) items + positions)         positions: one learned vector for each place in a history
    Z       = X_n + dropout(attention(norm(X_n)))        causal: place i sees the places up to i
    X_(n+1) = Z + dropout(W_2 dropout(relu(W_1 norm(Z))))
    vectors = norm(X_N)

`NextItem` holds the item vectors, for input and scores alike.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.models.histories import Groups, HistoryEncoder
from rowwise.models.mlp import Linear, Mlp


class SasRecBlock(nn.Module):
    """A layer of causal self-attention and a feed-forward layer, each after a norm, with a shortcut.

    Args:
        dim: of a vector.
        heads: attention heads, each with an equal part of a vector.
        dropout: rate on attention weights and on the output of each part.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.maps, self.project = Linear(dim, 3 * dim), Linear(dim, dim)
        self.feed_forward = Mlp((dim, dim, dim), dropout=dropout)

    def forward(self, x_ND: Tensor, groups: Groups) -> Tensor:
        """[N, D] to [N, D]."""
        attended_ND = self.project(groups.map(self._attend, self.maps(self.norms[0](x_ND))))
        x_ND = x_ND + F.dropout(attended_ND, self.dropout, self.training)
        return x_ND + F.dropout(self.feed_forward(self.norms[1](x_ND)), self.dropout, self.training)

    def _attend(self, maps_BLC: Tensor) -> Tensor:
        """[B, L, 3 D] to [B, L, D]."""
        heads = [part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in maps_BLC.chunk(3, 2)]
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True).transpose(1, 2).flatten(2)


class SASRec(HistoryEncoder):
    """SASRec (Kang & McAuley 2018): learned positions, then blocks of causal self-attention and a feed-forward layer.

    Arguments are those of `HistoryEncoder`; a layer is a block.
    """

    def __init__(self, dim: int, *, length: int = 50, layers: int = 2, heads: int = 1, dropout: float = 0.2) -> None:
        super().__init__(dim, length=length, layers=layers, heads=heads, dropout=dropout)
        self.positions = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.layers = nn.ModuleList(SasRecBlock(dim, heads, dropout) for _ in range(layers))

    def placed(self, x_ND: Tensor, groups: Groups) -> Tensor:
        return x_ND + self.positions[groups.positions_N]
