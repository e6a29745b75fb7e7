"""The loop around `step`: epochs, lines written down, evaluations, early stopping, checkpoints, going on after a stop.

What is due after a step is decided by `progress`, from numbers that the checkpoint holds; this file only does it. A
run that was killed and resumed therefore takes the same steps as one that was not, and ends with the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, final

import msgspec
import torch
from msgspec import structs
from torch import Tensor, nn

from rowwise.batch import Batch
from rowwise.checkpoint.read import Checkpoint
from rowwise.errors import CheckpointError, DataError, GradientError, SpecError
from rowwise.ingest.batcher import Batcher, Position
from rowwise.ops.linear import choose, chosen, has_onednn
from rowwise.train.breakdown import PAUSED, Breakdown
from rowwise.train.diagnose import find_cause
from rowwise.train.evaluate import Evaluator, Scores
from rowwise.train.objective import Objective
from rowwise.train.progress import Best, Progress
from rowwise.train.recorder import Recorder
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import FAILED, Saved
from rowwise.train.settings import Settings
from rowwise.train.snapshot import collect, restore
from rowwise.train.step import Machinery, Stepped, step


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The batches of one update."""

    batches: list[Batch]
    after: Position  # where the data stands once they are used
    last: bool  # of the epoch


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
        check(job, self.settings)
        self._clock = clock = Breakdown()
        self._work = Machinery.of(job.model, job.objective, self.settings.train, clock)
        self._batcher = job.batches(None)
        self.progress = Progress(position=self._batcher.state())
        self._recorder = Recorder(self._work.tables, job.tasks, self.settings.log, folder, clock)
        self._saved = None if folder is None else Saved(folder.checkpoints)
        self._stopping = False
        self._before_s = 0.0  # training time of the run less what the clock shows

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this run, exactly."""
        data = checkpoint.manifest.data
        if "progress" not in data:
            raise CheckpointError(f"{checkpoint.folder} is not of a run: it does not say how far it got")
        progress = msgspec.convert(data["progress"], Progress)
        # Whether that is the end is for these settings to say: a run that has ended can be given more epochs.
        over = progress.is_over(self.settings.train, self.settings.evaluate)
        self.progress = structs.replace(progress, finished=over)
        with _own_numbers(self._work.optimizer):
            restore(checkpoint, self.job.model, self._optimizers())
        self._batcher = self.job.batches(self.progress.position)
        # The two libraries round differently, and which is faster may be found out differently today.
        if has_onednn() or data["products"] == "torch":
            choose(data["products"])
        self._recorder.restore(checkpoint, self.progress)
        if self._saved is not None:
            self._saved.cut(self.progress.step)

    def stop(self) -> None:
        """End after the present step, with a checkpoint; may be called by a signal's handler."""
        self._stopping = True

    def note(self, split: str, scores: Scores) -> None:
        """Write down an evaluation that was made apart."""
        self._recorder.evaluated(self.progress, split, scores)

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
        finally:
            for handle in handles:
                handle.remove()
            self._recorder.close()
        return self.progress

    def _epoch(self) -> None:
        """The steps that are left of an epoch, or those up to a stop."""
        group = None
        for group in self._groups():
            stepped = self._step(group)
            self._after(stepped, epoch_end=group.last)
            if self._ends():
                return
        if group is None:
            raise DataError("there are no rows to train on: an epoch ended without a batch")

    def _groups(self) -> Iterator[_Group]:
        """The batches of each update."""
        batches = iter(self._batcher)
        group = self._read(batches)
        while group:
            after = self._batcher.state()
            # The last one has to be known as such: what is due at the end of an epoch belongs to its last step, and
            # one step makes one checkpoint.
            following = self._read(batches)
            last = not following
            yield _Group(batches=group, after=self._batcher.state() if last else after, last=last)
            group = following

    def _read(self, batches: Iterator[Batch]) -> list[Batch]:
        device = self.settings.train.device
        with self._clock.phase("data"):
            return [batch.to(device) for batch in islice(batches, self.settings.train.accumulate)]

    def _step(self, group: _Group) -> Stepped:
        number = self.progress.step + 1
        self._recorder.before(number)
        random = torch.get_rng_state()
        try:
            stepped = step(self._work, group.batches, number)
        except GradientError as error:
            torch.set_rng_state(random)  # of dropout, too, what is met again is the same
            raise GradientError(self._explain(error, group.batches, number)) from None
        self.progress = structs.replace(
            self.progress,
            position=group.after,
            step=number,
            samples=self.progress.samples + stepped.samples,
            time_s=self._before_s + self._clock.training_s(),
        )
        self._recorder.after(self.progress, stepped, group.batches)
        splits = self._batcher.splits
        self._tell(Shown(progress=self.progress, settings=self.settings, splits=splits, recorder=self._recorder))
        return stepped

    def _after(self, stepped: Stepped, *, epoch_end: bool) -> None:
        """What is due after a step."""
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
        more = {"progress": msgspec.to_builtins(self.progress), "recorder": numbers, "products": chosen()}
        return tensors | kept, data | more

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {} if self._work.optimizer is None else {"dense": self._work.optimizer}

    def _ends(self) -> bool:
        return self._stopping or self.progress.finished

    def _explain(self, error: GradientError, batches: list[Batch], number: int) -> str:
        """A bad number, where it comes from, and how to meet it again."""
        again = ""
        if self._saved is not None and self.folder is not None:
            again = f"; meet it again: rowwise resume {self.folder.path} --from {FAILED}"
            try:
                self._saved.add_failed(*self._state())  # before the model runs once more, which may draw numbers
            except CheckpointError as full:
                again = f"; and it cannot be met again, as {full}"
        cause = find_cause(self.job.model, batches, str(error))
        at = self.progress.position
        return f"step {number} (epoch {at.epoch}, from row {at.row} of split {at.split} on): {cause}{again}"


def check(job: Job, settings: Settings) -> None:
    """Refuse what would only come to light at the end of the first epoch."""
    how = settings.evaluate
    if how.task and how.task not in job.tasks:
        raise SpecError(f"evaluate.task={how.task!r}: the tasks are {', '.join(job.tasks)}")
    if job.evaluate is not None and how.metric not in job.evaluate.metrics:
        there = ", ".join(job.evaluate.metrics)
        raise SpecError(f"evaluate.metric={how.metric!r} is not measured; there are: {there}")


@contextmanager
def _own_numbers(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Keep decay, betas and their like as the settings have them: a run may be resumed with others."""
    groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    yield
    for group, numbers in zip(groups, own, strict=True):
        group.update(numbers)
