"""A baseline of boosted trees: LightGBM on the rows and columns of a run, measured on the same test rows.

Numbers are used as they are, without buckets, and a column that is a number and an id counts as a number only. An id is
a category, or missing if no training row has it. A list has two features, its first id and its length. Training stops
when the validation loss has not improved for `PATIENCE` trees. The validation loss also chooses the settings for
categories: smoothing of rare ids helps on some logs only. Known limits: the first label only, and the first
`MAX_ROWS` rows, as trees hold all rows in memory.
"""

from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rowwise import report
from rowwise.base.errors import SpecError
from rowwise.ingest.datasets.files import KINDS
from rowwise.ingest.transform import Bucketize
from rowwise.recipes.model_kinds import check_use, family_of
from rowwise.recipes.resolved import ResolvedRecipe, evaluation_batches
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.trained import resolve_saved
from rowwise.tables.spec import Value
from rowwise.train.evaluate import make_metrics
from rowwise.train.loss_settings import AmountLoss, AnyLoss, Poisson, first_label
from rowwise.train.run_folder import RunFolder
from rowwise.train.samples import Samples

MAX_ROWS = 2_000_000
MAX_TREES, PATIENCE = 2000, 50
QUICK_ROWS, QUICK_VALUES = 200_000, 2_000_000  # limits on training data for automatic baselines
PARAMETERS = {
    "objective": "binary", "metric": "binary_logloss", "learning_rate": 0.05, "num_leaves": 31, "feature_fraction": 0.7,
    "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 1.0, "verbosity": -1, "deterministic": True,
    "force_row_wise": True,
}  # fmt: skip
# Settings for categories: LightGBM's defaults, which trust an id after few rows, and smoothing of rare ids
CATEGORIES: tuple[dict[str, float], ...] = (
    {},
    {"min_data_per_group": 50, "cat_smooth": 50, "cat_l2": 20, "max_cat_threshold": 64},
)
BASELINE = "baseline.json"  # in the folder of a run
Doubles = NDArray[np.float64]


class TreeBaseline(Value, frozen=True):
    """Test metrics of the trees, named as the metrics of a run."""

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
    _import_lightgbm()
    resolved = resolve_saved(run)
    rows = resolved.rows
    check_use(resolved.recipe.model, "baseline", run)
    if rows.valid is None or rows.test is None:
        raise SpecError(f"{run}: trees need validation rows to stop and test rows to be measured", "a run with both")
    begin_s = perf_counter()
    samples = [_read_samples(resolved, selection) for selection in (rows.train, rows.valid, rows.test)]
    return _compare(run, resolved, samples, begin_s)


