"""Datasets that `rowwise data get` converts from downloads: a Parquet file for each part, and vocabularies of ids.

Rows keep their order in time, if any, so that a model is tested on rows later than its training rows.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray
from pyarrow import parquet as pq
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.datasets.dataset import PARTS, Dataset, open_stored
from rowwise.ingest.datasets.source import Download, SourceFolder
from rowwise.ingest.vocabulary import MIN_ROWS, IdCounter, write_vocabularies
from rowwise.tables.spec import Pooling, Table

TRAIN, VALID, TEST = 0, 1, 2
GROUP_ROWS = 1 << 16
SLICE_ROWS = 1 << 20
MAX_LISTED = 1 << 20  # ids of a vocabulary; a column with more is hashed
HASHED_ROWS = 1 << 22
KEY = "row"
PartedRows = Iterable[tuple[pa.Table, int | NDArray[np.int8]]]  # rows, and the part of all or of each


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDataset:
    """A dataset made of downloaded files.

    Args:
        what: one-line description of the rows and the label.
        split: one-line description of the parts.
        download: the files.
        read: reads the files as rows with their parts, in training order.
        columns: roles of the columns.
        min_rows: ids with fewer training rows share row 0 of their table with unknown ids.
    """

    what: str
    split: str
    download: Download
    read: Callable[[SourceFolder], PartedRows]
    columns: Columns
    min_rows: int = MIN_ROWS

    def make(self, name: str, source: Path, folder: Path) -> None:
        """Write the parts and vocabularies into `folder`; an interrupted process leaves no part."""
        writer = _PartWriter(folder, self.columns)
        try:
            for rows, parts in self.read(SourceFolder(source, name, self.download)):
                writer.add(rows, parts)
            writer.finish(name, self.min_rows)
        finally:
            writer.close()

    def open(self, name: str, folder: Path, dim: int = 16) -> Dataset:
        """Open the dataset written by `make`."""
        train, valid, test = open_stored(folder, PARTS, name)
        sparse: list[Sparse] = []
        tables: list[Table] = []
        for column in self.columns.sparse:
            file = _vocabulary(folder, column.column)
            rows = HASHED_ROWS
            if file.exists():
                rows = 1 + file.read_bytes().count(b"\n")
                column = replace(column, vocabulary=str(file))
            sparse.append(column)
            tables.append(Table(name=column.table_name, rows=rows, dim=dim, pooling=Pooling.MEAN))
        columns = replace(self.columns, sparse=tuple(sparse), key=KEY)
        return Dataset(train=train, valid=valid, test=test, columns=columns, tables=tuple(tables))


def by_time(table: pa.Table, column: str) -> PartedRows:
    """Split rows by time: 80 % training, 10 % validation, 10 % test."""
    borders = (table.num_rows * 8 // 10, table.num_rows * 9 // 10)
    yield from cut(table.sort_by(column), borders)


def cut(table: pa.Table, borders: Sequence[int]) -> PartedRows:
    """Split rows at two borders into training, validation and test rows."""
    for part, (begin, end) in enumerate(pairwise((0, *borders, table.num_rows))):
        yield from in_slices(table.slice(begin, end - begin), part)


def in_slices(table: pa.Table, part: int) -> PartedRows:
    for at in range(0, table.num_rows, SLICE_ROWS):
        yield table.slice(at, SLICE_ROWS), part


def with_parts(tables: Iterable[pa.Table], part_R: NDArray[np.int8]) -> PartedRows:
    """Pair consecutive tables with their slices of `part_R`."""
    first = 0
    for table in tables:
        yield table, part_R[first : first + table.num_rows]
        first += table.num_rows


def in_ten_folds(labels: Iterable[pa.Table], seed: int) -> NDArray[np.int8]:
    """The part of each row by ten stratified folds: the first is the test set, the second the validation set.

    Equals `StratifiedKFold(10, shuffle=True, random_state=seed)` of scikit-learn 0.19, by which BARS draws its folds:
    each label is shuffled by its own generator, with the same seed.
    """
    label_R = np.concatenate([table.column(0).to_numpy() for table in labels])
    part_R = np.zeros(len(label_R), np.int8)
    for value in (0, 1):
        at_L = np.flatnonzero(label_R == value)
        order_L = np.arange(len(at_L))
        np.random.RandomState(seed).shuffle(order_L)
        first, second, _ = np.split(order_L, np.cumsum([-(-len(at_L) // 10), -(-(len(at_L) - 1) // 10)]))
        part_R[at_L[first]], part_R[at_L[second]] = TEST, VALID
    return part_R


@final
class _PartWriter:
    """Writes rows to the files of their parts, and counts the ids of training rows."""

    def __init__(self, folder: Path, columns: Columns) -> None:
        self._folder, self._rows = folder, 0
        self._counters = {sparse.column: IdCounter(MAX_LISTED) for sparse in columns.sparse}
        self._files: dict[int, pq.ParquetWriter] = {}

    def add(self, rows: pa.Table, parts: int | NDArray[np.int8]) -> None:
        rows = rows.append_column(KEY, pa.array(np.arange(self._rows, self._rows + rows.num_rows)))
        self._rows += rows.num_rows
        if isinstance(parts, int):
            self._write(rows, parts)
            return
        for part in np.unique(parts).tolist():
            self._write(rows.filter(pa.array(parts == part)), part)

    def finish(self, name: str, min_rows: int) -> None:
        """Write vocabularies, then rename the complete files into place."""
        missing = [PARTS[part] for part in range(len(PARTS)) if part not in self._files]
        if missing:
            raise DataError(f"{name}: the {self._rows:,} rows of its files have none for {' and '.join(missing)}")
        self.close()
        ids = {column: counter.ids(min_rows) for column, counter in self._counters.items()}
        listed = {column: vocabulary for column, vocabulary in ids.items() if vocabulary}
        for column in self._counters:
            _vocabulary(self._folder, column).unlink(missing_ok=True)
        write_vocabularies(listed, {column: _vocabulary(self._folder, column) for column in listed})
        for part in (TEST, VALID, TRAIN):
            os.replace(self._unfinished(part), self._folder / f"{PARTS[part]}.parquet")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, rows: pa.Table, part: int) -> None:
        if not rows.num_rows:
            return
        if part not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[part] = pq.ParquetWriter(self._unfinished(part), rows.schema)
        self._files[part].write_table(rows, row_group_size=GROUP_ROWS)
        for column, counter in self._counters.items() if part == TRAIN else ():
            for ids in _chunks(rows[column]):
                counter.add(ids.drop_null())

    def _unfinished(self, part: int) -> Path:
        return self._folder / f".{PARTS[part]}.unfinished"


def _vocabulary(folder: Path, column: str) -> Path:
    return folder / "ids" / f"{column}.vocab"


def _chunks(column: pa.ChunkedArray) -> Iterator[pa.Array]:
    for chunk in column.chunks:
        yield chunk.flatten() if types.is_list(chunk.type) else chunk


def sparse_columns(*names: str) -> tuple[Sparse, ...]:
    return tuple(Sparse(column=name) for name in names)
