"""`SentGradients`: gradients that a backward has sent to the ranks of their rows, checked before they arrive there.

On exact wires the rank that sends gradients checks them, so the ranks agree while gradients are in flight. A lossy wire
can turn a finite number into infinity, so there the receiving rank checks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.base.errors import GradientError
from rowwise.tables.batch import Jagged
from rowwise.tables.ops.bad_gradient import find_bad_gradient
from rowwise.tables.ops.layout import TablePiece, lay_out_tables, make_group
from rowwise.tables.ops.lookup import LookupCall
from rowwise.tables.ops.tiles import max_abs
from rowwise.tables.spec import Pooling, Table


class SentGradients(NamedTuple):
    """Gradients of this rank's samples; None if no loss depends on that kind of output."""

    jagged: Jagged
    pooled_BS: Tensor | None
    sequences: Mapping[str, Tensor] | None  # [N, D] by feature

    def check(self, tables: Sequence[Table], rank: int) -> float:
        """Raise if a gradient is not finite; not collective, and it waits for nothing.

        Returns an upper bound of the absolute value of this rank's contribution to the gradient of any row.
        """
        jagged = self.jagged
        matrices = (self.pooled_BS, *(self.sequences or {}).values())
        largest_M = [max_abs(matrix) for matrix in matrices if matrix is not None]
        if not all(map(math.isfinite, largest_M)):  # locate it: gradients of empty bags reach no row
            fault = self._find_fault(tables, rank)
            if fault is not None:
                raise GradientError(f"{fault}. No row was updated")
        # Each id contributes to its row once, times its weight, or at most 1 for sums and means.
        parts = [jagged] if jagged.shared is None else [jagged, jagged.shared.jagged]
        weights = [max_abs(part.weights_N) for part in parts if part.weights_N is not None]
        ids = len(jagged.values_N) + (0 if jagged.shared is None else len(parts[-1].values_N) * jagged.batch_size)
        return max(largest_M, default=0.0) * max([1.0, *weights]) * ids

    def _find_fault(self, tables: Sequence[Table], rank: int) -> str | None:
        jagged = self.jagged.expanded().contiguous()
        pieces = [TablePiece(table, table) for table in tables]
        samples_W = (0,) * rank + (jagged.batch_size,)
        for sequences, grads in ((False, self.pooled_BS), (True, self.sequences)):
            chosen = [k for k, table in enumerate(tables) if (table.pooling is Pooling.SEQUENCE) == sequences]
            if grads is None or not chosen:
                continue
            group = make_group(pieces, lay_out_tables(pieces)[0], chosen)
            call = LookupCall.of(group, jagged, per_id=sequences, samples_W=samples_W)
            flat = grads if isinstance(grads, Tensor) else torch.cat([grads[f].flatten() for f in group.feature_names])
            fault = find_bad_gradient(call, flat)
            if fault is not None:
                return fault
        return None
