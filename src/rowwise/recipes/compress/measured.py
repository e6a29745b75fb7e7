"""Evaluates recorded trials: differences to the full model, the curve of each table, and the noise between seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from rowwise.hashing.allocate import SizeOption
from rowwise.recipes.compress.advice import ModelScore, SizePoint
from rowwise.recipes.compress.folder import Trial
from rowwise.recipes.compress.schedule import TrialSpec, full_model_trials

Metrics = Mapping[str, Mapping[str, float]]  # of each label


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrials:
    """Recorded trials, restricted to some methods and a seed."""

    trials: Mapping[TrialSpec, Trial]
    methods: tuple[str, ...]
    seed: int
    task: str = ""  # the label to evaluate; empty: the mean of all

    @property
    def full(self) -> ModelScore:
        """The mean score of the full model over seeds."""
        found = self._full_scores()
        return ModelScore(
            ne=mean(s.ne for s in found), loss=mean(s.loss for s in found), auc=mean(s.auc for s in found)
        )

    @property
    def noise(self) -> float:
        """The standard deviation of the full model's NE between seeds."""
        return stdev(one.ne for one in self._full_scores())

    def over_full(self, asked: TrialSpec) -> ModelScore:
        """The difference of a trial to the full model of the same seed.

        Same seed, not the mean of seeds: both have the same initial weights and batches, so much of the noise cancels.
        """
        whole = self.trials[TrialSpec(seed=asked.seed)]
        return subtract_scores(score_of(self.trials[asked].metrics, self.task), score_of(whole.metrics, self.task))

    def losses(self, table: str, ratio: float) -> dict[str, float]:
        """NE differences of a table at one ratio, by method; of methods with the same map only the first."""
        here = [t for t in self.trials_of(table) if t.asked.ratio == ratio]
        firsts = {t.digest or t.asked.method: t for t in reversed(here)}
        return {t.asked.method: self.over_full(t.asked).ne for t in reversed(firsts.values())}

    def trials_of(self, table: str) -> list[Trial]:
        """The trials of a table, ordered by method and falling size."""
        found = (t for t in self.trials.values() if t.metrics and (t.asked.table, t.asked.seed) == (table, self.seed))
        wanted = [t for t in found if t.asked.method in self.methods]
        return sorted(wanted, key=lambda t: (self.methods.index(t.asked.method), -t.size_bytes))

    def points(self, table: str) -> tuple[SizePoint, ...]:
        return tuple(self._point(trial) for trial in self.trials_of(table))

    def options(self, table: str) -> list[SizeOption]:
        return [SizeOption(method=one.method, size_bytes=one.size_bytes, loss=one.ne) for one in self.points(table)]

    def _point(self, trial: Trial) -> SizePoint:
        off, asked = self.over_full(trial.asked), trial.asked
        sizes = {"size_bytes": trial.size_bytes, "map_bytes": trial.map_bytes}
        return SizePoint(method=asked.method, ratio=asked.ratio, **sizes, ne=off.ne, loss=off.loss, auc=off.auc)

    def _full_scores(self) -> Sequence[ModelScore]:
        return [score_of(self.trials[asked].metrics, self.task) for asked in full_model_trials(self.seed)]


def score_of(metrics: Metrics, task: str = "") -> ModelScore:
    """The score of one label, or the mean over labels."""
    values = [metrics[task]] if task else list(metrics.values())
    return ModelScore(
        ne=mean(one["ne"] for one in values),
        loss=mean(one["loss"] for one in values),
        auc=mean(one["auc"] for one in values),
    )


def subtract_scores(one: ModelScore, other: ModelScore) -> ModelScore:
    return ModelScore(ne=one.ne - other.ne, loss=one.loss - other.loss, auc=one.auc - other.auc)
