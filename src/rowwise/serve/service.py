"""Computes the rows of requests in batches of what has arrived, in one thread, between the events of its loop.

While a batch is computed, new requests wait in their sockets; then all of them are read before the next batch is taken.
So batches grow with the load, and no request waits for others to come. A request belongs to the version that was chosen
when it came, in all of its slices; rows of two versions are never in one batch.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rowwise.errors import RowwiseError, StateError, one_line
from rowwise.serve.admission import Admission, ServiceLimits
from rowwise.serve.metrics import ServerMetrics
from rowwise.serve.queue import RequestQueue, RequestSlice
from rowwise.serve.record import RequestRecorder
from rowwise.serve.request import RequestReader, RequestRows
from rowwise.serve.traffic import Traffic
from rowwise.serve.version import ServedVersion

BAD_REQUEST, UNAVAILABLE, TOO_LATE = 400, 503, 504


class Rejection(NamedTuple):
    """Why a request has no answer, with a status of HTTP."""

    code: int
    message: str
    retry_after_s: float | None = None


Outcome = Tensor | Rejection  # logits [R, K]


@dataclass(slots=True)
class _Pending:
    """A request whose rows are not all computed."""

    version: ServedVersion
    rows: RequestRows
    future: asyncio.Future[Outcome]
    arrived_s: float
    logits: list[Tensor] = field(default_factory=list)  # of the slices so far


@final
class ScoringService:
    """Versions of a model, and the requests that wait for their rows.

    Args:
        limits: see there.
        clock: seconds that never go back.
    """

    def __init__(self, limits: ServiceLimits, clock: Callable[[], float] = time.perf_counter) -> None:
        """Without a version; `open` one and `move` the traffic to it before requests come."""
        self.limits, self.clock = limits, clock
        self.versions: dict[int, ServedVersion] = {}
        self.traffic: Traffic | None = None
        self.refused: dict[int, str] = {}  # versions, and why
        self.draining = False  # connections are closed with the next answer
        self.metrics = ServerMetrics()
        self.recorder: RequestRecorder | None = None
        self._readers: dict[int, RequestReader] = {}
        self._queue, self._admission = RequestQueue(limits.rows_at_once), Admission(limits.rows_at_once)
        self._pending: dict[int, _Pending] = {}
        self._next = self._chosen = 0
        self._scheduled = False

    def open(self, version: ServedVersion) -> None:
        self.versions[version.number] = version
        self._readers[version.number] = RequestReader(version.schema, self.limits.most_rows, version.sides)

    def close(self, number: int) -> None:
        """Forget a version; requests that were given it still get their answers."""
        del self.versions[number], self._readers[number]

    def move(self, traffic: Traffic) -> None:
        """Answer new requests by these versions, which are open."""
        assert set(traffic.versions) <= self.versions.keys()
        self.traffic = traffic
        self.metrics.show_version(self.versions[traffic.current])

    @property
    def current(self) -> ServedVersion:
        assert self.traffic is not None, "no version is open"
        return self.versions[self.traffic.current]

    def choose(self) -> ServedVersion:
        """The version of a new request."""
        assert self.traffic is not None, "no version is open"
        self._chosen += 1
        return self.versions[self.traffic.version_of(self._chosen)]

    def reader_of(self, version: ServedVersion) -> RequestReader:
        return self._readers[version.number]

    async def score(self, version: ServedVersion, rows: RequestRows, timeout_s: float | None = None) -> Outcome:
        """The logits of a request's rows by a version, or why there are none."""
        now_s, left_s = self.clock(), self.limits.timeout_s if timeout_s is None else timeout_s
        delay_s = self._admission.delay_s(rows.rows, self._queue.rows, left_s)
        if delay_s is not None:
            return Rejection(UNAVAILABLE, f"{self._queue.rows} rows wait: want more time, or fewer requests", delay_s)
        number, self._next = self._next, self._next + 1
        pending = self._pending[number] = _Pending(version, rows, asyncio.get_running_loop().create_future(), now_s)
        self._queue.add(number, rows.rows, now_s + left_s)
        self.metrics.waiting.set(self._queue.rows)
        self._schedule()
        try:
            return await pending.future
        finally:  # also when the client has gone
            self._queue.remove(number)
            self._pending.pop(number, None)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Compute one batch; called by the loop after it has read what has arrived."""
        self._scheduled = False
        batch = self._queue.take(self.clock())
        self.metrics.waiting.set(self._queue.rows)
        for number in batch.expired:
            self._resolve(number, Rejection(TOO_LATE, "the time of the request was over before it was computed"))
        for _, slices in groupby(sorted(batch.slices, key=self._number_of), self._number_of):
            self._compute(list(slices))
        if len(self._queue):
            self._schedule()

    def _number_of(self, one: RequestSlice) -> int:
        """The version of a slice's request."""
        return self._pending[one.request].version.number

    def _compute(self, slices: Sequence[RequestSlice]) -> None:
        begin_s, rows = self.clock(), sum(end - begin for _, begin, end in slices)
        outcomes: list[Outcome] = []
        try:
            outcomes = self._logits(slices)
        finally:
            if not outcomes:  # a bug, or the memory is full: no client may wait for ever
                for number, _, _ in slices:
                    self._fail(number, StateError("the batch could not be computed: see the log of the server"))
        computed_s = self.clock() - begin_s
        self._admission.observe(rows, computed_s)
        self.metrics.stage["compute"].observe(computed_s)
        self.metrics.batch_rows.observe(rows)
        self.metrics.rows.inc(rows)
        for (number, begin, _), outcome in zip(slices, outcomes, strict=True):
            self._deliver(number, begin, outcome, begin_s)

    def _deliver(self, number: int, begin: int, outcome: Outcome, computed_at_s: float) -> None:
        """Give a slice's logits to its request, which has its answer with the last of them."""
        pending = self._pending[number]
        if not begin:
            self.metrics.stage["queue"].observe(computed_at_s - pending.arrived_s)
        if isinstance(outcome, Rejection):
            self._queue.remove(number)
            self._resolve(number, outcome)
            return
        pending.logits.append(outcome)
        if sum(map(len, pending.logits)) == pending.rows.rows:
            self._resolve(number, pending.logits[0] if len(pending.logits) == 1 else torch.cat(pending.logits))

    def _logits(self, slices: Sequence[RequestSlice]) -> list[Outcome]:
        """The logits of each slice, of one version. A request that is refused leaves the others alone."""
        sizes = [end - begin for _, begin, end in slices]
        version = self._pending[slices[0].request].version
        try:
            logits_RK = version.forward(self._gather(slices), sum(sizes), self.limits.rows_at_once)
        except RowwiseError as error:
            if len(slices) == 1:
                return [self._explain(slices[0], error)]
            return [outcome for one in slices for outcome in self._logits([one])]
        return list(logits_RK.split(sizes))

    def _gather(self, slices: Sequence[RequestSlice]) -> dict[str, pa.Array]:
        """The columns of all slices, one after the other."""
        parts = [(self._pending[number].rows, begin, end) for number, begin, end in slices]
        cut = [rows.arrays if (begin, end) == (0, rows.rows) else rows.slice(begin, end) for rows, begin, end in parts]
        if len(cut) == 1:
            return cut[0]
        return {name: pa.concat_arrays([one[name] for one in cut]) for name in cut[0]}

    def _explain(self, one: RequestSlice, error: RowwiseError) -> Rejection:
        """The error of a slice, with the number of the row in its request."""
        pending = self._pending[one.request]
        rows = pending.rows
        try:
            pending.version.forward.preparation(rows.arrays, np.arange(rows.rows))
        except RowwiseError as whole:
            error = whole
        return Rejection(BAD_REQUEST, one_line(error) or "")

    def _resolve(self, number: int, outcome: Outcome) -> None:
        future = self._pending[number].future
        if not future.done():
            future.set_result(outcome)

    def _fail(self, number: int, error: RowwiseError) -> None:
        self._queue.remove(number)
        future = self._pending[number].future
        if not future.done():
            future.set_exception(error)
