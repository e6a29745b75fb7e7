"""Records a run: metrics, seconds by phase, traffic of tables, TensorBoard, profiler traces.

Training metrics are part of a checkpoint, so the lines after a resume are those of an uninterrupted run (times apart).

Each rank counts its own samples. Before a line or a checkpoint, `gather` moves the counts of all ranks to rank 0, and
the others begin at zero again. Known limits: metrics are sums of floats, so their last digits depend on the number of
ranks and on when they gathered, with `determinism: elastic`, too.
"""

import math
import resource
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import msgspec
import torch
from torch import Tensor

from rowwise.checkpoint.read import Checkpoint
from rowwise.parallel.comm.status import gather_object
from rowwise.tables.batch import Batch
from rowwise.tables.spec import Value
from rowwise.tables.store.row_store import StoreUse, sum_up
from rowwise.train.breakdown import PhaseSeconds
from rowwise.train.cache_counts import CacheCounts, cache_rows_of_csv, disk_cells
from rowwise.train.evaluate import (
    Scores,
    Values,
    make_metrics,
    undefined,
)
from rowwise.train.loss_settings import AmountLoss
from rowwise.train.managed_ids import ManagedRecord, RankRecord, counter_rows, write_evictions
from rowwise.train.on_device import StepNumbers
from rowwise.train.progress import Progress
from rowwise.train.run_folder import AFTER, Cell, RunFolder
from rowwise.train.samples import Samples
from rowwise.train.slow_hosts import SlowHosts
from rowwise.train.stages import Stages
from rowwise.train.step import StepContext, StepResult
from rowwise.train.timeline import STEPS, StageInterval
from rowwise.train.trackers import Log, Trackers
from rowwise.train.traffic import SavedTraffic, TableTraffic

if TYPE_CHECKING:
    from torch.profiler import profile

PAGE, STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
SPLITS = {"valid": "validation"}  # display names of splits
PREFIX = "recorder/"  # of the recorder's tensors in a checkpoint
NO_CACHES = StoreUse()


class SavedLosses(Value, frozen=True):
    """Sums of losses in a checkpoint, and the number of samples; None for NaN and infinity, which JSON lacks."""

    newest: tuple[tuple[float | None, int], ...]
    sum: float | None
    samples: int


class SavedRecorder(Value, frozen=True):
    """The recorder's state in a checkpoint, without its tensors."""

    losses: SavedLosses
    scored: bool
    metrics: dict[str, Any]
    traffic: dict[str, SavedTraffic]


class RankNumbers(NamedTuple):
    """A rank's part of a line, apart from metrics and traffic; sent to rank 0."""

    memory_bytes: int
    spent: PhaseSeconds
    caches: StoreUse
    managed: RankRecord
    intervals: list[StageInterval]


def _number(saved: float | None) -> float:
    return math.nan if saved is None else saved


