"""Runs one trial: trains the recipe's model on the history with some tables compressed, and measures it on later rows.

Like a run of the recipe without a folder. If the recipe picks its best step by the rows to measure on, so does a trial.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from msgspec import structs

from rowwise.idmaps import StoredIds
from rowwise.recipes.compose import ResolvedRecipe, make_batcher, make_evaluator, make_job, make_model, make_settings
from rowwise.recipes.compress.window import DataWindow
from rowwise.recipes.recipe import Tables
from rowwise.train.evaluate import Evaluator, Scores
from rowwise.train.settings import Log
from rowwise.train.trainer import RunDisplay, Trainer

METRICS = ("ne", "loss", "auc")
Metrics = dict[str, dict[str, float]]  # of each label
EVERY = 1000  # steps between log lines, which are not used


@final
@dataclass(slots=True)
class _RecordingEvaluator:
    """An evaluator that records its scores."""

    inner: Evaluator
    found: list[Scores]

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.inner.metrics

    def __call__(self) -> Scores:
        self.found.append(self.inner())
        return self.found[-1]


def measure(
    window: DataWindow, maps: Mapping[str, StoredIds], seed: int, rows: int | None, tell: Callable[[float], None]
) -> Metrics:
    """Train with these id maps on at most `rows` rows; returns metrics by label."""
    resolved = prepare(window.earlier, maps, seed, rows)
    model = make_model(resolved)
    job = make_job(resolved, model, lambda position: make_batcher(resolved, resolved.parts.train, position))
    kept = _RecordingEvaluator(job.evaluate or make_evaluator(resolved, model, window.later, ()), [])
    job = replace(job, evaluate=kept if window.validates else None)
    Trainer(job, make_settings(resolved.recipe), on_step=lambda shown: tell(done_share(shown))).run()
    scores = _best_scores(resolved, kept.found) if window.validates else kept()
    return {task: {name: values[name] for name in METRICS} for task, values in scores.tasks.items()}


def prepare(resolved: ResolvedRecipe, maps: Mapping[str, StoredIds], seed: int, rows: int | None) -> ResolvedRecipe:
    """The recipe with these id maps and seed, and at most the steps that `rows` rows make."""
    recipe = resolved.recipe
    tables = tuple(structs.replace(t, id_map=maps.get(t.name, t.id_map)) for t in resolved.tables)
    train = recipe.train
    if rows is not None:
        steps = max(1, -(-rows // (train.batch * train.accumulate)))
        train = structs.replace(train, steps=min(steps, train.steps or steps))
    evaluate = structs.replace(recipe.evaluate, slices=())
    changed = structs.replace(
        recipe, tables=Tables(list=tables), seed=seed, train=train, evaluate=evaluate, log=Log(every=EVERY)
    )
    return replace(resolved, recipe=changed)


def use_threads(resolved: ResolvedRecipe) -> None:
    """Set the recipe's threads: torch splits sums in matrix products by thread, so they change the bits."""
    if resolved.recipe.train.threads is not None:
        torch.set_num_threads(resolved.recipe.train.threads)


def done_share(shown: RunDisplay) -> float:
    """The share of a training that is done, by splits or steps, as the rows of splits are unknown."""
    position, train = shown.progress.position, shown.settings.train
    share = (position.epoch + position.split / max(shown.splits, 1)) / train.epochs
    return min(1.0, max(share, shown.progress.step / train.steps if train.steps else 0.0))


def _best_scores(resolved: ResolvedRecipe, found: list[Scores]) -> Scores:
    """The scores of the evaluation whose checkpoint a run would keep."""
    how = resolved.recipe.evaluate
    task = how.task or resolved.tasks[0]
    best = found[0]
    for scores in found[1:]:
        if how.is_better(scores.tasks[task][how.metric], best.tasks[task][how.metric]):
            best = scores
    return best
