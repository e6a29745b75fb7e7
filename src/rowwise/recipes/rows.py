"""The training, validation and test rows of a recipe; no row is in two of them.

Validation and test rows are files that the recipe names, else the dataset's own, else a share of the training rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import structs
from pyarrow import compute as pc

from rowwise.base.errors import DataError, SpecError
from rowwise.base.storage.read_cache import CacheFolder
from rowwise.ingest.batcher import table_rows_for_ids
from rowwise.ingest.block import Ints
from rowwise.ingest.columns import Columns
from rowwise.ingest.datasets.catalog import STORED, load
from rowwise.ingest.datasets.dataset import Dataset, PartReader
from rowwise.ingest.datasets.files import DELIMITED, from_files, make_dataset, open_files, open_named, pin
from rowwise.ingest.datasets.synthetic import synthetic
from rowwise.ingest.dialect import Dialect
from rowwise.ingest.prepare import Preparation, PreparationTask
from rowwise.ingest.reader import Reader, Split, check_columns
from rowwise.ingest.share import Share
from rowwise.ingest.transform import LoadedTransforms, serving, to_json
from rowwise.ingest.where import Comparison, RowFilter, TextTimeComparison, parse
from rowwise.recipes.recipe import Data, TimeShare
from rowwise.tables.spec import Table

WHOLE, NO_FILTER = Share(), RowFilter()
SYNTHETIC = (1_000_000, 100_000)  # default numbers of training and test rows


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The rows of a reader that are in a share and pass a filter."""

    reader: Reader
    share: Share = WHOLE
    where: RowFilter = NO_FILTER


class SelectedRows(NamedTuple):
    """Rows of a split that are in a selection."""

    reader: Reader
    split: Split
    names: tuple[str, ...]  # columns that a prediction reads
    order_R: Ints  # ascending

    def read(self, places_R: Ints | None = None) -> pa.Table:
        """Read the rows at these positions of `order_R`; None: all."""
        order_R = self.order_R if places_R is None else self.order_R[places_R]
        return self.reader.read(self.split, self.names).take(pa.array(order_R)).combine_chunks()


def make_task(
    rows: RowSelection,
    columns: Columns,
    tables: Sequence[Table],
    transforms: LoadedTransforms,
    quarantine: str | None = None,
) -> PreparationTask:
    """A task that prepares the rows of a selection as for serving, in stored order."""
    preparation = Preparation(
        columns=columns,
        table_rows=table_rows_for_ids(columns, tables),
        share=rows.share,
        shuffle=False,
        transforms=to_json(serving(transforms)),
        where=rows.where,
        quarantine=quarantine,
    )
    return PreparationTask(reader=rows.reader, splits=rows.reader.splits(), preparation=preparation)


