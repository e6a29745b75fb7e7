"""Requests for items: searches in batches of what has arrived.

They have a queue of their own beside that of the rows to score, as a search takes another time than a row. A search
among many items has another one: a batch of it is a slice of the items, and batches of all queues alternate. So an
exact search holds up no other request for longer than a slice takes.
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

Found = RetrievedItems | Rejection


@dataclass(slots=True)
class _WaitingSearch:
    version: ServedVersion
    retriever: Retriever
    query: ItemQuery
    future: asyncio.Future[Found | ItemScan]
    arrived_s: float
    deadline_s: float


class _WaitingScan(NamedTuple):
    scan: ItemScan
    future: asyncio.Future[NearItems | Rejection]


@final
class RetrievalService:
    """Searches for the requests of one process.

    Args:
        service: has the versions open.
    """

    def __init__(self, service: ScoringService) -> None:
        """Without a request that waits."""
        self._service = service
        self._loop: BatchLoop[_WaitingSearch] = BatchLoop(
            QUERIES_AT_ONCE,
            service.clock,
            "searches",
            kind_of=lambda one: one.version.number,
            compute=self._search,
            show=self._show,
        )
        self._scans: BatchLoop[_WaitingScan] = BatchLoop(
            1, service.clock, "slices of items", kind_of=lambda _: 0, compute=self._scan, show=self._show
        )

    def refusal_unread(self, timeout_s: float | None) -> Rejection | None:
        """Why a request cannot be answered in its time, before its body is read; None where no request waits."""
        return self._loop.refusal(1, self._service.limits.seconds(timeout_s)) if self._loop.rows else None

    async def retrieve(
        self, version: ServedVersion, retriever: Retriever, query: ItemQuery, timeout_s: float | None
    ) -> Found:
        """The items of a query by a version, or why there are none."""
        now_s, left_s = self._service.clock(), self._service.limits.seconds(timeout_s)
        deadline_s = now_s + left_s
        waiting = partial(_WaitingSearch, version, retriever, query, arrived_s=now_s, deadline_s=deadline_s)
        found = await self._loop.answer(waiting, 1, left_s, query.rows.costs(QUERIES_AT_ONCE))
        if not isinstance(found, ItemScan):
            return found
        scan = partial(_WaitingScan, found)
        near = await self._scans.answer(scan, found.slices, deadline_s - self._service.clock())
        return near if isinstance(near, Rejection) else self._name(retriever, query, near)

    def _show(self, _: int) -> None:
        self._service.metrics.waiting_searches.set(self._loop.rows + len(self._scans.requests))

    def _scan(self, slices: Sequence[RequestSlice]) -> None:
        """Look at the next slice of the items for a request."""
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
        """Answer requests to one version."""
        metrics, begin_s = self._service.metrics, self._service.clock()
        waiting = [self._loop.requests[one.request] for one in slices]
        for one in waiting:
            metrics.stage["queue"].observe(begin_s - one.arrived_s)
        found = compute_apart(waiting, self._found, lambda _, error: Rejection(BAD_REQUEST, one_line(error) or ""))
        metrics.stage["compute"].observe(self._service.clock() - begin_s)
        for one, outcome in zip(slices, found, strict=True):
            self._loop.resolve(one.request, outcome)

    def _found(self, waiting: Sequence[_WaitingSearch]) -> list[Found | ItemScan]:
        """The items of each request, to one version, or a search among many of them, which has not begun."""
        retriever = waiting[0].retriever
        users_QD, counts = retriever.vectors([one.query.rows for one in waiting])
        self._service.metrics.count_rows(counts)
        found: list[Found | ItemScan] = []
        for user_D, one in zip(users_QD, waiting, strict=True):
            if one.deadline_s <= self._service.clock():  # a search among many items may take what the others have
                found.append(LATE)
                continue
            near = retriever.begin(user_D, one.query)
            if isinstance(near, ItemScan) and near.fits_at_once(QUERIES_AT_ONCE):
                near.step()
                near = near.result()
            found.append(near if isinstance(near, ItemScan) else self._name(retriever, one.query, near))
        return found
