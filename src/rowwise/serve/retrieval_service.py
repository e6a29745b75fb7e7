"""Requests for items: searches in batches of what has arrived.

They have a queue of their own beside that of the rows to score, as a search takes another time than a row.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from rowwise.errors import RowwiseError, StoreError, one_line
from rowwise.serve.batches import BAD_REQUEST, LATE, UNAVAILABLE, BatchLoop, Rejection
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
    future: asyncio.Future[Found]
    arrived_s: float
    deadline_s: float


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
            kind_of=_version_of,
            compute=self._search,
            show=service.metrics.waiting_searches.set,
        )

    def refusal_unread(self, timeout_s: float | None) -> Rejection | None:
        """Why a request cannot be answered in its time, before its body is read; None where no request waits."""
        return self._loop.refusal(1, self._service.limits.seconds(timeout_s)) if self._loop.rows else None

    async def retrieve(
        self, version: ServedVersion, retriever: Retriever, query: ItemQuery, timeout_s: float | None
    ) -> Found:
        """The items of a query by a version, or why there are none."""
        left_s = self._service.limits.seconds(timeout_s)
        refusal = self._loop.refusal(1, left_s)
        if refusal is not None:
            return refusal
        now_s, future = self._service.clock(), asyncio.get_running_loop().create_future()
        waiting = _WaitingSearch(version, retriever, query, future, now_s, now_s + left_s)
        return await self._loop.answer(waiting, 1, waiting.deadline_s)

    def _search(self, slices: Sequence[RequestSlice]) -> None:
        """Answer requests to one version."""
        metrics, begin_s = self._service.metrics, self._service.clock()
        waiting = [self._loop.requests[one.request] for one in slices]
        for one in waiting:
            metrics.stage["queue"].observe(begin_s - one.arrived_s)
        found = self._found(waiting)
        metrics.stage["compute"].observe(self._service.clock() - begin_s)
        for one, outcome in zip(slices, found, strict=True):
            self._loop.resolve(one.request, outcome)

    def _found(self, waiting: Sequence[_WaitingSearch]) -> list[Found]:
        """The items of each request, to one version. A request that is refused leaves the others alone."""
        retriever, metrics = waiting[0].retriever, self._service.metrics
        try:
            users_QD, counts = retriever.vectors([one.query.rows for one in waiting])
        except StoreError as error:  # no fault of the request
            return [Rejection(UNAVAILABLE, one_line(error) or "")] * len(waiting)
        except RowwiseError as error:
            if len(waiting) == 1:
                return [Rejection(BAD_REQUEST, one_line(error) or "")]
            return [outcome for one in waiting for outcome in self._found([one])]
        metrics.count_rows(counts)
        found: list[Found] = []
        for user_D, one in zip(users_QD, waiting, strict=True):
            if one.deadline_s <= self._service.clock():  # a search among many items may take what the others have
                found.append(LATE)
                continue
            near = retriever.find(user_D, one.query)
            metrics.searches["exact" if near.exact else "index"].inc()
            found.append(retriever.name(near, one.query.unknown))
        return found


def _version_of(waiting: _WaitingSearch) -> int:
    return waiting.version.number
