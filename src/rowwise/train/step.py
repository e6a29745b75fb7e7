"""One update of all parameters: forward, backward, check, apply.

Read `run_step`, which `Pipeline.run` calls; the rest of the package is around it. `step` does not prepare later steps.
Nothing changes before the gradients were checked: the backward only stages gradients of rows ([Note: Staging] in
`tables/ops/lookup.py`), so a step that meets NaN or infinity leaves rows, parameters and optimizers as they were. Three
exceptions: buffers that a forward changes; the id maps of managed tables, where rows were assigned and evicted; and a
row whose finite gradients add up past the range of float32. The last is detected only in the update, on the rank that
holds the row, after other rows have changed. A bound on the sum travels with the loss; only if the bound exceeds the
range do the ranks exchange their status after the update, so that other steps need no further gather.

With several ranks each has some of the samples, or none. The loss is a mean over the samples of all ranks, gradients
are added over all ranks, and an error of one rank ends the step on all (see `step_header.py`). One rank runs the same
code. Torch's threads and generators belong to the process: ranks that are threads share them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowwise.base.errors import BatchError, GradientError, SpecError, UpdateError
from rowwise.ingest.batch_shard import BatchShard
from rowwise.models.inference import autocast
from rowwise.parallel.comm.chain import CollectiveChain
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import raise_if_any_rank_failed
from rowwise.parallel.shard.embeddings import AnyEmbeddings, ShardedEmbeddings
from rowwise.tables.batch import Batch
from rowwise.tables.embedding import check_not_in_backward
from rowwise.tables.ids.make import IdTables
from rowwise.tables.ids.managed.embeddings import ManagedEmbeddings
from rowwise.tables.ops.threads import one_thread
from rowwise.tables.ops.update import run_all
from rowwise.tables.spec import Wire
from rowwise.train.augment import augment
from rowwise.train.breakdown import Breakdown
from rowwise.train.compiled import compile_dense
from rowwise.train.dense import DenseGradients
from rowwise.train.dense_parallel import FsdpGradients, has_dtensors, local_part, shards_of
from rowwise.train.elastic import ElasticGradients
from rowwise.train.late import LateUpdates
from rowwise.train.losses import second_pass
from rowwise.train.objective import Clicks, Objective, Outcome
from rowwise.train.on_device import DeviceCopies, KnownNumbers, StepNumbers, clip_and_mask, prepare_device
from rowwise.train.optimizers import make_optimizer, set_rate
from rowwise.train.settings import Training
from rowwise.train.soft_labels import SoftLabels
from rowwise.train.step_header import (
    DENSE,
    LOSS,
    ROWS,
    GlobalStatus,
    StepFailure,
    StepHeader,
    raise_if_step_failed,
    start_losses,
    start_step_header,
)
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
    # Collected once: a walk over a model's modules takes longer than many kernels.
    tables: tuple[AnyEmbeddings, ...]
    id_maps: Mapping[AnyEmbeddings, IdTables]  # by tables behind an id map: the module that maps their ids
    managed: tuple[ManagedEmbeddings, ...]
    dense: tuple[nn.Parameter, ...]
    comm: Comm
    gradients: DenseGradients | ElasticGradients | FsdpGradients
    shards: VirtualShards | None  # of elastic training; otherwise None, and batches are not cut
    late: Mapping[AnyEmbeddings, LateUpdates]  # by module, with staleness; otherwise empty
    copies: DeviceCopies

    @property
    def runs_ahead(self) -> bool:
        """Whether the host launches a step without waiting for loss and norm; see `on_device.py`."""
        alone = len(self.comm.ranks) == 1
        exact = isinstance(self.gradients, DenseGradients) and self.gradients.coded is None
        return self.device.type != "cpu" and self.shards is None and (alone or exact)

    @property
    def routes_on_host(self) -> bool:
        """Whether ids stay on the host of a GPU, where sharded tables route them."""
        return self.device.type != "cpu" and any(isinstance(module, ShardedEmbeddings) for module in self.tables)

    @property
    def device(self) -> torch.device:
        return torch.device(self.settings.device)

    @property
    def soft(self) -> SoftLabels | None:
        """The soft labels of a loss that has some."""
        return self.objective.soft if isinstance(self.objective, Clicks) else None

    @classmethod
    def create(
        cls,
        model: nn.Module,
        objective: Objective,
        settings: Training,
        clock: Breakdown,
        comm: Comm | None = None,
        wire: Wire = EXACT,
    ) -> Self:
        """Collect tables and dense parameters of the model, and make the optimizer; a collective."""
        dense, tables = dense_parameters(model), embeddings_of(model)
        check_sharding(tables, 1 if comm is None else len(comm.ranks), settings)
        # The seed of the initial weights, the same on all ranks. Read before the split, which is a collective: ranks
        # that are threads share torch's generator, and none can have reseeded it yet.
        seed = torch.initial_seed()
        step_comm = solo() if comm is None else comm.split([comm.ranks])  # no other collectives come in between
        shards = None
        gradients: DenseGradients | ElasticGradients | FsdpGradients
        if (parts := shards_of(settings.dense_parallel, step_comm.topology)) > 1:
            _check_sharded(model, settings, wire)
            gradients = FsdpGradients(step_comm, parts, model)
        else:
            gradients = DenseGradients(dense, step_comm, wire)
            gradients.phase = clock.phase
        if settings.determinism == "elastic":
            if not wire.exact:
                raise SpecError(f"train.determinism='elastic' with {wire}", "'fp32' for every type of the wire")
            gradients, world = ElasticGradients(dense, step_comm, settings.virtual_shards), len(step_comm.ranks)
            shards = VirtualShards(count=settings.virtual_shards, rank=step_comm.rank, world=world, seed=seed)
            for module in tables:
                if isinstance(module, ShardedEmbeddings):
                    module.forwards_per_batch = settings.virtual_shards // world
        managed = tuple(module for module in model.modules() if isinstance(module, ManagedEmbeddings))
        if managed and settings.staleness:
            names = ", ".join(table.name for module in managed for table in module.managed)
            raise SpecError(
                f"train.staleness={settings.staleness} with managed tables ({names}): an id may have lost its row "
                "before its late update",
                "0",
            )
        apply = partial(_apply_rows, step_comm, clock)
        late = {module: LateUpdates(module, settings.staleness, apply) for module in tables if settings.staleness}
        device = torch.device(settings.device)
        prepare_device(device)
        if settings.compile:
            begin, end = BatchShard(rank=step_comm.rank, world=len(step_comm.ranks)).part(settings.batch)
            compile_dense(model, end - begin)
        return cls(
            model=model,
            objective=objective,
            optimizer=make_optimizer(settings.optimizer, dense),
            settings=settings,
            clock=clock,
            tables=tables,
            id_maps={module.stored: module for module in model.modules() if isinstance(module, IdTables)},
            managed=managed,
            dense=dense,
            comm=step_comm,
            gradients=gradients,
            shards=shards,
            late=late,
            copies=DeviceCopies(device),
        )


class LossPart(NamedTuple):
    """The mean loss of a piece, and the piece's share of the step's samples."""

    loss: Tensor
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Losses, outcomes and status of a training step."""

    outcomes: tuple[Outcome, ...]  # of this rank's batches
    samples: int  # of all ranks, like all fields below
    rate: float
    numbers: StepNumbers
    status: GlobalStatus  # exchanged before the forward

    @property
    def loss(self) -> float:
        return self.numbers.read()[0]

    @property
    def gradient_norm(self) -> float:
        """Norm of the gradients of dense parameters, before clipping."""
        return self.numbers.read()[1]


