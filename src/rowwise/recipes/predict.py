"""Writes predictions for rows as Parquet or CSV, in the order of the rows, each with its key. Labels are not read.

A row's prediction does not depend on the rows it is computed with ([Note: Blocks of rows] in `models/inference.py`).
Splits are predicted one by one, into a temporary file that is renamed at the end.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
from rowwise.ingest.transform import LoadedTransforms, serving, to_json
from rowwise.models.inference import RowBlocks, inference_mode
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.held_out import bind_preparation, held_out_rows
from rowwise.recipes.rows import RowSelection
from rowwise.serve.answer import prediction_columns, prediction_names, predictions_of
from rowwise.serve.forward import Logits, choose_blocks_of
from rowwise.spec import Table
from rowwise.train.on_device import to_device

PART = ".part"
WRITERS = {".parquet": pq.ParquetWriter, ".csv": csv.CSVWriter}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A trained model, and all that makes predictions of rows."""

    model: nn.Module
    columns: Columns
    tables: tuple[Table, ...]
    transforms: LoadedTransforms
    tasks: tuple[str, ...]
    device: str
    precision: str
    batch: int  # rows computed together, at most
    blocks: RowBlocks

    @classmethod
    def of_run(cls, resolved: ResolvedRecipe, model: nn.Module) -> Self:
        """The model of a run; a few rows of its data test in which blocks a row keeps its bits."""
        training, sample = resolved.recipe.train, held_out_rows(resolved)
        with inference_mode(model, training.device, training.precision):
            blocks = choose_blocks_of(
                bind_preparation(resolved, sample.schema), logits_on(model, training.device), sample
            )
        return cls(
            model=model,
            columns=resolved.columns,
            tables=resolved.tables,
            transforms=serving(resolved.transforms),
            tasks=resolved.tasks,
            device=training.device,
            precision=training.precision,
            batch=resolved.recipe.evaluate.batch,
            blocks=blocks,
        )


def logits_on(model: nn.Module, device: str) -> Logits:
    """The logits of a model on a device, brought back to the host."""
    return lambda batch: model(to_device(batch, model, device)).float().cpu()


def predict(
    predictor: Predictor,
    rows: RowSelection,
    out: Path,
    keep: Sequence[str] = (),
    tell: Callable[[int, int], None] | None = None,
) -> int:
    """Write a line for each row: its key (its number, if there is none), and each label's logit and probability.

    Args:
        predictor: the trained model.
        rows: the rows to predict for.
        out: the file, .parquet or .csv.
        keep: input columns that are copied to each line.
        tell: called with the numbers of completed splits and of all splits.

    Returns:
        The number of lines.
    """
    if out.suffix not in WRITERS:
        raise SpecError(f"--out {out}: want a name that ends in {' or '.join(WRITERS)}")
    key, splits, rows_read, lines_written = predictor.columns.key, rows.reader.splits(), 0, 0
    task = PreparationTask(reader=rows.reader, splits=splits, preparation=_preparation(predictor, rows))
    if key is not None and key not in rows.reader.schema.names:
        key = None
    copied = tuple(dict.fromkeys((*((key,) if key else ()), *keep)))
    _check_copied(copied, {*prediction_names(predictor.tasks), *(() if key else ("row",))}, rows, out)
    temporary = out.with_name(out.name + PART)
    writer: pq.ParquetWriter | csv.CSVWriter | None = None
    try:
        with inference_mode(predictor.model, predictor.device, predictor.precision):
            for index, split in enumerate(splits):
                opened = task.open(index, 0)
                order_R, count = opened.order_R, opened.table.num_rows
                logits_RK = _predict_split(predictor, opened)
                by_name = {} if key else {"row": pa.array(np.arange(rows_read, rows_read + count))}
                if copied:
                    table = rows.reader.read(split, copied)
                    by_name |= {name: table[name] for name in copied}
                if order_R is not None:  # only these rows of the split have logits
                    by_name = {name: values.take(order_R) for name, values in by_name.items()}
                lines = pa.table(by_name | prediction_columns(predictor.tasks, predictions_of(logits_RK)))
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


def _preparation(predictor: Predictor, rows: RowSelection) -> Preparation:
    columns = structs.replace(predictor.columns, labels=(), weight=None, time=None, key=None)
    return Preparation(
        columns=columns,
        table_rows=table_rows_for_ids(columns, predictor.tables),
        share=rows.share,
        shuffle=False,
        transforms=to_json(predictor.transforms),
        where=rows.where,
    )


def _predict_split(predictor: Predictor, opened: ReadSplit) -> Tensor:
    """Logits [R, K] of all rows of a split, computed batch by batch."""
    encoded, logits_of = opened.encode(), logits_on(predictor.model, predictor.device)
    logits = [torch.empty(0, len(predictor.tasks))]
    for begin, end, padding in predictor.blocks.cut(encoded.rows, predictor.batch):
        last = [SplitRows(encoded, end - 1, end)] * padding
        batch = collate([SplitRows(encoded, begin, end), *last], opened.preparation.columns)
        logits.append(logits_of(batch)[: end - begin])
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
