"""The requests that wait for their rows to be computed, as a pure state machine: times are arguments.

A batch takes rows of the oldest requests. A request of which more than a batch is left goes to the back after each
slice, so short requests pass between; one of which less is left is first in the next batch.
"""

from collections import OrderedDict
from typing import NamedTuple, final


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

    def add(self, request: int, rows: int, deadline_s: float) -> None:
        assert rows > 0
        assert request not in self._waiting
        self._waiting[request] = _Waiting(rows, 0, deadline_s)
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
        room = self._rows_at_once
        slices: list[RequestSlice] = []
        for number in list(self._waiting):
            if not room:
                break
            one = self._waiting.pop(number)
            end = min(one.rows, one.done + room)
            slices.append(RequestSlice(number, one.done, end))
            room -= end - one.done
            self.rows -= end - one.done
            if end < one.rows:
                self._waiting[number] = one._replace(done=end)  # at the back
                if one.rows - end <= self._rows_at_once:
                    self._waiting.move_to_end(number, last=False)
        return NextBatch(tuple(slices), expired)