def do_nothing() -> None:
    """The default of callbacks."""


class LaterSteps(NamedTuple):
    """What a step does for later ones."""

    prepare: Callable[[], None] = do_nothing  # called while collectives are in flight
    following: Sequence[Batch] = ()  # the pieces of the next step, for soft labels; none at the end of an epoch


NOTHING_LATER = LaterSteps()


def step(context: StepContext, batches: Sequence[Batch], number: int, header: StepHeader = NOTHING) -> StepResult:
    """One update from the samples of all batches of all ranks together, in a loop without a `Pipeline`.

    `number` counts from 1.
    """
    with context.clock.phase("status"):
        status = start_header(context, batches, number, header).finish()
    pieces = split_batches(context, batches, status.samples_W)
    return run_step(context, batches, pieces, status, number)


def start_header(
    context: StepContext, batches: Sequence[Batch], number: int, header: StepHeader
) -> CollectiveChain[GlobalStatus]:
    """Start to exchange the ranks' status before a step: if only some began its forward, they would wait forever."""
    equal = {"number of the step": number, "number of batches": len(batches)}
    if context.shards:
        equal["seed of torch"] = context.shards.seed % (1 << 53)
    samples, header = count_samples(batches), header.with_batches(batches)
    return start_step_header(context.comm, header, during=f"before step {number}", samples=samples, equal=equal)


