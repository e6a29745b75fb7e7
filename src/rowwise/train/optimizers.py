"""Torch's optimizers for the dense parameters, made from their settings; rows of tables are not their business.

Its own file because settings are read without torch. A schedule needs no state: the rate follows from the step.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from rowwise.spec import Schedule
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd

MARK = "__dynamo_disable"  # torch/_compile.py: what to call instead of the method


def make_optimizer(settings: DenseOptimizer, parameters: Sequence[nn.Parameter]) -> Optimizer | None:
    """The optimizer; None where there are no parameters, as in a model of tables only."""
    if not parameters:
        return None
    _leave_compiler_out()
    # One pass over each parameter; torch's default goes over them once for each of the formula's operations.
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    match settings:
        case DenseSgd(lr=lr, momentum=momentum, weight_decay=decay):
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=decay, fused=fused)
        case DenseAdagrad(lr=lr, eps=eps, weight_decay=decay):
            return torch.optim.Adagrad(parameters, lr=lr, eps=eps, weight_decay=decay)
        case DenseAdam(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            betas = beta1, beta2
            return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=fused)


def update(optimizer: Optimizer) -> None:
    """`optimizer.step()`, without torch's wrapper around it, which loads the compiler (see below)."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def forget_gradients(optimizer: Optimizer) -> None:
    """`optimizer.zero_grad()`, likewise."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def set_rate(optimizer: Optimizer, lr: float, schedule: Schedule | None, step: int) -> float:
    """The rate of an update, the first of which is step 1."""
    rate = lr if schedule is None else lr * schedule.factor(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _leave_compiler_out() -> None:
    """Let an optimizer be made without torch's compiler, which takes longer to load than all else together.

    Torch loads it to mark this method as not to be compiled. With a mark on it there is nothing to load it for.
    """
    method = inspect.unwrap(Optimizer.add_param_group)
    if not hasattr(method, MARK):
        setattr(method, MARK, method)