def fit_quick_trees(run: Path, max_rows: int = QUICK_ROWS, max_values: int = QUICK_VALUES) -> TreeBaseline | None:
    """`fit_trees` if it takes seconds: for files with few rows and an installed LightGBM; otherwise None."""
    if find_spec("lightgbm") is None:
        return None
    resolved = resolve_saved(run)
    recipe, rows = resolved.recipe, resolved.rows
    reads_files = recipe.data.dataset.partition(":")[0] in KINDS and not recipe.save.mirror
    if not reads_files or rows.valid is None or rows.test is None or family_of(recipe.model).ranks_items:
        return None
    begin_s = perf_counter()
    limit = min(max_rows, max_values // (len(resolved.columns.dense) + len(resolved.columns.sparse)))
    train = _read_samples(resolved, rows.train, limit + 1)
    if len(train.labels_B) > limit:
        return None
    samples = [train, _read_samples(resolved, rows.valid), _read_samples(resolved, rows.test)]
    return _compare(run, resolved, samples, begin_s)


def _compare(run: Path, resolved: ResolvedRecipe, read: list[_Samples], begin_s: float) -> TreeBaseline:
    """Fit trees to the first samples, stop by the second, measure on the third, and report."""
    train, valid, test = read
    known_ids = [np.unique(column_B[~np.isnan(column_B)]) for column_B in _category_columns(train)]
    for samples in read:
        for column_B, known_U in zip(_category_columns(samples), known_ids, strict=True):
            column_B[:] = _codes(column_B, known_U)
    loss, task = first_label(resolved.recipe.train.objective), resolved.tasks[0]
    shared = {"num_threads": resolved.recipe.train.threads or 0, "seed": resolved.recipe.seed}
    parameters = PARAMETERS | _objective(loss) | shared
    settings = CATEGORIES if train.categories else CATEGORIES[:1]
    fitted = [_fit(parameters | categories, train, valid) for categories in settings]
    trees = min(fitted, key=lambda booster: booster.best_score["valid_0"][parameters["metric"]])
    metrics, amounts = make_metrics((task,), 1, loss), isinstance(loss, AmountLoss)
    outputs_B = _outputs(loss, trees.predict(test.features_BF, raw_score=True))
    metrics.add(Samples.of(torch.from_numpy(outputs_B), torch.from_numpy(test.labels_B), amounts=amounts))
    baseline = TreeBaseline(
        task=task,
        trees=trees.best_iteration or trees.num_trees(),
        rows=len(train.labels_B),
        seconds=round(perf_counter() - begin_s, 3),
        test=metrics.value()[task].all,
    )
    RunFolder.open(run).write_json(BASELINE, msgspec.to_builtins(baseline))
    report.write(run)
    return baseline


def _objective(loss: AnyLoss) -> dict[str, str]:
    """LightGBM's objective and metric for the labels of a loss."""
    if not isinstance(loss, AmountLoss):
        return {}
    return {"objective": "poisson", "metric": "poisson"} if isinstance(loss, Poisson) else {
        "objective": "regression", "metric": "l2",
    }  # fmt: skip


def _outputs(loss: AnyLoss, scores_B: Doubles) -> Doubles:
    """Convert raw scores of trees to outputs of a model with this loss, for the first label."""
    if not isinstance(loss, AmountLoss):
        return scores_B
    offset, unit = loss.link.offset[0], loss.link.unit[0]
    return scores_B - np.log(unit) if isinstance(loss, Poisson) else (scores_B - offset) / unit


def _fit(parameters: dict[str, Any], train: _Samples, valid: _Samples) -> Any:
    lightgbm = _import_lightgbm()
    columns = train.features_BF.shape[1]
    options: Any = {"categorical_feature": list(range(columns - train.categories, columns)), "free_raw_data": False}
    dataset = lightgbm.Dataset(train.features_BF, train.labels_B, **options)
    return lightgbm.train(
        parameters,
        dataset,
        MAX_TREES,
        valid_sets=[lightgbm.Dataset(valid.features_BF, valid.labels_B, reference=dataset, **options)],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
    )


def _import_lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError:
        raise SpecError("trees need LightGBM", hint="pip install 'rowwise[trees]'") from None
    return lightgbm


def _read_samples(resolved: ResolvedRecipe, rows: RowSelection, max_rows: int = MAX_ROWS) -> _Samples:
    features: list[Doubles] = []
    labels: list[Doubles] = []
    numbers = [dense.column for dense in resolved.columns.dense]
    bucketed = {t.to: t.column for t in resolved.recipe.transforms if isinstance(t, Bucketize)}
    source = {s.feature_name: bucketed.get(s.column, s.column) for s in resolved.columns.sparse}
    names = [name for name, column in source.items() if column not in numbers]
    missing = {name: numbers.index(column) for name, column in source.items() if column in numbers}
    count = 0
    for batch in evaluation_batches(resolved, rows):
        sparse = batch.sparse.expanded()
        lengths_FB = sparse.lengths_FB.view(len(sparse.features), -1).numpy().astype(np.int64)
        begin_FB = (np.cumsum(lengths_FB.ravel()) - lengths_FB.ravel()).reshape(lengths_FB.shape)
        # Append a NaN: an empty bag at the end begins after the last id.
        values_N = np.append(sparse.values_N.numpy().astype(np.float64), np.nan)
        ids_FB = np.where(lengths_FB > 0, values_N[np.minimum(begin_FB, len(values_N) - 1)], np.nan)
        dense_BF = batch.dense_BF.numpy().astype(np.float64)
        for name, number in missing.items():  # undo the fill value of missing numbers
            dense_BF[lengths_FB[sparse.features.index(name)] == 0, number] = np.nan
        order = [sparse.features.index(name) for name in names]
        columns = [dense_BF, lengths_FB[order].T.astype(np.float64), ids_FB[order].T]
        features.append(np.concatenate(columns, 1))
        labels.append(batch.labels_BK[:, 0].numpy().astype(np.float64))
        count += len(labels[-1])
        if count >= max_rows:
            break
    if not count:
        raise SpecError("no rows for trees", "training, validation and test rows")
    return _Samples(np.concatenate(features), np.concatenate(labels), len(names))


def _category_columns(samples: _Samples) -> list[Doubles]:
    return [samples.features_BF[:, -k] for k in range(samples.categories, 0, -1)]


def _codes(column_B: Doubles, known_U: Doubles) -> Doubles:
    """The index of each id in `known_U`; NaN for other ids."""
    if not len(known_U):
        return np.full_like(column_B, np.nan)
    index_B = np.minimum(np.searchsorted(known_U, column_B), len(known_U) - 1)
    return np.where(known_U[index_B] == column_B, index_B, np.nan)
