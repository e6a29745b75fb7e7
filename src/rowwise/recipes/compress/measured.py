"""What trials say: losses above the whole model's, the curve of each table, and how much chance is in it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from rowwise.hashing.allocate import SizeOption
from rowwise.recipes.compress.advice import ModelScore, SizePoint
from rowwise.recipes.compress.folder import Trial
from rowwise.recipes.compress.schedule import TrialSpec, full_trials

Metrics = Mapping[str, Mapping[str, float]]  # of each label


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrials:
    """The trials of a folder that are asked about."""

    trials: Mapping[TrialSpec, Trial]
    methods: tuple[str, ...]
    seed: int
    task: str = ""  # the label that counts; none: the mean of all

    @property
    def full(self) -> ModelScore:
        """The whole model, the mean of its seeds."""
        found = self._seeds()
        return ModelScore(
            ne=mean(s.ne for s in found), loss=mean(s.loss for s in found), auc=mean(s.auc for s in found)
        )

    @property
    def noise(self) -> float:
        """The standard deviation of the whole model's NE between seeds."""
        return stdev(one.ne for one in self._seeds())

    def above(self, asked: TrialSpec) -> ModelScore:
        """What a trial is above the whole model of the same seed.

        Not above the mean of the seeds: the two began alike and saw the same batches, so much of what is chance in them
        is the same, and cancels.
        """
        whole = self.trials[TrialSpec(seed=asked.seed)]
        return score_difference(score_of(self.trials[asked].metrics, self.task), score_of(whole.metrics, self.task))

    def losses(self, table: str, ratio: float) -> dict[str, float]:
        """Of a table at one size, by method; of methods that make the same map only the first."""
        here = [t for t in self.of(table) if t.asked.ratio == ratio]
        firsts = {t.digest or t.asked.method: t for t in reversed(here)}
        return {t.asked.method: self.above(t.asked).ne for t in reversed(firsts.values())}

    def of(self, table: str) -> list[Trial]:
        """What was measured of a table: method by method, the largest first."""
        found = (t for t in self.trials.values() if t.metrics and (t.asked.table, t.asked.seed) == (table, self.seed))
        wanted = [t for t in found if t.asked.method in self.methods]
        return sorted(wanted, key=lambda t: (self.methods.index(t.asked.method), -t.size_bytes))

    def points(self, table: str) -> tuple[SizePoint, ...]:
        return tuple(self._point(trial) for trial in self.of(table))

    def options(self, table: str) -> list[SizeOption]:
        return [SizeOption(method=one.method, size_bytes=one.size_bytes, loss=one.ne) for one in self.points(table)]

    def _point(self, trial: Trial) -> SizePoint:
        off, asked = self.above(trial.asked), trial.asked
        sizes = {"size_bytes": trial.size_bytes, "map_bytes": trial.map_bytes}
        return SizePoint(method=asked.method, ratio=asked.ratio, **sizes, ne=off.ne, loss=off.loss, auc=off.auc)

    def _seeds(self) -> Sequence[ModelScore]:
        return [score_of(self.trials[asked].metrics, self.task) for asked in full_trials(self.seed)]


def score_of(metrics: Metrics, task: str = "") -> ModelScore:
    values = [metrics[task]] if task else list(metrics.values())
    return ModelScore(
        ne=mean(one["ne"] for one in values),
        loss=mean(one["loss"] for one in values),
        auc=mean(one["auc"] for one in values),
    )


def score_difference(one: ModelScore, other: ModelScore) -> ModelScore:
    return ModelScore(ne=one.ne - other.ne, loss=one.loss - other.loss, auc=one.auc - other.auc)
