"""A dataset: training, validation and test rows, roles of columns, and suggested tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pyarrow as pa
from msgspec.structs import replace

from rowwise.base.errors import DataError
from rowwise.ingest.columns import Columns
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.warehouse.ranges import ReadCounters, counters_of
from rowwise.tables.spec import Table

PARTS = ("train", "valid", "test")  # names of the files of a stored dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The rows, columns and suggested tables of a dataset.

    Choose hyperparameters and early stopping on `valid`, as choosing them on `test` biases its metrics. `valid` has no
    row of `train`.
    """

    train: Reader
    test: Reader | None
    columns: Columns
    tables: tuple[Table, ...]
    valid: Reader | None = None
    ceiling: str | None = None  # column with the logit of the generating model, for synthetic data


@final
class PartReader:
    """Selected splits of another reader, with their original numbers, so that a random share selects the same rows."""

    def __init__(self, reader: Reader, splits: Sequence[Split]) -> None:
        numbers = {split: index for index, split in enumerate(reader.splits())}
        numbered = (split if split.number is not None else replace(split, number=numbers[split]) for split in splits)
        self._reader, self._splits = reader, tuple(numbered)

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    @property
    def counters(self) -> ReadCounters:
        return counters_of(self._reader)

    def splits(self) -> tuple[Split, ...]:
        return self._splits

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        return self._reader.read(split, columns)


def hold_out(reader: Reader, parts: int) -> tuple[Reader, Reader | None]:
    """Split off the last of `parts` equal parts, the newest rows; None if there are fewer splits than parts."""
    splits = reader.splits()
    last = len(splits) // parts
    if not last:
        return reader, None
    return PartReader(reader, splits[:-last]), PartReader(reader, splits[-last:])


def open_stored(folder: Path, parts: Sequence[str], name: str) -> tuple[Reader, ...]:
    """Readers of the files `part`.parquet written by `rowwise data get`; raises unless all parts exist."""
    files = [folder / f"{part}.parquet" for part in parts]
    missing = [file.name for file in files if not file.exists()]
    if len(missing) == len(files):
        raise DataError(f"{folder}: {name} is not here: rowwise data get {name}")
    if missing:
        reason = f"{missing[0]} is missing, as an older version did not write it"
        raise DataError(f"{folder}: {reason}", hint=f"get all files anew: rowwise data get {name} --to {folder.parent}")
    return tuple(ParquetReader(file) for file in files)
