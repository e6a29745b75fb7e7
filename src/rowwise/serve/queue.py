"""The queue of requests with rows to compute, as a pure state machine: times are arguments.

A batch takes rows of the oldest requests. A request with more than a batch left goes to the back after each slice, so
that short requests are not blocked; one with less left is first in the next batch. A row with long lists costs as much
as several rows.
"""

from collections import OrderedDict
from typing import NamedTuple, TypeAlias, final

import numpy as np

Costs: TypeAlias = np.ndarray  # prefix sums over rows: rows + 1 numbers, the first is 0


class RequestSlice(NamedTuple):
    """Rows of a request in one batch."""

    request: int
    begin: int
    end: int


class NextBatch(NamedTuple):
    """The slices to compute next, and requests past their deadline."""

    slices: tuple[RequestSlice, ...]
    expired: tuple[int, ...]


class _Waiting(NamedTuple):
    rows: int
    done: int  # computed rows
    deadline_s: float
    costs: Costs | None  # None if each row costs 1

    def cost(self, end: int) -> float:
        """Cost of the rows from the first uncomputed one up to `end`."""
        return end - self.done if self.costs is None else float(self.costs[end] - self.costs[self.done])

    def fit(self, budget: float) -> int:
        """End of the rows that fit into a budget."""
        if self.costs is None:
            return min(self.rows, self.done + int(budget))
        return int(np.searchsorted(self.costs, self.costs[self.done] + budget, "right")) - 1


@final
class RequestQueue:
    """Waiting requests by number, oldest first.

    Args:
        rows_at_once: maximum cost of a batch, in rows.
    """

    def __init__(self, rows_at_once: int) -> None:
        self._rows_at_once = rows_at_once
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self.rows = 0  # uncomputed rows

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: int, rows: int, deadline_s: float, costs: Costs | None = None) -> None:
        assert rows > 0
        assert request not in self._waiting
        self._waiting[request] = _Waiting(rows, 0, deadline_s, costs)
        self.rows += rows

    def remove(self, request: int) -> None:
        """Remove a request; a no-op if it does not wait."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self.rows -= waiting.rows - waiting.done

    def take(self, now_s: float) -> NextBatch:
        """Dequeue the next batch."""
        expired = tuple(number for number, waiting in self._waiting.items() if waiting.deadline_s <= now_s)
        for number in expired:
            self.remove(number)
        budget = float(self._rows_at_once)
        slices: list[RequestSlice] = []
        for number, waiting in list(self._waiting.items()):
            end = waiting.fit(budget)
            if end <= waiting.done:
                if slices:
                    break
                end = waiting.done + 1  # an empty batch takes a row of any cost
            del self._waiting[number]
            slices.append(RequestSlice(number, waiting.done, end))
            budget = max(0.0, budget - waiting.cost(end))
            self.rows -= end - waiting.done
            if end < waiting.rows:
                self._waiting[number] = rest = waiting._replace(done=end)  # to the back
                if rest.cost(waiting.rows) <= self._rows_at_once:
                    self._waiting.move_to_end(number, last=False)
        return NextBatch(tuple(slices), expired)
