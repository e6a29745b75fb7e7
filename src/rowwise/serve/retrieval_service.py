"""Requests for items, searched in dynamic batches.

They have a separate queue from the rows to score, as the cost of a search differs. An exhaustive search over many items
has a third queue: a batch of it is a slice of the items, and batches of all queues alternate. So an exact search blocks
other requests for no longer than a slice.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

from rowwise.base.errors import one_line
from rowwise.serve.batches import BAD_REQUEST, LATE, BatchLoop, Rejection, compute_apart
from rowwise.serve.item_scan import ItemScan, NearItems
from rowwise.serve.queue import RequestSlice
from rowwise.serve.retrieval import QUERIES_AT_ONCE, ItemQuery, RetrievedItems, Retriever
from rowwise.serve.service import ScoringService
from rowwise.serve.version import ServedVersion

SearchOutcome = RetrievedItems | Rejection


@dataclass(slots=True)
class _WaitingSearch:
    version: ServedVersion
    retriever: Retriever
    query: ItemQuery
    future: asyncio.Future[SearchOutcome | ItemScan]
    arrived_s: float
    deadline_s: float


class _WaitingScan(NamedTuple):
    scan: ItemScan
    future: asyncio.Future[NearItems | Rejection]


@final
class RetrievalService:
    """Searches for the requests of one process.

    Args:
        service: the service with the open versions.
    """

    def __init__(self, service: ScoringService) -> None:
        self._service = service
        self._loop: BatchLoop[_WaitingSearch] = BatchLoop(
            QUERIES_AT_ONCE,
            service.clock,
            "searches",
            kind_of=lambda search: search.version.number,
            compute=self._search,
            publish=self._publish,
        )
        self._scans: BatchLoop[_WaitingScan] = BatchLoop(
            1, service.clock, "slices of items", kind_of=lambda _: 0, compute=self._scan, publish=self._publish
        )

    def refusal_unread(self, timeout_s: float | None) -> Rejection | None:
        """The rejection of a request before its body is read, or None; None if no request waits."""
        return self._loop.refusal(1, self._service.limits.seconds(timeout_s)) if self._loop.rows else None

    async def retrieve(
        self, version: ServedVersion, retriever: Retriever, query: ItemQuery, timeout_s: float | None
    ) -> SearchOutcome:
        """The items of a query by a version, or a rejection."""
        now_s, left_s = self._service.clock(), self._service.limits.seconds(timeout_s)
        deadline_s = now_s + left_s
        waiting = partial(_WaitingSearch, version, retriever, query, arrived_s=now_s, deadline_s=deadline_s)
        outcome = await self._loop.answer(waiting, 1, left_s, query.rows.costs(QUERIES_AT_ONCE))
        if not isinstance(outcome, ItemScan):
            return outcome
        scan = partial(_WaitingScan, outcome)
        near = await self._scans.answer(scan, outcome.slices, deadline_s - self._service.clock())
        return near if isinstance(near, Rejection) else self._name(retriever, query, near)

    def _publish(self, _: int) -> None:
        self._service.metrics.waiting_searches.set(self._loop.rows + len(self._scans.requests))

    def _scan(self, slices: Sequence[RequestSlice]) -> None:
        """Search the next slices of the items for requests."""
        begin_s = self._service.clock()
        for number, begin, end in slices:
            scan = self._scans.requests[number].scan
            for _ in range(begin, end):
                if scan.step():
                    self._scans.resolve(number, scan.result())
        self._service.metrics.stage["compute"].observe(self._service.clock() - begin_s)

    def _name(self, retriever: Retriever, query: ItemQuery, near: NearItems) -> RetrievedItems:
        self._service.metrics.searches["exact" if near.exact else "index"].inc()
        return retriever.name(near, query.unknown)

    def _search(self, slices: Sequence[RequestSlice]) -> None:
        """Compute searches of one version."""
        metrics, begin_s = self._service.metrics, self._service.clock()
        waiting = [self._loop.requests[part.request] for part in slices]
        for part in waiting:
            metrics.stage["queue"].observe(begin_s - part.arrived_s)
        outcomes = compute_apart(
            waiting, self._search_batch, lambda _, error: Rejection(BAD_REQUEST, one_line(error) or "")
        )
        metrics.stage["compute"].observe(self._service.clock() - begin_s)
        for part, outcome in zip(slices, outcomes, strict=True):
            self._loop.resolve(part.request, outcome)

    def _search_batch(self, waiting: Sequence[_WaitingSearch]) -> list[SearchOutcome | ItemScan]:
        """The items of each search, of one version, or an exhaustive search to be stepped."""
        retriever = waiting[0].retriever
        users_QD, counts = retriever.vectors([search.query.rows for search in waiting])
        self._service.metrics.count_rows(counts)
        outcomes: list[SearchOutcome | ItemScan] = []
        for user_D, search in zip(users_QD, waiting, strict=True):
            if search.deadline_s <= self._service.clock():  # earlier searches of the batch may have used up the time
                outcomes.append(LATE)
                continue
            near = retriever.begin(user_D, search.query)
            if isinstance(near, ItemScan) and near.fits_at_once(QUERIES_AT_ONCE):
                near.step()
                near = near.result()
            outcomes.append(near if isinstance(near, ItemScan) else self._name(retriever, search.query, near))
        return outcomes
