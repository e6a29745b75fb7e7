"""Writes predictions for rows as Parquet or CSV, in the order of the rows, each with its key. Labels are not read.

A sequence model has no labels: it predicts the top items for each row's list, by an exact search even if the version
has an index.

A row's prediction does not depend on the rows it is computed with ([Note: Blocks of rows] in `models/inference.py`).
Splits are predicted one by one, into a temporary file that is renamed at the end.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from pyarrow import csv, types
from pyarrow import parquet as pq
from torch import Tensor, nn

from rowwise.base.errors import DataError, SpecError
from rowwise.ingest.bound import BoundPreparation
from rowwise.ingest.collate import SplitRows, collate
from rowwise.ingest.prepare import ReadSplit
from rowwise.ingest.reader import Split, check_columns, split_names
from rowwise.ingest.transform import LoadedTransforms, serving
from rowwise.models.inference import RowBlocks, inference_mode
from rowwise.models.next_item import NextItem
from rowwise.models.retrieval import nearest_items
from rowwise.recipes.held_out import held_out_rows
from rowwise.recipes.resolved import ModelParts, ResolvedRecipe
from rowwise.recipes.rows import RowSelection, make_task
from rowwise.recipes.towers import next_item_of
from rowwise.serve.answer import prediction_columns, prediction_names, predictions_of
from rowwise.serve.forward import Logits, choose_blocks_of
from rowwise.serve.retrieval import MAX_ITEMS
from rowwise.tables.batch import Batch
from rowwise.train.on_device import to_device

ArrowColumns = dict[str, pa.Array | pa.ChunkedArray]
PART = ".part"
ALL = "all"  # keeps all columns
ITEMS, SCORES = "items", "scores"  # columns of the best items for a list
DEFAULT_K = 10  # items per list
ROWS = 1024  # lists per Arrow array, whose offsets have 32 bits
WRITERS = {".parquet": pq.ParquetWriter, ".csv": csv.CSVWriter}


class RankedItems(NamedTuple):
    """The candidate items of a sequence model."""

    keys: pa.Array
    vectors_ID: Tensor

    @property
    def kinds(self) -> dict[str, pa.DataType]:
        """The columns of the best items, and their types."""
        return {ITEMS: pa.list_(self.keys.type), SCORES: pa.list_(pa.float32())}

    def best(self, lists_RD: Tensor, k: int) -> dict[str, pa.Array]:
        """The k items with the largest dots for each of at least one vector, best first, bitwise as in serving."""
        dots, indices = zip(*(nearest_items(list_D, self.vectors_ID, k) for list_D in lists_RD), strict=True)
        offsets = pa.array(np.arange(len(indices) + 1) * len(indices[0]), pa.int32())
        keys = self.keys.take(pa.array(torch.cat(indices).numpy()))
        values = {ITEMS: keys, SCORES: pa.array(torch.cat(dots).numpy())}
        return {name: pa.ListArray.from_arrays(offsets, flat) for name, flat in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A trained model with everything that predicts raw rows."""

    model: nn.Module
    parts: ModelParts
    transforms: LoadedTransforms
    precision: str
    batch: int  # maximum rows per forward
    blocks: RowBlocks
    items: RankedItems | None = None  # candidates of a sequence model; None: the model has logits

    @property
    def names(self) -> list[str]:
        """The columns of a prediction."""
        return [ITEMS, SCORES] if self.items is not None else prediction_names(self.parts.tasks, self.parts.link)

    @classmethod
    def of_run(cls, resolved: ResolvedRecipe, model: nn.Module) -> Self:
        """The model of a run; held-out rows choose the blocks in which a row keeps its bits."""
        training, sample = resolved.recipe.train, held_out_rows(resolved)
        with inference_mode(model, training.device, training.precision):
            preparation = resolved.parts.bind(sample.schema, resolved.transforms)
            blocks = choose_blocks_for(model, training.device, preparation, sample)
        return cls(
            model=model,
            parts=resolved.parts,
            transforms=serving(resolved.transforms),
            precision=training.precision,
            batch=resolved.recipe.evaluate.batch,
            blocks=blocks,
        )


def logits_on(model: nn.Module, device: str) -> Logits:
    """The logits of a model on a device, copied to the host."""
    return _on_host(model.logits if isinstance(model, NextItem) else model, model, device)


def choose_blocks_for(model: nn.Module, device: str, preparation: BoundPreparation, sample: pa.Table) -> RowBlocks:
    """The blocks in which a row keeps its bits; in `inference_mode`. Lists are tested in several lengths."""
    tested = _on_host(model.cut_vectors, model, device) if isinstance(model, NextItem) else logits_on(model, device)
    return choose_blocks_of(preparation, tested, sample)


def _on_host(function: Callable[[Batch], Tensor], model: nn.Module, device: str) -> Logits:
    return lambda batch: function(to_device(batch, model, device)).float().cpu()


