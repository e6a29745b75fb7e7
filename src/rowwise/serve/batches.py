"""Requests that wait, computed in batches of what has arrived, in one thread, between the events of its loop.

While a batch is computed, new requests wait in their sockets; then all of them are read before the next batch is taken.
So batches grow with the load, and no request waits for others to come. Where a process has several of these, their
batches alternate, and each measures what passes between two of its own, so all refuse in time.
"""

import asyncio
import traceback
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, final

from rowwise.base.errors import RowwiseError, StoreError, one_line
from rowwise.serve.admission import Admission
from rowwise.serve.queue import Costs, RequestQueue, RequestSlice

BAD_REQUEST, FAILED, UNAVAILABLE, TOO_LATE = 400, 500, 503, 504


class Rejection(NamedTuple):
    """Why a request has no answer, with a status of HTTP."""

    code: int
    message: str
    retry_after_s: float | None = None


LATE = Rejection(TOO_LATE, "the time of the request was over before it was computed")

R = TypeVar("R")
T = TypeVar("T")


def compute_apart(
    requests: Sequence[R], compute: Callable[[Sequence[R]], list[T]], explain: Callable[[R, RowwiseError], Rejection]
) -> list[T | Rejection]:
    """The outcomes of requests that are computed together. One that is refused leaves the others alone.

    Args:
        requests: or slices of them.
        compute: an outcome for each; raises for all of them.
        explain: why a request is refused, by the error of computing it alone.
    """
    try:
        return [*compute(requests)]
    except StoreError as error:  # no fault of the requests
        return [Rejection(UNAVAILABLE, one_line(error) or "")] * len(requests)
    except RowwiseError as error:
        if len(requests) == 1:
            return [explain(requests[0], error)]
        return [outcome for one in requests for outcome in compute_apart([one], compute, explain)]


class WaitingRequest(Protocol):
    """A request that waits for its answer."""

    @property
    def future(self) -> asyncio.Future[Any]: ...


W = TypeVar("W", bound=WaitingRequest)


@final
class BatchLoop(Generic[W]):
    """Waiting requests by number, and when they are computed.

    Args:
        rows_at_once: most rows of a batch.
        clock: seconds that never go back.
        what: the rows of a request, in messages.
        kind_of: slices that are computed together have one kind; kinds can be sorted.
        compute: resolves slices of one kind. If it raises, their requests fail, and no others.
        show: called with the rows that wait.
    """

    def __init__(
        self,
        rows_at_once: int,
        clock: Callable[[], float],
        what: str,
        *,
        kind_of: Callable[[W], Any],
        compute: Callable[[Sequence[RequestSlice]], None],
        show: Callable[[int], None],
    ) -> None:
        """Without a request that waits."""
        self._clock, self._what = clock, what
        self._kind_of, self._compute, self._show = kind_of, compute, show
        self.admission = Admission(rows_at_once)
        self._queue = RequestQueue(rows_at_once)
        self.requests: dict[int, W] = {}
        self._next = 0
        self._left_at_s: float | None = None  # the end of the last batch, if it left requests waiting
        self._scheduled = False

    @property
    def rows(self) -> int:
        """Rows of requests that no batch has yet."""
        return self._queue.rows

    def refusal(self, rows: int, left_s: float) -> Rejection | None:
        """Why a request of so many rows cannot be answered in its time; None: it can."""
        delay_s = self.admission.delay_s(rows, self.rows, left_s)
        if delay_s is None:
            return None
        if not self.rows:
            self.admission.doubt()  # nothing else would measure again what one slow batch has taught
        needed_s = self.admission.seconds(self.rows + rows)
        took = f"about {max(1, round(1000 * needed_s)):,} ms are needed of the {1000 * left_s:,.0f} ms of the request"
        if self.rows:
            why = f"{self.rows:,} {self._what} wait before its {rows:,}: {took}: expected more time, or fewer requests"
        else:
            why = f"it has {rows:,} {self._what}: {took}: expected more time, or fewer {self._what}"
        return Rejection(UNAVAILABLE, why, delay_s)

    async def answer(
        self, make: Callable[[asyncio.Future[Any]], W], rows: int, left_s: float, costs: Costs | None = None
    ) -> Any:
        """What the future of a request gets, by its batches or because its time is over; or why it is refused."""
        refusal = self.refusal(rows, left_s)
        if refusal is not None:
            return refusal
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number, self._next = self._next, self._next + 1
        self.requests[number] = make(future)
        self._queue.add(number, rows, self._clock() + left_s, costs)
        self._show(self.rows)
        self._schedule()
        try:
            return await future
        finally:  # also when the client has gone
            self._queue.remove(number)
            self.requests.pop(number, None)

    def resolve(self, number: int, outcome: Any) -> None:
        """Give a request its answer, unless its client has gone. No more of its rows are computed."""
        self._queue.remove(number)
        future = self.requests[number].future
        if not future.done():
            future.set_result(outcome)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Compute one batch; called by the loop after it has read what has arrived."""
        self._scheduled = False
        now_s = self._clock()
        # While requests wait, the time of a batch is all that passes between two: requests are read in it, too.
        begin_s = now_s if self._left_at_s is None else self._left_at_s
        batch = self._queue.take(now_s)
        self._show(self.rows)
        for number in batch.expired:
            self.resolve(number, LATE)
        for _, slices in groupby(sorted(batch.slices, key=self._kind_of_slice), self._kind_of_slice):
            self._compute_or_fail(list(slices))
        end_s = self._clock()
        if batch.slices:
            self.admission.observe(sum(end - begin for _, begin, end in batch.slices), end_s - begin_s)
        self._left_at_s = end_s if len(self._queue) else None
        if len(self._queue):
            self._schedule()

    def _kind_of_slice(self, one: RequestSlice) -> Any:
        return self._kind_of(self.requests[one.request])

    def _compute_or_fail(self, slices: Sequence[RequestSlice]) -> None:
        try:
            self._compute(slices)
        except Exception:  # a bug, or the memory is full: no client may wait for ever, nor other requests fail
            traceback.print_exc()
            for number, _, _ in slices:
                self.resolve(number, Rejection(FAILED, "the batch could not be computed: see the log of the server"))