def split_batches(context: StepContext, batches: Sequence[Batch], samples_W: Sequence[int]) -> Sequence[Batch]:
    """The batches, or the virtual shards of the one batch."""
    return context.shards.split_batch(batches, samples_W) if context.shards else batches


def count_samples(batches: Sequence[Batch]) -> int:
    return sum(len(batch.labels_BK) for batch in batches)


def run_step(
    context: StepContext,
    batches: Sequence[Batch],
    pieces: Sequence[Batch],
    status: GlobalStatus,
    number: int,
    later: LaterSteps = NOTHING_LATER,
) -> StepResult:
    """One update from pieces of the batches of all ranks, whose headers were exchanged."""
    overlap = later.prepare
    if not status.samples:
        raise BatchError(f"step {number} has no samples on any rank", "at least one sample")
    if context.optimizer is not None:
        context.optimizer.zero_grad()
    try:
        with one_thread() if context.shards else nullcontext():
            context.copies.wait_for([*batches, *later.following])
            _assign_rows(context, batches)
            for late in context.late.values():
                late.apply_before(number)
            if context.soft is not None:
                _make_soft_labels(context, context.soft, pieces, later.following, status, number)
            losses, outcomes = _differentiate(context, pieces, status.samples, number, overlap)
            with context.clock.phase("backward"):
                numbers, may_overflow = _check_and_clip(context, losses, number)
                for late in context.late.values():
                    late.hold(number, may_overflow=may_overflow)
            overlap()
            with context.clock.phase("backward"):
                if not context.late:
                    _apply_rows(context.comm, context.clock, context.tables, number, may_overflow)
                rate = _update_dense(context, number)
    finally:
        # After an error no gradient of this step may reach the next step; after an update none is left.
        context.gradients.discard()
        for tables in context.tables:
            tables.discard()
        for managed in context.managed:
            managed.end_step()
    if context.shards:
        outcomes = [join(outcomes, [len(piece.labels_BK) for piece in pieces])]
    return StepResult(
        outcomes=tuple(outcomes),
        samples=status.samples,
        rate=rate,
        numbers=numbers,
        status=status,
    )


def embeddings_of(model: nn.Module) -> tuple[AnyEmbeddings, ...]:
    """All modules with tables in a model; raises if two tables share a name."""
    modules = {path: module for path, module in model.named_modules() if isinstance(module, AnyEmbeddings)}
    homes: dict[str, str] = {}
    for path, module in modules.items():
        for table in module.tables:
            if table.name in homes:
                both = f"{homes[table.name]!r} and {path!r}"
                # Checkpoints would distinguish them by module; plans, tables.csv and initial rows know the name only.
                raise SpecError(f"table {table.name!r} is in both {both}", "each name once in a model")
            homes[table.name] = path
    return tuple(modules.values())


