"""Parquet files as a `Reader`: a split is one row group of one file.

Only the footers are read to know the splits, and only the columns asked for to read one, so a wide table costs what
its used columns cost. Gives up: row groups are the unit of memory, so a file written as one huge group is read whole.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.errors import DataError
from rowwise.ingest.reader import Split, check_columns, find_files

ENDINGS = (".parquet", ".pq")


@final
class ParquetReader:
    """A Parquet file, a folder of them, or a pattern such as `logs/day=*/*.parquet`."""

    def __init__(self, path: str | Path) -> None:
        """Read the footers; a file that is not Parquet is refused here."""
        self._footers = {name: _footer(name) for name in find_files(path, ENDINGS)}
        self._schema = next(iter(self._footers.values())).schema.to_arrow_schema()

    @property
    def schema(self) -> pa.Schema:
        """The columns of the first file; other files need the ones that are read."""
        return self._schema

    def splits(self) -> tuple[Split, ...]:
        """One for each row group that has rows."""
        return tuple(split for name, footer in self._footers.items() for split in _groups(name, footer))

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        """One row group."""
        footer = self._footers[split.source]
        check_columns(columns, footer.schema.to_arrow_schema(), split.source)
        with _naming(split.source), pq.ParquetFile(split.source, metadata=footer) as file:
            return file.read_row_group(split.start, columns=list(columns)).select(list(columns))


def _footer(name: str) -> pq.FileMetaData:
    if Path(name).stat().st_size == 0:
        raise DataError(f"{name}: the file is empty: want Parquet")
    with _naming(name):
        return pq.read_metadata(name)


def _groups(name: str, footer: pq.FileMetaData) -> Iterator[Split]:
    first_row = 0
    for group in range(footer.num_row_groups):
        rows = footer.row_group(group).num_rows
        if rows:
            yield Split(source=name, start=group, stop=group + 1, first_row=first_row)
        first_row += rows


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Arrow says what is wrong with a file, but not with which."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as Parquet: {error}") from error
