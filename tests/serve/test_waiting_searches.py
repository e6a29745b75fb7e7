"""Requests for items that wait: refused where there is no time, not computed when it is over, apart from each other."""

import asyncio
import itertools
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from rowwise import nearest_items
from rowwise.base.errors import DataError, StoreError
from rowwise.ingest.raw_columns import RawColumns
from rowwise.serve.admission import ServiceLimits
from rowwise.serve.batches import BAD_REQUEST, FAILED, TOO_LATE, UNAVAILABLE, Rejection
from rowwise.serve.cached_rows import RowCounts
from rowwise.serve.item_scan import ItemFilter, ItemScan, NearItems
from rowwise.serve.request import RequestRows
from rowwise.serve.retrieval import QUERIES_AT_ONCE, ItemQuery, RetrievedItems
from rowwise.serve.retrieval_service import RetrievalService
from rowwise.serve.service import ScoringService

SEARCH_s = 0.01
ROWS, SLICES = 10, 40
ITEMS_ID = torch.arange(4.0 * ROWS * SLICES).view(-1, 4) % 97


class Searcher:
    """Searches in a time of its own; a query's vector is the number in its row."""

    def __init__(self, clock):
        self.clock, self.fault, self.unreadable = clock, None, None

    def vectors(self, queries):
        numbers = [rows.arrays["x"][0].as_py() for rows in queries]
        if None in numbers:
            raise DataError("request: row 0, column 'x': null")
        if self.unreadable is not None:
            raise self.unreadable
        return torch.tensor(numbers).view(-1, 1), RowCounts()

    def begin(self, query_D, query):
        self.clock.now_s += SEARCH_s
        if self.fault is not None:
            raise self.fault
        if query.exact:
            return ItemScan(torch.ones(4), ITEMS_ID, 3, query.allowed, slice_bytes=ROWS * 16)
        return NearItems(query_D, query_D.float(), exact=False)

    def name(self, near, unknown):
        return RetrievedItems(near.places_K.tolist(), near.dots_K.tolist(), unknown, near.exact)


def query_of(number, *, exact=False):
    rows = RequestRows(RawColumns.of({"x": pa.array([number], pa.int64())}), 1, 0)
    return ItemQuery(rows, 1, ItemFilter(), exact=exact, unknown=0)


@pytest.fixture
def waiting(clock):
    service = RetrievalService(ScoringService(ServiceLimits(), clock))
    versions = [SimpleNamespace(number=number) for number in (1, 2)]
    return SimpleNamespace(service=service, clock=clock, searcher=Searcher(clock), versions=versions)


def go(waiting, numbers, timeout_s=None):
    async def all_at_once():
        asked = [
            waiting.service.retrieve(waiting.versions[k % 2], waiting.searcher, query_of(number), timeout_s)
            for k, number in enumerate(numbers)
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(all_at_once())


def test_each_gets_its_own_answer_and_a_bad_one_leaves_the_others_alone(waiting):
    count = 3 * QUERIES_AT_ONCE + 5
    found = go(waiting, [None if number % 7 == 3 else number for number in range(count)])
    for number, outcome in enumerate(found):
        if number % 7 == 3:
            assert outcome == Rejection(BAD_REQUEST, "request: row 0, column 'x': null")
        else:
            assert outcome.items == [number]


def test_what_cannot_be_found_in_time_is_refused_at_once(waiting):
    go(waiting, range(100))  # measures searches
    began_s = waiting.clock.now_s
    found = go(waiting, range(400), timeout_s=40 * SEARCH_s)
    answered = [outcome for outcome in found if isinstance(outcome, RetrievedItems)]
    refused = [outcome for outcome in found if isinstance(outcome, Rejection)]
    assert 15 <= len(answered) <= 40
    assert len(answered) + len(refused) == 400
    assert {one.code for one in refused} == {UNAVAILABLE}
    assert all(one.retry_after_s > 0 for one in refused)
    assert waiting.clock.now_s - began_s == pytest.approx(len(answered) * SEARCH_s)


def test_what_is_too_late_is_not_computed(waiting):
    found = go(waiting, range(60), timeout_s=20.5 * SEARCH_s)  # nothing was measured yet
    late = [outcome for outcome in found if isinstance(outcome, Rejection)]
    assert {one.code for one in late} == {TOO_LATE}
    assert len(late) == 60 - 21  # the last search began in time


def test_a_fault_ends_the_requests_of_its_batch_alone(waiting, capsys):
    waiting.searcher.fault = MemoryError("none left")
    assert [one.code for one in go(waiting, range(2))] == [FAILED, FAILED]
    assert "none left" in capsys.readouterr().err
    waiting.searcher.fault = None
    assert [one.items for one in go(waiting, range(2))] == [[0], [1]]


def test_rows_that_cannot_be_read_are_no_fault_of_the_requests(waiting):
    waiting.searcher.unreadable = StoreError("a.safetensors: its rows cannot be read")
    assert {one.code for one in go(waiting, range(3))} == {UNAVAILABLE}


def test_others_pass_between_the_slices_of_an_exact_search(waiting, monkeypatch):
    """Those that come while it goes on are answered before it; the event loop turns between two slices."""
    seen, step = [], ItemScan.step

    def logged(scan):
        seen.append("slice")
        return step(scan)

    monkeypatch.setattr(ItemScan, "step", logged)

    async def ask(number, *, exact):
        found = await waiting.service.retrieve(
            waiting.versions[0], waiting.searcher, query_of(number, exact=exact), None
        )
        seen.append(number)
        return found

    async def go_on():
        exact = asyncio.create_task(ask(-1, exact=True))
        while seen.count("slice") < 3:
            await asyncio.sleep(0)
        for number in range(5):
            before = seen.count("slice")
            await ask(number, exact=False)
            assert seen.count("slice") - before <= 2
        while not exact.done():
            seen.append("turn")
            await asyncio.sleep(0)
        return await exact

    found = asyncio.run(go_on())
    assert seen.count("slice") == SLICES
    assert [one for one in seen if isinstance(one, int)] == [0, 1, 2, 3, 4, -1]
    last = seen[seen.index(4) :]
    assert all({one, after} != {"slice"} for one, after in itertools.pairwise(last))
    dots_K, places_K = nearest_items(torch.ones(4), ITEMS_ID, 3)
    assert (found.items, found.scores, found.exact) == (places_K.tolist(), dots_K.tolist(), True)


def test_exact_searches_take_turns_and_end_in_time_or_say_so(waiting, monkeypatch):
    step = ItemScan.step

    def timed(scan):
        waiting.clock.now_s += SEARCH_s
        return step(scan)

    monkeypatch.setattr(ItemScan, "step", timed)

    async def some(timeout_s):
        asked = [
            waiting.service.retrieve(waiting.versions[0], waiting.searcher, query_of(k, exact=True), timeout_s)
            for k in range(4)
        ]
        return await asyncio.gather(*asked)

    first = asyncio.run(some(1000.0))
    assert all(one.items == first[0].items for one in first)
    assert {one.code for one in asyncio.run(some(34 * SEARCH_s))} <= {TOO_LATE, UNAVAILABLE}
