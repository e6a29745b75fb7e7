"""Two towers: vectors of users and items in one space, for nearest-item search.

The model of "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (Yi et al. 2019, RecSys):

    u = user(dense, ids) / |.|,   v = item(dense, ids) / |.|          each an MLP over the features of its side
    logit = u . v / temperature

`retrieval.py` has the loss over the items of a batch and the search, `frequency.py` the correction of the loss.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import SpecError
from rowwise.models.inputs import Ids, input_columns, unpack
from rowwise.models.mlp import Mlp
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables


class VectorModel(nn.Module, ABC):
    """Base of models that make vectors of users and of items."""

    @abstractmethod
    def vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The vectors [B, D] of the users and of the items of a batch."""

    @abstractmethod
    def scores(self, users_UD: Tensor, items_ID: Tensor) -> Tensor:
        """Logits [U, I] of every user with every item."""

    def extra_loss(self, batch: Batch) -> Tensor | None:
        """An auxiliary loss of parts of the model; None without such parts."""
        return None


class Tower(nn.Module):
    """One tower: an MLP over its features, whose output has length 1; or the features themselves.

    Args:
        embeddings: pooled tables of this side only, of any dims.
        dense_features: dense numbers per sample of this side.
        sizes: of the layers; the last is the dim of the vectors. If empty, the features are the vector, of any length.
        more: columns that a subclass adds to the input of the MLP.
    """

    def __init__(
        self, embeddings: AnyTables, dense_features: int = 0, sizes: Sequence[int] = (256, 64), *, more: int = 0
    ) -> None:
        """Shares `embeddings` with the caller; creates the MLP."""
        super().__init__()
        self.embeddings = embeddings
        self.dense_features = dense_features
        columns = (input_columns(embeddings.tables, dense_features) + more, *sizes)
        self.layers = Mlp(columns) if sizes else None
        self.dim = columns[-1]

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Vectors [B, dim] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        return self.project(dense_BF, self.embeddings(ids).values())

    def project(self, *parts: Tensor) -> Tensor:
        """Vectors [B, dim] from the columns of features."""
        columns_BC = torch.cat(parts, 1)
        return columns_BC if self.layers is None else F.normalize(self.layers(columns_BC))

    def extra_loss(self, batch: Batch) -> Tensor | None:
        """An auxiliary loss of a subclass; here none."""
        return None


class TwoTower(VectorModel):
    """Two towers (Yi et al. 2019): logit = u . v / temperature.

    In a batch the dense numbers are the user's, then the item's; each tower finds its own ids by their features' names.

    Args:
        user: tower of the users, or queries.
        item: tower of the items, of the same dim.
        temperature: divides dots; a smaller one makes the softmax sharper.
    """

    def __init__(self, user: Tower, item: Tower, temperature: float = 0.1) -> None:
        super().__init__()
        if user.dim != item.dim:
            raise SpecError(f"vectors of users have dim {user.dim}, of items {item.dim}", "one dim for both towers")
        if not temperature > 0:
            raise SpecError(f"temperature={temperature}", "more than 0")
        self.user, self.item, self.temperature = user, item, temperature

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, 1]: of each user with the item of the same sample."""
        users_BD, items_BD = self.vectors(batch, sparse)
        return (users_BD * items_BD).sum(1, keepdim=True) / self.temperature

    def vectors(self, batch: Batch | Tensor, sparse: Ids | None = None) -> tuple[Tensor, Tensor]:
        """The vectors [B, D] of the users and of the items of a batch."""
        numbers = self.user.dense_features, self.item.dense_features
        dense_BF, ids = unpack(batch, sparse, sum(numbers))
        user_BF, item_BF = dense_BF.split(numbers, 1)
        return self.user(user_BF, ids), self.item(item_BF, ids)

    def extra_loss(self, batch: Batch) -> Tensor | None:
        return self.item.extra_loss(batch)

    def scores(self, users_UD: Tensor, items_ID: Tensor) -> Tensor:
        """Logits [U, I] of every user with every item."""
        return users_UD @ items_ID.t() / self.temperature
