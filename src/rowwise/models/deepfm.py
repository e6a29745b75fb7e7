"""DeepFM: a factorization machine and an MLP over the same vectors, added.

The model of "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (Guo et al. 2017,
arXiv 1703.04247):

    v_f    = the pooled rows of feature f; for the dense number x_i, x_i times a learned vector
    logits = first order + sum of v_i . v_j over all pairs i < j + deep([dense, v of the tables])

The first order is `Wide`: a weight for each id and each dense number. A bag counts as its pooled vector, so ids of the
same bag are not paired. The MLP reads the dense numbers themselves: as its first layer is linear, their vectors would
add weights but no function.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowwise.models.inputs import Ids, check_dims, input_columns, unpack
from rowwise.models.mlp import Mlp, Norm
from rowwise.models.wide import Wide, wide_tables
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.ops.interact import pair_sums

DENSE_STD = 0.01  # initial, of the vectors of dense numbers: dots begin near zero, as those of rows


class DeepFM(nn.Module):
    """DeepFM (Guo et al. 2017): logits = first order + dots of all pairs of vectors + an MLP over the same vectors.

    Args:
        embeddings: pooled tables of one dim. The first order makes tables "<name>_wide" with their optimizers.
        dense_features: dense numbers per sample.
        deep: sizes of the layers over the vectors; the last is the number of logits. Tasks share the pairs.
        dropout: rate on the MLP's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(
        self,
        embeddings: AnyTables,
        dense_features: int,
        deep: Sequence[int] = (400, 400, 400, 1),
        *,
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        """Shares `embeddings` with the caller; creates the first order and the MLP."""
        super().__init__()
        tables, dim = embeddings.tables, embeddings.tables[0].dim
        check_dims(tables, dim, f"that of table {tables[0].name!r}, as vectors of all pairs are multiplied")
        self.embeddings = embeddings
        self.dense_features = dense_features
        self.deep = Mlp((input_columns(tables, dense_features), *deep), dropout=dropout, norm=norm)
        self.first = Wide(wide_tables(tables, deep[-1]), dense_features, deep[-1], embeddings.device)
        self.dense_vectors = nn.Parameter(torch.randn(dense_features, dim) * DENSE_STD)

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, deep[-1]] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        vectors = self.embeddings(ids)  # starts both lookups before it waits for either
        first_BK = self.first(dense_BF, ids)
        pooled_BS = vectors.values()
        deep_BK = self.deep(torch.cat((dense_BF, pooled_BS), 1) if self.dense_features else pooled_BS)
        return first_BK + pair_dots(dense_BF, self.dense_vectors, pooled_BS) + deep_BK


def pair_dots(dense_BF: Tensor, vectors_FD: Tensor, pooled_BS: Tensor) -> Tensor:
    """The sum [B, 1] of the dots of all pairs among the vectors dense[i] * vectors[i] and the features of `pooled_BS`.

    Half of |sum of vectors|^2 - sum of |vector|^2: linear in the number of vectors, not quadratic.
    """
    # Not in 16 bits: the two sums are close, and their difference would be mostly rounding.
    with torch.autocast(dense_BF.device.type, enabled=False):
        dense_BF = dense_BF.to(vectors_FD.dtype)
        dots_B = pair_sums(dense_BF @ vectors_FD, pooled_BS)
        if len(vectors_FD):
            dots_B = dots_B - dense_BF.square() @ vectors_FD.square().sum(1) / 2
        return dots_B.unsqueeze(1)
