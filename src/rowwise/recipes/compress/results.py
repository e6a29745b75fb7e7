"""Results of recorded trials: differences to the full model, sizes per table, and the noise between seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from rowwise.base.records import ModelScore, SizePoint
from rowwise.recipes.compress.folder import Trial
from rowwise.recipes.compress.schedule import TrialSpec, full_model_trials
from rowwise.tables.ids.allocate import SizeOption

Metrics = Mapping[str, Mapping[str, float]]  # by label


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResults:
    """Recorded trials, restricted to some methods and a seed."""

    trials: Mapping[TrialSpec, Trial]
    methods: tuple[str, ...]
    seed: int
    task: str = ""  # the label to evaluate; empty: the mean of all

    @property
    def full(self) -> ModelScore:
        """The mean score of the full model over seeds."""
        scores = self._full_scores()
        return ModelScore(
            ne=mean(s.ne for s in scores), loss=mean(s.loss for s in scores), auc=mean(s.auc for s in scores)
        )

    @property
    def noise(self) -> float:
        """The standard deviation of the full model's NE between seeds."""
        return stdev(score.ne for score in self._full_scores())

    def subtract_full(self, spec: TrialSpec) -> ModelScore:
        """The difference of a trial to the full model of the same seed.

        Same seed, not the mean of seeds: both have the same initial weights and batches, so much of the noise cancels.
        """
        full = self.trials[TrialSpec(seed=spec.seed)]
        return subtract_scores(mean_score(self.trials[spec].metrics, self.task), mean_score(full.metrics, self.task))

    def losses(self, table: str, ratio: float) -> dict[str, float]:
        """NE differences of a table at one ratio, by method; methods with the same map count once, as the first."""
        at_ratio = [t for t in self.trials_of(table) if t.spec.ratio == ratio]
        firsts = {t.digest or t.spec.method: t for t in reversed(at_ratio)}
        return {t.spec.method: self.subtract_full(t.spec).ne for t in reversed(firsts.values())}

    def trials_of(self, table: str) -> list[Trial]:
        """The trials of a table, sorted by method and decreasing size."""
        trials = (t for t in self.trials.values() if t.metrics and (t.spec.table, t.spec.seed) == (table, self.seed))
        by_methods = [t for t in trials if t.spec.method in self.methods]
        return sorted(by_methods, key=lambda t: (self.methods.index(t.spec.method), -t.size_bytes))

    def points(self, table: str) -> tuple[SizePoint, ...]:
        return tuple(self._point(trial) for trial in self.trials_of(table))

    def options(self, table: str) -> list[SizeOption]:
        return [SizeOption(method=p.method, size_bytes=p.size_bytes, loss=p.ne) for p in self.points(table)]

    def _point(self, trial: Trial) -> SizePoint:
        score, spec = self.subtract_full(trial.spec), trial.spec
        sizes = {"size_bytes": trial.size_bytes, "map_bytes": trial.map_bytes}
        return SizePoint(method=spec.method, ratio=spec.ratio, **sizes, ne=score.ne, loss=score.loss, auc=score.auc)

    def _full_scores(self) -> Sequence[ModelScore]:
        return [mean_score(self.trials[spec].metrics, self.task) for spec in full_model_trials(self.seed)]


def mean_score(metrics: Metrics, task: str = "") -> ModelScore:
    """The mean score over labels, or the score of one label."""
    labels = [metrics[task]] if task else list(metrics.values())
    return ModelScore(
        ne=mean(values["ne"] for values in labels),
        loss=mean(values["loss"] for values in labels),
        auc=mean(values["auc"] for values in labels),
    )


def subtract_scores(one: ModelScore, other: ModelScore) -> ModelScore:
    return ModelScore(ne=one.ne - other.ne, loss=one.loss - other.loss, auc=one.auc - other.auc)
