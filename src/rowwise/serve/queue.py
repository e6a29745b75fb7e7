"""The requests that wait for their rows to be computed, as a pure state machine: times are arguments.

A batch takes rows of the oldest requests. A request of which more than a batch is left goes to the back after each
slice, so short requests pass between; one of which less is left is first in the next batch. A row with long lists
counts as several.
"""

from collections import OrderedDict
from typing import NamedTuple, TypeAlias, final

import numpy as np

Costs: TypeAlias = np.ndarray  # rows + 1 numbers, the first is 0


class RequestSlice(NamedTuple):
    """Rows of a request that are computed in one batch."""

    request: int
    begin: int
    end: int


class NextBatch(NamedTuple):
    """What is computed next, and the requests whose time was over before."""

    slices: tuple[RequestSlice, ...]
    expired: tuple[int, ...]


class _Waiting(NamedTuple):
    rows: int
    done: int  # rows that were computed
    deadline_s: float
    costs: Costs | None  # of the rows before each; None: each row counts once

    def cost(self, end: int) -> float:
        """Of the rows that are not computed, up to one."""
        return end - self.done if self.costs is None else float(self.costs[end] - self.costs[self.done])

    def fit(self, room: float) -> int:
        """How far rows are computed in so much room; one of them has room in an empty batch."""
        if self.costs is None:
            return min(self.rows, self.done + int(room))
        return int(np.searchsorted(self.costs, self.costs[self.done] + room, "right")) - 1


@final
class RequestQueue:
    """Waiting requests by number, the oldest first.

    Args:
        rows_at_once: most rows of a batch.
    """

    def __init__(self, rows_at_once: int) -> None:
        self._rows_at_once = rows_at_once
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self.rows = 0  # that are not computed yet

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: int, rows: int, deadline_s: float, costs: Costs | None = None) -> None:
        assert rows > 0
        assert request not in self._waiting
        self._waiting[request] = _Waiting(rows, 0, deadline_s, costs)
        self.rows += rows

    def remove(self, request: int) -> None:
        """Forget a request, if it still waits."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self.rows -= waiting.rows - waiting.done

    def take(self, now_s: float) -> NextBatch:
        """The next batch; its rows count as computed."""
        expired = tuple(number for number, one in self._waiting.items() if one.deadline_s <= now_s)
        for number in expired:
            self.remove(number)
        room = float(self._rows_at_once)
        slices: list[RequestSlice] = []
        for number, one in list(self._waiting.items()):
            end = one.fit(room)
            if end <= one.done:
                if slices:
                    break
                end = one.done + 1
            del self._waiting[number]
            slices.append(RequestSlice(number, one.done, end))
            room = max(0.0, room - one.cost(end))
            self.rows -= end - one.done
            if end < one.rows:
                self._waiting[number] = left = one._replace(done=end)  # at the back
                if left.cost(one.rows) <= self._rows_at_once:
                    self._waiting.move_to_end(number, last=False)
        return NextBatch(tuple(slices), expired)