def check_sharding(tables: Sequence[AnyEmbeddings], world: int, settings: Training) -> None:
    """Raise for unsharded tables on several ranks, and for tables sharded for another determinism than the step's."""
    elastic = settings.determinism == "elastic"
    for module in tables:
        check_not_in_backward(module)
        if not isinstance(module, ShardedEmbeddings):
            if world > 1:
                names = ", ".join(table.name for table in module.tables[:8])
                raise SpecError(
                    f"tables {names} are not sharded on {world} ranks", hint="call shard(model, plan, comm) first"
                )
        elif module.mean_over_ranks:
            raise SpecError(
                f"table {module.tables[0].name!r}: mean_over_ranks=True, and the loss is already a mean of all ranks",
                "mean_over_ranks=False",
            )
        elif module.routes.elastic != elastic:
            raise SpecError(
                f"train.determinism={settings.determinism!r}, and the model is sharded with elastic={not elastic}",
                f"shard(..., elastic={elastic})",
            )


def _check_sharded(model: nn.Module, settings: Training, wire: Wire) -> None:
    kind = settings.dense_parallel.kind
    if not wire.dense.facts.exact or wire.far is not None:
        setting = f"wire.dense={wire.dense}" if wire.far is None else f"wire.far={wire.far}"
        expected = "fp32" if wire.far is None else "null"
        raise SpecError(f"{setting} with train.dense_parallel.kind={kind}", f"{expected}, or kind=replicate")
    if not has_dtensors(model):
        raise SpecError(f"train.dense_parallel.kind={kind}, but parameters are whole", hint="call shard_dense first")


def dense_parameters(model: nn.Module) -> tuple[nn.Parameter, ...]:
    return tuple(parameter for parameter in model.parameters() if parameter.requires_grad)


def _assign_rows(context: StepContext, batches: Sequence[Batch]) -> None:
    """Assign rows to ids of managed tables, in the order of all samples of the step: virtual shards reorder them."""
    with context.clock.phase("forward"):
        for managed in context.managed:
            managed.begin_step([batch.sparse for batch in batches])


def _make_soft_labels(
    context: StepContext,
    soft: SoftLabels,
    pieces: Sequence[Batch],
    following: Sequence[Batch],
    status: GlobalStatus,
    number: int,
) -> None:
    """Logits for the samples of the next step, and for those of this step if the last has made none; a collective."""

    def logits(pieces: Sequence[Batch], channel: int) -> Tensor:
        logits: list[Tensor] = []
        for index, piece in enumerate(pieces):
            # A copy of the ids: what is prepared for a batch is used up by its first lookup.
            other = replace(piece, sparse=replace(piece.sparse))
            shards = context.shards
            draws = shards.seeded_draws(number, channel * shards.count + index) if shards else nullcontext()
            with context.clock.phase("forward"), autocast(context.settings.device, context.settings.precision), draws:
                logits.append(second_pass(context.model, augment(other, context.settings.augment)))
        return torch.cat(logits)

    soft.begin(number, status.samples_W, context.comm.rank, lambda: logits(pieces, 1))
    if following:
        soft.hold(number + 1, logits(following, 2), status.following_samples_W, context.comm.rank)


def _differentiate(
    context: StepContext, pieces: Sequence[Batch], samples: int, number: int, overlap: Callable[[], None]
) -> tuple[list[LossPart], list[Outcome]]:
    """Forward and backward, piece by piece; returns each piece's part of the loss, and its outcome."""
    losses: list[LossPart] = []
    outcomes: list[Outcome] = []
    overlap()
    for index, piece in enumerate(pieces):
        draws = context.shards.seeded_draws(number, index) if context.shards else nullcontext()
        with context.clock.phase("forward"), autocast(context.settings.device, context.settings.precision), draws:
            outcome = context.objective(augment(piece, context.settings.augment), number)
        share = len(piece.labels_BK) / samples
        # The mean over no samples is NaN, but its gradients times 0 are zeros. The backward still has to run, as the
        # other ranks wait for its collectives.
        losses.append(LossPart(outcome.loss.detach(), share))
        overlap()
        with context.clock.phase("backward"):
            loss = outcome.loss if share == 1 else outcome.loss * share
            context.gradients.backward(loss, last=index == len(pieces) - 1)
        outcomes.append(outcome)
    return losses, outcomes


