"""Records a run while it trains: metrics, time by phase, traffic of tables, TensorBoard, traces.

Training metrics are part of a checkpoint, so the lines after a resume are those of an uninterrupted run (times apart).

Each rank counts its own samples. When a line is due, or a checkpoint, the first rank takes over what the others have
counted since the last time (`gather`), so it alone has all, and they send little. Known limits: the last digits of
metrics, which are sums of floats and so depend a little on how many ranks there were and when they gathered; in
`elastic`, too.
"""

import math
import resource
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec
import torch
from torch import Tensor

from rowwise.batch import Batch
from rowwise.checkpoint.read import Checkpoint
from rowwise.comm.status import gather_object
from rowwise.errors import SpecError
from rowwise.spec import Value
from rowwise.train.evaluate import Scores, Values, recent_values_of, values_of
from rowwise.train.metrics import Metrics
from rowwise.train.progress import Progress
from rowwise.train.run_folder import Cell, RunFolder
from rowwise.train.settings import Log
from rowwise.train.stages import Seconds, Stages
from rowwise.train.step import StepContext, StepResult
from rowwise.train.traffic import SavedTraffic, TableTraffic

if TYPE_CHECKING:
    from torch.profiler import profile
    from torch.utils.tensorboard import SummaryWriter

PAGE, STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
HELD = "recorder/"  # how names of its tensors in a checkpoint begin


class SavedLosses(Value, frozen=True):
    """Sums of losses in a checkpoint, and the number of samples; None where JSON has no number."""

    newest: tuple[tuple[float | None, int], ...]
    sum: float | None
    samples: int


class SavedRecorder(Value, frozen=True):
    """Likewise, of everything but tensors."""

    losses: SavedLosses
    scored: bool
    metrics: dict[str, Any]
    traffic: dict[str, SavedTraffic]


def _number(given: float | None) -> float:
    return math.nan if given is None else given


