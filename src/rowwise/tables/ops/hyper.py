"""`hyper_tensor`: the hyperparameters of one update as the kernels and the reference read them."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from rowwise.tables.row_optimizers import KernelHyperparameters, RowOptimizer


@functools.lru_cache(maxsize=1024)  # a model's tables mostly share a few optimizers
def _cached_hyper(optimizer: RowOptimizer, step: int) -> KernelHyperparameters:
    return optimizer.hyper(step)


def hyper_tensor(optimizers: Iterable[RowOptimizer], steps: Iterable[int]) -> Tensor:
    """`KernelHyperparameters` of each table at its step (the first is 1), float32 [T, H]."""
    rows = [_cached_hyper(optimizer, step) for optimizer, step in zip(optimizers, steps, strict=True)]
    return torch.tensor(rows, dtype=torch.float32).view(-1, len(KernelHyperparameters._fields))
