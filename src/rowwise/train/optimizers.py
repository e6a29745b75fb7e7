"""Torch's optimizers for the dense parameters, made from their settings; rows of tables are not their business.

Settings are read without torch, elsewhere. A schedule needs no state: the rate follows from the step.

[Note: no compiler] Methods of torch's optimizers are wrapped so that a compiler leaves them alone. The wrappers load
that compiler, which takes as long as all else that a run loads, and nothing here is compiled. So ours are subclasses
that have the methods without those wrappers; `step` is called as that of any optimizer, with the hooks that it has.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rowwise.row_optimizers import Schedule
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd


def make_optimizer(settings: DenseOptimizer, parameters: Sequence[nn.Parameter]) -> Optimizer | None:
    """The optimizer; None where there are no parameters, as in a model of tables only."""
    if not parameters:
        return None
    # One pass over each parameter; torch's default goes over them once for each of the formula's operations.
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    match settings:
        case DenseSgd(lr=lr, momentum=momentum, weight_decay=decay):
            return _plain(torch.optim.SGD)(parameters, lr=lr, momentum=momentum, weight_decay=decay, fused=fused)
        case DenseAdagrad(lr=lr, eps=eps, weight_decay=decay):
            return _plain(torch.optim.Adagrad)(parameters, lr=lr, eps=eps, weight_decay=decay)
        case DenseAdam(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            betas = beta1, beta2
            return _plain(torch.optim.AdamW)(parameters, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=fused)


def set_rate(optimizer: Optimizer, lr: float, schedule: Schedule | None, step: int) -> float:
    """Set the learning rate of an update, the first of which is step 1."""
    rate = lr if schedule is None else lr * schedule.factor(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _plain(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    names = ("add_param_group", "zero_grad", "step")
    methods: dict[str, Callable[..., Any]] = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])  # one of the wrappers
    return type(kind.__name__, (kind,), methods)
