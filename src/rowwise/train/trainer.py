"""The training loop around `step`: epochs, logging, evaluations, early stopping, checkpoints, resuming.

`Progress` decides what is due after a step, from numbers that the checkpoint holds. A run that was killed and resumed
therefore takes the same steps as an uninterrupted run, and ends with the same bits.

Every rank runs this loop. All decide alike, because `progress` is the same on all ranks. What a single rank knows (a
request to stop, the end of its data, a read error, a failed update) travels with the header of the next step;
evaluations and checkpoints exchange a status of their own. Only rank 0 writes into the run's folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from msgspec import structs
from torch import nn

from rowwise.base.errors import AgreedError, GradientError, SpecError, UpdateError
from rowwise.checkpoint.read import Checkpoint
from rowwise.ingest.batcher import Batcher, Position
from rowwise.ingest.service.client import ServiceHealth
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import raising_on_all_ranks
from rowwise.parallel.plan import Forecast
from rowwise.tables.batch import Batch
from rowwise.tables.spec import Wire
from rowwise.train.breakdown import PAUSED, Breakdown
from rowwise.train.diagnose import find_cause
from rowwise.train.draws import random_state, set_random_state
from rowwise.train.evaluate import Evaluator, Scores
from rowwise.train.feeding import DataWait, ReadHealth, no_service
from rowwise.train.groups import UpdateGroups, check_and_pin
from rowwise.train.objective import InBatch, Objective, TwoCopies
from rowwise.train.pipeline import Pipeline
from rowwise.train.progress import BestEvaluation, Progress
from rowwise.train.ranks import seed_rank
from rowwise.train.recorder import Recorder
from rowwise.train.run_folder import RunFolder
from rowwise.train.run_state import RunState
from rowwise.train.settings import Settings
from rowwise.train.stages import PhaseTime, Stages
from rowwise.train.step import EXACT, StepContext, StepResult, do_nothing
from rowwise.train.step_header import exchange_step_header
from rowwise.train.trackers import Trackers
from rowwise.train.traffic import TableTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The model, objective, batches and evaluator of a training.

    `batches` makes this rank's training batches from a position on. `evaluate` scores the validation data. `health`
    reports the workers that prepare batches. `after_save` is called on rank 0 after each checkpoint. `copying` returns
    the step of a checkpoint that is being copied, which must not be removed, if any.
    """

    model: nn.Module
    objective: Objective
    batches: Callable[[Position | None], Batcher]
    tasks: tuple[str, ...]
    evaluate: Evaluator | None = None
    forecast: Forecast | None = None  # the planner's estimate of the seconds of a step
    health: ReadHealth = no_service
    after_save: Callable[[], None] = do_nothing
    copying: Callable[[], int | None] = do_nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDisplay:
    """What a progress display reads after each step."""

    progress: Progress
    settings: Settings
    splits: int  # of the training rows
    recorder: Recorder = field(repr=False)
    data_wait: DataWait
    health: ServiceHealth | None = None


OnStep = Callable[[RunDisplay], None]