def good_rows(
    rows: RowSelection, columns: Columns, tables: Sequence[Table], transforms: LoadedTransforms
) -> Iterator[SelectedRows]:
    """The good rows of a selection, by split; skips splits without good rows."""
    task = make_task(rows, columns, tables, transforms, quarantine="")  # drops bad rows
    for index, split in enumerate(task.splits):
        opened = task.open(index, 0)
        if opened.rows:
            order_R = np.arange(opened.rows) if opened.order_R is None else opened.order_R
            yield SelectedRows(rows.reader, split, tuple(task.preparation.names), order_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRows:
    """Training, validation and test rows of a recipe, and their dataset."""

    dataset: Dataset
    train: RowSelection
    valid: RowSelection | None
    test: RowSelection | None


def use_absolute_paths(data: Data) -> Data:
    """The section with absolute paths and tables' versions, so that a resumed run finds its rows from anywhere."""
    fields = {name: getattr(data, name) for name in data.__struct_fields__}
    for name in ("dataset", "valid", "test"):
        if fields[name] is not None:
            fields[name] = pin(fields[name])
    if data.dataset in STORED:  # others are not looked up in `folder`
        fields["folder"] = str(Path(data.folder).absolute())
    return Data(**fields)


def open_data(data: Data, columns: Columns | None = None, tables: tuple[Table, ...] = ()) -> RecipeRows:
    """Open the rows of a recipe; files are not inspected if `columns` and `tables` are given."""
    where = parse(data.where)
    dataset = _open_dataset(data, where, columns, tables)
    # `where` filters the dataset's rows, not named files.
    valid = _open_named("valid", data.valid, data) or _dataset_rows(dataset.valid, where)
    test = _open_named("test", data.test, data) or _dataset_rows(dataset.test, where)
    if isinstance(data.share, TimeShare):
        train, taken = _take_by_time(RowSelection(dataset.train, where=where), data, {"valid": valid, "test": test})
        return RecipeRows(
            dataset=dataset, train=train, valid=valid or taken.get("valid"), test=test or taken.get("test")
        )
    # Training rows are taken only for uses without rows of their own.
    shares = {"valid": 0.0 if valid else data.valid_share, "test": 0.0 if test else data.test_share}
    take = _take_last if data.share == "last" else partial(_take_random, group=data.group)
    train, taken = take(RowSelection(dataset.train, where=where), shares)
    return RecipeRows(dataset=dataset, train=train, valid=valid or taken.get("valid"), test=test or taken.get("test"))


def _open_named(key: str, name: str | None, data: Data) -> RowSelection | None:
    """The files that the recipe names in data.valid or data.test."""
    if name is None:
        return None
    reader = _open_files(name, data)
    if reader is None:
        kind = "csv" if name.endswith(DELIMITED) else "parquet"
        raise SpecError(f"data.{key}={name!r}", f"parquet:PATH or csv:PATH, such as {kind}:{name}")
    return RowSelection(reader)


def _dataset_rows(reader: Reader | None, where: RowFilter) -> RowSelection | None:
    return None if reader is None else RowSelection(reader, where=where)


def open_reader(name: str, text: Dialect | None = None) -> Reader:
    """A reader of parquet:PATH and the like, or of a path by its files' endings; `text`: dialect of text files."""
    return open_files(name, text)


def _open_dataset(data: Data, where: RowFilter, columns: Columns | None, tables: tuple[Table, ...]) -> Dataset:
    if data.dataset == "synthetic":
        return synthetic(data.rows or SYNTHETIC[0], data.test_rows or SYNTHETIC[1])
    if data.rows is not None or data.test_rows is not None:
        raise SpecError(
            f"data.rows and data.test_rows are for synthetic data, not {data.dataset!r}", hint="set train.steps instead"
        )
    names = (data.dataset, data.valid or "", data.test or "")
    if data.text is not None and not any(name.startswith("csv:") for name in names):
        raise SpecError(f"data.text with {data.dataset}: no text file is read", hint="leave it out")
    files = _open_files(data.dataset, data, where)
    if files is None:
        return load(data.dataset, Path(data.folder))
    uncounted = None if columns is None else columns.uncounted(tables)
    if columns is not None and not uncounted:
        return make_dataset(files, columns, tables)
    labels = columns.labels if columns is not None else ()
    return from_files(files, data.label or labels, sparse=uncounted or ())


def _open_files(name: str, data: Data, where: RowFilter = NO_FILTER) -> Reader | None:
    cache = data.cache
    cache_folder = None if cache is None else CacheFolder(Path(cache.folder).absolute(), cache.size_bytes)
    return open_named(name, where, cache_folder, data.text)


def _take_by_time(
    rows: RowSelection, data: Data, named: dict[str, RowSelection | None]
) -> tuple[RowSelection, dict[str, RowSelection]]:
    """Rows before the first border train; each window between borders is a part."""
    share = data.share
    assert isinstance(share, TimeShare)
    borders = {"valid": share.valid_from, "test": share.test_from}
    for name, border in borders.items():
        if border is not None and named[name] is not None:
            conflict = f"data.{name} or the dataset has {name} rows already"
            raise SpecError(f"data.share.{name}_from={border!r}: {conflict}", f"one source of {name} rows")
    kind = partial(TextTimeComparison, formats=share.formats) if share.formats else Comparison
    later = [kind(column=share.column, op=">=", value=at) for at in borders.values() if at is not None]
    ends = [structs.replace(bound, op="<") for bound in later]
    windows = [ends[:1], *zip(later, (*ends[1:], None), strict=True)]
    splits = rows.reader.splits()
    source = splits[0].source if splits else data.dataset
    selections: list[RowSelection] = []
    for window in windows:
        where = RowFilter(all_of=(*rows.where.all_of, *(bound for bound in window if bound is not None)))
        try:
            where.check(rows.reader.schema, source)
        except DataError as error:
            raise DataError(f"data.share: {error}") from None
        # A Parquet reader skips row groups without rows of the window.
        selection = RowSelection(_open_files(data.dataset, data, where) or rows.reader, where=where)
        if not _has_rows(selection, backwards=bool(selections)):  # training rows are mostly in the first splits
            tests = " and ".join(f"{bound.column} {bound.op} {bound.value}" for bound in where.all_of)
            span = _describe_range(rows, share.column)
            raise DataError(f"data.share: {data.dataset}: no row has {tests}; {span}", "another time")
        selections.append(selection)
    names = [name for name, border in borders.items() if border is not None]
    return selections[0], dict(zip(names, selections[1:], strict=True))


def _has_rows(rows: RowSelection, *, backwards: bool) -> bool:
    """Whether any row passes the filter: reads its columns split by split, up to the first such row."""
    splits = rows.reader.splits()
    ordered = reversed(splits) if backwards else splits
    return any(rows.where.mask(rows.reader.read(split, rows.where.columns)).any() for split in ordered)


def _describe_range(rows: RowSelection, column: str) -> str:
    """The range of a column in words, such as: column 'day' goes from 3 to 9."""
    low: Any = None
    high: Any = None
    for split in rows.reader.splits():
        table = rows.reader.read(split, tuple(dict.fromkeys((column, *rows.where.columns))))
        extremes = pc.call_function("min_max", [table.filter(pa.array(rows.where.mask(table)))[column]])
        if extremes["min"].is_valid:
            ends = extremes["min"].as_py(), extremes["max"].as_py()
            low, high = (ends[0], ends[1]) if low is None else (min(low, ends[0]), max(high, ends[1]))
    return f"column {column!r} " + ("has no value" if low is None else f"goes from {low} to {high}")


def _take_random(
    rows: RowSelection, shares: dict[str, float], group: str | None
) -> tuple[RowSelection, dict[str, RowSelection]]:
    """The remaining rows, and a random share of rows or groups for each use."""
    if group is not None:
        check_columns((group,), rows.reader.schema, "data.group")
    begin = 0.0
    taken: dict[str, RowSelection] = {}
    for use, share in shares.items():
        if share:
            taken[use] = replace(rows, share=Share(begin=begin, end=begin + share, group=group))
            begin += share
    return replace(rows, share=Share(begin=begin, group=group)), taken


def _take_last(rows: RowSelection, shares: dict[str, float]) -> tuple[RowSelection, dict[str, RowSelection]]:
    """The remaining rows, and the last splits for each use: test rows from the end, then validation rows."""
    splits = list(rows.reader.splits())
    total = len(splits)
    taken: dict[str, RowSelection] = {}
    for name in ("test", "valid"):
        count = round(shares[name] * total)
        if shares[name] and (not count or count >= len(splits)):
            raise DataError(
                f"data.share=last: {total} splits are too few to take {shares[name]:.0%} as {name} rows",
                "data.share=random, or data.valid and data.test",
            )
        if count:
            taken[name] = replace(rows, reader=PartReader(rows.reader, splits[-count:]))
            del splits[-count:]
    return (replace(rows, reader=PartReader(rows.reader, splits)) if taken else rows), taken
