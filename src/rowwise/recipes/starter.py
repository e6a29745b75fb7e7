"""Writes a first recipe for files from their dataset card, with comments on what to edit next.

All columns, tables and learning rates are written out, because people edit what they see. Known limit: all tables
have one dim.
"""

import math
import re
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import MappingProxyType

import pyarrow as pa
from msgspec import structs

from rowwise.base.errors import DataError
from rowwise.base.quantity import round_digits
from rowwise.ingest import transform
from rowwise.ingest.columns import Dense
from rowwise.ingest.delimited import CsvReader
from rowwise.ingest.dialect import Dialect
from rowwise.ingest.division import SHARE
from rowwise.ingest.encode import encode
from rowwise.ingest.inspect import ColumnCard, DatasetCard, Inspection, table_names
from rowwise.ingest.labels import LABELS, LabelValues, parse_label, unlabelled
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.roles import AS_TOLD
from rowwise.ingest.vocabulary import write_vocabularies
from rowwise.recipes.column_tables import replace_vocabularies
from rowwise.recipes.derived import LARGE_ROWS, Derived, derive, left_out
from rowwise.recipes.model_configs import DcnConfig, DlrmConfig, kind_of
from rowwise.recipes.recipe import NAME, About, Data, Recipe, TableChanges, Tables, TimeShare
from rowwise.recipes.text import decode, parse, write
from rowwise.tables.row_optimizers import RowWiseAdagrad, Schedule
from rowwise.tables.spec import Pooling
from rowwise.train.loss_settings import AnyLoss, LogLoss, Poisson, Squared, wanted_values
from rowwise.train.settings import DenseAdam, Evaluation, Training

SMALL_ROWS = 20_000
FIRST_ROWS = 4096  # must be encoded before a recipe is written
DECAY_EPOCHS = 8  # until the dense learning rate is 0, for small data
STEPS = 100  # per epoch, approximately
BATCHES = (64, 2048)
WIDTH = 110  # of comments
EMPTY: Mapping[str, str] = MappingProxyType({})
OBJECTIVES: dict[LabelValues, AnyLoss] = {"clicks": LogLoss(), "numbers": Squared(), "amounts": Poisson()}
METRICS: dict[LabelValues, str] = {"clicks": "ne", "numbers": "rmse", "amounts": "poisson_deviance"}
EVALUATIONS = 10  # per epoch of large data; otherwise 4
SHOWN = ("data.share", "train.batch", "train.epochs", "evaluate.metric")


def recipe_name(path: str) -> str:
    """The name of a recipe for files: logs for logs/*.parquet."""
    plain = [re.sub(r"[^A-Za-z0-9_.-]+", "_", part) for part in PurePath(path).parts if not set("*?[") & set(part)]
    name = PurePath(plain[-1]).stem.lstrip("_.-") if plain else ""
    return name if NAME.fullmatch(name) else "recipe"