@final
class Trainer:
    """Trains a model; `run` returns after the last step, or after a request to stop.

    Args:
        job: model, objective, data and evaluator.
        settings: the sections train, evaluate, save and log of a recipe.
        folder: the run's folder, the same on all ranks; without one nothing is saved.
        on_step: called after every step, on rank 0.
        comm: the ranks of the run; a single rank by default.
        wire: the types in which dense gradients travel.
    """

    def __init__(
        self,
        job: TrainingJob,
        settings: Settings | None = None,
        folder: RunFolder | None = None,
        on_step: OnStep | None = None,
        comm: Comm | None = None,
        wire: Wire = EXACT,
    ) -> None:
        self.job, self.settings, self.folder = job, settings or Settings(), folder
        self._clock = clock = Breakdown() if comm is None else Breakdown(waited=comm.waited, observer=comm.observer)
        check_job(job, self.settings)
        self._context = StepContext.create(job.model, job.objective, self.settings.train, clock, comm, wire)
        self._comm = step_comm = self._context.comm
        self._single_rank, first = len(step_comm.ranks) == 1, step_comm.rank == 0
        if self._context.shards is None:
            seed_rank(step_comm)
        self._on_step = on_step if on_step is not None and first else lambda _: None
        self._batcher = self._open_batches(None)
        self.progress = Progress(position=self._batcher.state())
        written_folder = folder if first else None
        self._stages = stages = Stages(clock, job.forecast, self.settings.train, job.health)
        self._recorder = Recorder(self._context, job.tasks, self.settings.log, written_folder, stages)
        self._state = RunState(self._context, self._recorder, folder, self.settings.save, job.copying)
        self._stop_requested = False  # on this rank
        self._stopping = False  # all ranks know of a request to stop
        self._resumed = False  # the next epoch may begin in its middle
        self._earlier_s = 0.0  # training time of the run's former processes

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this run, bit-exactly."""
        self.progress = self.read_progress(checkpoint)
        # Before anything is restored: the position may belong to other data, and that is an error.
        self._batcher, self._resumed = self._open_batches(self.progress.position), True
        self._state.restore(checkpoint, self.progress)

    def read_progress(self, checkpoint: Checkpoint) -> Progress:
        """The progress in a checkpoint of this run; restores nothing."""
        progress = self._state.read_progress(checkpoint)
        # Decided anew, not read from the checkpoint: a finished run may be resumed with more epochs.
        over = progress.is_over(self.settings.train, self.settings.evaluate)
        return structs.replace(progress, finished=over)

    def _open_batches(self, position: Position | None) -> Batcher:
        """The batches from a position on; raises on all ranks if one of them cannot open its files."""
        with raising_on_all_ranks(self._comm, during="opening the data"):
            batcher = self.job.batches(position)
            batcher.on_read = self._clock.add_read
            batcher.change = partial(check_and_pin, self._context)
            return batcher

    def stop(self) -> None:
        """Request the end of the run, with a checkpoint; safe in a signal handler.

        A single rank ends after the current step. Several ranks end after the newest step in preparation: the header
        of that step carries the request.
        """
        self._stop_requested = True
        self._stopping = self._stopping or self._single_rank

    def record_evaluation(self, split: str, scores: Scores) -> None:
        """Write the scores of an evaluation made by the caller."""
        self._recorder.record_evaluation(self.progress, split, scores)

    @property
    def traffic(self) -> TableTraffic:
        """Ids that the batches looked up in each table; on rank 0, of all ranks."""
        return self._recorder.traffic

    @property
    def data_wait(self) -> DataWait:
        """This rank's share of time spent waiting for data, since `run` began."""
        return self._stages.data_wait

    @property
    def mean_step(self) -> dict[str, PhaseTime]:
        """This rank's seconds of a step by phase, the mean since `run` began; empty for a single step."""
        return self._stages.mean_step()

    @property
    def trackers(self) -> Trackers:
        """Experiment trackers of the run; the caller ends them."""
        return self._recorder.trackers

    def prune(self) -> None:
        """Remove checkpoints that were kept at the last save because they were being copied; collective."""
        self._state.prune(self.progress)
        self._state.wait()

    def run(self) -> Progress:
        """Train to the end."""
        handles = self._context.clock.watch(self._context.tables)
        self._earlier_s = self.progress.time_s - self._clock.training_s()
        self._recorder.start(self.progress)
        self._context.model.train()
        try:
            while not self._is_done():
                self._train_epoch()
            if self._stopping:
                self._save()  # after a step that was saved already it only writes the manifest's data again
            self._recorder.gather()
            self._state.wait()
        finally:
            for handle in handles:
                handle.remove()
            self._recorder.close()
        return self.progress

    def _train_epoch(self) -> None:
        """Take the remaining steps of an epoch, or those up to a stop."""
        groups = UpdateGroups(self._batcher, self._context)
        done = self.progress.step
        with self._clock.working_for(done + 1):
            first = groups.read()
        header = groups.header(first, stop=self._stop_requested)
        with self._clock.phase("status"):
            status = exchange_step_header(self._comm, header, during=f"after step {done}")
        self._stopping = self._stopping or status.stop
        groups.begin(status, first, resumed=self._resumed)
        self._resumed = False
        self.trackers.mark("epoch_start", self.progress.position.epoch + 1, self.progress.samples)
        pipeline = Pipeline(self._context, groups, first, status, done + 1, lambda: self._stop_requested)
        while status.following and not self._is_done():
            stepped = self._run_step(pipeline)
            status = stepped.status
            self._stopping = self._stopping or status.stop
            self._evaluate_and_save(stepped, pipeline, epoch_end=not status.following)
        pipeline.close()

    def _run_step(self, pipeline: Pipeline) -> StepResult:
        self._recorder.start_step(self.progress.step + 1)
        prepared = pipeline.next_step()
        random = random_state()
        try:
            stepped = pipeline.run(prepared)
        except (GradientError, AgreedError) as error:
            if not self._single_rank and not _stopped_all_ranks(error):
                raise
            pipeline.close()
            set_random_state(random)  # so that a repetition of the step draws the same dropout masks
            raise self._explain(error, prepared.batches, prepared.number) from None
        self.progress = structs.replace(
            self.progress,
            position=prepared.after if stepped.status.following else self._batcher.state(),
            step=prepared.number,
            samples=self.progress.samples + stepped.samples,
            time_s=self._earlier_s + self._clock.training_s(),
        )
        self._recorder.record_step(self.progress, stepped, prepared.batches)
        self._stages.end_step()
        display = RunDisplay(
            progress=self.progress,
            settings=self.settings,
            splits=self._batcher.splits,
            recorder=self._recorder,
            data_wait=self.data_wait,
            health=self.job.health(),
        )
        self._on_step(display)
        return stepped

    def _evaluate_and_save(self, stepped: StepResult, pipeline: Pipeline, *, epoch_end: bool) -> None:
        settings, best = self.settings, False
        if epoch_end:
            self.trackers.mark("epoch_stop", self.progress.position.epoch, self.progress.samples)
        over = self.progress.is_over(settings.train, settings.evaluate)
        if self.job.evaluate and self.progress.wants_evaluation(settings.evaluate, epoch_end=epoch_end, over=over):
            with self._clock.phase(PAUSED), self._recorder.pause_caches():
                pipeline.settle()
                self.trackers.mark("eval_start", self.progress.position.epoch + (not epoch_end), self.progress.samples)
                best = self._record_scores(self.job.evaluate())
            over = self.progress.is_over(settings.train, settings.evaluate)  # patience may have run out
        if over:
            self.progress = structs.replace(self.progress, finished=True)
            self._recorder.write_last_line(self.progress, stepped)
        if best or self.progress.wants_saving(settings.save, epoch_end=epoch_end, over=over):
            with self._clock.phase(PAUSED), self._recorder.pause_caches():
                pipeline.settle()
                self._save()

    def _record_scores(self, scores: Scores) -> bool:
        """Record the scores of a validation; returns whether they are the best so far."""
        settings, progress = self.settings.evaluate, self.progress
        task, metric = settings.task or self.job.tasks[0], settings.metric
        value = scores.tasks[task][metric]
        better = settings.is_better(value, None if progress.best is None else progress.best.value)
        best = BestEvaluation(step=progress.step, task=task, metric=metric, value=value) if better else progress.best
        worse = 0 if better else progress.worse + 1
        self.progress = structs.replace(progress, evaluated=progress.step, best=best, worse=worse)
        self._recorder.record_evaluation(self.progress, "valid", scores)
        return better

    def _save(self) -> None:
        self._state.save(self.progress)
        if self._comm.rank == 0:
            self.job.after_save()

    def _is_done(self) -> bool:
        return self._stopping or self.progress.finished

    def _explain(self, error: GradientError | AgreedError, batches: Sequence[Batch], number: int) -> Exception:
        """The error with the layer or table that caused it, and the command that repeats the step; a collective."""
        hint = self._state.save_failed(self.progress)  # before the model runs once more and draws random numbers
        if isinstance(error, AgreedError):
            return AgreedError(f"{error}{hint}", error.kinds)
        cause = find_cause(self.job.model, batches, str(error), alone=self._single_rank)
        start = self.progress.position
        return GradientError(
            f"step {number} (epoch {start.epoch}, from row {start.row} of split {start.split} on): {cause}{hint}"
        )


def check_job(job: TrainingJob, settings: Settings) -> None:
    """Raise at the start what would otherwise fail at the end of the first epoch."""
    task, metric = settings.evaluate.task, settings.evaluate.metric
    if task and task not in job.tasks:
        raise SpecError(f"evaluate.task={task!r}", f"one of {', '.join(job.tasks)}")
    if job.evaluate is not None and metric not in job.evaluate.metrics:
        raise SpecError(f"evaluate.metric={metric!r} is not measured", f"one of {', '.join(job.evaluate.metrics)}")
    if settings.train.determinism == "elastic" and isinstance(job.objective, (InBatch, TwoCopies)):
        model = "two towers" if isinstance(job.objective, InBatch) else "two copies"
        raise SpecError(
            f"{model} with train.determinism='elastic': the loss spans the items of a whole batch, of which a virtual "
            "shard holds a part",
            "determinism='run'",
        )


def _stopped_all_ranks(error: GradientError | AgreedError) -> bool:
    """Whether the error ended the step on all ranks, before any parameter changed."""
    if isinstance(error, AgreedError):
        return GradientError.__name__ in error.kinds
    return not isinstance(error, UpdateError)
