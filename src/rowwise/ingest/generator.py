"""Rows that a function makes, as a `Reader`: as many as wanted, in constant memory.

The function gets (first row, count) and must depend on nothing else, so any range can be made at any time, twice.
"""

from collections.abc import Callable, Sequence
from typing import final

import pyarrow as pa

from rowwise.errors import DataError
from rowwise.ingest.reader import Split, check_columns

SPLIT_ROWS = 1 << 16


@final
class GeneratorReader:
    """Rows `first_row` up to `first_row + rows` of a function; `name` is what errors call it."""

    def __init__(
        self,
        make: Callable[[int, int], pa.Table],
        rows: int,
        *,
        first_row: int = 0,
        split_rows: int = SPLIT_ROWS,
        name: str = "generator",
    ) -> None:
        """Make no rows yet, but ask for none of them to learn the columns."""
        if rows < 0 or first_row < 0 or split_rows < 1:
            want = "want rows and first_row that are not negative, and at least one row a split"
            raise DataError(f"{name}: rows={rows}, first_row={first_row}, split_rows={split_rows}: {want}")
        self._make, self._name = make, name
        self._range = range(first_row, first_row + rows, split_rows)
        self._schema = make(first_row, 0).schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def splits(self) -> tuple[Split, ...]:
        step, end = self._range.step, self._range.stop
        return tuple(Split(source=self._name, start=r, stop=min(r + step, end), first_row=r) for r in self._range)

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        """Make the rows of a range."""
        check_columns(columns, self._schema, self._name)
        count = split.stop - split.start
        made = self._make(split.start, count)
        if made.num_rows != count:
            raise DataError(f"{self._name}: asked for {count} rows from {split.start} on and got {made.num_rows}")
        return made.select(list(columns))
