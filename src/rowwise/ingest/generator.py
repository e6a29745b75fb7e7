"""A `Reader` of generated rows: any number of rows in constant memory.

The function gets (first row, count) and must be pure, so that a split can be generated again.
"""

from collections.abc import Callable, Sequence
from typing import final

import pyarrow as pa

from rowwise.base.errors import DataError
from rowwise.ingest.reader import Split, check_columns

SPLIT_ROWS = 1 << 16


@final
class GeneratorReader:
    """Rows `first_row` up to `first_row + rows` of a function; errors call the source `name`."""

    def __init__(
        self,
        make: Callable[[int, int], pa.Table],
        rows: int,
        *,
        first_row: int = 0,
        split_rows: int = SPLIT_ROWS,
        name: str = "generator",
    ) -> None:
        """Call the function once, for no rows, to get the schema."""
        if rows < 0 or first_row < 0 or split_rows < 1:
            raise DataError(
                f"{name}: rows={rows}, first_row={first_row}, split_rows={split_rows}",
                "rows and first_row that are not negative, and at least one row a split",
            )
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
        check_columns(columns, self._schema, self._name)
        count = split.stop - split.start
        table = self._make(split.start, count)
        if table.num_rows != count:
            raise DataError(
                f"{self._name}: the function returned {table.num_rows} rows for ({split.start}, {count})", count
            )
        return table.select(list(columns))
