"""Writes predictions for rows of files as Parquet: rows in their order, each with its key. Labels are not read.

Streams one split at a time, into a temporary file that is renamed at the end.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from pyarrow import parquet as pq
from torch import Tensor, nn

from rowwise.errors import DataError
from rowwise.ingest.batcher import table_rows_for_ids
from rowwise.ingest.collate import SplitRows, collate
from rowwise.ingest.columns import Columns
from rowwise.ingest.prepare import Preparation, PreparationTask, ReadSplit
from rowwise.ingest.transform import serving, to_json
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.rows import RowSelection
from rowwise.train.evaluate import evaluation_mode
from rowwise.train.step import autocast

PART = ".part"


def predict(
    resolved: ResolvedRecipe,
    model: nn.Module,
    rows: RowSelection,
    out: Path,
    tell: Callable[[int, int], None] | None = None,
) -> int:
    """Write a line for each row: its key (or number, without a key), and each label's logit and probability.

    Args:
        resolved: the recipe that the model was trained by.
        model: the trained model.
        rows: the rows to predict for.
        out: the Parquet file.
        tell: called with (splits done, splits in all).
    """
    columns = structs.replace(resolved.columns, labels=(), weight=None, time=None, key=None)
    key, splits, done = resolved.columns.key, rows.reader.splits(), 0
    written = 0
    task = PreparationTask(reader=rows.reader, splits=splits, preparation=_preparation(resolved, columns, rows))
    if key is not None and key not in rows.reader.schema.names:
        key = None
    part = out.with_name(out.name + PART)
    writer: pq.ParquetWriter | None = None
    try:
        with evaluation_mode(model):
            for index, split in enumerate(splits):
                opened = task.open(index, 0)
                order_R, count = opened.order_R, opened.table.num_rows
                logits_RK = _predict_split(resolved, model, opened)
                keys = rows.reader.read(split, (key,))[key] if key else pa.array(np.arange(done, done + count))
                lines = _output_rows(
                    resolved.tasks, key or "row", keys if order_R is None else keys.take(order_R), logits_RK
                )
                writer = writer or pq.ParquetWriter(part, lines.schema)
                writer.write_table(lines)
                done += count
                written += lines.num_rows
                if tell is not None:
                    tell(index + 1, len(splits))
        if writer is None:
            raise DataError("there are no rows to predict for")
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


def _output_rows(tasks: tuple[str, ...], key: str, keys: pa.Array, logits_RK: Tensor) -> pa.Table:
    columns = {key: keys}
    for k, task in enumerate(tasks):
        columns[f"{task}_logit"] = pa.array(logits_RK[:, k].numpy())
        columns[f"{task}_probability"] = pa.array(logits_RK[:, k].sigmoid().numpy())
    return pa.table(columns)
