"""`FieldModel`: the base of models over a sample's vectors of one dim, combined in pairs or by attention."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from rowwise.models.inputs import Ids, check_dims, input_columns, unpack
from rowwise.models.mlp import Mlp
from rowwise.tables.batch import Batch
from rowwise.tables.embedding import Vectors
from rowwise.tables.ids.make import AnyTables

WIDER = 4  # width of the hidden layer over the dense numbers, in dims


class FieldModel(nn.Module, ABC):
    """The vectors X [B, M, D] of a sample: one of the dense numbers, then the pooled rows of each feature.

    Args:
        embeddings: pooled tables of one dim.
        dense_features: dense numbers per sample; an MLP of one hidden layer maps them to a vector. 0 for no vector.
    """

    def __init__(self, embeddings: AnyTables, dense_features: int) -> None:
        """Shares `embeddings` with the caller."""
        super().__init__()
        tables = embeddings.tables
        self.embeddings, self.dense_features, self.dim = embeddings, dense_features, tables[0].dim
        check_dims(tables, self.dim, f"that of table {tables[0].name!r}, as vectors of all features meet")
        input_columns(tables, dense_features)
        self.fields = sum(len(table.feature_names) for table in tables) + (dense_features > 0)
        self.dense = Mlp((dense_features, WIDER * self.dim, self.dim)) if dense_features else None

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, K] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        vectors = self.embeddings(ids)  # first: their transfer overlaps with the layers below
        return self.logits(self.vectors_of(dense_BF, vectors))

    def vectors_of(self, dense_BF: Tensor, pooled: Vectors) -> Tensor:
        """The vectors [B, M, D] of each sample."""
        parts = [] if self.dense is None else [self.dense(dense_BF)]
        x_BS = torch.cat([*parts, pooled.values()], 1)
        return x_BS.view(x_BS.shape[0], self.fields, self.dim)

    @abstractmethod
    def logits(self, x_BMD: Tensor) -> Tensor:
        """Logits [B, K] of the vectors of each sample."""
