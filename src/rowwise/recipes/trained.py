"""Trained runs: their recipe, the model of a checkpoint, its metrics and its predictions. Prints nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs
from torch import nn

from rowwise.base.errors import DataError, SpecError
from rowwise.base.textfile import read_bytes, read_text
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.plan import Plan
from rowwise.recipes.compose import make_evaluator, make_model, resolve, set_threads
from rowwise.recipes.export_items import ranked_items
from rowwise.recipes.id_maps import relocate_maps
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.predict import Predictor, predict
from rowwise.recipes.recipe import check_ranks
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.rows import RowSelection, open_reader
from rowwise.recipes.run_files import DISK, PLAN, label_notes
from rowwise.recipes.sharding import choose_plan, shard_tables
from rowwise.recipes.table_memory import measure_memory, raise_if_short
from rowwise.recipes.text import RECIPE, apply_changes, decode, parse
from rowwise.train.evaluate import Scores, Values
from rowwise.train.metrics import Metrics
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder
from rowwise.train.snapshot import restore_model

Warn = Callable[[str], None]  # takes a line for each setting that was replaced or has no effect


def ignore_warning(line: str) -> None:
    """The default `warn` of library functions."""


def evaluate(
    path: Path,
    *,
    which: str = "best",
    data: str | None = None,
    slices: tuple[str, ...] | None = None,
    warn: Warn = ignore_warning,
) -> Scores:
    """Measure a checkpoint of a run on its test rows, or on the rows of other files."""
    resolved, model = load_trained(path, which, warn)
    rows = choose_rows(path, resolved, data)
    for line in label_notes(resolved, rows):
        warn(line)
    return make_evaluator(resolved, model, rows, slices)()


def predict_rows(  # noqa: PLR0913 - options of the command
    path: Path,
    out: Path,
    *,
    which: str = "best",
    data: str | None = None,
    keep: Sequence[str] = (),
    tell: Callable[[int, int], None] | None = None,
    warn: Warn = ignore_warning,
    k: int | None = None,
) -> int:
    """Predict for the test rows of a run, or for rows of other files, beside `keep` columns; returns their number.

    `k`: items per list; for sequence models only.
    """
    resolved, model = load_trained(path, which, warn)
    rows = choose_rows(path, resolved, data)
    return predict(_make_predictor(path, resolved, model, warn), rows, out, keep, tell, k)


def load_predictor(path: Path, which: str = "best", warn: Warn = ignore_warning) -> Predictor:
    """A predictor with the weights of a checkpoint of a run."""
    return _make_predictor(path, *load_trained(path, which, warn), warn)


def _make_predictor(path: Path, resolved: ResolvedRecipe, model: nn.Module, warn: Warn) -> Predictor:
    predictor = Predictor.of_run(resolved, model)
    if family_of(resolved.recipe.model).retrieves == "lists":
        try:
            predictor = replace(predictor, items=ranked_items(resolved, model))
        except SpecError as error:
            raise SpecError(f"{path}: no items can be ranked: {error}") from None
    if predictor.blocks.kind != "padded":
        warn(predictor.blocks.describe())
    return predictor


def load_trained(path: Path, which: str = "best", warn: Warn = ignore_warning) -> tuple[ResolvedRecipe, nn.Module]:
    """The resolved recipe of a run, and its model with the weights of a checkpoint."""
    RunFolder.open(path)
    resolved = resolve_saved(path)
    for line in resolved.notes:
        warn(line)
    set_threads(resolved.recipe)
    recipe, comm = structs.replace(resolved.recipe, plan=None), solo()
    folder = path / DISK if recipe.disk is None else Path(recipe.disk)
    memory = measure_memory(resolved, comm, "use", folder)
    on_disk = memory.is_short and recipe.train.device == "cpu"
    if not on_disk:
        raise_if_short(memory)
    model = make_model(resolved, on_meta=on_disk)
    if on_disk:
        shard_tables(recipe, model, choose_plan(recipe, model, comm.topology, memory), comm, folder)
    restore_model(CheckpointFolder(path / "ckpt").open(which), model)
    return resolved, model


def best_possible_metrics(resolved: ResolvedRecipe, rows: RowSelection) -> dict[str, Values]:
    """Metrics of the true logits that synthetic labels were drawn from: no model is better on average."""
    column = resolved.rows.dataset.ceiling
    if column is None:
        return {}
    task = resolved.tasks[0]
    metrics = Metrics((task,), window=1)
    for split in rows.reader.splits():
        table = rows.reader.read(split, (task, column))
        logits, labels = (torch.from_numpy(table[name].to_numpy().astype("float64")) for name in (column, task))
        metrics.update(logits, labels)
    return {task: metrics.value()[task].all}


def resolve_saved(path: Path, changes: Sequence[str] = (), world: int = 1) -> ResolvedRecipe:
    source = path / RECIPE
    sections = parse(read_text(source), str(source))
    apply_changes(sections, changes)
    for change in changes:
        if change.startswith("init_from=") and CheckpointFolder(path / "ckpt").steps():
            raise SpecError(
                f"--set {change} for a run that is resumed: its checkpoint has the weights",
                "a new run with rowwise train --init-from",
            )
    recipe = relocate_maps(decode(sections, str(source)), path)
    check_ranks(recipe, world)
    if world != _saved_world(path) and not any(change.startswith("train.threads=") for change in changes):
        # Ranks share the cores: the number of threads follows the number of ranks.
        recipe = structs.replace(recipe, train=structs.replace(recipe.train, threads=None))
    return resolve(recipe)


def _saved_world(path: Path) -> int:
    try:
        return Plan.from_json(read_bytes(path / PLAN)).world
    except OSError:
        return 1


def choose_rows(path: Path, resolved: ResolvedRecipe, data: str | None) -> RowSelection:
    """The rows of `data`, or without it the run's test rows."""
    rows = resolved.rows.test if data is None else RowSelection(open_reader(data, text=resolved.recipe.data.text))
    if rows is None:
        raise DataError(f"{path}: its recipe has no test rows", "--data parquet:PATH")
    return rows
