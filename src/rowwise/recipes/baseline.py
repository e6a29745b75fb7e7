"""A baseline of boosted trees: LightGBM on the rows and columns of a run, measured on the same test rows.

Numbers are used as they are. An id is a category, or missing if no training row has it. A list counts by its first id
and its length. Training stops when the validation loss has not improved for `PATIENCE` trees. Known limits: the first
label only, and the first `MOST_ROWS` rows, as trees hold all rows in memory.
"""

from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rowwise import report
from rowwise.errors import SpecError
from rowwise.recipes.compose import ResolvedRecipe, evaluation_batches
from rowwise.recipes.model_configs import RankingModel, kind_of
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.runs import resolve_saved
from rowwise.spec import Value
from rowwise.train.evaluate import values_of
from rowwise.train.metrics import Metrics
from rowwise.train.run_folder import RunFolder

MOST_ROWS = 2_000_000
MOST_TREES, PATIENCE = 2000, 50
PARAMETERS = {
    "objective": "binary", "metric": "binary_logloss", "learning_rate": 0.05, "num_leaves": 63, "verbosity": -1,
    "deterministic": True, "force_row_wise": True,
}  # fmt: skip
BASELINE = "baseline.json"  # in the folder of a run
Doubles = NDArray[np.float64]


class TreeBaseline(Value, frozen=True):
    """Test metrics of the trees, with the names that a run's metrics have."""

    task: str
    trees: int
    rows: int  # number of training rows
    seconds: float
    test: dict[str, float]


class _Samples(NamedTuple):
    """Features and labels. The last `categories` features are ids, NaN for none."""

    features_BF: Doubles
    labels_B: Doubles
    categories: int


def fit_trees(run: Path) -> TreeBaseline:
    """Train LightGBM on the training rows of a run, and write its test metrics to the run's folder."""
    lightgbm = _import_lightgbm()
    resolved = resolve_saved(run)
    rows, task = resolved.rows, resolved.tasks[0]
    if isinstance(resolved.recipe.model, RankingModel):
        got = f"model.kind={kind_of(resolved.recipe.model)} ranks items, and trees do not"
        raise SpecError(f"{run}: {got}: want a run of another model")
    if rows.valid is None or rows.test is None:
        raise SpecError(f"{run}: trees stop by validation rows and are measured on test rows: want a run with both")
    begin_s = perf_counter()
    train, valid, test = (_read_samples(resolved, selection) for selection in (rows.train, rows.valid, rows.test))
    known_ids = [np.unique(column_B[~np.isnan(column_B)]) for column_B in _category_columns(train)]
    for samples in (train, valid, test):
        for column_B, known_U in zip(_category_columns(samples), known_ids, strict=True):
            column_B[:] = _codes(column_B, known_U)
    first = train.features_BF.shape[1] - train.categories
    options: Any = {"categorical_feature": list(range(first, train.features_BF.shape[1])), "free_raw_data": False}
    dataset = lightgbm.Dataset(train.features_BF, train.labels_B, **options)
    threads = resolved.recipe.train.threads or 0
    trees = lightgbm.train(
        PARAMETERS | {"num_threads": threads, "seed": resolved.recipe.seed},
        dataset,
        MOST_TREES,
        valid_sets=[lightgbm.Dataset(valid.features_BF, valid.labels_B, reference=dataset, **options)],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
    )
    metrics = Metrics((task,), window=1)
    logits_B = trees.predict(test.features_BF, raw_score=True)
    metrics.update(torch.from_numpy(logits_B)[:, None], torch.from_numpy(test.labels_B)[:, None])
    baseline = TreeBaseline(
        task=task,
        trees=trees.best_iteration or trees.num_trees(),
        rows=len(train.labels_B),
        seconds=round(perf_counter() - begin_s, 3),
        test=values_of(metrics.value()[task]),
    )
    RunFolder.open(run).write_json(BASELINE, msgspec.to_builtins(baseline))
    report.write(run)
    return baseline


def _import_lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError:
        raise SpecError("trees need LightGBM: want pip install 'rowwise[trees]'") from None
    return lightgbm


def _read_samples(resolved: ResolvedRecipe, rows: RowSelection) -> _Samples:
    features: list[Doubles] = []
    labels: list[Doubles] = []
    names = [sparse.feature_name for sparse in resolved.columns.sparse]
    count = 0
    for batch in evaluation_batches(resolved, rows):
        sparse = batch.sparse.expanded()
        order = [sparse.features.index(name) for name in names]
        lengths_FB = sparse.lengths_FB.view(len(sparse.features), -1).numpy().astype(np.int64)
        begin_FB = (np.cumsum(lengths_FB.ravel()) - lengths_FB.ravel()).reshape(lengths_FB.shape)
        # One NaN more: an empty bag at the end begins behind the last id.
        values_N = np.append(sparse.values_N.numpy().astype(np.float64), np.nan)
        ids_FB = np.where(lengths_FB > 0, values_N[np.minimum(begin_FB, len(values_N) - 1)], np.nan)
        columns = [batch.dense_BF.numpy().astype(np.float64), lengths_FB[order].T.astype(np.float64), ids_FB[order].T]
        features.append(np.concatenate(columns, 1))
        labels.append(batch.labels_BK[:, 0].numpy().astype(np.float64))
        count += len(labels[-1])
        if count >= MOST_ROWS:
            break
    if not count:
        raise SpecError("no rows for trees: want training, validation and test rows")
    return _Samples(np.concatenate(features), np.concatenate(labels), len(names))


def _category_columns(samples: _Samples) -> list[Doubles]:
    return [samples.features_BF[:, -k] for k in range(samples.categories, 0, -1)]


def _codes(column_B: Doubles, known_U: Doubles) -> Doubles:
    """The index of each id among the known ones; NaN for other ids."""
    if not len(known_U):
        return np.full_like(column_B, np.nan)
    index_B = np.minimum(np.searchsorted(known_U, column_B), len(known_U) - 1)
    return np.where(known_U[index_B] == column_B, index_B, np.nan)
