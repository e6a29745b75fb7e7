"""Writes predictions for rows as Parquet or CSV, in the order of the rows, each with its key. Labels are not read.

A row's prediction does not depend on the rows it is computed with ([Note: Blocks of rows] in `models/inference.py`).
Splits are predicted one by one, into a temporary file that is renamed at the end.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from pyarrow import csv, types
from pyarrow import parquet as pq
from torch import Tensor, nn

from rowwise.errors import DataError, SpecError
from rowwise.ingest.collate import SplitRows, collate
from rowwise.ingest.columns import Columns
from rowwise.ingest.prepare import ReadSplit
from rowwise.ingest.reader import Split, check_columns, split_names
from rowwise.ingest.transform import LoadedTransforms, serving
from rowwise.models.inference import RowBlocks, inference_mode
from rowwise.models.link import AmountLink
from rowwise.recipes.held_out import bind_preparation, held_out_rows
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.rows import RowSelection, make_task
from rowwise.serve.answer import prediction_columns, prediction_names, predictions_of
from rowwise.serve.forward import Logits, choose_blocks_of
from rowwise.spec import Table
from rowwise.train.on_device import to_device

PART = ".part"
ALL = "all"  # in place of the columns to keep
WRITERS = {".parquet": pq.ParquetWriter, ".csv": csv.CSVWriter}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A trained model, and all that makes predictions of rows."""

    model: nn.Module
    columns: Columns
    tables: tuple[Table, ...]
    transforms: LoadedTransforms
    tasks: tuple[str, ...]
    link: AmountLink | None  # None: logits of labels 0 and 1
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
            link=resolved.link,
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
    """Write a line for each row: its key (its number, if there is none), and each label's logit and probability,
    or output and amount.

    Args:
        predictor: the trained model.
        rows: the rows to predict for.
        out: the file, .parquet or .csv.
        keep: input columns that are copied to each line, in this order, or several between commas; `ALL` alone: all.
        tell: called with the numbers of completed splits and of all splits.

    Returns:
        The number of lines.
    """
    if out.suffix not in WRITERS:
        raise SpecError(f"--out {out}", f"a name that ends in {' or '.join(WRITERS)}")
    key, rows_read, lines_written = predictor.columns.key, 0, 0
    columns = structs.replace(predictor.columns, labels=(), weight=None, time=None, key=None)
    task = make_task(rows, columns, predictor.tables, predictor.transforms)
    splits = task.splits
    if key is not None and key not in rows.reader.schema.names:
        key = None
    copied = _copied(keep, key, rows.reader.schema)
    numbered = key is None and "row" not in copied
    _check_copied(copied, prediction_names(predictor.tasks, predictor.link), rows)
    temporary = out.with_name(out.name + PART)
    writer: pq.ParquetWriter | csv.CSVWriter | None = None
    try:
        with inference_mode(predictor.model, predictor.device, predictor.precision):
            for index, split in enumerate(splits):
                opened = task.open(index, 0)
                order_R, count = opened.order_R, opened.table.num_rows
                logits_RK = _predict_split(predictor, opened)
                by_name = {"row": pa.array(np.arange(rows_read, rows_read + count))} if numbered else {}
                by_name |= _read_copied(rows, split, copied, out.suffix)
                if order_R is not None:  # only these rows of the split have logits
                    by_name = {name: values.take(order_R) for name, values in by_name.items()}
                lines = pa.table(by_name | _columns_of(predictor, logits_RK))
                writer = writer or WRITERS[out.suffix](temporary, lines.schema)
                writer.write_table(lines)
                rows_read += count
                lines_written += lines.num_rows
                if tell is not None:
                    tell(index + 1, len(splits))
        if writer is None:
            raise DataError("no rows to predict for", "data with at least one row")
        writer.close()
        temporary.replace(out)
    finally:
        if writer is not None:
            writer.close()
        temporary.unlink(missing_ok=True)
    return lines_written


def _columns_of(predictor: Predictor, logits_RK: Tensor) -> dict[str, pa.Array]:
    return prediction_columns(predictor.tasks, predictor.link, predictions_of(logits_RK, predictor.link))


def _predict_split(predictor: Predictor, opened: ReadSplit) -> Tensor:
    """Logits [R, K] of all rows of a split, computed batch by batch."""
    encoded, logits_of = opened.encode(), logits_on(predictor.model, predictor.device)
    logits = [torch.empty(0, len(predictor.tasks))]
    for begin, end, padding in predictor.blocks.cut(encoded.rows, predictor.batch):
        last = [SplitRows(encoded, end - 1, end)] * padding
        batch = collate([SplitRows(encoded, begin, end), *last], opened.preparation.columns)
        logits.append(logits_of(batch)[: end - begin])
    return torch.cat(logits)


def _copied(keep: Sequence[str], key: str | None, schema: pa.Schema) -> tuple[str, ...]:
    names = schema.names if tuple(keep) == (ALL,) else split_names(keep, schema)
    return tuple(dict.fromkeys((*((key,) if key else ()), *names)))


def _check_copied(copied: Sequence[str], predicted: Collection[str], rows: RowSelection) -> None:
    """Raise for columns that the rows lack, or that have the name of a prediction."""
    splits = rows.reader.splits()
    check_columns(copied, rows.reader.schema, splits[0].source if splits else "the rows")
    for name in copied:
        if name in predicted:
            raise SpecError(f"--keep {name}: the file has a column of this name already", hint="leave it out")


def _read_copied(rows: RowSelection, split: Split, copied: Sequence[str], suffix: str) -> dict[str, pa.ChunkedArray]:
    """The columns that are copied, as the file can hold them."""
    if not copied:
        return {}
    table = rows.reader.read(split, copied)
    return {name: _as_csv(table[name]) if suffix == ".csv" else table[name] for name in copied}


def _as_csv(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as CSV can hold it: lists and structs as JSON, bytes as text."""
    if types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if types.is_nested(kind):
        write = partial(json.dumps, ensure_ascii=False, default=_in_json)
    elif types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        write = _in_json
    else:
        return values.cast(pa.large_string()) if types.is_string_view(kind) else values
    texts = [None if value is None else write(value) for value in values.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.large_string())])


def _in_json(value: object) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
