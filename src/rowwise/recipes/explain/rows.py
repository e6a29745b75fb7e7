"""A sample of rows in memory, in which one feature can be replaced by that of other rows.

Letters: N rows, F dense features.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Self

import torch
from torch import Tensor

from rowwise.base.errors import DataError
from rowwise.tables.batch import Batch, Jagged
from rowwise.tables.ops.jagged import concatenate, permute
from rowwise.train.virtual import split


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows as one batch on the host, without shared bags."""

    batch: Batch

    @classmethod
    def sample(cls, batches: Iterable[Batch], max_rows: int, seed: int, seconds: float) -> Self:
        """A uniform sample of at most `max_rows` rows; reading ends after `seconds`."""
        draw, held, until_s = torch.Generator().manual_seed(seed), list[tuple[Batch, Tensor]](), monotonic() + seconds
        for batch in batches:  # a row has a random key; those with the least keys are a uniform sample
            rows = len(batch.labels_BK)
            held.append((replace(batch, sparse=batch.sparse.expanded()), torch.rand(rows, generator=draw)))
            if sum(len(keys) for _, keys in held) > 2 * max_rows:
                held = [_smallest_keys(held, max_rows)]
            if monotonic() > until_s:
                break
        if not held or not sum(len(keys) for _, keys in held):
            raise DataError("no rows to explain the model with", "data with at least one row")
        return cls(_smallest_keys(held, max_rows)[0])

    def __len__(self) -> int:
        return len(self.batch.labels_BK)

    def first(self, rows: int) -> "HeldRows":
        """The first rows, which are a sample, too."""
        return HeldRows(self.batch.of_samples(torch.arange(min(rows, len(self)))))

    def with_bags_of(self, feature: str, order_N: Tensor) -> Batch:
        """A batch whose row n has this feature's bag of row `order_N[n]`."""
        sparse = self.batch.sparse
        others = [name for name in sparse.features if name != feature]
        moved = sparse.of_samples(order_N, (feature,))
        if others:
            moved = _merge_features(permute(sparse, others), moved, sparse.features)
        return replace(self.batch, sparse=moved)

    def with_numbers_of(self, column: int, values_N: Tensor) -> Batch:
        """A batch with other numbers in a dense column."""
        dense_NF = self.batch.dense_BF.clone()
        dense_NF[:, column] = values_N
        return replace(self.batch, dense_BF=dense_NF)


def pieces(batch: Batch, size: int) -> list[Batch]:
    """Split a batch into batches of at most `size` rows."""
    rows = len(batch.labels_BK)
    return split(batch, [min(size, rows - begin) for begin in range(0, rows, size)])


def _smallest_keys(held: list[tuple[Batch, Tensor]], count: int) -> tuple[Batch, Tensor]:
    """The rows with the least keys."""
    keys_N = torch.cat([keys for _, keys in held])
    order_N = keys_N.argsort()[:count]
    return _concatenate([batch for batch, _ in held]).of_samples(order_N), keys_N[order_N]


def _concatenate(batches: list[Batch]) -> Batch:
    first = batches[0]
    weights = [batch.weights_B for batch in batches if batch.weights_B is not None]
    return Batch(
        dense_BF=torch.cat([batch.dense_BF for batch in batches]),
        sparse=concatenate([batch.sparse for batch in batches], first.sparse.features),
        labels_BK=torch.cat([batch.labels_BK for batch in batches]),
        weights_B=torch.cat(weights) if weights else None,
    )


def _merge_features(left: Jagged, right: Jagged, features: tuple[str, ...]) -> Jagged:
    """The features of two batches of the same samples."""
    weights_N = None
    if left.weights_N is not None and right.weights_N is not None:
        weights_N = torch.cat([left.weights_N, right.weights_N])
    joined = Jagged(
        features=(*left.features, *right.features),
        values_N=torch.cat([left.values_N, right.values_N]),
        lengths_FB=torch.cat([left.lengths_FB, right.lengths_FB]),
        weights_N=weights_N,
    )
    return permute(joined, features)
