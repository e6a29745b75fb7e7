"""`LateUpdates`: updates of rows that a lookup may miss, with `train.staleness` (bounded staleness, as in Persia).

With staleness k, the lookup of step i sees the updates of the steps up to i - 1 - k. Dense parameters are never late.
The gradients of later steps are queued here, and applied step by step just before the lookup that has to see them, so
results do not depend on timing or on `pipeline_depth`. The queue is flushed before an evaluation, a checkpoint and the
end of an epoch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from rowwise.parallel.shard.embeddings import AnyEmbeddings


class HeldStep(NamedTuple):
    """The checked gradients of a step's lookups in one module."""

    number: int
    staged: Any  # result of the module's `take_staged`
    may_overflow: bool


ApplyRows = Callable[[Sequence[AnyEmbeddings], int, bool], None]  # (modules, number of the step, may_overflow)


@final
class LateUpdates:
    """The queue of gradients of one module whose update is late."""

    def __init__(self, tables: AnyEmbeddings, staleness: int, apply_rows: ApplyRows) -> None:
        self._tables, self._staleness, self._apply = tables, staleness, apply_rows
        self._held: deque[HeldStep] = deque()

    def hold(self, number: int, *, may_overflow: bool) -> None:
        """Take the gradients that a step has staged."""
        self._held.append(HeldStep(number, self._tables.take_staged(), may_overflow))

    def apply_before(self, number: int) -> None:
        """Apply the updates that the lookup of this step has to see; collective."""
        self._apply_until(number - 1 - self._staleness)

    def apply_all(self) -> None:
        """Apply all queued gradients; collective."""
        if self._held:
            self._apply_until(self._held[-1].number)

    def _apply_until(self, newest: int) -> None:
        while self._held and self._held[0].number <= newest:
            held = self._held.popleft()
            self._tables.put_staged(held.staged)
            self._apply([self._tables], held.number, held.may_overflow)
