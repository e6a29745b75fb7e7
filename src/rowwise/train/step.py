"""One update of all parameters: forward, backward, check, apply.

Read `step` from top to bottom; everything else of training is around it. Nothing is changed before the gradients have
been looked at: rows only stage theirs in the backward (see `embedding.py`), so a step that stops on a bad number leaves
the model as it was.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowwise.batch import Batch
from rowwise.embedding import Embeddings
from rowwise.errors import GradientError
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Objective, Outcome
from rowwise.train.optimizers import forget_gradients, set_rate, update
from rowwise.train.settings import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What a step works with."""

    model: nn.Module
    objective: Objective
    optimizer: Optimizer | None
    settings: Training
    clock: Breakdown

    @property
    def tables(self) -> list[Embeddings]:
        """All modules with tables."""
        return embeddings_of(self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What a step tells."""

    outcomes: tuple[Outcome, ...]
    samples: int
    loss: float
    rate: float
    gradient_norm: float  # of the dense parameters, before any clipping


def step(work: Machinery, batches: Sequence[Batch], number: int) -> Stepped:
    """One update, the first of which is number 1, from the samples of all batches together."""
    samples = sum(len(batch.labels_BK) for batch in batches)
    loss = 0.0
    outcomes: list[Outcome] = []
    if work.optimizer is not None:
        forget_gradients(work.optimizer)
    for batch in batches:
        with work.clock.phase("forward"), autocast(work.settings):
            outcome = work.objective(batch)
        share = len(batch.labels_BK) / samples
        loss += _finite(outcome.loss, "the loss", work) * share
        with work.clock.phase("backward"):
            (outcome.loss if share == 1 else outcome.loss * share).backward()
        outcomes.append(outcome)
    with work.clock.phase("update"):
        norm = _gradient_norm(work)
        for tables in work.tables:  # first: they refuse gradients that are not finite
            tables.update()
        rate = _apply(work, number)
    return Stepped(outcomes=tuple(outcomes), samples=samples, loss=loss, rate=rate, gradient_norm=norm)


def autocast(settings: Training) -> AbstractContextManager[object]:
    """Dense products in 16 bits, if the settings say so; what adds up or takes logarithms stays in 32."""
    device = torch.device(settings.device).type
    return torch.autocast(device, torch.bfloat16, enabled=settings.precision == "bf16")


def embeddings_of(model: nn.Module) -> list[Embeddings]:
    """All modules with tables in a model."""
    return [module for module in model.modules() if isinstance(module, Embeddings)]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What torch's optimizers train."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _gradient_norm(work: Machinery) -> float:
    gradients = [p.grad for p in dense_parameters(work.model) if p.grad is not None]
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients)
    length = _finite(norm, "the gradient of the dense parameters", work)
    if work.settings.clip is not None and length > work.settings.clip:
        torch._foreach_mul_(gradients, work.settings.clip / length)
    return length


def _apply(work: Machinery, number: int) -> float:
    """Change the dense parameters; returns their rate."""
    if work.optimizer is None:
        return 0.0
    rate = set_rate(work.optimizer, work.settings.optimizer.lr, work.settings.schedule, number)
    update(work.optimizer)
    return rate


def _finite(value: Tensor, what: str, work: Machinery) -> float:
    """The number; where it is none, what was staged is forgotten and the step ends."""
    number = float(value.detach())
    if not math.isfinite(number):
        for tables in work.tables:
            tables.discard()
        raise GradientError(f"{what} is {number}")
    return number