@final
class Recorder:
    """Counts every step and writes a line every `log.every` steps; without a folder it only counts.

    Args:
        context: the context of the steps; tables.csv lists its tables.
        tasks: names of the labels.
        log: how often to write.
        folder: the run's folder on rank 0; other ranks write nothing.
        stages: seconds by phase.
    """

    def __init__(
        self, context: StepContext, tasks: Sequence[str], log: Log, folder: RunFolder | None, stages: Stages
    ) -> None:
        self._loss = loss = context.settings.objective  # decides what is measured
        self.log, self._tasks, self._folder, self._stages = log, tuple(tasks), folder, stages
        self._context, self._profiled, self._comm = context, log.profiled(), context.comm
        self._metrics = make_metrics(tasks, log.window, loss)
        self._losses: deque[tuple[float, int]] = deque(maxlen=log.window)
        self._loss_sum, self._loss_samples = 0.0, 0
        self._unread: deque[tuple[StepNumbers, int]] = deque()
        self._scored = False
        self.traffic = TableTraffic()  # ids that the batches looked up in each table; on rank 0, of all ranks
        self._caches = CacheCounts(context.tables)
        # As of the last line: the share of ids that met their row in memory, and metrics of the newest batches.
        self.hit_rate: float | None = None
        self.recent_metrics: Mapping[str, Values] = {}
        self._managed = ManagedRecord(context.managed)
        self._slices: list[dict[str, Cell]] = []
        self._slow_hosts = SlowHosts(context.comm.topology)
        self._written = 0  # the step of the newest line
        self.trackers = Trackers(folder, log)
        self._profile: profile | None = None
        self._last = 0  # the step that began last
        self._resumed = False

    def start(self, progress: Progress) -> None:
        """Begin the first line: earlier seconds are not part of it."""
        self.trackers.begin()
        self._stages.begin(progress)
        self._caches.take()  # lookups of a restore are not counted

    def start_step(self, step: int) -> None:
        self._last = step
        self._stages.clock.begin_step(step)
        if self._folder is not None and self._profiled and step == self._profiled.start:
            self._profile = torch.profiler.profile(record_shapes=True)
            self._profile.start()

    def record_step(self, progress: Progress, stepped: StepResult, batches: Sequence[Batch]) -> None:
        if self._profile is not None and progress.step == self._profiled.stop - 1:
            self._end_profile()
        for outcome, batch in zip(stepped.outcomes, batches, strict=True):
            if outcome.logits_BK is not None:
                logits_BK, ahead = outcome.logits_BK.detach().float(), self._context.runs_ahead
                amounts = isinstance(self._loss, AmountLoss)
                samples = Samples.of(logits_BK, batch.labels_BK, batch.weights_B, check=not ahead, amounts=amounts)
                self._metrics.add(samples)
                self._scored = True
        self._managed.record_step(progress.step)
        self._unread.append((stepped.numbers, stepped.samples))
        self._read_losses(pending=int(self._context.runs_ahead))
        if progress.step % self.log.every == 0 or progress.step == 1:  # step 1: a short run counts a batch, too
            self.traffic.add(self._context.tables, batches[0], self._context.id_maps)
        if progress.step % self.log.every == 0:
            self._write(progress, stepped)

    def _read_losses(self, pending: int = 0) -> None:
        """Count the losses of all steps except the newest `pending`, which a device may still compute."""
        while len(self._unread) > pending:
            numbers, samples = self._unread.popleft()
            loss, _ = numbers.read()
            self._losses.append((loss * samples, samples))
            self._loss_sum += loss * samples
            self._loss_samples += samples

    def write_last_line(self, progress: Progress, stepped: StepResult) -> None:
        """At the end of the run: write the steps since the last line."""
        if self._written != progress.step:
            self._write(progress, stepped)

    def gather(self, caches: StoreUse = NO_CACHES) -> "list[RankNumbers]":
        """Move the counts of all ranks to rank 0, and return the numbers of each there; a collective."""
        self._read_losses()
        local = RankNumbers(
            memory_bytes(), self._stages.spent, caches, self._managed.take(), self._stages.clock.timeline.take_changes()
        )
        numbers_W = [local]
        if len(self._comm.ranks) > 1:
            message = local, self._metrics.state(), self.traffic.state(), self.traffic.tensors()
            gathered = gather_object(self._comm, message, "metrics")
            if gathered is None:
                self._metrics = make_metrics(self._tasks, self.log.window, self._loss)
                self.traffic = TableTraffic()
                return []
            for _, metrics, *traffic in gathered[1:]:
                self._metrics.merge_state(metrics)
                self.traffic.merge(*traffic)
            numbers_W = [numbers for numbers, *_ in gathered]
        if self._folder is not None:
            # Before the checkpoint whose state has these evictions.
            write_evictions(self._folder, [numbers.managed for numbers in numbers_W])
            self._write_timeline(self._folder, [numbers.intervals for numbers in numbers_W])
        return numbers_W

    def recent_loss(self) -> float:
        """The mean loss of the newest batches; cheap enough for every step, unlike an AUC."""
        return sum(loss for loss, _ in self._losses) / max(sum(samples for _, samples in self._losses), 1)

    def pause_caches(self) -> AbstractContextManager[None]:
        """Exclude the caches' counts of the with block."""
        return self._caches.paused()

    def record_evaluation(self, progress: Progress, split: str, scores: Scores) -> None:
        if self._folder is None:
            return
        self._write_metrics(progress, split, scores.tasks)
        for line in undefined(scores.tasks, SPLITS.get(split, split)):
            self._folder.warn(line)
        rows: list[dict[str, Cell]] = []
        for row in scores.slices:
            key: dict[str, Cell] = {"split": split, "feature": row.feature, "task": row.task}
            rows.append({**key, "value": "other" if row.value is None else row.value, **row.values})
        if rows:
            self._slices = [row for row in self._slices if row["split"] != split] + rows
            self._folder.replace("slices.csv", self._slices)
        if split == AFTER and scores.rates:
            self._folder.replace("reliability.csv", [asdict(group) for group in scores.rates])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and numbers for a checkpoint, on rank 0; a collective."""
        self.gather()
        state = self._metrics.state() | self.traffic.tensors() if self._comm.rank == 0 else {}
        tensors = {PREFIX + key: value for key, value in state.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        losses = {"newest": list(self._losses), "sum": self._loss_sum, "samples": self._loss_samples}
        traffic = self.traffic.state()
        return tensors, {"metrics": numbers, "losses": losses, "scored": self._scored, "traffic": traffic}

    def restore(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Continue from a checkpoint's counts, on rank 0; cut the lines that were written after the checkpoint."""
        data = msgspec.convert(checkpoint.manifest.data.get("recorder"), SavedRecorder)
        losses, self._resumed = data.losses, True
        self._losses.extend((_number(loss), samples) for loss, samples in losses.newest)
        self._loss_sum, self._loss_samples = _number(losses.sum), losses.samples
        self._scored = data.scored
        if self._comm.rank:
            return
        names = [name for name in checkpoint.names() if name.startswith(PREFIX)]
        tensors = {name.removeprefix(PREFIX): checkpoint.load(name) for name in names}
        counts = {name: tensors.pop(name) for name in self.traffic.tensors() if name in tensors}
        self.traffic.restore({name: msgspec.structs.asdict(saved) for name, saved in data.traffic.items()}, counts)
        self._metrics = self._metrics.restored({**data.metrics, **tensors})
        if self._folder is not None:
            self._folder.drop_after(progress.step)
            self._slices = self._folder.rows("slices.csv")

    def close(self) -> None:
        """Write tables.csv and the profiler's trace."""
        if self._profile is not None:
            self._end_profile()
        if self._folder is not None:
            if self._profiled and self._last < self._profiled.start:
                reason = f"the run ended after step {self._last}"
                self._folder.warn(f"log.profile: step {self._profiled.start} is not traced: {reason}")
            self._folder.replace("tables.csv", self.traffic.rows(self._context.tables))

    def _values(self) -> tuple[dict[str, Values], dict[str, Values]]:
        """Metrics by task: of the newest batches, and of all batches."""
        if not self._scored:
            mean = self._loss_sum / max(self._loss_samples, 1)
            return {self._tasks[0]: {"loss": self.recent_loss()}}, {self._tasks[0]: {"loss": mean}}
        metrics = self._metrics.value()
        recent = {task: metric.recent for task, metric in metrics.items()}
        return recent, {task: metric.all for task, metric in metrics.items()}

    def _write(self, progress: Progress, stepped: StepResult) -> None:
        steps, samples = self._stages.end_line(progress)
        numbers_W = self.gather(self._caches.take())
        self._written = progress.step
        if self._comm.rank:
            return
        self.recent_metrics, lifetime = self._values()
        caches = sum_up(numbers.caches for numbers in numbers_W)
        self.hit_rate = caches.hit_rate if caches.tables else None
        if self._folder is None:
            return
        self._write_metrics(progress, "train", self.recent_metrics)
        self._write_metrics(progress, "lifetime", lifetime)
        max_bytes = max(numbers.memory_bytes for numbers in numbers_W)
        self._write_times(progress, stepped, samples, max_bytes, disk_cells(caches))
        spent_W = [numbers.spent for numbers in numbers_W]
        self._folder.append("stages.csv", self._stages.rows(progress.step, steps, spent_W))
        for line in self._slow_hosts.add(spent_W):
            self._folder.log(line)
            self._folder.warn(line)
        if caches.tables:
            self._folder.append("caches.csv", cache_rows_of_csv(progress.step, caches))
        if self._context.managed:
            managed_W = [numbers.managed for numbers in numbers_W]
            self._folder.append("managed.csv", counter_rows(progress.step, managed_W))

    def _write_timeline(self, folder: RunFolder, intervals_W: list[list[StageInterval]]) -> None:
        """Replace timeline.csv; a resumed run keeps that of its former process until it has all steps."""
        steps = {interval.step for interval in intervals_W[0]}
        if steps and (len(steps) == STEPS or not self._resumed):
            folder.replace("timeline.csv", self._stages.timeline_rows(intervals_W))

    def _write_times(
        self, progress: Progress, stepped: StepResult, samples: int, max_bytes: int, disk: dict[str, Cell]
    ) -> None:
        assert self._folder is not None
        spent = self._stages.spent.exposed
        samples_s = samples / max(sum(spent.values()), 1e-9)
        values = {"memory_bytes": max_bytes, "rate": stepped.rate, "gradient_norm": stepped.gradient_norm}
        row = _step_cells(progress) | {"samples_s": samples_s} | {f"{phase}_s": s for phase, s in spent.items()}
        self._folder.append("steps.csv", [row | values | self._stages.worker_cells() | disk])
        scalars = {f"run/{name}": value for name, value in {"samples_s": samples_s, **values}.items()}
        self.trackers.log(scalars | {f"seconds/{phase}": value for phase, value in spent.items()}, progress.step)

    def _write_metrics(self, progress: Progress, split: str, tasks: Mapping[str, Values]) -> None:
        assert self._folder is not None
        scores = [(task, metric, value) for task, values in tasks.items() for metric, value in values.items()]
        key = _step_cells(progress) | {"split": split}
        self._folder.append("metrics.csv", [key | {"task": t, "metric": m, "value": value} for t, m, value in scores])
        self.trackers.log({f"{task}/{metric}/{split}": value for task, metric, value in scores}, progress.step)

    def _end_profile(self) -> None:
        assert self._profile is not None
        assert self._folder is not None
        self._profile.stop()
        folder = self._folder.path / "trace"
        folder.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"steps-{self._profiled.start}-{self._profiled.stop - 1}.json"))
        self._profile = None


def memory_bytes() -> int:
    """Resident memory of this process; its peak where the system has no /proc."""
    if PAGE.exists():
        return int(PAGE.read_text().split()[1]) * resource.getpagesize()
    return peak_memory_bytes()


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    # getrusage is the fallback only: a process starts with the ru_maxrss of the process that forked it.
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    if peaks:
        return peaks[0] * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _step_cells(progress: Progress) -> dict[str, Cell]:
    return {"step": progress.step, "samples": progress.samples, "time_s": round(progress.time_s, 3)}
