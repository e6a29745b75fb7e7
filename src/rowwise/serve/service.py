"""Scores the rows of requests in dynamic batches (`BatchLoop`).

The version of a request is chosen on arrival, for all of its slices; a batch has rows of one version only.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from rowwise.base.errors import RowwiseError, one_line
from rowwise.ingest.raw_columns import RawColumns
from rowwise.serve.admission import ServiceLimits
from rowwise.serve.answer import predictions_of
from rowwise.serve.batches import BAD_REQUEST, BatchLoop, Rejection, compute_apart
from rowwise.serve.cached_rows import CachedBatches
from rowwise.serve.json_body import BodyLimits
from rowwise.serve.metrics import ServerMetrics
from rowwise.serve.queue import RequestSlice
from rowwise.serve.record import RequestRecorder
from rowwise.serve.request import RequestReader, RequestRows
from rowwise.serve.traffic import Traffic
from rowwise.serve.version import ServedVersion
from rowwise.tables.store.policy import Ints


class Predictions(NamedTuple):
    """The answer to a request."""

    values_RP: Tensor  # see `serve/answer.py`
    defaults_R: Mapping[str, Ints] = {}  # ids with default rows per sample, by table

    @classmethod
    def join(cls, parts: Sequence["Predictions"]) -> "Predictions":
        if len(parts) == 1:
            return parts[0]
        names = dict.fromkeys(name for part in parts for name in part.defaults_R)
        defaults = {
            name: np.concatenate([part.defaults_R.get(name, np.zeros(len(part.values_RP), np.int64)) for part in parts])
            for name in names
        }
        return cls(torch.cat([part.values_RP for part in parts]), defaults)


Outcome = Predictions | Rejection


@dataclass(slots=True)
class _Pending:
    """A request with uncomputed rows."""

    version: ServedVersion
    rows: RequestRows
    future: asyncio.Future[Outcome]
    arrived_s: float
    exact: bool  # whether to wait for all rows
    predictions: list[Predictions] = field(default_factory=list)  # of the slices so far


@final
class ScoringService:
    """Versions of a model, and the requests that wait for their rows.

    Args:
        limits: of requests and batches.
        clock: monotonic seconds.
    """

    def __init__(self, limits: ServiceLimits, clock: Callable[[], float] = time.perf_counter) -> None:
        """Without a version; `open` one and `move` the traffic to it before requests arrive."""
        self.limits, self.clock = limits, clock
        self.body_limits = BodyLimits(limits.max_json_bytes, limits.max_json_values, list_values=limits.max_list_values)
        self.versions: dict[int, ServedVersion] = {}
        self.traffic: Traffic | None = None
        self.refused: dict[int, str] = {}  # reason by version
        self.draining = False  # connections are closed with the next response
        self.metrics = ServerMetrics()
        self.recorder: RequestRecorder | None = None
        self._readers: dict[int, RequestReader] = {}
        self._requests = 0
        self._loop: BatchLoop[_Pending] = BatchLoop(
            limits.rows_at_once,
            clock,
            "rows",
            kind_of=_batch_key,
            compute=self._compute,
            publish=self.metrics.waiting.set,
        )
        self.admission = self._loop.admission

    @property
    def rows(self) -> int:
        """Waiting rows, which are in no batch yet."""
        return self._loop.rows

    def open(self, version: ServedVersion) -> None:
        self.versions[version.number] = version
        self._readers[version.number] = RequestReader(
            version.schema, self.limits.max_rows, version.sides, self.limits.max_bytes, self.body_limits
        )

    def close(self, number: int) -> tuple[ServedVersion, RequestReader]:
        """Close a version, for the caller to free; its requests in flight are still answered."""
        return self.versions.pop(number), self._readers.pop(number)

    def move(self, traffic: Traffic) -> None:
        """Route new requests to these versions, which must be open."""
        assert set(traffic.versions) <= self.versions.keys()
        self.traffic = traffic
        self.metrics.set_version(self.versions[traffic.current])

    @property
    def current(self) -> ServedVersion:
        assert self.traffic is not None, "no version is open"
        return self.versions[self.traffic.current]

    def choose(self) -> ServedVersion:
        """The version of a new request."""
        assert self.traffic is not None, "no version is open"
        self._requests += 1
        return self.versions[self.traffic.version_of(self._requests)]

    def reader_of(self, version: ServedVersion) -> RequestReader:
        return self._readers[version.number]

    def refusal_unread(self, kind: str, size_bytes: int, timeout_s: float | None) -> Rejection | None:
        """The rejection of a request by the size of its body, or None; None if no rows wait."""
        if not self._loop.rows:
            return None
        rows = min(self.admission.expected_rows(kind, size_bytes), self.limits.max_rows)
        return self._loop.refusal(rows, self.limits.seconds(timeout_s))

    async def score(
        self, version: ServedVersion, rows: RequestRows, timeout_s: float | None = None, *, exact: bool = False
    ) -> Outcome:
        """The predictions of rows by a version, or a rejection; `exact`: wait for all rows, without defaults."""
        pending = partial(_Pending, version, rows, arrived_s=self.clock(), exact=exact)
        left_s, costs = self.limits.seconds(timeout_s), rows.costs(self.limits.rows_at_once)
        return await self._loop.answer(pending, rows.rows, left_s, costs)

    def _compute(self, slices: Sequence[RequestSlice]) -> None:
        begin_s, rows = self.clock(), sum(end - begin for _, begin, end in slices)
        outcomes = compute_apart(slices, self._predict, self._explain)
        computed_s = self.clock() - begin_s
        self.metrics.stage["compute"].observe(computed_s)
        self.metrics.batch_rows.observe(rows)
        self.metrics.rows.inc(rows)
        for (number, begin, _), outcome in zip(slices, outcomes, strict=True):
            self._deliver(number, begin, outcome, begin_s)

    def _deliver(self, number: int, begin: int, outcome: Outcome, computed_at_s: float) -> None:
        """Add the predictions of a slice to its request, and resolve it after the last slice."""
        pending = self._loop.requests[number]
        if not begin:
            self.metrics.stage["queue"].observe(computed_at_s - pending.arrived_s)
        if isinstance(outcome, Rejection):
            self._loop.resolve(number, outcome)
            return
        pending.predictions.append(outcome)
        if sum(len(part.values_RP) for part in pending.predictions) == pending.rows.rows:
            self._loop.resolve(number, Predictions.join(pending.predictions))

    def _predict(self, slices: Sequence[RequestSlice]) -> list[Predictions]:
        """The predictions of each slice, of one version."""
        sizes = [end - begin for _, begin, end in slices]
        first = self._loop.requests[slices[0].request]
        cached = CachedBatches(first.version.cached, exact=first.exact)
        try:
            logits_RK = first.version.forward(
                self._gather(slices), sum(sizes), self.limits.rows_at_once, cached.collect if cached.tables else None
            )
        finally:
            self.metrics.count_rows(cached.counts)
            self.metrics.count_device(first.version.device_caches)
        parts, begins = predictions_of(logits_RK, first.version.link).split(sizes), accumulate(sizes, initial=0)
        return [
            Predictions(part, cached.defaults_of(begin, len(part))) for part, begin in zip(parts, begins, strict=False)
        ]

    def _gather(self, slices: Sequence[RequestSlice]) -> RawColumns:
        """The concatenated columns of all slices."""
        parts = [(self._loop.requests[number].rows.arrays, begin, end) for number, begin, end in slices]
        return RawColumns.join(
            [
                columns if (begin, end) == (0, columns.rows) else columns.slice(begin, end)
                for columns, begin, end in parts
            ]
        )

    def _explain(self, part: RequestSlice, error: RowwiseError) -> Rejection:
        """The error of a slice, recomputed for the whole request for the right row number."""
        pending = self._loop.requests[part.request]
        rows = pending.rows
        try:
            pending.version.forward.preparation(rows.arrays, np.arange(rows.rows))
        except RowwiseError as row_error:
            error = row_error
        return Rejection(BAD_REQUEST, one_line(error) or "")


def _batch_key(pending: _Pending) -> tuple[int, bool]:
    """Requests are computed together if they agree on the version and on waiting for all rows."""
    return pending.version.number, pending.exact
