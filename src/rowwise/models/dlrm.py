"""DLRM: dense numbers and ids meet in the dot products of all pairs of vectors.

The model of "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (Naumov et al. 2019,
arXiv 1906.00091):

    v_0 = bottom(dense)                           an MLP whose output has the dim of the tables
    v_f = the pooled rows of feature f            f = 1 .. F
    logits = top([v_0, v_i . v_j for j < i])      an MLP over v_0 and the F (F + 1) / 2 dots

Without dense numbers v_0 is one learned vector, the same for all samples, so that each feature keeps a first-order
term: its dot with v_0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowwise.models.inputs import Ids, check_dims, input_columns, unpack
from rowwise.models.mlp import Mlp, Norm, PackedModule
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.ops.interact import interact
from rowwise.tables.ops.linear import LinearLayer


class DLRM(PackedModule):
    """DLRM (Naumov et al. 2019): logits = top([v_0, v_i . v_j for j < i]), v_0 = bottom(dense), v_f pooled rows.

    Args:
        embeddings: pooled tables, of the last size of `bottom`.
        dense_features: dense numbers per sample.
        bottom: sizes of the layers over the dense numbers, the last with a ReLU as well; without dense numbers only
            the last size counts, that of a learned vector.
        top: sizes of the layers over the dots; the last is the number of logits.
        dropout: rate on both MLPs' hidden layers.
        norm: "batch" or "layer" normalisation of their hidden layers; None for none.
    """

    def __init__(
        self,
        embeddings: AnyTables,
        dense_features: int,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 512, 256, 1),
        *,
        dropout: float = 0.0,
        norm: Norm | None = None,
    ) -> None:
        """Shares `embeddings` with the caller; creates the MLPs."""
        super().__init__()
        self.embeddings = embeddings
        self.dense_features = dense_features
        dim = bottom[-1]
        input_columns(embeddings.tables, dense_features)
        hidden: dict[str, Any] = {"dropout": dropout, "norm": norm}
        self.bottom = Mlp((dense_features, *bottom), relu_last=True, **hidden) if dense_features else Vector(dim)
        check_dims(embeddings.tables, dim, "in which the bottom layers end")
        features = sum(len(table.feature_names) for table in embeddings.tables)
        self.top = Mlp((dim + features * (features + 1) // 2, *top), **hidden)

    def chain(self) -> Sequence[LinearLayer] | None:
        """The layers before and after the interaction."""
        bottom, top = self.bottom.chain() if isinstance(self.bottom, Mlp) else [], self.top.chain()
        return None if bottom is None or top is None else [*bottom, *top]

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, top[-1]] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        vectors = self.embeddings(ids)  # first: their transfer overlaps with the layers below
        if self.packed is not None:
            first = len(self.bottom.layers) if isinstance(self.bottom, Mlp) else 0
            x_BF = dense_BF if first else self.bottom(dense_BF)
            return self.packed.around_pairs(x_BF, vectors.values(), first)
        bottom_BD = self.bottom(dense_BF)
        return self.top(interact(bottom_BD, vectors.values()))


class Vector(nn.Module):
    """A learned vector, the same for each sample.

    Args:
        dim: of the vector.
    """

    def __init__(self, dim: int) -> None:
        """Initial length about 1, as of an MLP's output: rows learn through their dots with it."""
        super().__init__()
        self.vector = nn.Parameter(torch.randn(dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] to [B, dim]."""
        return self.vector.expand(x.shape[0], -1)
