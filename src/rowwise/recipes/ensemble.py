"""Several runs as one model: the mean of their probabilities, such as of one recipe trained with several seeds.

The calibration of the mean is the mean calibration, unlike for a mean of logits. All runs read the same columns in the
same way, so one pass over the rows serves all models. The models may differ. Known limit: the tables of all runs are in
memory together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from rowwise import report
from rowwise.base.errors import DataError, SpecError
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.ingest.dialect import style_of
from rowwise.ingest.transform import to_json
from rowwise.recipes.id_names import name_ids
from rowwise.recipes.model_kinds import check_use
from rowwise.recipes.predict import Predictor, predict
from rowwise.recipes.recipe import check_amounts
from rowwise.recipes.resolved import ResolvedRecipe, evaluation_batches
from rowwise.recipes.rows import RowSelection, open_reader
from rowwise.recipes.served import open_predictor, read_model
from rowwise.recipes.sharding import tables_of
from rowwise.recipes.trained import Warn, choose_rows, ignore_warning, load_trained, predict_rows
from rowwise.serve.package import find_version, is_served
from rowwise.serve.row_tiers import make_tiers
from rowwise.tables.batch import Batch
from rowwise.train.evaluate import ClickEvaluator, Scores, Slicing, Values
from rowwise.train.run_folder import RunFolder
from rowwise.train.step import dense_parameters

ENSEMBLE = "ensemble.json"  # in the folder of a run
ROW_KEYS = ("dataset", "folder", "valid", "test", "valid_share", "test_share", "share", "rows", "test_rows", "where")


@final
class Ensemble(nn.Module):
    """The logit of the mean probability of several models; counts the seconds of each model."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.seconds = [0.0] * len(models)

    def forward(self, batch: Batch) -> Tensor:
        return mean_probability(self.logits_of_each(batch))

    def logits_of_each(self, batch: Batch) -> Tensor:
        """Logits [models, B, K]."""
        logits = []
        for number, model in enumerate(self.models):
            begin_s = perf_counter()
            logits.append(model(batch).float())
            self.seconds[number] += perf_counter() - begin_s
        return torch.stack(logits)


def mean_probability(logits_MBK: Tensor) -> Tensor:
    """The logit [B, K] of the mean probability over M models, exact where probabilities round to 0 or 1."""
    return logsigmoid(logits_MBK).logsumexp(0) - logsigmoid(-logits_MBK).logsumexp(0)


class EnsembleScores(NamedTuple):
    """Metrics of the ensemble and of each of its runs, with time and memory."""

    ensemble: Scores
    each: tuple[dict[str, Values], ...]
    seconds: tuple[float, ...]  # of each model, on the measured rows
    weight_bytes: tuple[int, ...]  # of each model: rows of tables and dense parameters


@final
class _SideBySide(nn.Module):
    """Logits [B, K + models x K]: those of the ensemble, then those of each model."""

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble

    def forward(self, batch: Batch) -> Tensor:
        logits_MBK = self.ensemble.logits_of_each(batch)
        return torch.cat((mean_probability(logits_MBK), *logits_MBK), 1)


def load_ensemble(
    paths: Sequence[Path], which: str = "best", warn: Warn = ignore_warning, *, same_rows: bool = True
) -> tuple[ResolvedRecipe, Ensemble]:
    """The resolved recipe of the first run, and the models of all; raises for runs that do not fit together.

    Args:
        paths: folders of the runs.
        which: the checkpoint of each.
        warn: called with a line for each setting that was replaced or has no effect.
        same_rows: whether their recipes have to name the same rows.
    """
    first: ResolvedRecipe | None = None
    models = []
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise SpecError(f"{path}: the run is named twice", "each run once")
        resolved, model = load_trained(path, which, warn)
        check_use(resolved.recipe.model, "ensemble", path)
        check_amounts(resolved.recipe, "an ensemble")
        first = first or resolved
        _check_alike(paths[0], first, path, resolved, same_rows=same_rows)
        models.append(model)
    if first is None:
        raise SpecError("no runs", "at least one run")
    return first, Ensemble(models)


def _check_alike(
    first_path: Path, first: ResolvedRecipe, path: Path, other: ResolvedRecipe, *, same_rows: bool
) -> None:
    """Raise for the first of labels, inputs and rows in which two runs differ."""
    runs = f"{path} and {first_path}"
    other_labels, first_labels = other.columns.labels, first.columns.labels
    if other_labels != first_labels:
        raise SpecError(
            f"{runs} differ in labels {', '.join(other_labels)} and {', '.join(first_labels)}",
            "runs with the same labels",
        )
    inputs, expected = _inputs_of(other), _inputs_of(first)
    for name in (*expected, *inputs):
        if inputs.get(name) != expected.get(name):
            raise SpecError(f"{runs} differ in {name}", "runs that read the same columns in the same way")
    for key in ROW_KEYS if same_rows else ():
        values = getattr(other.recipe.data, key), getattr(first.recipe.data, key)
        if values[0] != values[1]:
            raise SpecError(
                f"{runs} differ in their test rows, data.{key}={values[0]!r} and {values[1]!r}",
                "the same test rows, or --data",
            )


