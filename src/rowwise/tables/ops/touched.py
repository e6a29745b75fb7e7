"""`TouchedRows`: which rows changed since they were last saved, a byte per row of an arena, table after table.

Off until `Arena.track`: it costs each update one more pass over its ids. A row that was looked up and kept its
bits, as its gradient was zero, counts as touched too.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from rowwise.tables.ops.layout import BASE, ROWS, SOURCE


# [Note: Touched rows]
# A row's byte is set by all code that changes rows: `Arena.update`, `fill`, and `mark_all`, which code calls that
# writes into views of rows, such as loading a state dict. It is set before the row changes, as an update that raises
# has changed other rows. A checkpoint clears it.
@final
class TouchedRows:
    """Marks of touched rows; at first all rows are marked, as nothing was saved yet."""

    def __init__(
        self, rows_T: Sequence[int], bases_T: Sequence[int], device: torch.device, *, cached: bool = False
    ) -> None:
        """`rows_T`: rows of each table; `bases_T`: its first byte in the arena, ascending.

        `cached`: descriptors of some features have the slots of a cache in place of their table's rows.
        """
        starts = [0, *accumulate(rows_T)]
        self.marks_R = torch.ones(starts[-1], dtype=torch.uint8, device=device)
        self._rows_T, self._cached = list(rows_T), cached
        self._starts_T, self._bases_T = torch.tensor(starts), torch.tensor(bases_T)

    def mark(self, rows: Tensor, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> None:
        """Mark the rows that the features of a batch look up."""
        # A feature's table is found by its first byte in the arena.
        tables_F = torch.searchsorted(self._bases_T, features_FC[:, BASE].contiguous())
        starts_F = self._starts_T[tables_F]
        if self._cached and rows.is_cuda:
            features_FC = features_FC.clone()
            features_FC[:, ROWS] = torch.tensor(self._rows_T)[tables_F]
        if not self._cached or rows.is_cuda:
            torch.ops.rowwise.mark(self.marks_R, starts_F, rows, features_FC, values_N, offsets, batch)
            return
        rows_F = [self._rows_T[table] for table in tables_F.tolist()]
        for source, start, rows in zip(features_FC[:, SOURCE].tolist(), starts_F.tolist(), rows_F, strict=True):
            ids_N = values_N[offsets[source * batch] : offsets[(source + 1) * batch]].long()
            self.marks_R[start + ids_N[(ids_N >= 0) & (ids_N < rows)]] = 1

    def mark_all(self) -> None:
        self.marks_R.fill_(1)

    def clear(self) -> None:
        """Unmark every row, after a save."""
        self.marks_R.zero_()

    def table(self, index: int) -> Tensor:
        """The marks of a table: a view [R], not 0 where a row changed."""
        return self.marks_R.split(self._rows_T)[index]

    def to(self, device: torch.device) -> None:
        """Move to another device; existing views keep the old memory."""
        self.marks_R = self.marks_R.to(device)
