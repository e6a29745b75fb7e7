"""A first recipe for somebody's files, from their dataset card: it trains as it is, and says what to edit next.

Pure but for the card; needs no torch. Everything is written out, columns, tables and rates, as people edit what they
see. Known limits: it is a beginning, not a tuned model; all tables have one width.
"""

import math
import re
from pathlib import PurePath

from msgspec import structs

from rowwise.errors import DataError
from rowwise.ingest.inspect import ColumnCard, DatasetCard
from rowwise.recipes.recipe import NAME, About, Data, DlrmConfig, Recipe, Tables
from rowwise.recipes.text import write
from rowwise.row_optimizers import RowWiseAdagrad
from rowwise.spec import Pooling, Table
from rowwise.train.settings import DenseAdam, Evaluation, Training

SMALL_ROWS, LARGE_ROWS = 20_000, 5_000_000
STEPS = 100  # of an epoch, about
BATCHES = (64, 2048)
PART = 0.1  # of the rows, to validate on, and as many to test on
LOOKS = 10  # at the validation rows, in the epoch of a large dataset
SHOWN = ("data.share", "data.test_share", "train.batch", "train.epochs", "evaluate.metric")


def name_for(path: str) -> str:
    """What a recipe for some files is called: logs/*.parquet makes logs."""
    plain = [re.sub(r"[^A-Za-z0-9_.-]+", "_", part) for part in PurePath(path).parts if not set("*?[") & set(part)]
    name = PurePath(plain[-1]).stem.lstrip("_.-") if plain else ""
    return name if NAME.fullmatch(name) else "recipe"


def starter(card: DatasetCard, dataset: str, file: str) -> str:
    """The recipe as text.

    Args:
        card: what is known of the rows, all of them.
        dataset: parquet:PATH or csv:PATH.
        file: where the recipe will be.
    """
    _refuse(card)
    columns, tables = card.suggest(_dim(card.rows))
    steps = max(1, round(card.rows * (1 - 2 * PART) / _batch(card.rows)))
    large = card.rows > LARGE_ROWS
    recipe = Recipe(
        about=About(
            what=f"DLRM on {card.rows:,} rows of {card.source}",
            run=f"rowwise train {file}",
        ),
        data=Data(dataset=dataset, label=card.label, valid_share=PART, test_share=PART),
        columns=columns,
        tables=Tables(list=tuple(_table(table, card) for table in tables)),
        model=_model(columns.dense != (), card.rows),
        train=Training(batch=_batch(card.rows), epochs=2 if large else 10, optimizer=DenseAdam(lr=0.002)),
        evaluate=Evaluation(every=max(1, steps // LOOKS) if large else 0, patience=2),
    )
    return "\n".join([*_comments(card, recipe), ""]) + write(recipe, shown=SHOWN)


def _refuse(card: DatasetCard) -> None:
    """What no recipe can be made for."""
    label = next((column for column in card.columns if column.role == "label"), None)
    if label is not None and label.note:
        raise DataError(f"{card.source}: {label.note}: want a column of 0 and 1; name one with --label{_likely(card)}")
    if label is None:
        raise DataError(f"{card.source}: no column is known to be the label: name one with --label{_likely(card)}")
    if not any(column.role == "sparse" for column in card.columns):
        raise DataError(f"{card.source}: no column holds ids or words, and without any there are no tables to train")


def _likely(card: DatasetCard) -> str:
    found = [name for name in card.likely_labels if name != card.label]
    return f", such as {' or '.join(found)}" if found else ""


def _batch(rows: int) -> int:
    return min(max(BATCHES[0], 1 << int(math.log2(max(rows / STEPS, 1)))), BATCHES[1])


def _dim(rows: int) -> int:
    return 8 if rows < SMALL_ROWS else 16 if rows < LARGE_ROWS else 32


def _model(dense: bool, rows: int) -> DlrmConfig:
    sizes = (64,) if rows < SMALL_ROWS else (128, 64) if rows < LARGE_ROWS else (512, 256)
    return DlrmConfig(bottom=sizes if dense else (), top=sizes)


def _table(table: Table, card: DatasetCard) -> Table:
    feature = table.feature_names[0]
    listed = any(column.name == feature and column.mean_length is not None for column in card.columns)
    pooling = Pooling.MEAN if listed else Pooling.SUM
    return structs.replace(table, pooling=pooling, optimizer=RowWiseAdagrad(lr=0.05))


def _comments(card: DatasetCard, recipe: Recipe) -> list[str]:
    left_out = [column for column in card.columns if column.role == "unused"]
    used = {recipe.columns.key, recipe.columns.time} if recipe.columns else set()
    left_out += [column for column in card.columns if column.role in ("key", "time") and column.name not in used]
    lines = [
        f"# {recipe.about.run}",
        "#",
        "# A beginning, made by rowwise data inspect; it trains as it is. What to look at next:",
        "#   columns   is each number under dense and each id under sparse? log1p is for counts and amounts",
        "#   tables    ids are hashed into 16 rows each in small tables, 8 in large ones: few ids share a row",
        "#   data      share: random tests on rows from everywhere; last on the last ones, as it will be in use",
        "#   train     batch and the two rates (optimizer, here and of the tables) matter most, in this order",
        "#   evaluate  training stops when ne on the validation rows was not better twice",
        "# Change a value for one run: rowwise train FILE --set train.batch=1024. All there is to set: the recipe.yaml",
        "# in the folder of a run.",
    ]
    if left_out:
        lines += ["#", "# Left out:"]
        lines += [f"#   {_reason(column)}" for column in left_out]
    return lines


def _reason(column: ColumnCard) -> str:
    return " ".join((column.note or f"{column.name!r} holds {column.type}, which no model takes").split())
