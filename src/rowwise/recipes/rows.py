"""Which rows a recipe trains, validates and tests on.

Its own file because it is the one question of a recipe that data alone answers: a dataset has test rows of its own, or
files are named, or a share of the training rows is taken away; the same rows are never used twice.
"""

from dataclasses import dataclass
from pathlib import Path

from rowwise.errors import DataError, SpecError
from rowwise.ingest.columns import Columns
from rowwise.ingest.datasets.catalog import load
from rowwise.ingest.datasets.dataset import Dataset, PartReader
from rowwise.ingest.datasets.files import from_files, of_files, open_files
from rowwise.ingest.datasets.synthetic import synthetic
from rowwise.ingest.delimited import CsvReader
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.reader import Reader
from rowwise.ingest.share import Share
from rowwise.recipes.recipe import Data
from rowwise.spec import Table

ALL = Share()
SYNTHETIC = (1_000_000, 100_000)  # rows to train and to test on
FILES = {"parquet": ParquetReader, "csv": CsvReader}


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a reader."""

    reader: Reader
    share: Share = ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The rows of a recipe, by what they are for; and the dataset that they are of."""

    dataset: Dataset
    train: Rows
    valid: Rows | None
    test: Rows | None


def absolute(data: Data) -> Data:
    """The same, whatever folder a later command is started in."""
    given = {name: getattr(data, name) for name in data.__struct_fields__}
    for name in ("dataset", "valid", "test"):
        kind, colon, path = (given[name] or "").partition(":")
        if colon and kind in FILES:
            given[name] = f"{kind}:{Path(path).absolute()}"
    return Data(**(given | {"folder": str(Path(data.folder).absolute())}))


def open_parts(data: Data, columns: Columns | None = None, tables: tuple[Table, ...] = ()) -> Parts:
    """Open what a recipe names; `columns` and `tables` are those of the recipe, which spare a look at the rows."""
    dataset = _dataset(data, columns, tables)
    valid = _files(data.valid) or dataset.valid
    test = _files(data.test) or dataset.test
    # A dataset's own parts stand; only what is missing is taken away from the training rows.
    shares = {"valid": 0.0 if valid else data.valid_share, "test": 0.0 if test else data.test_share}
    if data.share == "last":
        train, parts = _take_last(dataset.train, shares)
    else:
        train, parts = _take_random(dataset.train, shares)
    valid_rows, test_rows = (Rows(own) if own else parts.get(name) for own, name in ((valid, "valid"), (test, "test")))
    return Parts(dataset=dataset, train=train, valid=valid_rows, test=test_rows)


def open_named(name: str) -> Reader:
    """parquet:PATH, csv:PATH, or a path whose files say by their endings what they are."""
    return _files(name) or open_files(name)


def _dataset(data: Data, columns: Columns | None, tables: tuple[Table, ...]) -> Dataset:
    if data.dataset == "synthetic":
        return synthetic(data.rows or SYNTHETIC[0], data.test_rows or SYNTHETIC[1])
    if data.rows is not None or data.test_rows is not None:
        raise SpecError(
            f"data.rows and data.test_rows are for synthetic rows; {data.dataset!r} has its own: use train.steps"
        )
    files = _files(data.dataset)
    if files is None:
        return load(data.dataset, Path(data.folder))
    if columns is not None and tables:
        return of_files(files, columns, tables)
    label = columns.labels[0] if columns is not None and columns.labels else None
    return from_files(files, data.label or label)


def _files(name: str | None) -> Reader | None:
    kind, colon, path = (name or "").partition(":")
    return FILES[kind](path) if colon and kind in FILES else None


def _take_random(reader: Reader, shares: dict[str, float]) -> tuple[Rows, dict[str, Rows]]:
    at = 0.0
    parts: dict[str, Rows] = {}
    for name, share in shares.items():
        if share:
            parts[name] = Rows(reader, Share(begin=at, end=at + share))
            at += share
    return Rows(reader, Share(begin=at)), parts


def _take_last(reader: Reader, shares: dict[str, float]) -> tuple[Rows, dict[str, Rows]]:
    """Whole splits off the end: the last ones to test on, those before them to validate on."""
    splits = list(reader.splits())
    total = len(splits)
    parts: dict[str, Rows] = {}
    for name in ("test", "valid"):
        count = round(shares[name] * total)
        if shares[name] and (not count or count >= len(splits)):
            want = "use share: random, or name files for them"
            raise DataError(
                f"data.share=last: {total} splits are too few to take {shares[name]:.0%} for {name}: {want}"
            )
        if count:
            parts[name] = Rows(PartReader(reader, splits[-count:]))
            del splits[-count:]
    return Rows(PartReader(reader, splits) if parts else reader), parts
