"""`ReturnedGradients`: gradients that backwards have sent to the ranks of their rows, until they arrive there.

A module receives them as late as it can: before the next backward sends some, or when an update needs them. On exact
wires the rank that sends gradients checks them, so their ranks agree whether all are finite while they travel. Lossy
wires can make infinity of a finite number, so there the rank that receives them checks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

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
    """Gradients of this rank's samples; None: no loss depends on that kind of output."""

    jagged: Jagged
    pooled_BS: Tensor | None
    sequences: Mapping[str, Tensor] | None  # [N, D] by feature


@final
class ReturnedGradients:
    """The gradients of one module's lookups on their way to the ranks of their rows.

    Args:
        tables: all tables, in the order of the output.
        rank: of the samples.
    """

    def __init__(self, tables: Sequence[Table], rank: int) -> None:
        self._tables, self._rank = tuple(tables), rank
        self._sent: list[SentGradients] = []
        self._receive: list[Callable[[], None]] = []

    def add(self, sent: SentGradients, receive: Callable[[], None] | None) -> None:
        """Gradients that this rank has started to send; `receive` waits for those that it gets, and stages them."""
        self._sent.append(sent)
        if receive is not None:
            self._receive.append(receive)

    def receive(self) -> None:
        """Wait for all gradients that backwards have sent, and stage them; collective."""
        pending, self._receive = self._receive, list[Callable[[], None]]()
        for one in pending:
            one()

    def check(self) -> float:
        """Raise if a gradient that this rank has sent is not finite; not collective, and it waits for nothing.

        Returns an upper bound of the absolute value of what this rank adds to the gradient of any row.
        """
        return sum(self._check(sent) for sent in self._sent)

    @property
    def any_sent(self) -> bool:
        """Whether backwards have sent gradients since `forget`; alike on all ranks."""
        return bool(self._sent)

    def forget(self) -> None:
        """Forget the gradients that this rank has sent, after an update."""
        self._sent = []

    def _check(self, sent: SentGradients) -> float:
        jagged = sent.jagged
        matrices = (sent.pooled_BS, *(sent.sequences or {}).values())
        largest_M = [max_abs(matrix) for matrix in matrices if matrix is not None]
        if not all(map(math.isfinite, largest_M)):  # of empty bags they reach no row, so a suspect has to be located
            fault = self._find_fault(sent)
            if fault is not None:
                raise GradientError(f"{fault}. No row was updated")
        # Each id contributes to its row once, times its weight, or at most 1 for sums and means.
        parts = [jagged] if jagged.shared is None else [jagged, jagged.shared.jagged]
        weights = [max_abs(part.weights_N) for part in parts if part.weights_N is not None]
        ids = len(jagged.values_N) + (0 if jagged.shared is None else len(parts[-1].values_N) * jagged.batch_size)
        return max(largest_M, default=0.0) * max([1.0, *weights]) * ids

    def _find_fault(self, sent: SentGradients) -> str | None:
        jagged = sent.jagged.expanded().contiguous()
        pieces = [TablePiece(table, table) for table in self._tables]
        samples_W = (0,) * self._rank + (jagged.batch_size,)
        for sequences, grads in ((False, sent.pooled_BS), (True, sent.sequences)):
            chosen = [k for k, table in enumerate(self._tables) if (table.pooling is Pooling.SEQUENCE) == sequences]
            if grads is None or not chosen:
                continue
            group = make_group(pieces, lay_out_tables(pieces)[0], chosen)
            call = LookupCall.of(group, jagged, per_id=sequences, samples_W=samples_W)
            flat = grads if isinstance(grads, Tensor) else torch.cat([grads[f].flatten() for f in group.feature_names])
            fault = find_bad_gradient(call, flat)
            if fault is not None:
                return fault
        return None
