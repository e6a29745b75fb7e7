"""What a run is about to train, and what it takes: known before there is a folder, a table or a step.

Its own file because it is also all that a dry run does: everything that can be refused is refused, nothing is written,
and tables take no memory, so that a recipe of many gigabytes can be looked at anywhere.
"""

from pathlib import Path

from msgspec import structs
from torch import nn

from rowwise.checkpoint.read import Checkpoint
from rowwise.recipes.compose import Resolved, make_batcher, make_model, make_objective, resolve
from rowwise.recipes.recipe import Recipe, Tables
from rowwise.recipes.text import RECIPE
from rowwise.spec import Value, state_width
from rowwise.train.saved import Saved
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd
from rowwise.train.step import dense_parameters

FLOAT_bytes = 4


class Outlook(Value, frozen=True):
    """A run in numbers; memory is that of the model, which batches come on top of."""

    recipe: str
    dataset: str
    splits: dict[str, int]  # of the rows to train, validate and test on
    dense: int
    sparse: int
    labels: tuple[str, ...]
    model: str
    batch: int
    precision: str
    threads: int
    dense_parameters: int
    dense_bytes: int  # with gradients and optimizer state
    tables: int
    rows: int
    largest: str
    rows_bytes: int
    state_bytes: int


def outlook(resolved: Resolved, model: nn.Module) -> Outlook:
    """Of a recipe and its model, whose tables may be smaller than the recipe's."""
    recipe, parts, tables = resolved.recipe, resolved.parts, resolved.tables
    named = {"train": parts.train, "valid": parts.valid, "test": parts.test}
    parameters = sum(parameter.numel() for parameter in dense_parameters(model))
    assert recipe.train.threads is not None
    return Outlook(
        recipe=recipe.name,
        dataset=recipe.data.dataset,
        splits={name: len(rows.reader.splits()) for name, rows in named.items() if rows is not None},
        dense=len(resolved.columns.dense),
        sparse=len(resolved.columns.sparse),
        labels=resolved.tasks,
        model=type(model).__name__,
        batch=recipe.train.batch,
        precision=recipe.train.precision,
        threads=recipe.train.threads,
        dense_parameters=parameters,
        dense_bytes=parameters * FLOAT_bytes * (2 + _slots(recipe.train.optimizer)),
        tables=len(tables),
        rows=sum(table.rows for table in tables),
        largest=max(tables, key=lambda table: table.rows * table.row_bytes).name,
        rows_bytes=sum(table.rows * table.row_bytes for table in tables),
        state_bytes=sum(table.rows * state_width(table) * FLOAT_bytes for table in tables),
    )


def look_ahead(recipe: Recipe) -> Outlook:
    """What a run of the recipe would be."""
    resolved = resolve(recipe)
    small = Tables(list=tuple(structs.replace(table, rows=1) for table in resolved.tables))
    model = make_model(Resolved(recipe=structs.replace(resolved.recipe, tables=small), parts=resolved.parts))
    make_objective(resolved, model)
    make_batcher(resolved, resolved.parts.train)
    if resolved.recipe.init_from is not None:
        open_start(Path(resolved.recipe.init_from))
    return outlook(resolved, model)


def open_start(path: Path) -> Checkpoint:
    """What a warm start takes over: the best checkpoint of a run, or one by its folder."""
    return Saved(path / "ckpt").open("best") if (path / RECIPE).is_file() else Checkpoint.open(path)


def _slots(optimizer: DenseOptimizer) -> int:
    """Numbers that are kept beside each weight."""
    match optimizer:
        case DenseSgd(momentum=momentum):
            return 1 if momentum else 0
        case DenseAdagrad():
            return 1
        case DenseAdam():
            return 2
