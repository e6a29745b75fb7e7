"""Runs one trial: trains the recipe's model on the history with some tables compressed, and measures it on later rows.

A trial trains like a run, but without a folder. Validation rows choose its best step, as in a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

from msgspec import structs

from rowwise.recipes.compose import make_evaluator, make_job, make_model, make_settings
from rowwise.recipes.compress.window import DataWindow
from rowwise.recipes.recipe import Tables
from rowwise.recipes.resolved import ResolvedRecipe, make_batcher
from rowwise.tables.idmaps import StoredIds
from rowwise.train.evaluate import Evaluator, Scores
from rowwise.train.settings import Log
from rowwise.train.trainer import RunDisplay, Trainer

METRICS = ("ne", "loss", "auc")
Metrics = dict[str, dict[str, float]]  # by label
LOG_EVERY = 1000  # steps; nobody reads the log of a trial


@final
@dataclass(slots=True)
class _RecordingEvaluator:
    """An evaluator that records its scores."""

    inner: Evaluator
    scores: list[Scores]

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.inner.metrics

    def __call__(self) -> Scores:
        self.scores.append(self.inner())
        return self.scores[-1]


def run_trial(
    window: DataWindow, maps: Mapping[str, StoredIds], seed: int, rows: int | None, report: Callable[[float], None]
) -> Metrics:
    """Train with these id maps on at most `rows` rows; returns metrics by label."""
    resolved = change_recipe(window.earlier, maps, seed, rows)
    model = make_model(resolved)
    job = make_job(resolved, model, lambda position: make_batcher(resolved, resolved.rows.train, position))
    evaluator = _RecordingEvaluator(job.evaluate or make_evaluator(resolved, model, window.later, ()), [])
    job = replace(job, evaluate=evaluator if window.validates else None)
    Trainer(job, make_settings(resolved.recipe), on_step=lambda display: report(done_fraction(display))).run()
    scores = _best_scores(resolved, evaluator.scores) if window.validates else evaluator()
    return {task: {name: values[name] for name in METRICS} for task, values in scores.tasks.items()}


def change_recipe(
    resolved: ResolvedRecipe, maps: Mapping[str, StoredIds], seed: int, rows: int | None
) -> ResolvedRecipe:
    """The recipe with these id maps and seed, and at most the steps of `rows` rows."""
    recipe = resolved.recipe
    tables = tuple(structs.replace(t, id_map=maps.get(t.name, t.id_map)) for t in resolved.tables)
    train = recipe.train
    if rows is not None:
        steps = max(1, -(-rows // (train.batch * train.accumulate)))
        train = structs.replace(train, steps=min(steps, train.steps or steps))
    evaluate = structs.replace(recipe.evaluate, slices=())
    changed = structs.replace(
        recipe, tables=Tables(list=tables), seed=seed, train=train, evaluate=evaluate, log=Log(every=LOG_EVERY)
    )
    return replace(resolved, recipe=changed)


def done_fraction(display: RunDisplay) -> float:
    """The completed fraction of a training, by splits or steps, as rows per split are unknown."""
    position, train = display.progress.position, display.settings.train
    fraction = (position.epoch + position.split / max(display.splits, 1)) / train.epochs
    return min(1.0, max(fraction, display.progress.step / train.steps if train.steps else 0.0))


def _best_scores(resolved: ResolvedRecipe, evaluations: list[Scores]) -> Scores:
    """The scores of the evaluation whose checkpoint a run would keep."""
    settings = resolved.recipe.evaluate
    task = settings.task or resolved.tasks[0]
    best = evaluations[0]
    for scores in evaluations[1:]:
        if settings.is_better(scores.tasks[task][settings.metric], best.tasks[task][settings.metric]):
            best = scores
    return best
