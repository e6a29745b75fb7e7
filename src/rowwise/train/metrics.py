"""The training metrics of each task: loss, NE, AUC and calibration, over the newest batches and over all.

`row()` names each number for a log line or a column.

Small batches are queued and counted together: on 1,024 samples an operator takes longer to call than to run. Sums are
exact in any order (see `exact.py`), so the metrics have the bits of batches counted one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from rowwise.base.errors import SpecError, StateError
from rowwise.train.amounts import Values
from rowwise.train.auc import Auc, AucValue, RecentAuc
from rowwise.train.entropy import SUMS, EntropyValue, fits, read_sums, sums_state, totals
from rowwise.train.exact import RunSums
from rowwise.train.reliability import RateGroup, rate_groups
from rowwise.train.samples import Samples, concatenate
from rowwise.train.state import State, check_equal, join, part, read_int

METRICS = ("loss", "ne", "calibration", "base_rate", "count", "auc", "auc_bound")  # of `named_values`
MAX_WAITING = 16  # queued batches
MAX_SAMPLES = 1 << 14  # queued samples


@dataclass(frozen=True, slots=True)
class TaskMetrics:
    """The metrics of one task."""

    fit: EntropyValue
    area: AucValue
    recent_fit: EntropyValue
    recent_area: AucValue

    @property
    def all(self) -> Values:
        """The metrics of all samples, by name."""
        return named_values(self.fit, self.area)

    @property
    def recent(self) -> Values:
        """The metrics of the newest batches, by name."""
        return named_values(self.recent_fit, self.recent_area)


def named_values(fit: EntropyValue, area: AucValue) -> Values:
    return {
        "loss": fit.log_loss,
        "ne": fit.ne,
        "calibration": fit.calibration,
        "base_rate": fit.base_rate,
        "count": float(fit.count),
        "auc": area.auc,
        "auc_bound": area.bound,
    }


class Metrics:
    """Metrics of named tasks, over all batches and over the newest `window` of them."""

    __slots__ = ("_auc", "_recent_auc", "_sums", "_tasks", "_waiting")

    def __init__(self, tasks: Sequence[str] = ("label",), window: int = 100) -> None:
        if not tasks or len(set(tasks)) != len(tasks):
            raise SpecError(f"tasks={tuple(tasks)}", "at least one name, and each name once")
        self._tasks = tuple(tasks)
        self._sums = RunSums(window, SUMS, len(tasks))
        self._auc, self._recent_auc = Auc(len(tasks)), RecentAuc(window, len(tasks))
        self._waiting: list[Samples] = []  # checked, not yet counted

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Count a batch: logits and labels [N] or [N, tasks], weights the same or [N]."""
        self.add(Samples.of(logits, labels, weights))

    def add(self, samples: Samples) -> None:
        """Count samples, which were checked when they were made or need no check."""
        samples.check_tasks(len(self._tasks))
        self._waiting.append(samples)
        if len(self._waiting) >= MAX_WAITING or sum(map(len, self._waiting)) >= MAX_SAMPLES:
            self._count()

    def _count(self) -> None:
        """Count the queued samples."""
        if not self._waiting:
            return
        sizes, samples = list(map(len, self._waiting)), concatenate(self._waiting)
        self._waiting = []
        for parts_35K in totals(samples, sizes):
            self._sums.add(parts_35K)
        self._auc.add(samples)
        self._recent_auc.add_batches(samples, sizes)

    def merge(self, other: "Metrics") -> None:
        check_equal("tasks", self._tasks, other._tasks)
        self._count()
        other._count()
        self._sums.merge(other._sums)  # first, as it raises for another window
        self._auc.merge(other._auc)
        self._recent_auc.merge(other._recent_auc)

    def merge_state(self, state: Mapping[str, object]) -> None:
        """Add the counts of another rank."""
        self.merge(self.from_state(state))

    def value(self) -> dict[str, TaskMetrics]:
        """The metrics of each task, by its name."""
        self._count()
        all_fits, recent_fits = fits(self._sums.all_3SK), fits(self._sums.recent())
        metrics = map(TaskMetrics, all_fits, self._auc.value(), recent_fits, self._recent_auc.value())
        return dict(zip(self._tasks, metrics, strict=True))

    def rates(self) -> tuple[RateGroup, ...]:
        """Predicted and observed rates of all batches."""
        self._count()
        return rate_groups(self._tasks, self._auc.counts())

    def row(self) -> dict[str, float]:
        """Each number by its name, such as "click.recent.auc"."""
        row: dict[str, float] = {}
        for name, task in self.value().items():
            for over, fit, area in (("", task.fit, task.area), ("recent.", task.recent_fit, task.recent_area)):
                lead = f"{name}.{over}"
                row |= {f"{lead}{field}": getattr(fit, field) for field in ("log_loss", "ne", "calibration")}
                row |= {f"{lead}base_rate": fit.base_rate, f"{lead}count": fit.count}
                row |= {f"{lead}auc": area.auc, f"{lead}auc_bound": area.bound}
        return row

    def state(self) -> State:
        self._count()
        tasks, names = len(self._tasks), {f"task.{k}": name for k, name in enumerate(self._tasks)}
        parts = {
            "entropy": sums_state(self._sums.all_3SK),
            "recent_entropy": {"tasks": tasks, "batches": self._sums.window} | sums_state(self._sums.newest()),
            "auc": self._auc.state(),
            "recent_auc": self._recent_auc.state(),
        }
        return {"tasks": tasks, **names, **join(parts)}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metrics that `state` saved, bit-exactly."""
        names = [state.get(f"task.{k}") for k in range(read_int(state, "tasks"))]
        if not all(isinstance(name, str) for name in names):
            raise StateError(
                f"the state of metrics names the tasks {names}", "a name under each of task.0, task.1, ..."
            )
        recent, shape = part(state, "recent_entropy"), (SUMS, len(names))
        metrics = cls([str(name) for name in names], read_int(recent, "batches"))
        metrics._sums.restore(read_sums(part(state, "entropy"), shape), read_sums(recent, (None, *shape)))
        metrics._auc = Auc.from_state(part(state, "auc"))
        metrics._recent_auc = RecentAuc.from_state(part(state, "recent_auc"))
        return metrics

    def restored(self, state: Mapping[str, object]) -> Self:
        """Metrics with the counts that `state` saved."""
        return self.from_state(state)
