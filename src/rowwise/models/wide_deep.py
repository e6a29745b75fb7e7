"""Wide & Deep: the sum of a linear model that memorises single ids and an MLP that generalises over their vectors.

The model of "Wide & Deep Learning for Recommender Systems" (Cheng et al. 2016, arXiv 1606.07792):

    logits = wide(dense, ids) + deep([dense, pooled rows of all features])

`Wide` has a weight for each id. As in the paper it is trained by FTRL, which can make weights sparse (`Ftrl.l1`), and
may read crosses of features: ids like any other, made of two ids when the data is read, with tables of their own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowwise.models.inputs import Ids, input_columns, unpack
from rowwise.models.mlp import Mlp, Norm
from rowwise.models.wide import Wide, wide_tables
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.row_optimizers import Ftrl
from rowwise.tables.spec import Table

# FTRL's usual beta of 1 suits gradients of single samples. Those of a mean over a batch are smaller by its size; with
# a beta of 1 they would hardly move the weights of rare ids.
WIDE = Ftrl(lr=0.05, beta=1e-6)


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al. 2016): logits = a linear model over ids + an MLP over their vectors.

    Args:
        embeddings: pooled tables of the MLP, of any dims.
        dense_features: dense numbers per sample.
        deep: sizes of the MLP's layers; the last is the number of logits.
        wide: tables of the linear model, of dim deep[-1]; by default `wide_tables` with the optimizer `WIDE`. With
            crosses: `[*wide_tables(tables, optimizer=WIDE), Table(name="user_x_item", rows=..., dim=1, ...)]`.
        dropout: rate on the MLP's hidden layers.
        norm: "batch" or "layer" normalisation of its hidden layers; None for none.
    """

    def __init__(
        self,
        embeddings: AnyTables,
        dense_features: int,
        deep: Sequence[int] = (1024, 512, 256, 1),
        *,
        wide: Sequence[Table] | None = None,
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        """Shares `embeddings` with the caller; creates the MLP and the wide tables."""
        super().__init__()
        self.embeddings = embeddings
        self.dense_features = dense_features
        self.deep = Mlp((input_columns(embeddings.tables, dense_features), *deep), dropout=dropout, norm=norm)
        tables = wide_tables(embeddings.tables, deep[-1], WIDE) if wide is None else wide
        self.wide = Wide(tables, dense_features, deep[-1], embeddings.device)

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, deep[-1]] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        vectors = self.embeddings(ids)  # starts both lookups before it waits for either
        wide_BK = self.wide(dense_BF, ids)
        return wide_BK + self.deep(torch.cat((dense_BF, vectors.values()), 1))
