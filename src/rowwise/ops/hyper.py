"""The numbers an update works with: one row a table, some of which move with the step.

Its own file because everything else about a table is written down once (`layout`). One row is `Hyper` in
`_cpp/tables.h`; the tensor holds floats of 32 bits, as the kernels compute in them, and the reference reads the
same rounded numbers.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.spec import Ftrl, Moments, RowOptimizer, Sgd


class Hyper(NamedTuple):
    """One table's row."""

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # 0: none
    a: float = 0.0  # beta1, or FTRL's l1
    b: float = 0.0  # beta2, or l2
    c: float = 0.0  # 1 / (1 - beta1 ** step), or beta
    d: float = 0.0  # 1 / (1 - beta2 ** step)


@functools.lru_cache(maxsize=1024)  # a model's tables mostly share a few optimizers
def hyper_of(optimizer: RowOptimizer, step: int) -> Hyper:
    """The numbers of an optimizer at a step, the first being 1."""
    clip = optimizer.clip or 0.0
    if isinstance(optimizer, Ftrl):
        return Hyper(optimizer.lr, clip=clip, a=optimizer.l1, b=optimizer.l2, c=optimizer.beta)
    lr = optimizer.lr * (optimizer.schedule.factor(step) if optimizer.schedule else 1.0)
    eps = 0.0 if isinstance(optimizer, Sgd) else optimizer.eps
    found = Hyper(lr, eps, optimizer.weight_decay, clip)
    if isinstance(optimizer, Moments):
        beta1, beta2 = optimizer.beta1, optimizer.beta2
        found = found._replace(a=beta1, b=beta2, c=1 / (1 - beta1**step), d=1 / (1 - beta2**step))
    return found


def moves(optimizer: RowOptimizer) -> bool:
    """Whether the numbers differ from step to step."""
    return isinstance(optimizer, Moments) or getattr(optimizer, "schedule", None) is not None


def hyper_tensor(optimizers: Iterable[RowOptimizer], steps: Iterable[int]) -> Tensor:
    """One row for each table at its step [T, 8]."""
    rows = [hyper_of(optimizer, step) for optimizer, step in zip(optimizers, steps, strict=True)]
    return torch.tensor(rows, dtype=torch.float32).view(-1, 8)
