"""One update of all parameters: forward, backward, check, apply.

Read `step` from top to bottom; everything else of training is around it. Nothing is changed before the gradients have
been looked at: rows only stage theirs in the backward (see `embedding.py`), so a step that stops on a bad number leaves
rows, parameters and optimizers as they were. Two things it cannot take back: what a forward itself counts in buffers,
and the other rows, where finite gradients of one row add up past the range of float32.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowwise.batch import Batch
from rowwise.embedding import Embeddings
from rowwise.errors import GradientError, SpecError
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Objective, Outcome
from rowwise.train.optimizers import forget_gradients, make_optimizer, set_rate, update
from rowwise.train.settings import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What a step works with."""

    model: nn.Module
    objective: Objective
    optimizer: Optimizer | None
    settings: Training
    clock: Breakdown
    # Looked up once: walking through the modules of a model takes longer than many a kernel.
    tables: tuple[Embeddings, ...]
    dense: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, model: nn.Module, objective: Objective, settings: Training, clock: Breakdown) -> Self:
        """All that there is in a model, and the optimizer that the settings ask for."""
        dense = dense_parameters(model)
        return cls(
            model=model,
            objective=objective,
            optimizer=make_optimizer(settings.optimizer, dense),
            settings=settings,
            clock=clock,
            tables=embeddings_of(model),
            dense=dense,
        )


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
    try:
        for batch in batches:
            with work.clock.phase("forward"), autocast(work.settings):
                outcome = work.objective(batch)
            share = len(batch.labels_BK) / samples
            loss += _finite(outcome.loss, "the loss") * share
            with work.clock.phase("backward"):
                (outcome.loss if share == 1 else outcome.loss * share).backward()
            outcomes.append(outcome)
        with work.clock.phase("update"):
            norm = _gradient_norm(work)
            rate = _apply(work, number)
    finally:
        # Nothing is left after an update; after an error nothing of this step may reach the next one.
        for tables in work.tables:
            tables.discard()
    return Stepped(outcomes=tuple(outcomes), samples=samples, loss=loss, rate=rate, gradient_norm=norm)


def autocast(settings: Training) -> AbstractContextManager[object]:
    """Dense products in 16 bits, if the settings say so; what adds up or takes logarithms stays in 32."""
    if settings.precision == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(settings.device).type, torch.bfloat16)


def embeddings_of(model: nn.Module) -> tuple[Embeddings, ...]:
    """All modules with tables in a model; each name of a table may be there once."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, Embeddings)]
    homes: dict[str, str] = {}
    for path, module in found:
        for table in module.tables:
            if table.name in homes:
                both = f"{homes[table.name]!r} and {path!r}"
                # Checkpoints tell them apart by their modules; plans, tables.csv and initial rows by their names only.
                raise SpecError(f"table {table.name!r} is in both {both}: want each name once in a model")
            homes[table.name] = path
    return tuple(module for _, module in found)


def dense_parameters(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """What torch's optimizers train."""
    return tuple(parameter for parameter in model.parameters() if parameter.requires_grad)


def _gradient_norm(work: Machinery) -> float:
    """The length of the dense gradient, which is clipped then; raises if it, or that of rows, is not finite."""
    gradients = [p.grad for p in work.dense if p.grad is not None]
    length = 0.0
    if gradients:
        length = _finite(torch.nn.utils.get_total_norm(gradients), "the gradient of the dense parameters")
    for tables in work.tables:
        tables.check_staged()
    if work.settings.clip is not None and length > work.settings.clip:
        torch._foreach_mul_(gradients, work.settings.clip / length)
    return length


def _apply(work: Machinery, number: int) -> float:
    """Change rows and dense parameters; returns the rate of the latter."""
    for tables in work.tables:  # first: they may still refuse, and then the dense part stays as it was
        tables.update()
    if work.optimizer is None:
        return 0.0
    rate = set_rate(work.optimizer, work.settings.optimizer.lr, work.settings.schedule, number)
    update(work.optimizer)
    return rate


def _finite(value: Tensor, what: str) -> float:
    """The number; where it is none, the step ends."""
    number = float(value.detach())
    if not math.isfinite(number):
        raise GradientError(f"{what} is {number}")
    return number
