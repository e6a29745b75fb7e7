"""Which rows changed since somebody saved them: a byte for each row of an arena, one table after the other.

Known limits: a row that was looked up and kept its bits, as its gradient was zero, counts as touched too.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor


# [Note: Touched rows]
# A byte is set by whoever changes a row: the two ways to the update kernel (`update.update` and `merged.apply`),
# whatever looked the rows up; filling; and `mark_all` by those who write into views of rows, such as a state dict that
# is loaded. It is set before the row changes, as an update that raises has changed others. Whoever saved the rows
# clears it.
@final
class TouchedRows:
    """At first everything is touched, as nothing is known of before."""

    def __init__(self, rows_T: Sequence[int], bases_T: Sequence[int], device: torch.device) -> None:
        """How many rows each table has, and where it begins in the arena, ascending."""
        starts = [0, *accumulate(rows_T)]
        self.marks_R = torch.ones(starts[-1], dtype=torch.uint8, device=device)
        self._rows_T = list(rows_T)
        self._starts_T, self._bases_T = torch.tensor(starts), torch.tensor(bases_T)

    def mark(self, rows: Tensor, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> None:
        """What the features of a batch look up in an arena's rows is about to change."""
        # By where a table begins, which is all that the kernels know of it.
        starts_F = self._starts_T[torch.searchsorted(self._bases_T, features_FC[:, 2].contiguous())]
        torch.ops.rowwise.mark(self.marks_R, starts_F, rows, features_FC, values_N, offsets, batch)

    def mark_all(self) -> None:
        """Any row may have changed."""
        self.marks_R.fill_(1)

    def clear(self) -> None:
        """All rows are saved as they are."""
        self.marks_R.zero_()

    def table(self, index: int) -> Tensor:
        """The marks of a table: a view [R], not zero where a row changed."""
        return self.marks_R.split(self._rows_T)[index]

    def to(self, device: torch.device) -> None:
        """Move to another device; views taken before stay behind."""
        self.marks_R = self.marks_R.to(device)