def _check_and_clip(context: StepContext, parts: Sequence[LossPart], number: int) -> tuple[StepNumbers, bool]:
    """Clip the dense gradients; returns loss and norm, and whether the sum of a row's gradients may overflow.

    Raises if loss or gradients are not finite; a step that runs ahead on a GPU raises later. The gather of the losses
    overlaps with the exchange of gradients: most tables check gradients where they are sent (`parallel/shard/sent.py`).
    """
    if context.runs_ahead:
        loss = sum((part.loss * part.share for part in parts if part.share), torch.zeros((), device=context.device))
        with context.clock.phase("reduce"):
            context.gradients.finish()
            if len(context.comm.ranks) > 1:  # a bad loss is bad on all ranks, as their dense gradients are
                loss = context.comm.all_reduce(loss.view(1), "step").wait().view(())
        return clip_and_mask(loss, context.dense, context.optimizer, context.settings.clip), False
    losses = [float(part.loss) * part.share if part.share else 0.0 for part in parts]
    bound, failures = _check_gradients(context, losses)
    with context.clock.phase("status"):
        gather = start_losses(context.comm, losses, bound, failures[0] if failures else None)
    with context.clock.phase("reduce"):
        context.gradients.finish()
    norm = _gradient_norm(context)
    if not math.isfinite(norm):
        failures.append(StepFailure(DENSE, GradientError(f"the gradient of the dense parameters is {norm}")))
    with context.clock.phase("status"):
        gathered = gather.finish()
        raise_if_step_failed(context.comm, gathered, failures, during=f"step {number}")
    _clip(context, norm)
    return KnownNumbers(gathered.loss, norm), gathered.may_overflow


def _gradient_norm(context: StepContext) -> float:
    gradients = [p.grad for p in context.dense if p.grad is not None]
    if isinstance(context.gradients, FsdpGradients):
        return context.gradients.norm(gradients)
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def _check_gradients(context: StepContext, losses: Sequence[float]) -> tuple[float, list[StepFailure]]:
    """An upper bound of the summed gradients of a row; and this rank's failures, of losses and of row gradients."""
    bound = 0.0
    failures = [StepFailure(LOSS, GradientError(f"the loss is {loss}")) for loss in losses if not math.isfinite(loss)]
    for tables in context.tables:
        try:
            bound += tables.check_staged()
        except GradientError as error:
            failures.append(StepFailure(ROWS, error))
    return bound, failures


def _clip(context: StepContext, norm: float) -> None:
    if context.settings.clip is not None and norm > context.settings.clip:
        parts = [local_part(p.grad) for p in context.dense if p.grad is not None]
        torch._foreach_mul_(parts, context.settings.clip / norm)


def _apply_rows(comm: Comm, clock: Breakdown, tables: Sequence[AnyEmbeddings], number: int, may_overflow: bool) -> None:
    """Update rows, before the dense parameters: rows may still fail, and the dense parameters then stay unchanged."""
    failure: UpdateError | None = None
    try:
        with clock.phase("update"):
            run_all(module.update for module in tables)
    except GradientError as error:
        if len(comm.ranks) == 1:
            raise
        failure = UpdateError(f"step {number}: {error}")
    if may_overflow:
        raise_if_any_rank_failed(comm, failure, during="update of rows")
    elif failure is not None:
        # Stored weights were not finite, which the bound cannot predict: this rank raises, and the others lose a peer.
        raise failure


def _update_dense(context: StepContext, number: int) -> float:
    if context.optimizer is None:
        return 0.0
    rate = set_rate(context.optimizer, context.settings.optimizer.lr, context.settings.schedule, number)
    context.optimizer.step()
    return rate
