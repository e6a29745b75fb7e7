"""What a dataset is to the rest: rows to train on, rows to test on, what the columns are, and tables to begin with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import pyarrow as pa

from rowwise.ingest.columns import Columns
from rowwise.ingest.reader import Reader, Split
from rowwise.spec import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """All that a recipe needs of its data; the tables are a suggestion."""

    train: Reader
    test: Reader | None
    columns: Columns
    tables: tuple[Table, ...]
    valid: Reader | None = None  # to stop early and to choose by
    ceiling: str | None = None  # a column with the best logit that there can be, where the data was made up


@final
class PartReader:
    """Some splits of another reader."""

    def __init__(self, reader: Reader, splits: Sequence[Split]) -> None:
        """Keep the splits in the order given."""
        self._reader, self._splits = reader, tuple(splits)

    @property
    def schema(self) -> pa.Schema:
        """That of the reader."""
        return self._reader.schema

    def splits(self) -> tuple[Split, ...]:
        """Those that were chosen."""
        return self._splits

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        """As the reader reads it."""
        return self._reader.read(split, columns)


def hold_out(reader: Reader, parts: int) -> tuple[Reader, Reader | None]:
    """The last of so many equal parts apart, as time goes on from the first rows to the last; None if it is empty."""
    splits = reader.splits()
    held = len(splits) // parts
    if not held:
        return reader, None
    return PartReader(reader, splits[:-held]), PartReader(reader, splits[-held:])
