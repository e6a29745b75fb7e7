"""`RowStream`: rows that are not one tensor, such as those of a table on disk, read and written in runs."""

from typing import Protocol

import torch
from torch import Tensor

from rowwise.tables.spec import Init, Value


class InitialValues(Value, frozen=True):
    """Initial values of rows: a function of their table's key, row and column."""

    init: Init
    key: int = 0


class RowStream(Protocol):
    """The rows of a table piece, or one slot of its optimizer state.

    Several threads may call at the same time: for different rows, or for several slots of the same rows.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole piece: (rows, dim), (rows, row_bytes) of int8 rows, (rows,) of one number per row."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers; uint8 for int8 rows, as their scales are part of them."""
        ...

    @property
    def initial(self) -> InitialValues | None:
        """The values of rows that are not `written`; None if all are."""
        ...

    def written(self, begin: int, end: int) -> Tensor:
        """The rows of [begin, end) that were ever changed: ascending int64."""
        ...

    def forget(self) -> None:
        """Give all rows of the piece, and their optimizer state, their initial values."""
        ...

    def read(self, begin: int, end: int) -> Tensor:
        """A copy of rows [begin, end), as they are stored."""
        ...

    def read_rows(self, rows: Tensor) -> Tensor:
        """A copy of these rows: ascending int64."""
        ...

    def write(self, begin: int, values: Tensor) -> None:
        """Overwrite rows [begin, begin + len(values)) with a copy of the values, which are contiguous."""
        ...

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        """Overwrite these rows: ascending int64."""
        ...


def outline_stream(rows: Tensor | RowStream) -> tuple[Tensor, RowStream | None]:
    """A tensor and None, or a stream's shape and type as a tensor on the meta device, and the stream."""
    if isinstance(rows, Tensor):
        return rows, None
    return torch.empty(rows.shape, dtype=rows.dtype, device="meta"), rows
