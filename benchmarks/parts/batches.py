"""Tables that are named by their numbers, and batches for them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rowwise import Adagrad, Adam, Batch, Jagged, Lamb, RowWiseAdagrad, Sgd, Table

OPTIMIZERS = {
    "rowwise_adagrad": RowWiseAdagrad(lr=0.01),
    "sgd": Sgd(lr=0.01),
    "adagrad": Adagrad(lr=0.01),
    "adam": Adam(lr=0.01),
    "lamb": Lamb(lr=0.01),
}


def names_of(count: int) -> tuple[str, ...]:
    return tuple(f"t{k}" for k in range(count))


def tables_of(rows: Sequence[int], dim: int, **settings: Any) -> list[Table]:
    """A table of so many rows each, all with the same settings."""
    names = names_of(len(rows))
    return [Table(name=name, rows=count, dim=dim, **settings) for name, count in zip(names, rows, strict=True)]


def bags_of(features: Iterable[str], ids_N: Tensor, pooling: int = 1) -> Jagged:
    """So many ids in each bag, feature after feature."""
    lengths_FB = torch.full((len(ids_N) // pooling,), pooling, dtype=torch.int64)
    return Jagged(features=tuple(features), values_N=ids_N, lengths_FB=lengths_FB)


def clicks_of(size: int, features: int, rows: int, dense: int) -> Batch:
    """Random numbers, one random id for each feature, and random labels."""
    sparse = bags_of(names_of(features), torch.randint(0, rows, (features * size,)))
    labels_BK = torch.randint(0, 2, (size, 1)).float()
    return Batch(dense_BF=torch.randn(size, dense), sparse=sparse, labels_BK=labels_BK)