@final
class Recorder:
    """Counts every step and writes a line every so often; without a folder it only counts.

    Args:
        work: whose tables' traffic is looked at.
        tasks: names of the labels.
        log: how often.
        folder: where to; of several ranks the first only has one.
        stages: where the time went.
    """

    def __init__(
        self,
        work: StepContext,
        tasks: Sequence[str],
        log: Log,
        folder: RunFolder | None,
        stages: Stages,
    ) -> None:
        """Nothing is written before the first line is due."""
        self.log, self._tasks, self._folder, self._stages = log, tuple(tasks), folder, stages
        self._work, self._profiled, self._comm = work, log.profiled(), work.comm
        self._metrics = Metrics(tasks, window=log.window)
        self._losses: deque[tuple[float, int]] = deque(maxlen=log.window)
        self._loss_sum, self._loss_samples = 0.0, 0
        self._scored = False
        self._traffic = TableTraffic()
        self._slices: list[dict[str, Cell]] = []
        self._shown: Mapping[str, Values] = {}
        self._spent_W: list[Seconds] = []  # of the line that is being written, on each rank
        self._written = 0  # the step of the newest line
        self._memory_bytes = 0  # of the rank that holds most, when it was last asked
        self._board = _board(folder, log)
        self._profile: profile | None = None
        self._last = 0  # step that has begun

    def begin(self, progress: Progress) -> None:
        """Training goes on from here: what came before is no part of the next line's times."""
        self._stages.begin(progress)

    def before(self, step: int) -> None:
        self._last = step
        if self._folder is not None and self._profiled and step == self._profiled.start:
            self._profile = torch.profiler.profile(record_shapes=True)
            self._profile.start()

    def after(self, progress: Progress, stepped: StepResult, batches: Sequence[Batch]) -> None:
        if self._profile is not None and progress.step == self._profiled.stop - 1:
            self._end_profile()
        for outcome, batch in zip(stepped.outcomes, batches, strict=True):
            if outcome.logits_BK is not None:
                self._metrics.update(outcome.logits_BK.detach().float(), batch.labels_BK, batch.weights_B)
                self._scored = True
        self._losses.append((stepped.loss * stepped.samples, stepped.samples))
        self._loss_sum += stepped.loss * stepped.samples
        self._loss_samples += stepped.samples
        if progress.step % self.log.every == 0 or progress.step == 1:  # at least one, however short the run
            self._traffic.add(self._work.tables, batches[0], self._work.around)
        if progress.step % self.log.every == 0:
            self._write(progress, stepped)

    def finish(self, progress: Progress, stepped: StepResult) -> None:
        """The run has reached its end: what came since the last line makes one, too."""
        if self._written != progress.step:
            self._write(progress, stepped)

    def gather(self) -> None:
        """Let the first rank have what the others have counted since the last time; called by all ranks."""
        self._memory_bytes, self._spent_W = memory_bytes(), [self._stages.spent]
        if len(self._comm.ranks) == 1:
            return
        traffic = self._traffic.state(), self._traffic.tensors()
        told = gather_object(
            self._comm, (self._metrics.state(), traffic, self._memory_bytes, self._stages.spent), "metrics"
        )
        if told is None:
            self._metrics, self._traffic = Metrics(self._tasks, window=self.log.window), TableTraffic()
            return
        for metrics, traffic, held_bytes, spent in told[1:]:
            self._metrics.merge(Metrics.from_state(metrics))
            self._traffic.merge(*traffic)
            self._memory_bytes = max(self._memory_bytes, held_bytes)
            self._spent_W.append(spent)

    def recent_loss(self) -> float:
        """The mean loss of the newest batches; costs next to nothing, unlike an area under a curve."""
        return sum(loss for loss, _ in self._losses) / max(sum(samples for _, samples in self._losses), 1)

    def waited(self) -> float:
        """The share of the time that was spent waiting for data, since the last line was written."""
        spent = self._stages.so_far()
        return spent["data"] / max(sum(spent.values()), 1e-9)

    @property
    def traffic(self) -> TableTraffic:
        """Lookups of each table, counted on the first rank."""
        return self._traffic

    @property
    def shown(self) -> Mapping[str, Values]:
        """The metrics of the newest batches, as they were written last."""
        return self._shown

    def evaluated(self, progress: Progress, split: str, scores: Scores) -> None:
        if self._folder is None:
            return
        self._write_metrics(progress, split, scores.tasks)
        rows: list[dict[str, Cell]] = []
        for row in scores.slices:
            place: dict[str, Cell] = {"split": split, "feature": row.feature, "task": row.task}
            rows.append({**place, "value": "other" if row.value is None else row.value, **row.values})
        if rows:
            self._slices = [row for row in self._slices if row["split"] != split] + rows
            self._folder.replace("slices.csv", self._slices)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and numbers for a checkpoint, on the first rank; called by all."""
        self.gather()
        found = self._metrics.state() | self._traffic.tensors() if self._comm.rank == 0 else {}
        tensors = {HELD + key: value for key, value in found.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in found.items() if not isinstance(value, Tensor)}
        losses = {"newest": list(self._losses), "sum": self._loss_sum, "samples": self._loss_samples}
        traffic = self._traffic.state()
        return tensors, {"metrics": numbers, "losses": losses, "scored": self._scored, "traffic": traffic}

    def restore(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Count on from a checkpoint, and forget the lines that were written after it.

        What all ranks had counted goes to the first, and the others begin anew.
        """
        data = msgspec.convert(checkpoint.manifest.data.get("recorder"), SavedRecorder)
        losses = data.losses
        self._losses.extend((_number(loss), samples) for loss, samples in losses.newest)
        self._loss_sum, self._loss_samples = _number(losses.sum), losses.samples
        self._scored = data.scored
        if self._comm.rank:
            return
        names = [name for name in checkpoint.names() if name.startswith(HELD)]
        tensors = {name.removeprefix(HELD): checkpoint.load(name) for name in names}
        counted = {name: tensors.pop(name) for name in self._traffic.tensors() if name in tensors}
        self._traffic.restore({name: msgspec.structs.asdict(one) for name, one in data.traffic.items()}, counted)
        self._metrics = Metrics.from_state({**data.metrics, **tensors})
        if self._folder is not None:
            self._folder.cut(progress.step)
            self._slices = self._folder.rows("slices.csv")

    def close(self) -> None:
        """The run has ended, or stops here."""
        if self._profile is not None:
            self._end_profile()
        if self._folder is not None:
            if self._profiled and self._last < self._profiled.start:
                want = f"there was none after {self._last}"
                self._folder.warn(f"log.profile: step {self._profiled.start} is not traced, because {want}")
            self._folder.replace("tables.csv", self._traffic.rows(self._work.tables))
        if self._board is not None:
            self._board.close()

    def _values(self) -> tuple[dict[str, Values], dict[str, Values]]:
        """Metrics by task: of the newest batches, and of all."""
        if not self._scored:
            mean = self._loss_sum / max(self._loss_samples, 1)
            return {self._tasks[0]: {"loss": self.recent_loss()}}, {self._tasks[0]: {"loss": mean}}
        found = self._metrics.value()
        recent = {task: recent_values_of(one) for task, one in found.items()}
        return recent, {task: values_of(one) for task, one in found.items()}

    def _write(self, progress: Progress, stepped: StepResult) -> None:
        steps, samples = self._stages.end_line(progress)
        self.gather()
        self._written = progress.step
        if self._comm.rank:
            return
        self._shown, lifetime = self._values()
        if self._folder is None:
            return
        self._write_metrics(progress, "train", self._shown)
        self._write_metrics(progress, "lifetime", lifetime)
        self._write_times(progress, stepped, samples)
        self._folder.append("stages.csv", self._stages.rows(progress.step, steps, self._spent_W))

    def _write_times(self, progress: Progress, stepped: StepResult, samples: int) -> None:
        assert self._folder is not None
        spent = self._stages.spent
        samples_s = samples / max(sum(spent.values()), 1e-9)
        about = {"memory_bytes": self._memory_bytes, "rate": stepped.rate, "gradient_norm": stepped.gradient_norm}
        row = _place(progress) | {"samples_s": samples_s} | {f"{phase}_s": s for phase, s in spent.items()} | about
        self._folder.append("steps.csv", [row | self._stages.of_workers()])
        if self._board is not None:
            for name, value in {"samples_s": samples_s, **about}.items():
                self._board.add_scalar(f"run/{name}", value, progress.step)
            for phase, value in spent.items():
                self._board.add_scalar(f"seconds/{phase}", value, progress.step)

    def _write_metrics(self, progress: Progress, split: str, tasks: Mapping[str, Values]) -> None:
        assert self._folder is not None
        lines: list[dict[str, Cell]] = []
        for task, values in tasks.items():
            for metric, value in values.items():
                lines.append(_place(progress) | {"split": split, "task": task, "metric": metric, "value": value})
                if self._board is not None:
                    self._board.add_scalar(f"{task}/{metric}/{split}", value, progress.step)
        self._folder.append("metrics.csv", lines)

    def _end_profile(self) -> None:
        assert self._profile is not None
        assert self._folder is not None
        self._profile.stop()
        folder = self._folder.path / "trace"
        folder.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"steps-{self._profiled.start}-{self._profiled.stop - 1}.json"))
        self._profile = None


def memory_bytes() -> int:
    """Resident memory of this process; its peak where the system reports no current value."""
    if PAGE.exists():
        return int(PAGE.read_text().split()[1]) * resource.getpagesize()
    return peak_memory_bytes()


def peak_memory_bytes() -> int:
    """The most that this process has held."""
    # What getrusage tells of a process that was started by a larger one is that of the larger one.
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    if found:
        return found[0] * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _place(progress: Progress) -> dict[str, Cell]:
    return {"step": progress.step, "samples": progress.samples, "time_s": round(progress.time_s, 3)}


def _board(folder: RunFolder | None, log: Log) -> "SummaryWriter | None":
    if folder is None or not log.tensorboard:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SpecError("log.tensorboard=true needs a package that is not here: pip install tensorboard") from None
    return SummaryWriter(str(folder.path / "tb"))
