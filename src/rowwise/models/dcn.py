"""DCN-v2: each layer multiplies the input by a linear map of the previous layer, which adds a degree of crosses.

The model of "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems"
(Wang et al. 2021, arXiv 2008.13535):

    x_0      = [dense, pooled rows of all features]
    x_(l+1)  = x_0 * (W_l x_l + b_l) + x_l                    * by element; W_l is full, or U_l V_l of a low rank
    stacked:  logits = deep(x_L)
    parallel: logits = W [x_L, deep(x_0)] + b

The paper's mixture of low-rank experts is left out. Initial weights are those of nn.Linear.

Gated, these are the layers of GDCN, "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction"
(Wang et al. 2023, arXiv 2311.04635):

    x_(l+1)  = x_0 * (W_l x_l + b_l) * sigmoid(V_l x_l) + x_l
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.inputs import Ids, input_columns, unpack
from rowwise.models.mlp import Linear, Mlp, Norm
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables

Structure = Literal["stacked", "parallel"]


def cross_map(width: int, rank: int | None, *, bias: bool = True) -> nn.Module:
    """W x + b, with W a full matrix, or the product of two thin ones."""
    if rank is None:
        return Linear(width, width, bias)
    if rank < 1:
        raise SpecError(f"rank={rank}", f"at least 1, or None for a full matrix of {width} x {width}")
    return nn.Sequential(Linear(width, rank, bias=False), Linear(rank, width, bias))


class Cross(nn.Module):
    """A cross layer: x_0 * (W x + b) + x, or gated: x_0 * (W x + b) * sigmoid(V x) + x.

    Args:
        width: of x.
        rank: of W and V as products of two thin matrices; None for full matrices.
        gated: whether there is a gate V.
    """

    def __init__(self, width: int, rank: int | None = None, *, gated: bool = False) -> None:
        super().__init__()
        self.map = cross_map(width, rank)
        self.gate = cross_map(width, rank, bias=False) if gated else None

    def forward(self, first_BS: Tensor, x_BS: Tensor) -> Tensor:
        """[B, width] of x_0 and of x to [B, width]."""
        crossed_BS = first_BS * self.map(x_BS)
        return (crossed_BS if self.gate is None else crossed_BS * self.gate(x_BS).sigmoid()) + x_BS


class DCN(nn.Module):
    """DCN-v2 (Wang et al. 2021): cross layers x_(l+1) = x_0 * (W x_l + b) + x_l, before or beside an MLP.

    Args:
        embeddings: pooled tables of any dims.
        dense_features: dense numbers per sample.
        deep: sizes of the MLP's layers; the last is the number of logits.
        crosses: cross layers.
        rank: of their matrices; None for full matrices.
        gated: whether cross layers are those of GDCN.
        structure: "stacked", the MLP over the crosses, or "parallel", both over the input and a linear layer over both.
        dropout: rate on the MLP's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(  # noqa: PLR0913 - a model's hyperparameters
        self,
        embeddings: AnyTables,
        dense_features: int,
        deep: Sequence[int] = (512, 256, 1),
        *,
        crosses: int = 3,
        rank: int | None = None,
        gated: bool = False,
        structure: Structure = "stacked",
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        """Shares `embeddings` with the caller; creates the layers."""
        super().__init__()
        if structure not in get_args(Structure):
            raise SpecError(f"structure={structure!r}", f"one of {', '.join(map(repr, get_args(Structure)))}")
        if crosses < 1:
            raise SpecError(f"crosses={crosses}", "at least one cross layer")
        width = input_columns(embeddings.tables, dense_features)
        self.embeddings = embeddings
        self.dense_features = dense_features
        self.structure = structure
        self.crosses = nn.ModuleList(Cross(width, rank, gated=gated) for _ in range(crosses))
        if structure == "stacked":
            self.deep = Mlp((width, *deep), dropout=dropout, norm=norm)
        else:
            self.deep = Mlp((width, *deep[:-1]), relu_last=True, dropout=dropout, norm=norm)
            self.top = Linear(width + deep[-2], deep[-1])

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, deep[-1]] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        first_BS = x_BS = torch.cat((dense_BF, self.embeddings(ids).values()), 1)
        for cross in self.crosses:
            x_BS = cross(first_BS, x_BS)
        if self.structure == "stacked":
            return self.deep(x_BS)
        return self.top(torch.cat((x_BS, self.deep(first_BS)), 1))
