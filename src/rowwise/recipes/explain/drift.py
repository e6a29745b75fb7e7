"""Drift between training rows and explained rows: the population stability index of each feature."""

import torch
from torch import Tensor

from rowwise.base.records import Drift
from rowwise.recipes.explain.rows import HeldRows
from rowwise.train.evaluate import ids_or_none

BINS = 10  # bins of a dense feature: deciles of the training rows
MAX_IDS = 20  # bins of a sparse feature, one per common id; all other ids are one bin


def measure_drift(train: HeldRows, rows: HeldRows, sparse: tuple[str, ...], dense: dict[str, int]) -> tuple[Drift, ...]:
    """The drift of each feature, largest first."""
    drifts = [_drift(name, *_id_counts(train, rows, name)) for name in sparse]
    drifts += [_drift(name, *_number_counts(train, rows, column)) for name, column in dense.items()]
    return tuple(sorted(drifts, key=lambda drift: drift.chance - drift.index))


def _drift(feature: str, train_K: Tensor, other_K: Tensor) -> Drift:
    train_K, other_K = train_K.double() + 0.5, other_K.double() + 0.5  # no bin is empty
    p_K, q_K = train_K / train_K.sum(), other_K / other_K.sum()
    chance = (len(p_K) - 1) * float(1 / train_K.sum() + 1 / other_K.sum())
    return Drift(feature=feature, index=float(((q_K - p_K) * (q_K / p_K).log()).sum()), chance=chance)


def _id_counts(train: HeldRows, rows: HeldRows, feature: str) -> tuple[Tensor, Tensor]:
    ids_N, other_N = ids_or_none(train.batch, feature), ids_or_none(rows.batch, feature)
    ids_U, counts_U = torch.unique(ids_N, return_counts=True)
    common_K = ids_U[counts_U.argsort(descending=True)[:MAX_IDS]].sort().values
    return _count(ids_N, common_K), _count(other_N, common_K)


def _count(ids_N: Tensor, common_K: Tensor) -> Tensor:
    """Counts of each common id, and of all other ids."""
    index_N = torch.searchsorted(common_K, ids_N).clamp(max=len(common_K) - 1)
    return torch.bincount(torch.where(common_K[index_N] == ids_N, index_N, len(common_K)), minlength=len(common_K) + 1)


def _number_counts(train: HeldRows, rows: HeldRows, column: int) -> tuple[Tensor, Tensor]:
    numbers_N, other_N = (held.batch.dense_BF[:, column].contiguous() for held in (train, rows))
    edges = torch.quantile(numbers_N, torch.linspace(0, 1, BINS + 1)[1:-1]).unique()
    bins = len(edges) + 1
    train_K, other_K = (
        torch.bincount(torch.searchsorted(edges, x, right=True), minlength=bins) for x in (numbers_N, other_N)
    )
    return train_K, other_K
