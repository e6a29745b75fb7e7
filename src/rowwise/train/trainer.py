"""The loop around `step`: epochs, lines written down, evaluations, early stopping, checkpoints, going on after a stop.

What is due after a step is decided by `progress`, from numbers that the checkpoint holds; this file only does it. A
run that was killed and resumed therefore takes the same steps as one that was not, and ends with the same bits.

Of several ranks each runs this loop, and all decide alike: `progress` is the same on all of them. What only one knows
(a wish to stop, data that has ended or cannot be read, rows that refused an update) travels with the first gather of
the next step, and is asked for before an evaluation or a checkpoint. Only the first rank writes into the run's folder.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from msgspec import structs
from torch import nn

from rowwise.batch import Batch
from rowwise.checkpoint.read import Checkpoint
from rowwise.comm.seam import Comm
from rowwise.comm.status import raising_on_all_ranks
from rowwise.errors import AgreedError, GradientError, SpecError, UpdateError
from rowwise.ingest.batcher import Batcher, Position
from rowwise.ingest.service.client import ServiceHealth
from rowwise.plan import Forecast
from rowwise.spec import Wire
from rowwise.train.breakdown import PAUSED, Breakdown
from rowwise.train.diagnose import find_cause
from rowwise.train.evaluate import Evaluator, Scores
from rowwise.train.feeding import AskHealth, DataWait, no_service
from rowwise.train.groups import UpdateGroup, UpdateGroups
from rowwise.train.objective import InBatch, Objective
from rowwise.train.progress import BestEvaluation, Progress
from rowwise.train.ranks import seed_rank
from rowwise.train.recorder import Recorder
from rowwise.train.run_folder import RunFolder
from rowwise.train.run_state import RunState
from rowwise.train.settings import Settings
from rowwise.train.stages import Stages
from rowwise.train.step import EXACT, StepContext, StepResult, step
from rowwise.train.step_header import StepHeader, exchange_step_header
from rowwise.train.traffic import TableTraffic


def no_extra_data() -> None:
    """A checkpoint is all that is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The model, objective, batches and evaluator of a training.

    `batches` makes the training batches from a position on, of several ranks this one's part of them; `evaluate` looks
    at the validation data, if there is any. `health`: how the workers keep up that prepare the batches. `saved`: called
    on the first rank after each checkpoint.
    """

    model: nn.Module
    objective: Objective
    batches: Callable[[Position | None], Batcher]
    tasks: tuple[str, ...]
    evaluate: Evaluator | None = None
    forecast: Forecast | None = None  # what whoever decided where the tables are expects of a step
    health: AskHealth = no_service
    saved: Callable[[], None] = no_extra_data


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDisplay:
    """The progress display of a run."""

    progress: Progress
    settings: Settings
    splits: int  # of the training rows
    recorder: Recorder = field(repr=False)
    health: ServiceHealth | None = None


Tell = Callable[[RunDisplay], None]


@final
class Trainer:
    """Trains a model; `run` returns when it has ended, or was asked to stop.

    Args:
        job: what is trained.
        settings: how.
        folder: where the run is written, the same on all ranks; None: nowhere, and nothing is saved.
        tell: hears of every step, on the first rank.
        comm: the ranks, all of which do the same; None: there is one.
        wire: how dense gradients travel.
    """

    def __init__(
        self,
        job: TrainingJob,
        settings: Settings | None = None,
        folder: RunFolder | None = None,
        tell: Tell | None = None,
        comm: Comm | None = None,
        wire: Wire = EXACT,
    ) -> None:
        self.job, self.settings, self.folder = job, settings or Settings(), folder
        self._clock = clock = Breakdown(waited=None if comm is None else comm.waited)
        check(job, self.settings, 1 if comm is None else len(comm.ranks))
        self._work = StepContext.of(job.model, job.objective, self.settings.train, clock, comm, wire)
        self._comm = own = self._work.comm
        self._alone, first = len(own.ranks) == 1, own.rank == 0
        if self._work.shards is None:
            seed_rank(own)
        self._tell = tell if tell is not None and first else lambda _: None
        self._batcher = self._open(None)
        self.progress = Progress(position=self._batcher.state())
        written = folder if first else None
        self._stages = stages = Stages(clock, job.forecast, self.settings.train, job.health)
        self._recorder = Recorder(self._work, job.tasks, self.settings.log, written, stages)
        self._state = RunState(self._work, self._recorder, folder, self.settings.save)
        self._asked = False  # this rank was asked to stop
        self._stopping = False  # all ranks know of such a wish
        self._resumed = False  # in the middle of an epoch, maybe
        self._before_s = 0.0  # training time of the run less what the clock shows

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this run, exactly."""
        progress = self._state.progress_of(checkpoint)
        self._batcher, self._resumed = self._open(progress.position), True  # first: it may be of other data
        # Whether that is the end is for these settings to say: a run that has ended can be given more epochs.
        over = progress.is_over(self.settings.train, self.settings.evaluate)
        self.progress = structs.replace(progress, finished=over)
        self._state.restore(checkpoint, self.progress)

    def _open(self, position: Position | None) -> Batcher:
        """The batches from a position on; files that only one rank cannot find end all ranks."""
        with raising_on_all_ranks(self._comm, during="opening the data"):
            return self.job.batches(position)

    def stop(self) -> None:
        """End after the present step, of several ranks maybe the next, with a checkpoint; signals' handlers call it."""
        self._asked = True
        self._stopping = self._stopping or self._alone

    def note(self, split: str, scores: Scores) -> None:
        """Write down an evaluation that was made apart."""
        self._recorder.evaluated(self.progress, split, scores)

    @property
    def traffic(self) -> TableTraffic:
        """Lookups of each table; on the first rank, those of all ranks."""
        return self._recorder.traffic

    @property
    def wait(self) -> DataWait:
        """Time that this rank has waited for rows since it began to train."""
        return self._stages.wait

    def run(self) -> Progress:
        """Train to the end."""
        handles = self._work.clock.watch(self._work.tables)
        self._before_s = self.progress.time_s - self._clock.training_s()
        self._recorder.begin(self.progress)
        self._work.model.train()
        try:
            while not self._ends():
                self._epoch()
            # Whenever the wish to stop came: where the last step was saved anyway, this does nothing.
            if self._stopping:
                self._save()
            self._recorder.gather()
            self._state.wait()
        finally:
            for handle in handles:
                handle.remove()
            self._recorder.close()
        return self.progress

    def _epoch(self) -> None:
        """The steps that are left of an epoch, or those up to a stop."""
        groups = UpdateGroups(self._batcher, self._work)
        status = exchange_step_header(self._comm, self._header(groups), during=f"after step {self.progress.step}")
        self._stopping = self._stopping or status.stop
        groups.begin(status, resumed=self._resumed)
        self._resumed = False
        while status.following and not self._ends():
            stepped = self._step(groups.take(status.following), groups)
            status = stepped.status
            self._stopping = self._stopping or status.stop
            self._after(stepped, epoch_end=not status.following)

    def _header(self, groups: UpdateGroups) -> StepHeader:
        return StepHeader(following=groups.following, stop=self._asked, error=groups.error)

    def _step(self, group: UpdateGroup, groups: UpdateGroups) -> StepResult:
        number = self.progress.step + 1
        self._recorder.before(number)
        random = torch.get_rng_state()
        try:
            stepped = step(self._work, group.batches, number, self._header(groups))
        except (GradientError, AgreedError) as error:
            if not self._alone and not _is_of_all(error):
                raise
            torch.set_rng_state(random)  # of dropout, too, what is met again is the same
            raise self._explain(error, group.batches, number) from None
        self.progress = structs.replace(
            self.progress,
            position=group.after if stepped.status.following else self._batcher.state(),
            step=number,
            samples=self.progress.samples + stepped.samples,
            time_s=self._before_s + self._clock.training_s(),
        )
        self._recorder.after(self.progress, stepped, group.batches)
        self._stages.stepped()
        shown = RunDisplay(
            progress=self.progress,
            settings=self.settings,
            splits=self._batcher.splits,
            recorder=self._recorder,
            health=self.job.health(),
        )
        self._tell(shown)
        return stepped

    def _after(self, stepped: StepResult, *, epoch_end: bool) -> None:
        how, over = self.settings, self.progress.is_over(self.settings.train, self.settings.evaluate)
        better = False
        if self.job.evaluate and self.progress.wants_evaluation(how.evaluate, epoch_end=epoch_end, over=over):
            with self._clock.phase(PAUSED):
                better = self._evaluate(self.job.evaluate())
            # What an evaluation found may end the run.
            over = self.progress.is_over(how.train, how.evaluate)
        if over:
            self.progress = structs.replace(self.progress, finished=True)
            self._recorder.finish(self.progress, stepped)
        if better or self.progress.wants_saving(how.save, epoch_end=epoch_end, over=over):
            with self._clock.phase(PAUSED):
                self._save()

    def _evaluate(self, scores: Scores) -> bool:
        """Take note of an evaluation; returns whether it is the best so far."""
        how, now = self.settings.evaluate, self.progress
        task = how.task or self.job.tasks[0]
        value = scores.tasks[task][how.metric]
        better = how.is_better(value, None if now.best is None else now.best.value)
        best = BestEvaluation(step=now.step, task=task, metric=how.metric, value=value) if better else now.best
        worse = 0 if better else now.worse + 1
        self.progress = structs.replace(now, evaluated=now.step, best=best, worse=worse)
        self._recorder.evaluated(self.progress, "valid", scores)
        return better

    def _save(self) -> None:
        self._state.save(self.progress)
        if self._comm.rank == 0:
            self.job.saved()

    def _ends(self) -> bool:
        return self._stopping or self.progress.finished

    def _explain(self, error: GradientError | AgreedError, batches: list[Batch], number: int) -> Exception:
        """A bad number, where it comes from, and how to meet it again; called by all ranks."""
        again = self._state.save_failed(self.progress)  # before the model runs once more, which may draw numbers
        if isinstance(error, AgreedError):
            return AgreedError(f"{error}{again}", error.kinds)
        cause = find_cause(self.job.model, batches, str(error), alone=self._alone)
        at = self.progress.position
        return GradientError(
            f"step {number} (epoch {at.epoch}, from row {at.row} of split {at.split} on): {cause}{again}"
        )


def check(job: TrainingJob, settings: Settings, world: int = 1) -> None:
    """Refuse what would only come to light at the end of the first epoch."""
    how = settings.evaluate
    if how.task and how.task not in job.tasks:
        raise SpecError(f"evaluate.task={how.task!r}: the tasks are {', '.join(job.tasks)}")
    if job.evaluate is not None and how.metric not in job.evaluate.metrics:
        there = ", ".join(job.evaluate.metrics)
        raise SpecError(f"evaluate.metric={how.metric!r} is not measured; there are: {there}")
    if world > 1 and isinstance(job.objective, InBatch):
        got = f"a softmax over the items of a batch, whose samples are on {world} ranks"
        raise SpecError(f"{got}: want one process for two towers, as each rank knows of its own items only")


def _is_of_all(error: GradientError | AgreedError) -> bool:
    """Whether all ranks left the same step because of the error, before anything changed."""
    if isinstance(error, AgreedError):
        return GradientError.__name__ in error.kinds
    return not isinstance(error, UpdateError)
