"""The training metrics of each task: loss, NE, AUC and calibration, over the newest batches and over all.

`row()` names each number for a log line or a column.

Small batches wait and are counted together: on 1,024 samples an operator takes longer to call than to run. Their sums
are exact in any order (see `exact.py`), so the metrics have the bits of batches counted one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from rowwise.errors import SpecError, StateError
from rowwise.train.auc import Auc, AucValue, RecentAuc
from rowwise.train.entropy import Entropy, EntropyValue, RecentEntropy, totals
from rowwise.train.reliability import RateGroup, rate_groups
from rowwise.train.samples import Samples, concatenate
from rowwise.train.state import State, check_alike, join, part, read_int

MOST_WAITING = 16  # batches,
MOST_SAMPLES = 1 << 14  # and samples in them


@dataclass(frozen=True, slots=True)
class TaskMetrics:
    """The metrics of one task."""

    fit: EntropyValue
    area: AucValue
    recent_fit: EntropyValue
    recent_area: AucValue


class Metrics:
    """Metrics of named tasks, over all batches and over the newest `window` of them."""

    __slots__ = ("_auc", "_entropy", "_recent_auc", "_recent_entropy", "_tasks", "_waiting")

    def __init__(self, tasks: Sequence[str] = ("label",), window: int = 100) -> None:
        if not tasks or len(set(tasks)) != len(tasks):
            raise SpecError(f"tasks={tuple(tasks)}", "at least one name, and each name once")
        self._tasks = tuple(tasks)
        self._entropy, self._recent_entropy = Entropy(len(tasks)), RecentEntropy(window, len(tasks))
        self._auc, self._recent_auc = Auc(len(tasks)), RecentAuc(window, len(tasks))
        self._waiting: list[Samples] = []  # checked, not yet counted

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Count a batch: logits and labels [N] or [N, tasks], weights the same or [N]."""
        self.add(Samples.of(logits, labels, weights))

    def add(self, samples: Samples) -> None:
        """Count samples whose values were checked when they were made, or need no check."""
        samples.check_tasks(len(self._tasks))
        self._waiting.append(samples)
        if len(self._waiting) >= MOST_WAITING or sum(map(len, self._waiting)) >= MOST_SAMPLES:
            self._count()

    def _count(self) -> None:
        """Count the samples that wait."""
        if not self._waiting:
            return
        sizes, samples = [len(one) for one in self._waiting], concatenate(self._waiting)
        self._waiting = []
        for parts_35K in totals(samples, sizes):
            self._entropy.add_totals(parts_35K)
            self._recent_entropy.add_totals(parts_35K)
        self._auc.add(samples)
        self._recent_auc.add_batches(samples, sizes)

    def merge(self, other: "Metrics") -> None:
        check_alike("tasks", self._tasks, other._tasks)
        self._count()
        other._count()
        self._recent_entropy.merge(other._recent_entropy)  # first, as it refuses another window
        self._entropy.merge(other._entropy)
        self._auc.merge(other._auc)
        self._recent_auc.merge(other._recent_auc)

    def value(self) -> dict[str, TaskMetrics]:
        """The metrics of each task, by its name."""
        self._count()
        fits, areas = self._entropy.value(), self._auc.value()
        recent_fits, recent_areas = self._recent_entropy.value(), self._recent_auc.value()
        shown = map(TaskMetrics, fits, areas, recent_fits, recent_areas)
        return dict(zip(self._tasks, shown, strict=True))

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
        names: State = {f"task.{k}": name for k, name in enumerate(self._tasks)}
        return {"tasks": len(self._tasks), **names, **join(self._accumulators())}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metric that `state` saved, with the same bits."""
        names = [state.get(f"task.{k}") for k in range(read_int(state, "tasks"))]
        if not all(isinstance(name, str) for name in names):
            raise StateError(
                f"the state of metrics names the tasks {names}", "a name under each of task.0, task.1, ..."
            )
        metrics = cls([str(name) for name in names])
        metrics._entropy = Entropy.from_state(part(state, "entropy"))
        metrics._recent_entropy = RecentEntropy.from_state(part(state, "recent_entropy"))
        metrics._auc = Auc.from_state(part(state, "auc"))
        metrics._recent_auc = RecentAuc.from_state(part(state, "recent_auc"))
        return metrics

    def _accumulators(self) -> dict[str, Entropy | RecentEntropy | Auc | RecentAuc]:
        return {
            "entropy": self._entropy,
            "recent_entropy": self._recent_entropy,
            "auc": self._auc,
            "recent_auc": self._recent_auc,
        }
