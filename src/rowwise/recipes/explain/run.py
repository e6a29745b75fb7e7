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
READING, SCORING = 0.2, 0.6  # shares of the time for reading rows, and for permutations


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
        task: the label; None: the label that the recipe evaluates.
        rows: maximum rows to score.
        repeats: permutations of each feature.
        seconds: approximate time budget, which may reduce the scored rows and the repeats.
        tell: called with the number of finished permutations and the total.
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
    sparse = tuple(column.feature_name for column in resolved.columns.sparse)
    numbers = (dense.column for dense in resolved.columns.dense)
    dense = {f"{name} as a number" if name in sparse else name: index for index, name in enumerate(numbers)}
    features: list[tuple[str, int | None]] = [*dense.items(), *((feature, None) for feature in sparse)]
    held = held.first(_rows_in_time(scorer, held, len(features), seconds * SCORING))
    logits_N = scorer.logits(held.batch)
    times = Permutations(repeats, until_s - seconds * READING, seed)
    permuted = permute_features(scorer, held, logits_N, features, times, tell)
    ranking = importances(permuted)
    subset = held.first(max(MIN_ROWS, len(held) // 4))
    plotted = [entry.feature for entry in ranking if entry.feature in dense][:MAX_DEPENDENCES]
    ids = tuple(id_effects(held, permuted, sparse, MAX_IDS))
    slices = calibration_slices(held, logits_N, scorer.task, sparse, dense)[:MAX_SLICES]
    explanation = ModelExplanation(
        task=name,
        rows=len(held),
        train_rows=len(train),
        repeats=min(entry.repeats for entry in ranking),
        loss=scorer.loss(held, logits_N),
        importance=ranking,
        ids=ids,
        names=_name_ids(resolved, chosen, ids, slices),
        dependence=tuple(dependence(scorer, subset, feature, dense[feature]) for feature in plotted),
        calibration=slices,
        drift=measure_drift(train, held, sparse, dense),
    )
    RunFolder.open(path).write_json(EXPLANATION, msgspec.to_builtins(explanation))
    report.write(path)
    return explanation


def _rows_in_time(scorer: Scorer, rows: HeldRows, features: int, seconds: float) -> int:
    """Number of rows for which `MIN_REPEATS` repeats of all features take `seconds`."""
    tried = rows.first(TRIED_ROWS)
    scorer.logits(tried.batch)  # warm-up
    begin_s = monotonic()
    scorer.logits(tried.batch)
    row_s = (monotonic() - begin_s) / len(tried)
    return max(MIN_ROWS, int(seconds / max(row_s * MIN_REPEATS * features, 1e-12)))


def _name_ids(
    resolved: ResolvedRecipe, rows: RowSelection, ids: Sequence[IdEffect], slices: Sequence[CalibrationSlice]
) -> dict[str, dict[str, str]]:
    """Names of the reported ids."""
    features = {column.feature_name for column in resolved.columns.sparse}
    shown: dict[str, set[int]] = {}
    for feature, row in [(effect.feature, effect.id) for effect in ids] + [
        (part.feature, int(part.value)) for part in slices if part.feature in features
    ]:
        shown.setdefault(feature, set()).add(row)
    named = name_ids(rows, resolved.columns, resolved.tables, resolved.transforms, shown)
    return {feature: {str(row): name for row, name in names.items()} for feature, names in named.items()}
