"""xDeepFM: products of vectors, element by element, of rising degree, beside an MLP and a linear model.

The model of "xDeepFM: Combining Explicit and Implicit Feature Interactions for Recommender Systems"
(Lian et al. 2018, arXiv 1803.05170):

    X^0    = [v_0, pooled rows of all features]                       M vectors of dim D
    X^k_h  = sum over i, j of W^k_hij X^(k-1)_i * X^0_j               * by element; H_k vectors
    p^k_h  = sum over d of X^k_hd
    logits = first order + w [p^1, ..., p^N] + b + deep(flatten X^0)

The first order is `Wide`, as in DeepFM. All vectors of a layer are both passed on and summed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.fields import FieldModel
from rowwise.models.inputs import Ids, unpack
from rowwise.models.mlp import Linear, Mlp, Norm
from rowwise.models.wide import Wide, wide_tables
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables


class CompressedInteraction(nn.Module):
    """Y_h = sum over i, j of W_hij X_i * X^0_j.

    Args:
        vectors: of X.
        first: vectors of X^0.
        out: vectors of Y.
    """

    def __init__(self, vectors: int, first: int, out: int) -> None:
        super().__init__()
        self.map = Linear(vectors * first, out, bias=False)

    def forward(self, x_BHD: Tensor, first_BMD: Tensor) -> Tensor:
        """[B, vectors, D] and [B, first, D] to [B, out, D]."""
        products_BDP = torch.einsum("bhd,bmd->bdhm", x_BHD, first_BMD).flatten(2)
        return self.map(products_BDP).transpose(1, 2).contiguous()


class XDeepFM(FieldModel):
    """xDeepFM (Lian et al. 2018): first order + sums of element-wise products of rising degree + an MLP.

    Args:
        embeddings: pooled tables of one dim. The first order makes tables "<name>_wide" with their optimizers.
        dense_features: dense numbers per sample.
        deep: sizes of the MLP's layers; the last is the number of logits.
        products: vectors of each layer of products.
        dropout: rate on the MLP's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(
        self,
        embeddings: AnyTables,
        dense_features: int,
        deep: Sequence[int] = (256, 1),
        *,
        products: Sequence[int] = (32, 32),
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        """Shares `embeddings` with the caller; creates the first order and the layers."""
        super().__init__(embeddings, dense_features)
        if not products:
            raise SpecError("products=()", "the size of at least one layer")
        sizes = [self.fields, *products]
        self.layers = nn.ModuleList(
            CompressedInteraction(sizes[k], self.fields, sizes[k + 1]) for k in range(len(products))
        )
        self.top = Linear(sum(products), deep[-1])
        self.deep = Mlp((self.fields * self.dim, *deep), dropout=dropout, norm=norm)
        self.first = Wide(wide_tables(embeddings.tables, deep[-1]), dense_features, deep[-1], embeddings.device)

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, deep[-1]] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        vectors = self.embeddings(ids)  # starts both lookups before it waits for either
        first_BK = self.first(dense_BF, ids)
        return first_BK + self.logits(self.vectors_of(dense_BF, vectors))

    def logits(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, K], without the first order."""
        y_BHD = x_BMD
        sums: list[Tensor] = []
        for layer in self.layers:
            y_BHD = layer(y_BHD, x_BMD)
            sums.append(y_BHD.sum(2))
        return self.top(torch.cat(sums, 1)) + self.deep(x_BMD.flatten(1))