def make_starter(
    card: DatasetCard, dataset: str, file: str, vocabularies: Mapping[str, str] = EMPTY, text: Dialect | None = None
) -> str:
    """The recipe as text.

    Args:
        card: statistics of all rows.
        dataset: parquet:PATH or csv:PATH.
        file: the path of the recipe, for the command in its comment.
        vocabularies: file by column; ids of other columns are hashed.
        text: dialect of text files.
    """
    derived = derive(card)
    _check_card(card, derived)
    large = card.rows > LARGE_ROWS
    numbers = [column for column in card.columns if column.role == "dense" or (not large and column.is_number_too)]
    model = _choose_model(card.rows, numbers=bool(numbers))
    decays = kind_of(model) == "dcn" and card.rows < SMALL_ROWS
    epochs = 2 if large else DECAY_EPOCHS if decays else 20
    columns, tables = card.suggest(_dim(card.rows), derived.sparse)
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
    files = Data(dataset=dataset, label=card.labels[0], text=text)
    if card.borders is None:
        data = structs.replace(files, valid_share=SHARE, test_share=SHARE, group=card.group)
    else:
        data = structs.replace(files, share=TimeShare(**structs.asdict(card.borders)))
    recipe = Recipe(
        about=About(
            what=f"{kind_of(model).upper()} on {card.rows:,} rows of {card.source}",
            run=f"rowwise train {file}",
        ),
        data=data,
        transforms=derived.transforms,
        columns=structs.replace(
            columns, dense=tuple(map(_dense, numbers)), sparse=sparse, time=None, label_values="clicks"
        ),
        tables=Tables(all=TableChanges(dim=_dim(card.rows), optimizer=_row_optimizer(large)), each=pooling),
        model=model,
        train=Training(
            batch=_batch(card.rows),
            epochs=epochs,
            optimizer=DenseAdam(lr=0.002),
            schedule=Schedule(decay_steps=steps * epochs) if decays else None,
            objective=OBJECTIVES[card.label_values],
        ),
        evaluate=Evaluation(
            metric=METRICS[card.label_values],
            every=max(1, steps // (EVALUATIONS if large else 4)),
            patience=2 if large else None if decays else 6,
        ),
    )
    shown = (*SHOWN, "data.test_share") if card.borders is None else SHOWN
    return "\n".join([*_comments(card, recipe), ""]) + write(recipe, shown=shown)


def write_starter(found: Inspection, reader: Reader, dataset: str, path: Path, *, grow: Path | None = None) -> bool:
    """Write the recipe, and vocabularies beside it, if it encodes the first rows; False if its file exists.

    Args:
        found: inspection of all rows.
        reader: reader of the rows.
        dataset: parquet:PATH or csv:PATH.
        path: file of the recipe.
        grow: vocabularies of an earlier recipe, whose ids keep their rows.
    """
    folder = path.with_suffix(".ids")
    files = {column: folder / f"{table}.vocab" for column, table in table_names(found.ids).items()}
    style = reader.dialect if isinstance(reader, CsvReader) else None
    text = make_starter(found.card, dataset, str(path), {column: str(file) for column, file in files.items()}, style)
    if path.exists():
        return False
    existed = folder.exists()
    write_vocabularies(found.ids, files, grow)
    try:
        _check_first_rows(decode(parse(text, str(path)), str(path)), reader)
    except DataError:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    path.write_text(text)
    return True


def _check_first_rows(recipe: Recipe, reader: Reader) -> None:
    """Raise if the first rows cannot be transformed and encoded; needs neither a model nor torch."""
    assert recipe.columns is not None
    columns, lookups = replace_vocabularies(recipe.columns)
    columns = structs.replace(columns, label_values=wanted_values(recipe.train.objective))
    loaded = transform.load((*recipe.transforms, *lookups))
    names = transform.sources(loaded, columns.names)
    split, table = _first_rows(reader, names)
    unlabelled_R = unlabelled(table, [parse_label(text) for text in columns.labels])
    if unlabelled_R is not None:
        table = table.filter(pa.array(~unlabelled_R))
    columns.check(transform.schema_after(reader.schema, loaded, split.source), split.source)
    transformed, _ = transform.apply(table, loaded, columns.names, transform.RowPosition(split=split))
    rows = {s.table_name: s.rows for s in columns.sparse if s.rows is not None}
    encode(transformed, columns, rows, split)


def _first_rows(reader: Reader, names: tuple[str, ...]) -> tuple[Split, pa.Table]:
    for split in reader.splits():
        table = reader.read(split, names).slice(0, FIRST_ROWS)
        if table.num_rows:
            return split, table
    raise DataError("no split has rows", "files with rows")


def _check_card(card: DatasetCard, derived: Derived) -> None:
    label = next((column for column in card.columns if column.role == "label"), None)
    if label is not None and label.note:
        raise DataError(f"{card.source}: {label.note}", f"--label COLUMN{_suggest_labels(card)}")
    by_name = next((column for column in card.columns if column.name.lower() in LABELS), None)
    if label is None and by_name is not None and not card.likely_labels:
        problem = next(
            (line for line in card.warnings if repr(by_name.name) in line), f"column {by_name.name!r} is no label"
        )
        raise DataError(f"{card.source}: {problem.removeprefix(f'{card.source}: ')}; or --label COLUMN")
    if label is None:
        raise DataError(f"{card.source}: no label column", f"--label COLUMN{_suggest_labels(card)}")
    if not derived.sparse and not any(column.is_ids for column in card.columns):
        raise DataError(f"{card.source}: no column is left to learn from", "a column by --sparse or --dense COLUMN")


def _dense(column: ColumnCard) -> Dense:
    if not column.std or column.mean is None:
        return Dense(column=column.name, log1p=column.is_skewed)
    mean = math.expm1(column.mean) if column.is_skewed else column.mean
    fill = round_digits(mean) if column.nulls else 0.0
    return Dense(
        column=column.name,
        fill=fill,
        log1p=column.is_skewed,
        mean=round_digits(column.mean),
        std=round_digits(column.std),
    )


def _suggest_labels(card: DatasetCard) -> str:
    names = [name for name in card.likely_labels if name != card.label]
    return f", such as {' or '.join(names)}" if names else ""


def _batch(rows: int) -> int:
    return min(max(BATCHES[0], 1 << int(math.log2(max(rows / STEPS, 1)))), BATCHES[1])


def _dim(rows: int) -> int:
    return 8 if rows < SMALL_ROWS else 16 if rows < LARGE_ROWS else 32


def _row_optimizer(large: bool) -> RowWiseAdagrad:
    return RowWiseAdagrad(lr=0.05) if large else RowWiseAdagrad(lr=0.1, initial=1e-6, weight_decay=1e-4)


def _choose_model(rows: int, *, numbers: bool) -> DlrmConfig | DcnConfig:
    """DCN if there are numbers, dropout and normalisation for small data; see docs/decisions/0018-starter.md."""
    large = rows > LARGE_ROWS
    top = (512, 256) if large else (64,) if rows < SMALL_ROWS else (256, 128)
    if numbers and not large:
        return DcnConfig(deep=top, crosses=3, rank=16, structure="parallel", dropout=0.3, norm="layer")
    bottom = () if not numbers else (512, 256) if large else (64,)
    return DlrmConfig(bottom=bottom, top=top, dropout=0.0 if large else 0.3, norm=None if large else "layer")


def _comments(card: DatasetCard, recipe: Recipe) -> list[str]:
    used = (recipe.columns.key, recipe.columns.time) if recipe.columns else ()
    rest = left_out(card, used)
    share = (
        "random takes test rows from everywhere, last takes the last rows; group: its rows stay in one split"
        if card.borders is None
        else "validation rows from valid_from, test rows from test_from; or random, with valid_share"
    )
    lines = [
        f"# {recipe.about.run}",
        "#",
        "# Written by rowwise data inspect; it trains as it is. Check next:",
        "#   columns   is each number under dense and each id under sparse? log1p is for counts and amounts",
        "#   columns   numbers: (x - mean) / std, after log1p; those of transforms have a table of buckets, too",
        "#   columns   vocabulary: its ids have a row each, and rare and new ones share one; rows: ids are hashed",
        "#             to N slots, 16 per id in small tables and 8 in large ones: few collisions",
        f"#   data      share: {share}",
        "#   train     batch and the learning rates (train.optimizer, and of tables) matter most, in this order",
        f"#   evaluate  stops when {recipe.evaluate.metric} of validation rows has not improved `patience` times",
        "# Change a value for one run: rowwise train FILE --set train.batch=1024. All settings: recipe.yaml of a",
        "# run.",
    ]
    if card.checks:
        lines += ["#", "# Before you trust its test metrics:"]
        for check in card.checks:
            lines += textwrap.wrap(" ".join(check.split()), WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    if rest:
        lines += ["#", "# Left out:"]
        lines += [f"#   {_reason(column, card)}" for column in rest]
    return lines


def _reason(column: ColumnCard, card: DatasetCard) -> str:
    if card.borders is not None and column.name == card.borders.column:
        parts = f": only its {' and '.join(column.parts)} {'is' if len(column.parts) == 1 else 'are'} used"
        return f"{column.name!r} splits the rows{parts if column.parts else ', so it is no feature'}"
    if column.parts:
        return f"{column.name!r}, but for its {' and '.join(column.parts)}"
    if column.role == "time":
        return f"{column.name!r} holds times, which are never seen again"
    if column.role == "group":
        return f"{column.name!r} names groups of rows, of which none is in training and test rows, so it is no feature"
    if column.why == AS_TOLD:
        return f"{column.name!r} by --{'ignore' if column.role == 'unused' else column.role}"
    return " ".join((column.note or f"{column.name!r} has type {column.type}, which models cannot use").split())
