"""Writes a first recipe for files from their dataset card, with comments on what to edit next.

All columns, tables and learning rates are written out, because people edit what they see. Known limit: all tables
have one dim.
"""

import math
import re
import textwrap
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType

from msgspec import structs

from rowwise.errors import DataError
from rowwise.ingest.inspect import AS_TOLD, LABELS, SHARE, ColumnCard, DatasetCard
from rowwise.ingest.transform import SplitText
from rowwise.recipes.model_configs import DlrmConfig
from rowwise.recipes.recipe import NAME, About, Data, Recipe, TableChanges, Tables, TimeShare
from rowwise.recipes.text import write
from rowwise.row_optimizers import RowWiseAdagrad
from rowwise.spec import Pooling
from rowwise.train.settings import DenseAdam, Evaluation, Training

SMALL_ROWS, LARGE_ROWS = 20_000, 5_000_000
STEPS = 100  # of an epoch, approximately
BATCHES = (64, 2048)
WIDTH = 110  # of comments
EMPTY: Mapping[str, str] = MappingProxyType({})
EVALUATIONS = 10  # in an epoch of a large dataset; others have 4
SHOWN = ("data.share", "train.batch", "train.epochs", "evaluate.metric")


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
    files = Data(dataset=dataset, label=card.label)
    if card.borders is None:
        data = structs.replace(files, valid_share=SHARE, test_share=SHARE)
    else:
        data = structs.replace(files, share=TimeShare(**structs.asdict(card.borders)))
    recipe = Recipe(
        about=About(what=f"DLRM on {card.rows:,} rows of {card.source}", run=f"rowwise train {file}"),
        data=data,
        transforms=tuple(SplitText(column=c.name, separator=c.separator) for c in card.columns if c.separator),
        columns=structs.replace(columns, sparse=sparse, time=None),
        tables=Tables(all=TableChanges(dim=_dim(card.rows), optimizer=_row_optimizer(large)), each=pooling),
        model=_choose_model(card.rows, dense=bool(columns.dense)),
        train=Training(batch=_batch(card.rows), epochs=2 if large else 20, optimizer=DenseAdam(lr=0.002)),
        evaluate=Evaluation(every=max(1, steps // (EVALUATIONS if large else 4)), patience=2 if large else 6),
    )
    shown = (*SHOWN, "data.test_share") if card.borders is None else SHOWN
    return "\n".join([*_comments(card, recipe), ""]) + write(recipe, shown=shown)


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


def _row_optimizer(large: bool) -> RowWiseAdagrad:
    return RowWiseAdagrad(lr=0.05) if large else RowWiseAdagrad(lr=0.1, initial=1e-6, weight_decay=1e-4)


def _choose_model(rows: int, *, dense: bool) -> DlrmConfig:
    """DLRM, with dropout and layer normalisation where rows are few; see docs/decisions/0018-starter.md."""
    large = rows > LARGE_ROWS
    bottom = () if not dense else (512, 256) if large else (64,)
    top = (512, 256) if large else (64,) if rows < SMALL_ROWS else (256, 128)
    return DlrmConfig(bottom=bottom, top=top, dropout=0.0 if large else 0.3, norm=None if large else "layer")


def _comments(card: DatasetCard, recipe: Recipe) -> list[str]:
    left_out = [column for column in card.columns if column.role == "unused"]
    used = {recipe.columns.key, recipe.columns.time} if recipe.columns else set()
    left_out += [column for column in card.columns if column.role in ("key", "time") and column.name not in used]
    share = (
        "random takes test rows from everywhere, last takes the last rows, as in production"
        if card.borders is None
        else "rows from valid_from on validate, those from test_from on test; or random, with valid_share"
    )
    lines = [
        f"# {recipe.about.run}",
        "#",
        "# Written by rowwise data inspect; it trains as it is. Check next:",
        "#   columns   is each number under dense and each id under sparse? log1p is for counts and amounts",
        "#   columns   vocabulary: its ids have a row each, and rare and new ones share one; rows: ids are hashed",
        "#             to so many, 16 an id in small tables and 8 in large ones, so that few share a row",
        f"#   data      share: {share}",
        "#   train     batch and the learning rates (train.optimizer, and of tables) matter most, in this order",
        "#   evaluate  training stops when ne on the validation rows has not improved `patience` times",
        "# Change a value for one run: rowwise train FILE --set train.batch=1024. All settings: recipe.yaml of a",
        "# run.",
    ]
    if card.checks:
        lines += ["#", "# Before you trust its test metrics:"]
        for check in card.checks:
            lines += textwrap.wrap(" ".join(check.split()), WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    if left_out:
        lines += ["#", "# Left out:"]
        lines += [f"#   {_reason(column, card)}" for column in left_out]
    return lines


def _reason(column: ColumnCard, card: DatasetCard) -> str:
    if card.borders is not None and column.name == card.borders.column:
        return f"{column.name!r} divides the rows, so it is no feature"
    if column.why == AS_TOLD:
        return f"{column.name!r} by --{'ignore' if column.role == 'unused' else column.role}"
    return " ".join((column.note or f"{column.name!r} has type {column.type}, which models cannot use").split())
