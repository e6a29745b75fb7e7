"""HSTU: gated attention over a history, without a softmax.

The encoder of "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (Zhai et al. 2024, arXiv 2402.17152), with the relative bias of places and without that of times:

    U, V, Q, K = silu(W_1 norm(X))
    A          = silu(Q K^T + bias[i - j]) / length        causal; weights need not sum to 1
    Y          = X + W_2 dropout(norm(A V) * U)

`NextItem` holds the item vectors, for input and scores alike.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.models.histories import Groups, HistoryEncoder
from rowwise.models.mlp import Linear


class HstuLayer(nn.Module):
    """X + W_2 dropout(norm(silu(Q K^T + bias) V / length) * U).

    Args:
        dim: of a vector.
        length: max. items of a history.
        heads: attention heads, each with an equal part of a vector.
        dropout: rate before W_2.
    """

    def __init__(self, dim: int, length: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.length, self.heads, self.dropout = length, heads, dropout
        self.bias = nn.Parameter(torch.randn(heads, length) * 0.02)  # by distance to the earlier item
        self.maps, self.project = Linear(dim, 4 * dim), Linear(dim, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

    def forward(self, x_ND: Tensor, groups: Groups) -> Tensor:
        """[N, D] to [N, D]."""
        gate_ND, maps_NC = F.silu(self.maps(self.norms[0](x_ND))).tensor_split((x_ND.shape[1],), 1)
        gated_ND = self.norms[1](groups.map(self._attend, maps_NC)) * gate_ND
        return x_ND + self.project(F.dropout(gated_ND, self.dropout, self.training))

    def _attend(self, maps_BLC: Tensor) -> Tensor:
        """[B, L, 3 D] to [B, L, D]."""
        v_BHLD, q_BHLD, k_BHLD = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in maps_BLC.chunk(3, 2))
        place_L = torch.arange(maps_BLC.shape[1], device=maps_BLC.device)
        distance_LL = place_L.unsqueeze(1) - place_L  # beyond `length` only in padding
        weights_BHLL = (
            F.silu(q_BHLD @ k_BHLD.transpose(2, 3) + self.bias[:, distance_LL.clamp(0, self.length - 1)]) / self.length
        )
        return (weights_BHLL.masked_fill(distance_LL < 0, 0.0) @ v_BHLD).transpose(1, 2).flatten(2)


class HSTU(HistoryEncoder):
    """HSTU (Zhai et al. 2024): layers of gated attention whose weights are silu(Q K^T + bias) and no softmax.

    Arguments are those of `HistoryEncoder`.
    """

    def __init__(self, dim: int, *, length: int = 50, layers: int = 2, heads: int = 1, dropout: float = 0.2) -> None:
        super().__init__(dim, length=length, layers=layers, heads=heads, dropout=dropout)
        self.layers = nn.ModuleList(HstuLayer(dim, length, heads, dropout) for _ in range(layers))
