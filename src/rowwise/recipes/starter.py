"""Writes a first recipe for files from their dataset card, with comments on what to edit next.

All columns, tables and learning rates are written out, because people edit what they see. Known limit: all tables
have one dim.
"""

import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType

from msgspec import structs

from rowwise.errors import DataError
from rowwise.ingest.inspect import LABELS, ColumnCard, DatasetCard
from rowwise.ingest.transform import SplitText
from rowwise.recipes.recipe import NAME, About, Data, DcnConfig, Recipe, TableChanges, Tables
from rowwise.recipes.text import write
from rowwise.row_optimizers import RowWiseAdagrad
from rowwise.spec import Pooling
from rowwise.train.settings import DenseAdam, Evaluation, Training

SMALL_ROWS, LARGE_ROWS = 20_000, 5_000_000
STEPS = 100  # of an epoch, approximately
BATCHES = (64, 2048)
EMPTY: Mapping[str, str] = MappingProxyType({})
SHARE = 0.1  # of the rows to validate on, and as much to test on
EVALUATIONS = 10  # in an epoch of a large dataset; others have 2
MOST_FULL_RANK, CROSS_RANK = 512, 64  # most inputs of full-rank crosses, and the rank of others
SHOWN = ("data.share", "data.test_share", "train.batch", "train.epochs", "evaluate.metric")


def recipe_name(path: str) -> str:
    """The name of a recipe for files: logs for logs/*.parquet."""
    plain = [re.sub(r"[^A-Za-z0-9_.-]+", "_", part) for part in PurePath(path).parts if not set("*?[") & set(part)]
    name = PurePath(plain[-1]).stem.lstrip("_.-") if plain else ""
    return name if NAME.fullmatch(name) else "recipe"


def make_starter(card: DatasetCard, dataset: str, file: str, vocabularies: Mapping[str, str] = EMPTY) -> str:
    """The recipe as text.

    Args:
        card: facts of all rows.
        dataset: parquet:PATH or csv:PATH.
        file: the path of the recipe, for the command in its comment.
        vocabularies: file of each column whose ids are listed; others are hashed.
    """
    _check_card(card)
    columns, tables = card.suggest(_dim(card.rows))
    rows_of = {table.feature_names[0]: table.rows for table in tables}
    sparse = tuple(
        structs.replace(column, vocabulary=vocabularies[column.column])
        if column.column in vocabularies
        else structs.replace(column, rows=rows_of[column.feature_name])
        for column in columns.sparse
    )
    lists = {column.name for column in card.columns if column.mean_length is not None}
    pooling = {s.table_name: TableChanges(pooling=Pooling.MEAN) for s in sparse if s.column in lists}
    steps = max(1, round(card.rows * (1 - 2 * SHARE) / _batch(card.rows)))
    large = card.rows > LARGE_ROWS
    recipe = Recipe(
        about=About(what=f"DCN-v2 on {card.rows:,} rows of {card.source}", run=f"rowwise train {file}"),
        data=Data(dataset=dataset, label=card.label, valid_share=SHARE, test_share=SHARE),
        transforms=tuple(SplitText(column=c.name, separator=c.separator) for c in card.columns if c.separator),
        columns=structs.replace(columns, sparse=sparse, time=None),
        tables=Tables(all=TableChanges(dim=_dim(card.rows), optimizer=RowWiseAdagrad(lr=0.05)), each=pooling),
        model=_choose_model(len(columns.sparse), _dim(card.rows), card.rows),
        train=Training(batch=_batch(card.rows), epochs=2 if large else 10, optimizer=DenseAdam(lr=0.002)),
        evaluate=Evaluation(every=max(1, steps // (EVALUATIONS if large else 2)), patience=2 if large else 4),
    )
    return "\n".join([*_comments(card, recipe), ""]) + write(recipe, shown=SHOWN)


def _check_card(card: DatasetCard) -> None:
    label = next((column for column in card.columns if column.role == "label"), None)
    if label is not None and label.note:
        raise DataError(f"{card.source}: {label.note}: want --label COLUMN with 0 and 1{_suggest_labels(card)}")
    named = next((column for column in card.columns if column.name.lower() in LABELS), None)
    if label is None and named is not None and not card.likely_labels:
        want = "want 0 and 1 for a label, or --label COLUMN"
        raise DataError(f"{card.source}: column {named.name!r} holds {named.type}: {want}")
    if label is None:
        raise DataError(f"{card.source}: no label column: want --label COLUMN{_suggest_labels(card)}")
    if not any(column.role == "sparse" for column in card.columns):
        raise DataError(f"{card.source}: no column has ids or strings: want at least one, for an embedding table")


def _suggest_labels(card: DatasetCard) -> str:
    names = [name for name in card.likely_labels if name != card.label]
    return f", such as {' or '.join(names)}" if names else ""


def _batch(rows: int) -> int:
    return min(max(BATCHES[0], 1 << int(math.log2(max(rows / STEPS, 1)))), BATCHES[1])


def _dim(rows: int) -> int:
    return 8 if rows < SMALL_ROWS else 16 if rows < LARGE_ROWS else 32


def _choose_model(features: int, dim: int, rows: int) -> DcnConfig:
    """DCN-v2, which is always close to the best of DLRM, DeepFM and DCN; see docs/decisions/0018-starter.md."""
    sizes = (64,) if rows < SMALL_ROWS else (128, 64) if rows < LARGE_ROWS else (512, 256)
    rank = None if features * dim <= MOST_FULL_RANK else CROSS_RANK
    return DcnConfig(deep=sizes, crosses=2, rank=rank, dropout=0.0 if rows > LARGE_ROWS else 0.2)


def _comments(card: DatasetCard, recipe: Recipe) -> list[str]:
    left_out = [column for column in card.columns if column.role == "unused"]
    used = {recipe.columns.key, recipe.columns.time} if recipe.columns else set()
    left_out += [column for column in card.columns if column.role in ("key", "time") and column.name not in used]
    lines = [
        f"# {recipe.about.run}",
        "#",
        "# Written by rowwise data inspect; it trains as it is. Check next:",
        "#   columns   is each number under dense and each id under sparse? log1p is for counts and amounts",
        "#   columns   vocabulary: its ids have a row each, and rare and new ones share one; rows: ids are hashed",
        "#             to so many, 16 an id in small tables and 8 in large ones, so that few share a row",
        "#   data      share: random takes test rows from everywhere, last takes the last rows, as in production",
        "#   train     batch and the learning rates (train.optimizer, and of tables) matter most, in this order",
        "#   evaluate  training stops when ne on the validation rows has not improved `patience` times",
        "# Change a value for one run: rowwise train FILE --set train.batch=1024. All settings: recipe.yaml of a",
        "# run.",
    ]
    if left_out:
        lines += ["#", "# Left out:"]
        lines += [f"#   {_reason(column)}" for column in left_out]
    return lines


def _reason(column: ColumnCard) -> str:
    return " ".join((column.note or f"{column.name!r} has type {column.type}, which models cannot use").split())
