"""A `Reader` of a table in memory: pyarrow, pandas, polars, or any object with an Arrow stream.

For notebooks and tests. A split is a range of rows, so shuffling works as with files.
"""

from collections.abc import Sequence
from typing import final

import pyarrow as pa

from rowwise.base.errors import DataError
from rowwise.ingest.reader import Split, check_columns

SPLIT_ROWS = 1 << 16


@final
class FrameReader:
    """The rows of a frame; errors call the source `name`."""

    def __init__(self, frame: object, split_rows: int = SPLIT_ROWS, name: str = "frame") -> None:
        """Import the columns, zero-copy if the frame has Arrow's layout."""
        if split_rows < 1:
            raise DataError(f"{name}: split_rows={split_rows}", "at least 1")
        if not hasattr(frame, "__arrow_c_stream__"):
            raise DataError(
                f"{name}: got {type(frame).__name__}",
                "a table of pyarrow, pandas or polars, or another with __arrow_c_stream__",
            )
        self._table = pa.table(frame)
        self._split_rows, self._name = split_rows, name

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def splits(self) -> tuple[Split, ...]:
        rows, step = self._table.num_rows, self._split_rows
        starts = range(0, rows, step)
        return tuple(Split(source=self._name, start=r, stop=min(r + step, rows), first_row=r) for r in starts)

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        check_columns(columns, self.schema, self._name)
        return self._table.select(list(columns)).slice(split.start, split.stop - split.start)
