"""Dynamic batching: waiting requests are computed in batches, in the thread of the event loop.

While a batch is computed, new requests wait in their sockets; then all are read, and answers are sent, before the next
batch is formed. So batches grow with the load, and no request waits for others to arrive. Several loops of a process
alternate their batches, and each measures the time between two of its own, so all refuse in time.
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
READ_TURNS = 2  # turns of the loop between batches: in the first answers are sent, in the second new requests are read


class Rejection(NamedTuple):
    """The HTTP status and message of a request that is not answered."""

    code: int
    message: str
    retry_after_s: float | None = None


LATE = Rejection(TOO_LATE, "the deadline of the request passed before it was computed")

R = TypeVar("R")
T = TypeVar("T")


def compute_apart(
    requests: Sequence[R], compute: Callable[[Sequence[R]], list[T]], explain: Callable[[R, RowwiseError], Rejection]
) -> list[T | Rejection]:
    """Outcomes of a batch of requests. If the batch fails, each request is computed alone, so only faulty ones fail.

    Args:
        requests: requests or slices of them.
        compute: outcomes of a batch; raises for the whole batch.
        explain: the rejection of a request, from the error of computing it alone.
    """
    try:
        return [*compute(requests)]
    except StoreError as error:  # no fault of the requests
        return [Rejection(UNAVAILABLE, one_line(error) or "")] * len(requests)
    except RowwiseError as error:
        if len(requests) == 1:
            return [explain(requests[0], error)]
        return [outcome for request in requests for outcome in compute_apart([request], compute, explain)]


class WaitingRequest(Protocol):
    """A request that waits for its answer."""

    @property
    def future(self) -> asyncio.Future[Any]: ...


W = TypeVar("W", bound=WaitingRequest)


@final
class BatchLoop(Generic[W]):
    """Waiting requests by number, and the schedule of their batches.

    Args:
        rows_at_once: maximum rows of a batch.
        clock: monotonic seconds.
        what: noun for the rows of a request, in messages.
        kind_of: a sortable key; slices of one batch are computed together if their keys are equal.
        compute: resolves slices of one key. If it raises, only their requests fail.
        publish: called with the number of waiting rows.
    """

    def __init__(
        self,
        rows_at_once: int,
        clock: Callable[[], float],
        what: str,
        *,
        kind_of: Callable[[W], Any],
        compute: Callable[[Sequence[RequestSlice]], None],
        publish: Callable[[int], None],
    ) -> None:
        self._clock, self._what = clock, what
        self._kind_of, self._compute, self._publish = kind_of, compute, publish
        self.admission = Admission(rows_at_once)
        self._queue = RequestQueue(rows_at_once)
        self.requests: dict[int, W] = {}
        self._next_number = 0
        self._busy_since_s: float | None = None  # end of the last batch, if requests were left waiting
        self._scheduled = False

    @property
    def rows(self) -> int:
        """Waiting rows, which are in no batch yet."""
        return self._queue.rows

    def refusal(self, rows: int, left_s: float) -> Rejection | None:
        """The rejection of a request that would miss its deadline, or None."""
        delay_s = self.admission.delay_s(rows, self.rows, left_s)
        if delay_s is None:
            return None
        if not self.rows:
            self.admission.doubt()  # else one slow batch would refuse all later requests
        needed_s = self.admission.seconds(self.rows + rows)
        needed = f"{max(1, round(1000 * needed_s)):,} ms are needed, more than is safe of its {1000 * left_s:,.0f} ms"
        if self.rows:
            ahead = f"{self.rows:,} {self._what} wait before its {rows:,}"
            message = f"{ahead}: about {needed}: expected more time, or fewer requests"
        else:
            message = f"it has {rows:,} {self._what}: about {needed}: expected more time, or fewer {self._what}"
        return Rejection(UNAVAILABLE, message, delay_s)

    async def answer(
        self, make: Callable[[asyncio.Future[Any]], W], rows: int, left_s: float, costs: Costs | None = None
    ) -> Any:
        """The outcome of a request, or its rejection on admission or at its deadline."""
        refusal = self.refusal(rows, left_s)
        if refusal is not None:
            return refusal
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number, self._next_number = self._next_number, self._next_number + 1
        self.requests[number] = make(future)
        self._queue.add(number, rows, self._clock() + left_s, costs)
        self._publish(self.rows)
        self._schedule()
        try:
            return await future
        finally:  # also if the client has disconnected
            self._queue.remove(number)
            self.requests.pop(number, None)

    def resolve(self, number: int, outcome: Any) -> None:
        """Set the outcome of a request, unless its client has disconnected; drops its remaining rows."""
        self._queue.remove(number)
        future = self.requests[number].future
        if not future.done():
            future.set_result(outcome)

    def _schedule(self, turns: int = 0) -> None:
        """Compute a batch after so many turns of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._work, turns)

    def _work(self, turns: int = 0) -> None:
        """Compute one batch; called by the loop after it has read the arrived requests."""
        if turns:
            asyncio.get_running_loop().call_soon(self._work, turns - 1)
            return
        self._scheduled = False
        now_s = self._clock()
        # Under load a batch costs all time since the last one, including that of reading requests.
        begin_s = now_s if self._busy_since_s is None else self._busy_since_s
        batch = self._queue.take(now_s)
        self._publish(self.rows)
        for number in batch.expired:
            self.resolve(number, LATE)
        for _, slices in groupby(sorted(batch.slices, key=self._kind_of_slice), self._kind_of_slice):
            self._compute_or_fail(list(slices))
        end_s = self._clock()
        if batch.slices:
            self.admission.observe(sum(end - begin for _, begin, end in batch.slices), end_s - begin_s)
        self._busy_since_s = end_s if len(self._queue) else None
        if len(self._queue):
            self._schedule(READ_TURNS)

    def _kind_of_slice(self, part: RequestSlice) -> Any:
        return self._kind_of(self.requests[part.request])

    def _compute_or_fail(self, slices: Sequence[RequestSlice]) -> None:
        try:
            self._compute(slices)
        except Exception:  # a bug, or out of memory: fail these requests only, and let no client wait for ever
            traceback.print_exc()
            for number, _, _ in slices:
                self.resolve(number, Rejection(FAILED, "the batch could not be computed: see the log of the server"))
