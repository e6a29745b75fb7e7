"""Writes predictions for rows as Parquet or CSV, in the order of the rows, each with its key. Labels are not read.

Splits are predicted one by one, into a temporary file that is renamed at the end.
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
from rowwise.train.on_device import to_device
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
    """Write a line for each row: its key (its number, if there is none), and each label's logit and probability.

    Args:
        resolved: the recipe that the model was trained by.
        model: the trained model.
        rows: the rows to predict for.
        out: the file, .parquet or .csv.
        keep: input columns that are copied to each line.
        tell: called with the numbers of completed splits and of all splits.

    Returns:
        The number of lines.
    """
    if out.suffix not in WRITERS:
        raise SpecError(f"--out {out}: want a name that ends in {' or '.join(WRITERS)}")
    columns = structs.replace(resolved.columns, labels=(), weight=None, time=None, key=None)
    key, splits, rows_read, lines_written = resolved.columns.key, rows.reader.splits(), 0, 0
    task = PreparationTask(reader=rows.reader, splits=splits, preparation=_preparation(resolved, columns, rows))
    if key is not None and key not in rows.reader.schema.names:
        key = None
    copied = tuple(dict.fromkeys((*((key,) if key else ()), *keep)))
    _check_copied(copied, {*_column_names(resolved.tasks), *(() if key else ("row",))}, rows, out)
    temporary = out.with_name(out.name + PART)
    writer: pq.ParquetWriter | csv.CSVWriter | None = None
    try:
        with evaluation_mode(model):
            for index, split in enumerate(splits):
                opened = task.open(index, 0)
                order_R, count = opened.order_R, opened.table.num_rows
                logits_RK = _predict_split(resolved, model, opened)
                by_name = {} if key else {"row": pa.array(np.arange(rows_read, rows_read + count))}
                if copied:
                    table = rows.reader.read(split, copied)
                    by_name |= {name: table[name] for name in copied}
                if order_R is not None:  # only these rows of the split have logits
                    by_name = {name: values.take(order_R) for name, values in by_name.items()}
                lines = pa.table(by_name | _predictions(resolved.tasks, logits_RK))
                writer = writer or WRITERS[out.suffix](temporary, lines.schema)
                writer.write_table(lines)
                rows_read += count
                lines_written += lines.num_rows
                if tell is not None:
                    tell(index + 1, len(splits))
        if writer is None:
            raise DataError("no rows to predict for: want data with at least one row")
        writer.close()
        temporary.replace(out)
    finally:
        if writer is not None:
            writer.close()
        temporary.unlink(missing_ok=True)
    return lines_written


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
    logits = [torch.empty(0, len(resolved.tasks))]
    for begin in range(0, encoded.rows, size):
        rows = SplitRows(encoded, begin, min(begin + size, encoded.rows))
        batch = to_device(collate([rows], columns), model, training.device)
        with autocast(training):
            logits.append(model(batch).float().cpu())
    return torch.cat(logits)


def _check_copied(copied: Sequence[str], predicted: Collection[str], rows: RowSelection, out: Path) -> None:
    """Raise for columns that the rows lack, that have the name of a prediction, or that the file cannot hold."""
    splits = rows.reader.splits()
    check_columns(copied, rows.reader.schema, splits[0].source if splits else "the rows")
    for name in copied:
        kind = rows.reader.schema.field(name).type
        if name in predicted:
            raise SpecError(f"--keep {name}: the file has a column of this name already: leave it out")
        if out.suffix == ".csv" and is_list(kind):
            raise SpecError(f"--keep {name}: column {name!r} holds {kind}, which CSV cannot: want --out FILE.parquet")


def _column_names(tasks: Sequence[str]) -> list[str]:
    return [f"{task}_{kind}" for task in tasks for kind in ("logit", "probability")]


def _predictions(tasks: Sequence[str], logits_RK: Tensor) -> dict[str, pa.Array]:
    columns = [values_R for logits_R in logits_RK.unbind(1) for values_R in (logits_R, logits_R.sigmoid())]
    return {name: pa.array(values_R.numpy()) for name, values_R in zip(_column_names(tasks), columns, strict=True)}
