"""A table in memory as a `Reader`: pyarrow, pandas, polars, or anything that hands out Arrow streams.

For notebooks and tests. A split is a range of rows, so that shuffling works as it does on files.
"""

from collections.abc import Sequence
from typing import final

import pyarrow as pa

from rowwise.errors import DataError
from rowwise.ingest.reader import Split, check_columns

SPLIT_ROWS = 1 << 16


@final
class FrameReader:
    """A frame; `name` is what errors call it."""

    def __init__(self, frame: object, split_rows: int = SPLIT_ROWS, name: str = "frame") -> None:
        """Take the columns over; no values are copied where the frame keeps them as Arrow does."""
        if split_rows < 1:
            raise DataError(f"split_rows={split_rows}: want at least 1")
        if not hasattr(frame, "__arrow_c_stream__"):
            want = "want a table of pyarrow, pandas or polars, or another with __arrow_c_stream__"
            raise DataError(f"{name}: got {type(frame).__name__}; {want}")
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
        """A slice of the frame."""
        check_columns(columns, self.schema, self._name)
        return self._table.select(list(columns)).slice(split.start, split.stop - split.start)
