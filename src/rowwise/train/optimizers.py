"""Torch optimizers for the dense parameters, from their settings. Rows of tables have optimizers of their own.

A schedule is stateless: the rate is a function of the step.

[Note: no compiler] Torch wraps methods of its optimizers in `torch._disable_dynamo`. The wrapper imports
`torch._dynamo`, which takes as long as all other imports of a run, and nothing here is compiled. So these optimizers
are subclasses with the unwrapped methods; `step` runs its hooks as usual.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rowwise.tables.row_optimizers import Schedule
from rowwise.train.dense_parallel import is_dtensor
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd


def make_optimizer(settings: DenseOptimizer, parameters: Sequence[nn.Parameter]) -> Optimizer | None:
    """The optimizer; None for a model of tables only."""
    if not parameters:
        return None
    # One pass over each parameter; torch's default makes a pass for each operation of the formula.
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    match settings:
        case DenseSgd(lr=lr, momentum=momentum, weight_decay=decay):
            fused = fused and not any(map(is_dtensor, parameters))  # torch has no fused SGD for DTensors
            return _plain(torch.optim.SGD)(parameters, lr=lr, momentum=momentum, weight_decay=decay, fused=fused)
        case DenseAdagrad(lr=lr, eps=eps, weight_decay=decay):
            return _plain(torch.optim.Adagrad)(parameters, lr=lr, eps=eps, weight_decay=decay)
        case DenseAdam(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            betas = beta1, beta2
            return _plain(torch.optim.AdamW)(parameters, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=fused)


def set_rate(optimizer: Optimizer, lr: float, schedule: Schedule | None, step: int) -> float:
    """Set and return the learning rate of a step, counted from 1."""
    rate = lr if schedule is None else lr * schedule.factor(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _plain(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """The optimizer class without the wrappers of [Note: no compiler]."""
    names = ("add_param_group", "zero_grad", "step")
    methods: dict[str, Callable[..., Any]] = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])  # unwrapping has removed no_grad as well
    return type(kind.__name__, (kind,), methods)