def predict(
    predictor: Predictor,
    rows: RowSelection,
    out: Path,
    keep: Sequence[str] = (),
    tell: Callable[[int, int], None] | None = None,
    k: int | None = None,
) -> int:
    """Write a line for each row: its key (its number, if there is none), and each label's logit and probability,
    or output and amount, or the best items for its list and their scores.

    Args:
        predictor: the trained model.
        rows: the rows to predict for.
        out: the file, .parquet or .csv.
        keep: input columns to copy to each line, in this order, each a name or names between commas; `ALL` alone: all.
        tell: called with the number of completed splits and the total.
        k: at most k items per list; None: 10.

    Returns:
        The number of lines.
    """
    best = _items_per_list(k, predictor.items)
    check_out(out)
    parts, rows_read, lines_written = predictor.parts, 0, 0
    key, columns = parts.columns.key, structs.replace(parts.columns, labels=(), weight=None, time=None, key=None)
    task = make_task(rows, columns, parts.tables, predictor.transforms)
    splits = task.splits
    if key is not None and key not in rows.reader.schema.names:
        key = None
    copied = _columns_to_copy(keep, key, rows.reader.schema)
    numbered = key is None and "row" not in copied
    _check_copied_columns(copied, predictor.names, rows)
    if not splits:
        raise DataError("no rows to predict for", "data with at least one row")
    with line_writer(out) as write, inference_mode(predictor.model, parts.device, predictor.precision):
        for index, split in enumerate(splits):
            opened = task.open(index, 0)
            order_R, count = opened.order_R, opened.table.num_rows
            by_name = {"row": pa.array(np.arange(rows_read, rows_read + count))} if numbered else {}
            by_name |= _read_copied_columns(rows, split, copied, out.suffix)
            if order_R is not None:  # only these rows of the split have logits
                by_name = {name: values.take(order_R) for name, values in by_name.items()}
            lines = pa.table(by_name | _predict_split(predictor, opened, best, out.suffix))
            write(lines)
            rows_read += count
            lines_written += lines.num_rows
            if tell is not None:
                tell(index + 1, len(splits))
    return lines_written


def check_out(out: Path) -> None:
    """Raise for a name of another format, or without a folder."""
    if out.suffix not in WRITERS:
        raise SpecError(f"--out {out}", f"a name that ends in {' or '.join(WRITERS)}")
    if not out.parent.is_dir() or (out.exists() and not out.is_file()):
        raise SpecError(f"--out {out}", "the name of a file in an existing folder")


@contextmanager
def line_writer(out: Path) -> Iterator[Callable[[pa.Table], None]]:
    """A function that writes lines to a temporary file, which is renamed at the end; an error leaves no file."""
    temporary, writers = out.with_name(out.name + PART), list[pq.ParquetWriter | csv.CSVWriter]()

    def write(lines: pa.Table) -> None:
        if not writers:
            writers.append(WRITERS[out.suffix](temporary, lines.schema))
        writers[0].write_table(lines)

    try:
        temporary.touch()  # an error of Python's names the file
        yield write
        for writer in writers:
            writer.close()
        temporary.replace(out)
    finally:
        for writer in writers:
            writer.close()
        temporary.unlink(missing_ok=True)


def _items_per_list(k: int | None, items: RankedItems | None) -> int:
    if k is not None and items is None:
        raise SpecError(f"--k {k}: the model ranks no items for a list", "a run with model.kind=sasrec or hstu")
    if k is not None and not 1 <= k <= MAX_ITEMS:
        raise SpecError(f"--k {k}", f"1 to {MAX_ITEMS} items")
    return DEFAULT_K if k is None else k


def _predict_split(predictor: Predictor, opened: ReadSplit, best: int, suffix: str) -> ArrowColumns:
    """The columns of predictions of all rows of a split, computed batch by batch."""
    encoded, model, items = opened.encode(), predictor.model, predictor.items
    tasks, link, device = predictor.parts.tasks, predictor.parts.link, predictor.parts.device
    outputs_of = logits_on(model, device)
    if items is not None:
        outputs_of = _on_host(next_item_of(model).vectors, model, device)
    parts = []
    for begin, end, padding in predictor.blocks.cut(encoded.rows, predictor.batch):
        filler = [SplitRows(encoded, end - 1, end)] * padding
        batch = collate([SplitRows(encoded, begin, end), *filler], opened.preparation.columns)
        parts.append(outputs_of(batch)[: end - begin])
    if items is not None:
        chunks = [items.best(lists_ND, best) for lists_BD in parts for lists_ND in lists_BD.split(ROWS)]
        ranked = {name: pa.chunked_array([chunk[name] for chunk in chunks], kind) for name, kind in items.kinds.items()}
        return {name: as_csv(values) for name, values in ranked.items()} if suffix == ".csv" else ranked
    return prediction_columns(tasks, link, predictions_of(torch.cat([torch.empty(0, len(tasks)), *parts]), link))


def _columns_to_copy(keep: Sequence[str], key: str | None, schema: pa.Schema) -> tuple[str, ...]:
    names = schema.names if tuple(keep) == (ALL,) else split_names(keep, schema)
    return tuple(dict.fromkeys((*((key,) if key else ()), *names)))


def _check_copied_columns(copied: Sequence[str], predicted: Collection[str], rows: RowSelection) -> None:
    """Raise for missing columns, and for names that predictions have."""
    splits = rows.reader.splits()
    check_columns(copied, rows.reader.schema, splits[0].source if splits else "the rows")
    for name in copied:
        if name in predicted:
            raise SpecError(f"--keep {name}: the file has a column of this name already", hint="leave it out")


def _read_copied_columns(rows: RowSelection, split: Split, copied: Sequence[str], suffix: str) -> ArrowColumns:
    """The copied columns, as the file format stores them."""
    if not copied:
        return {}
    table = rows.reader.read(split, copied)
    return {name: as_csv(table[name]) if suffix == ".csv" else table[name] for name in copied}


def as_csv(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """A column for CSV: lists and structs as JSON, bytes as text."""
    if types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if types.is_nested(kind):
        write = partial(json.dumps, ensure_ascii=False, default=_to_text)
    elif types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        write = _to_text
    else:
        return values.cast(pa.large_string()) if types.is_string_view(kind) else values
    texts = [None if value is None else write(value) for value in values.to_pylist()]
    return pa.array(texts, pa.large_string())


def _to_text(value: object) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
