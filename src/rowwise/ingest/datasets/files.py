"""Any Parquet or CSV files as a dataset: what the columns are is guessed from their first splits."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from rowwise.ingest.columns import FITS, IDS, Columns
from rowwise.ingest.datasets.dataset import Dataset
from rowwise.ingest.delimited import CsvReader
from rowwise.ingest.inspect import Role, inspect
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.reader import Reader
from rowwise.spec import Table

DELIMITED = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")  # how names of files end that are not Parquet
LOOK_AT = 8  # splits


def open_files(path: str | Path) -> Reader:
    """A reader by the endings of the names."""
    place = Path(path)
    inside = place.rglob("*") if place.is_dir() else [place]
    is_lines = any(p.name.endswith(DELIMITED) for p in inside)
    return CsvReader(path) if is_lines else ParquetReader(path)


def from_files(reader: Reader, label: str | None = None, dim: int = 16, sparse: Sequence[str] = ()) -> Dataset:
    """Columns and tables as the first splits suggest them; `sparse` are columns of ids, whatever they look like."""
    roles: dict[str, Role] = {f.name: "sparse" for f in reader.schema if f.name in sparse and FITS[IDS](f.type)}
    columns, tables = inspect(reader, label, splits=LOOK_AT, roles=roles).suggest(dim)
    # What is missing in no row of the first splits may be missing later, and no model needs these.
    return make_dataset(reader, structs.replace(columns, key=None, time=None), tables)


def make_dataset(reader: Reader, columns: Columns, tables: tuple[Table, ...]) -> Dataset:
    """All rows are for training; a recipe's shares take validation and test rows from them."""
    return Dataset(train=reader, test=None, columns=columns, tables=tables)