def _inputs_of(resolved: ResolvedRecipe) -> dict[str, object]:
    """Everything that determines a batch of rows, by its name in messages."""
    columns = resolved.columns
    rows = {name: table.rows for table in resolved.tables for name in table.feature_names}
    inputs: dict[str, object] = {f"column {dense.column!r}": dense for dense in columns.dense}
    inputs |= {f"column {s.column!r}": (s, rows[s.feature_name]) for s in columns.sparse}
    inputs["the order of the columns"] = [d.column for d in columns.dense]
    return inputs | {"transforms": to_json(resolved.transforms), "the weight column": columns.weight}


def evaluate_ensemble(
    paths: Sequence[Path],
    *,
    which: str = "best",
    data: str | None = None,
    slices: tuple[str, ...] | None = None,
    warn: Warn = ignore_warning,
) -> EnsembleScores:
    """Measure the ensemble and each of its runs on the test rows, or on the rows of other files."""
    resolved, ensemble = load_ensemble(paths, which, warn, same_rows=data is None)
    rows, recipe, outputs = choose_rows(paths[0], resolved, data), resolved.recipe, 1 + len(paths)

    def batches() -> Iterable[Batch]:
        for batch in evaluation_batches(resolved, rows):
            yield replace(batch, labels_BK=batch.labels_BK.repeat(1, outputs))

    names = [f"{number}.{task}" for number in range(outputs) for task in resolved.tasks]
    slicing = Slicing(recipe.evaluate.slices if slices is None else slices, recipe.evaluate.slice_ids)
    name = partial(name_ids, rows, resolved.columns, resolved.tables, resolved.transforms)
    scores = ClickEvaluator(_SideBySide(ensemble), batches, names, recipe.train, slicing, name_ids=name)()
    by_model = [{task: scores.tasks[f"{k}.{task}"] for task in resolved.tasks} for k in range(outputs)]
    own_slices = tuple(replace(row, task=row.task[2:]) for row in scores.slices if row.task.startswith("0."))
    sizes = tuple(map(weight_bytes, ensemble.models))
    return EnsembleScores(Scores(by_model[0], own_slices), tuple(by_model[1:]), tuple(ensemble.seconds), sizes)


def record_ensemble(paths: Sequence[Path], scores: EnsembleScores) -> None:
    """Write the test metrics of the ensemble to the folder of each of its runs, and rewrite their reports."""
    for path in paths:
        RunFolder.open(path).write_json(ENSEMBLE, {"runs": len(paths), "test": dict(scores.ensemble.tasks)})
        report.write(path)


def predict_ensemble(  # noqa: PLR0913 - options of the command
    paths: Sequence[Path],
    out: Path,
    *,
    which: str = "best",
    data: str | None = None,
    keep: Sequence[str] = (),
    tell: Callable[[int, int], None] | None = None,
    warn: Warn = ignore_warning,
    memory_bytes: int | None = None,
    k: int | None = None,
) -> int:
    """Write the mean probability of the runs, and its logit, for the test rows or rows of other files.

    A single path may be a version that `rowwise export` wrote; `memory_bytes`: budget for its rows, larger tables are
    cached. `k`: items per list; for sequence models only.
    """
    if len(paths) == 1 and is_served(paths[0]):
        if data is None:
            raise DataError(f"{paths[0]}: a version has no test rows", "--data parquet:PATH")
        folder = find_version(paths[0]).path
        tiers, text = make_tiers(CheckpointManifest.read(folder), memory_bytes, (), None), read_model(folder).text
        rows = RowSelection(open_reader(data, text=None if text is None else style_of(text)))
        return predict(open_predictor(paths[0], tiers=tiers), rows, out, keep, tell, k)
    if memory_bytes is not None:
        raise SpecError("--memory is for a version", hint=f"run rowwise export {paths[0]} DIR, and give DIR")
    if len(paths) == 1:  # any model, such as two towers
        return predict_rows(paths[0], out, which=which, data=data, keep=keep, tell=tell, warn=warn, k=k)
    resolved, ensemble = load_ensemble(paths, which, warn, same_rows=data is None)
    rows = choose_rows(paths[0], resolved, data)
    return predict(Predictor.of_run(resolved, ensemble), rows, out, keep, tell, k)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of rows and of dense parameters, without optimizer state."""
    rows_bytes = sum(table.rows * table.row_bytes for table in tables_of(model))
    return rows_bytes + sum(dense.numel() * dense.element_size() for dense in dense_parameters(model))
