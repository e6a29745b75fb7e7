"""One update of all parameters: forward, backward, check, apply.

Read `step` from top to bottom; everything else of training is around it. Nothing is changed before the gradients have
been looked at: rows only stage theirs in the backward (see `embedding.py`), so a step that stops on a bad number leaves
rows, parameters and optimizers as they were. Two things it cannot take back: what a forward itself counts in buffers,
and the other rows, where finite gradients of one row add up past the range of float32. That comes to light in the
update, on the rank that holds the row. Whether it can happen at all is known before, by a bound that travels with the
loss; only then do the ranks tell each other after the update how it went, and no other step has a gather for it.

With several ranks each has some of the samples, or none, and a step is still one: the loss is a mean over the samples
of all, gradients are added over all, and what stops one stops all (see `step_header.py`). With one rank it is the same
code. What is torch's own (threads, generators) belongs to the process: ranks that are threads of one share it.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from rowwise.batch import Batch
from rowwise.comm.seam import Comm
from rowwise.comm.solo import solo
from rowwise.comm.status import raise_if_any_rank_failed
from rowwise.errors import BatchError, GradientError, SpecError, UpdateError
from rowwise.hashing.embeddings import MappedEmbeddings
from rowwise.ops.threads import one_thread
from rowwise.ops.update import run_all
from rowwise.shard.embeddings import AnyEmbeddings, ShardedEmbeddings
from rowwise.spec import Wire
from rowwise.train.breakdown import Breakdown
from rowwise.train.dense import DenseGradients
from rowwise.train.elastic import ElasticGradients
from rowwise.train.objective import Objective, Outcome
from rowwise.train.optimizers import make_optimizer, set_rate
from rowwise.train.settings import Training
from rowwise.train.step_header import GlobalStatus, StepFailure, StepHeader, exchange_step_header, reduce_loss_or_raise
from rowwise.train.virtual import VirtualShards, join

EXACT = Wire()
NOTHING = StepHeader()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """Model, objective, optimizers, tables and communicators of a training step."""

    model: nn.Module
    objective: Objective
    optimizer: Optimizer | None
    settings: Training
    clock: Breakdown
    # Looked up once: walking through the modules of a model takes longer than many a kernel.
    tables: tuple[AnyEmbeddings, ...]
    around: Mapping[AnyEmbeddings, MappedEmbeddings]  # some of them: what makes rows of ids
    dense: tuple[nn.Parameter, ...]
    comm: Comm
    gradients: DenseGradients | ElasticGradients
    shards: VirtualShards | None  # None: batches are not cut

    @classmethod
    def of(
        cls,
        model: nn.Module,
        objective: Objective,
        settings: Training,
        clock: Breakdown,
        comm: Comm | None = None,
        wire: Wire = EXACT,
    ) -> Self:
        """All that there is in a model, and the optimizer that the settings ask for; called by all ranks."""
        dense, tables = dense_parameters(model), embeddings_of(model)
        check_sharding(tables, 1 if comm is None else len(comm.ranks), settings)
        # By what torch was seeded with, as the initial weights are; read before any rank can have gone on.
        seed = torch.initial_seed()
        own = solo() if comm is None else comm.split([comm.ranks])  # where nothing else comes in between
        gradients, shards = DenseGradients(dense, own, wire), None
        if settings.determinism == "elastic":
            if not wire.exact:
                raise SpecError(f"train.determinism='elastic' with {wire}: want every type of the wire to be 'fp32'")
            gradients, world = ElasticGradients(dense, own, settings.virtual_shards), len(own.ranks)
            shards = VirtualShards(count=settings.virtual_shards, rank=own.rank, world=world, seed=seed)
            for module in tables:
                if isinstance(module, ShardedEmbeddings):
                    module.calls = settings.virtual_shards // world  # one for each shard of a rank's batch
        return cls(
            model=model,
            objective=objective,
            optimizer=make_optimizer(settings.optimizer, dense),
            settings=settings,
            clock=clock,
            tables=tables,
            around={one.stored: one for one in model.modules() if isinstance(one, MappedEmbeddings)},
            dense=dense,
            comm=own,
            gradients=gradients,
            shards=shards,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Losses, outcomes and status of a training step."""

    outcomes: tuple[Outcome, ...]  # of this rank's batches
    samples: int  # of all ranks, as all that follows
    loss: float
    rate: float
    gradient_norm: float  # of the dense parameters, before any clipping
    status: GlobalStatus  # what the ranks told each other before it


def step(work: StepContext, batches: Sequence[Batch], number: int, header: StepHeader = NOTHING) -> StepResult:
    """One update, counted from 1, from the samples of all batches of all ranks."""
    if work.optimizer is not None:
        work.optimizer.zero_grad()
    try:
        with one_thread() if work.shards else nullcontext():
            status = _exchange_header(work, batches, number, header)
            pieces = work.shards.of(batches, status.samples_W) if work.shards else batches
            losses, outcomes = _differentiate(work, pieces, status.samples, number)
            with work.clock.phase("backward"):
                norm = _gradient_norm(work)
                bound, failure = _check(work, losses, norm)
                loss, may_overflow = reduce_loss_or_raise(work.comm, losses, bound, failure, during=f"step {number}")
                _clip(work, norm)
                _update_rows(work, number, may_overflow=may_overflow)
                rate = _update_dense(work, number)
    finally:
        # Nothing is left after an update; after an error nothing of this step may reach the next one.
        work.gradients.discard()
        for tables in work.tables:
            tables.discard()
    if work.shards:
        outcomes = [join(outcomes, [len(piece.labels_BK) for piece in pieces])]
    return StepResult(
        outcomes=tuple(outcomes),
        samples=status.samples,
        loss=loss,
        rate=rate,
        gradient_norm=norm,
        status=status,
    )


