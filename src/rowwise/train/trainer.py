"""The loop around `step`: epochs, lines written down, evaluations, early stopping, checkpoints, going on after a stop.

What is due after a step is decided by `progress`, from numbers that the checkpoint holds; this file only does it. A
run that was killed and resumed therefore takes the same steps as one that was not, and ends with the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, final

import msgspec
import torch
from msgspec import structs
from torch import Tensor, nn

from rowwise.batch import Batch
from rowwise.checkpoint.read import Checkpoint
from rowwise.errors import CheckpointError, DataError, GradientError
from rowwise.ingest.batcher import Batcher, Position
from rowwise.train.breakdown import PAUSED, Breakdown
from rowwise.train.diagnose import find_cause
from rowwise.train.evaluate import Evaluator, Scores
from rowwise.train.objective import Objective
from rowwise.train.optimizers import make_optimizer
from rowwise.train.progress import Best, Progress
from rowwise.train.recorder import Recorder
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import FAILED, Saved
from rowwise.train.settings import Settings
from rowwise.train.snapshot import collect, restore
from rowwise.train.step import Machinery, dense_parameters, step


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, on what.

    `batches` makes the training batches from a position on; `evaluate` looks at the validation data, if there is any.
    """

    model: nn.Module
    objective: Objective
    batches: Callable[[Position | None], Batcher]
    tasks: tuple[str, ...]
    evaluate: Evaluator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What can be shown while a run goes on."""

    progress: Progress
    settings: Settings
    splits: int  # of the training rows
    recorder: Recorder = field(repr=False)


Tell = Callable[[Shown], None]


@final
class Trainer:
    """Trains a model; `run` returns when it has ended, or was asked to stop.

    Args:
        job: what is trained.
        settings: how.
        folder: where the run is written; None: nowhere, and nothing is saved.
        tell: hears of every step.
    """

    def __init__(
        self, job: Job, settings: Settings | None = None, folder: RunFolder | None = None, tell: Tell | None = None
    ) -> None:
        """Start from the model as it is."""
        self.job, self.settings, self.folder = job, settings or Settings(), folder
        self._tell = tell or (lambda _: None)
        self._clock = clock = Breakdown()
        self._work = Machinery(
            model=job.model,
            objective=job.objective,
            optimizer=make_optimizer(self.settings.train.optimizer, dense_parameters(job.model)),
            settings=self.settings.train,
            clock=clock,
        )
        self._batcher = job.batches(None)
        self.progress = Progress(position=self._batcher.state())
        self._recorder = Recorder(job.model, job.tasks, self.settings.log, folder, clock)
        self._saved = None if folder is None else Saved(folder.checkpoints)
        self._stopping = False
        self._before_s = -clock.training_s()  # training time of the run less what the clock shows

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this run, exactly."""
        data = checkpoint.manifest.data
        if "progress" not in data:
            raise CheckpointError(f"{checkpoint.folder} is not of a run: it does not say how far it got")
        self.progress = msgspec.convert(data["progress"], Progress)
        restore(checkpoint, self.job.model, self._optimizers())
        self._batcher = self.job.batches(self.progress.position)
        self._recorder.restore(checkpoint, self.progress)
        self._before_s = self.progress.time_s - self._clock.training_s()

    def stop(self) -> None:
        """End after the present step, with a checkpoint; may be called by a signal's handler."""
        self._stopping = True

    def note(self, split: str, scores: Scores) -> None:
        """Write down an evaluation that was made apart."""
        self._recorder.evaluated(self.progress, split, scores)

    def run(self) -> Progress:
        """Train to the end."""
        handles = self._work.clock.watch(self._work.tables)
        self._work.model.train()
        try:
            while not self._ends():
                self._epoch()
        finally:
            for handle in handles:
                handle.remove()
            self._recorder.close()
        return self.progress

    def _epoch(self) -> None:
        """The steps that are left of an epoch, or those up to a stop."""
        for batches in self._groups():
            self._step(batches)
            self._after(epoch_end=False)
            if self._ends():
                return
        self.progress = structs.replace(self.progress, position=self._batcher.state())
        if not self.progress.step:
            raise DataError("there are no rows to train on: the first epoch ended without a batch")
        self._after(epoch_end=True)

    def _groups(self) -> Iterator[list[Batch]]:
        """The batches of each update."""
        batches = iter(self._batcher)
        clock = self._work.clock
        while True:
            with clock.phase("data"):
                device = self.settings.train.device
                group = [batch.to(device) for batch in islice(batches, self.settings.train.accumulate)]
            if not group:
                return
            yield group

    def _step(self, batches: list[Batch]) -> None:
        number = self.progress.step + 1
        self._recorder.before(number)
        try:
            stepped = step(self._work, batches, number)
        except GradientError as error:
            raise GradientError(self._explain(error, batches, number)) from None
        self.progress = structs.replace(
            self.progress,
            position=self._batcher.state(),
            step=number,
            samples=self.progress.samples + stepped.samples,
            time_s=self._before_s + self._clock.training_s(),
        )
        self._recorder.after(self.progress, stepped, batches)
        splits = self._batcher.splits
        self._tell(Shown(progress=self.progress, settings=self.settings, splits=splits, recorder=self._recorder))

    def _after(self, *, epoch_end: bool) -> None:
        """What is due now."""
        how, over = self.settings, self.progress.is_over(self.settings.train, self.settings.evaluate)
        better = False
        if self.job.evaluate and self.progress.wants_evaluation(how.evaluate, epoch_end=epoch_end, over=over):
            with self._clock.phase(PAUSED):
                better = self._evaluate(self.job.evaluate())
            # What an evaluation found may end the run.
            over = self.progress.is_over(how.train, how.evaluate)
        if over:
            self.progress = structs.replace(self.progress, finished=True)
        if better or self._stopping or self.progress.wants_saving(how.save, epoch_end=epoch_end, over=over):
            with self._clock.phase(PAUSED):
                self._save()

    def _evaluate(self, scores: Scores) -> bool:
        """Take note of an evaluation; returns whether it is the best so far."""
        how, now = self.settings.evaluate, self.progress
        task = how.task or self.job.tasks[0]
        values = scores.tasks.get(task, {})
        if how.metric not in values:
            there = ", ".join(values) or f"no task {task!r}"
            raise DataError(f"evaluate.metric={how.metric!r} is not measured; there are: {there}")
        value = values[how.metric]
        better = how.is_better(value, None if now.best is None else now.best.value)
        best = Best(step=now.step, task=task, metric=how.metric, value=value) if better else now.best
        worse = 0 if better else now.worse + 1
        self.progress = structs.replace(now, evaluated=now.step, best=best, worse=worse)
        self._recorder.evaluated(self.progress, "valid", scores)
        return better

    def _save(self) -> None:
        if self._saved is None:
            return
        tensors, data = self._state()
        self._saved.add(self.progress.step, tensors, data)
        self._saved.prune(self.settings.save.keep, None if self.progress.best is None else self.progress.best.step)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, data = collect(self.job.model, self._optimizers())
        kept, numbers = self._recorder.state()
        return tensors | kept, data | {"progress": msgspec.to_builtins(self.progress), "recorder": numbers}

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {} if self._work.optimizer is None else {"dense": self._work.optimizer}

    def _ends(self) -> bool:
        return self._stopping or self.progress.finished

    def _explain(self, error: GradientError, batches: list[Batch], number: int) -> str:
        """A bad number, where it comes from, and how to meet it again."""
        again = ""
        if self._saved is not None and self.folder is not None:
            self._saved.add_failed(
                *self._state()
            )  # first: looking for the cause runs the model, which may draw numbers
            again = f"; meet it again: rowwise resume {self.folder.path} --from {FAILED}"
        cause = find_cause(self.job.model, batches, str(error))
        at = self.progress.position
        return f"step {number} (epoch {at.epoch}, from row {at.row} of split {at.split} on): {cause}{again}"
