"""`explain`: explains a run by a sample of its test rows in bounded time; writes explanation.json and the report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from rowwise import report
from rowwise.base.errors import SpecError
from rowwise.base.records import CalibrationSlice, IdEffect, ModelExplanation
from rowwise.recipes.explain.drift import measure_drift
from rowwise.recipes.explain.importance import (
    Permutations,
    Scorer,
    dependence,
    id_effects,
    importances,
    permute_features,
)
from rowwise.recipes.explain.rows import HeldRows
from rowwise.recipes.explain.slices import calibration_slices
from rowwise.recipes.id_names import name_ids
from rowwise.recipes.model_kinds import check_use
from rowwise.recipes.recipe import check_amounts
from rowwise.recipes.resolved import ResolvedRecipe, evaluation_batches
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.trained import Warn, choose_rows, ignore_warning, load_trained
from rowwise.train.run_folder import RunFolder

EXPLANATION = "explanation.json"  # in the folder of a run
MIN_ROWS, TRIED_ROWS = 500, 256
MAX_IDS, MAX_SLICES, MAX_DEPENDENCES = 8, 20, 12
MIN_REPEATS = 2
READING, SCORING = 0.2, 0.6  # shares of the time: of reading rows, of permutations


def explain(  # noqa: PLR0913 - options of the command
    path: Path,
    *,
    which: str = "best",
    data: str | None = None,
    task: str | None = None,
    rows: int = 20_000,
    repeats: int = 5,
    seconds: float = 60.0,
    tell: Callable[[int, int], None] = lambda done, total: None,
    warn: Warn = ignore_warning,
) -> ModelExplanation:
    """Explain a run by its test rows, or by rows of other files.

    Args:
        path: the folder of the run.
        which: the checkpoint: best, last or step-<number>.
        data: rows to use in place of the run's test rows.
        task: the label; None: that of the recipe's evaluation.
        rows: most rows to score.
        repeats: permutations of each feature.
        seconds: about how long it may take; fewer rows are scored, or fewer repeats made, where that is too short.
        tell: called with the numbers of permutations done and in all.
        warn: called with a line for each setting that was replaced or has no effect.
    """
    resolved, model = load_trained(path, which, warn)
    check_use(resolved.recipe.model, "explain", path)
    check_amounts(resolved.recipe, "rowwise explain")
    tasks, settings = resolved.tasks, resolved.recipe.evaluate
    name = (settings.task or tasks[0]) if task is None else task
    if name not in tasks:
        raise SpecError(f"label {name!r}", f"one of {', '.join(tasks)}")
    seed, until_s = resolved.recipe.seed, monotonic() + seconds
    chosen = choose_rows(path, resolved, data)
    held = HeldRows.sample(evaluation_batches(resolved, chosen), rows, seed, seconds * READING)
    train = HeldRows.sample(evaluation_batches(resolved, resolved.rows.train), rows, seed, seconds * READING)
    scorer = Scorer(model=model, task=tasks.index(name), batch=settings.batch, training=resolved.recipe.train)
    dense = {one.column: column for column, one in enumerate(resolved.columns.dense)}
    sparse = tuple(one.feature_name for one in resolved.columns.sparse)
    features: list[tuple[str, int | None]] = [*dense.items(), *((feature, None) for feature in sparse)]
    held = held.first(_rows_in_time(scorer, held, len(features), seconds * SCORING))
    logits_N = scorer.logits(held.batch)
    times = Permutations(repeats, until_s - seconds * READING, seed)
    permuted = permute_features(scorer, held, logits_N, features, times, tell)
    found = importances(permuted)
    few = held.first(max(MIN_ROWS, len(held) // 4))
    shown = [one.feature for one in found if one.feature in dense][:MAX_DEPENDENCES]
    ids = tuple(id_effects(held, permuted, sparse, MAX_IDS))
    slices = calibration_slices(held, logits_N, scorer.task, sparse, dense)[:MAX_SLICES]
    explanation = ModelExplanation(
        task=name,
        rows=len(held),
        train_rows=len(train),
        repeats=min(one.repeats for one in found),
        loss=scorer.loss(held, logits_N),
        importance=found,
        ids=ids,
        names=_names(resolved, chosen, ids, slices),
        dependence=tuple(dependence(scorer, few, feature, dense[feature]) for feature in shown),
        calibration=slices,
        drift=measure_drift(train, held, sparse, dense),
    )
    RunFolder.open(path).write_json(EXPLANATION, msgspec.to_builtins(explanation))
    report.write(path)
    return explanation


def _rows_in_time(scorer: Scorer, rows: HeldRows, features: int, seconds: float) -> int:
    """As many rows as `MIN_REPEATS` repeats of all features score in so many seconds."""
    tried = rows.first(TRIED_ROWS)
    scorer.logits(tried.batch)  # what is slow once only
    begin_s = monotonic()
    scorer.logits(tried.batch)
    row_s = (monotonic() - begin_s) / len(tried)
    return max(MIN_ROWS, int(seconds / max(row_s * MIN_REPEATS * features, 1e-12)))


def _names(
    resolved: ResolvedRecipe, rows: RowSelection, ids: Sequence[IdEffect], slices: Sequence[CalibrationSlice]
) -> dict[str, dict[str, str]]:
    """What people call the ids that are shown."""
    features = {one.feature_name for one in resolved.columns.sparse}
    shown: dict[str, set[int]] = {}
    for feature, row in [(one.feature, one.id) for one in ids] + [
        (one.feature, int(one.value)) for one in slices if one.feature in features
    ]:
        shown.setdefault(feature, set()).add(row)
    named = name_ids(rows, resolved.columns, resolved.tables, resolved.transforms, shown)
    return {feature: {str(row): name for row, name in names.items()} for feature, names in named.items()}