def autocast(settings: Training) -> AbstractContextManager[object]:
    """Dense products in 16 bits, if the settings say so; what adds up or takes logarithms stays in 32."""
    if settings.precision == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(settings.device).type, torch.bfloat16)


def embeddings_of(model: nn.Module) -> tuple[AnyEmbeddings, ...]:
    """All modules with tables in a model; each name of a table may be there once."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, AnyEmbeddings)]
    homes: dict[str, str] = {}
    for path, module in found:
        for table in module.tables:
            if table.name in homes:
                both = f"{homes[table.name]!r} and {path!r}"
                # Checkpoints tell them apart by their modules; plans, tables.csv and initial rows by their names only.
                raise SpecError(f"table {table.name!r} is in both {both}: want each name once in a model")
            homes[table.name] = path
    return tuple(module for _, module in found)


def check_sharding(tables: Sequence[AnyEmbeddings], world: int, settings: Training) -> None:
    """Refuse tables that every rank would train by itself, and those of another determinism than the step's."""
    elastic = settings.determinism == "elastic"
    for module in tables:
        if not isinstance(module, ShardedEmbeddings):
            if world > 1:
                names = ", ".join(table.name for table in module.tables[:8])
                raise SpecError(
                    f"tables {names} are not sharded, and there are {world} ranks: shard(model, plan, comm)"
                )
        elif module.routes.elastic != elastic:
            got = f"train.determinism={settings.determinism!r}, and the model is sharded with elastic={not elastic}"
            raise SpecError(f"{got}: want shard(..., elastic={elastic})")


def dense_parameters(model: nn.Module) -> tuple[nn.Parameter, ...]:
    return tuple(parameter for parameter in model.parameters() if parameter.requires_grad)


def _exchange_header(work: StepContext, batches: Sequence[Batch], number: int, header: StepHeader) -> GlobalStatus:
    """Before the forward: one that only some ranks can begin would leave the others waiting inside it."""
    alike = {"number of the step": number, "number of batches": len(batches)}
    if work.shards:
        alike["seed of torch"] = work.shards.seed % (1 << 53)
    samples, header = sum(len(batch.labels_BK) for batch in batches), header.with_batches(batches)
    with work.clock.phase("forward"):
        during = f"before step {number}"
        status = exchange_step_header(work.comm, header, during=during, samples=samples, alike=alike)
    if not status.samples:
        raise BatchError("a step without a sample on any rank: want at least one")
    return status


def _differentiate(
    work: StepContext, pieces: Sequence[Batch], samples: int, number: int
) -> tuple[list[float], list[Outcome]]:
    """Forward and backward, piece by piece; gives what each adds to the loss."""
    losses: list[float] = []
    outcomes: list[Outcome] = []
    for place, piece in enumerate(pieces):
        chance = work.shards.chance(number, place) if work.shards else nullcontext()
        with work.clock.phase("forward"), autocast(work.settings), chance:
            outcome = work.objective(piece)
        share = len(piece.labels_BK) / samples
        # A mean over no samples is not a number; times 0 its gradients still are zeros, and no collective is missed.
        losses.append(float(outcome.loss.detach()) * share if share else 0.0)
        with work.clock.phase("backward"):
            loss = outcome.loss if share == 1 else outcome.loss * share
            work.gradients.backward(loss, last=place == len(pieces) - 1)
        outcomes.append(outcome)
    with work.clock.phase("backward"):
        work.gradients.finish()
    return losses, outcomes


def _gradient_norm(work: StepContext) -> float:
    gradients = [p.grad for p in work.dense if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def _check(work: StepContext, losses: Sequence[float], norm: float) -> tuple[float, StepFailure | None]:
    """A bound for the gradients of rows; and what is not finite first: the loss, dense gradients, those of rows."""
    bound = 0.0
    found: list[StepFailure] = [
        StepFailure(1, GradientError(f"the loss is {loss}")) for loss in losses if not math.isfinite(loss)
    ]
    if not math.isfinite(norm):
        found.append(StepFailure(2, GradientError(f"the gradient of the dense parameters is {norm}")))
    for tables in work.tables:
        try:
            bound += tables.check_staged()
        except GradientError as error:
            found.append(StepFailure(3, error))
    return bound, found[0] if found else None


def _clip(work: StepContext, norm: float) -> None:
    if work.settings.clip is not None and norm > work.settings.clip:
        torch._foreach_mul_([p.grad for p in work.dense if p.grad is not None], work.settings.clip / norm)


def _update_rows(work: StepContext, number: int, *, may_overflow: bool) -> None:
    """First of all parameters: it may still fail, and then the dense part stays as it was."""
    failure: UpdateError | None = None
    try:
        with work.clock.phase("update"):
            run_all(tables.update for tables in work.tables)
    except GradientError as error:
        if len(work.comm.ranks) == 1:
            raise
        failure = UpdateError(f"step {number}: {error}")
    if may_overflow:
        raise_if_any_rank_failed(work.comm, failure, during="update of rows")
    elif failure is not None:  # stored rows were not finite: the others, which cannot know, miss this rank
        raise failure


def _update_dense(work: StepContext, number: int) -> float:
    if work.optimizer is None:
        return 0.0
    rate = set_rate(work.optimizer, work.settings.optimizer.lr, work.settings.schedule, number)
    work.optimizer.step()
    return rate
