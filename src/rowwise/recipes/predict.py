"""Writes predictions for rows of files as Parquet or CSV: rows in their order, each with its key. Labels are not read.

Streams one split at a time, into a temporary file that is renamed at the end.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from pyarrow import csv
from pyarrow import parquet as pq
from torch import Tensor, nn

from rowwise.errors import DataError, SpecError
from rowwise.ingest.batcher import table_rows_for_ids
from rowwise.ingest.collate import SplitRows, collate
from rowwise.ingest.columns import Columns, is_list
from rowwise.ingest.prepare import Preparation, PreparationTask, ReadSplit
from rowwise.ingest.reader import check_columns
from rowwise.ingest.transform import serving, to_json
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.rows import RowSelection
from rowwise.train.evaluate import evaluation_mode
from rowwise.train.step import autocast

PART = ".part"
WRITERS = {".parquet": pq.ParquetWriter, ".csv": csv.CSVWriter}


def predict(
    resolved: ResolvedRecipe,
    model: nn.Module,
    rows: RowSelection,
    out: Path,
    keep: Sequence[str] = (),
    tell: Callable[[int, int], None] | None = None,
) -> int:
    """Write a line for each row: its key (or number, without a key), and each label's logit and probability.

    Args:
        resolved: the recipe that the model was trained by.
        model: the trained model.
        rows: the rows to predict for.
        out: the file, .parquet or .csv.
        keep: input columns that each line has, too.
        tell: called with (splits done, splits in all).
    """
    if out.suffix not in WRITERS:
        raise SpecError(f"--out {out}: want a name that ends in {' or '.join(WRITERS)}")
    columns = structs.replace(resolved.columns, labels=(), weight=None, time=None, key=None)
    key, splits, done = resolved.columns.key, rows.reader.splits(), 0
    written = 0
    task = PreparationTask(reader=rows.reader, splits=splits, preparation=_preparation(resolved, columns, rows))
    if key is not None and key not in rows.reader.schema.names:
        key = None
    kept = tuple(dict.fromkeys((*((key,) if key else ()), *keep)))
    _check_kept(kept, {*_names(resolved.tasks), *(() if key else ("row",))}, rows, out)
    part = out.with_name(out.name + PART)
    writer: pq.ParquetWriter | csv.CSVWriter | None = None
    try:
        with evaluation_mode(model):
            for index, split in enumerate(splits):
                opened = task.open(index, 0)
                order_R, count = opened.order_R, opened.table.num_rows
                logits_RK = _predict_split(resolved, model, opened)
                named = {} if key else {"row": pa.array(np.arange(done, done + count))}
                if kept:
                    given = rows.reader.read(split, kept)
                    named |= {name: given[name] for name in kept}
                if order_R is not None:
                    named = {name: values.take(order_R) for name, values in named.items()}
                lines = pa.table(named | _predictions(resolved.tasks, logits_RK))
                writer = writer or WRITERS[out.suffix](part, lines.schema)
                writer.write_table(lines)
                done += count
                written += lines.num_rows
                if tell is not None:
                    tell(index + 1, len(splits))
        if writer is None:
            raise DataError("no rows to predict for: want data with at least one row")
        writer.close()
        part.replace(out)
    finally:
        if writer is not None:
            writer.close()
        part.unlink(missing_ok=True)
    return written


def _preparation(resolved: ResolvedRecipe, columns: Columns, rows: RowSelection) -> Preparation:
    return Preparation(
        columns=columns,
        table_rows=table_rows_for_ids(columns, resolved.tables),
        share=rows.share,
        shuffle=False,
        transforms=to_json(serving(resolved.transforms)),
        where=rows.where,
    )


def _predict_split(resolved: ResolvedRecipe, model: nn.Module, opened: ReadSplit) -> Tensor:
    """Logits [R, K] of all rows of a split, computed batch by batch."""
    training, size, columns = resolved.recipe.train, resolved.recipe.evaluate.batch, opened.preparation.columns
    encoded = opened.encode()
    found = [torch.empty(0, len(resolved.tasks))]
    for begin in range(0, encoded.rows, size):
        batch = collate([SplitRows(encoded, begin, min(begin + size, encoded.rows))], columns).to(training.device)
        with autocast(training):
            found.append(model(batch).float().cpu())
    return torch.cat(found)


def _check_kept(kept: Sequence[str], made: Collection[str], rows: RowSelection, out: Path) -> None:
    """Refuse columns that are not there, that a prediction is called like, or that the file cannot hold."""
    splits = rows.reader.splits()
    check_columns(kept, rows.reader.schema, splits[0].source if splits else "the rows")
    for name in kept:
        kind = rows.reader.schema.field(name).type
        if name in made:
            raise SpecError(f"--keep {name}: the file has a column of this name already: leave it out")
        if out.suffix == ".csv" and is_list(kind):
            raise SpecError(f"--keep {name}: column {name!r} holds {kind}, which CSV cannot: want --out FILE.parquet")


def _names(tasks: Sequence[str]) -> list[str]:
    return [f"{task}_{what}" for task in tasks for what in ("logit", "probability")]


def _predictions(tasks: Sequence[str], logits_RK: Tensor) -> dict[str, pa.Array]:
    columns = [part for logits_R in logits_RK.unbind(1) for part in (logits_R, logits_R.sigmoid())]
    return {name: pa.array(values_R.numpy()) for name, values_R in zip(_names(tasks), columns, strict=True)}
