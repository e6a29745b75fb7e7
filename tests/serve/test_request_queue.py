"""The queue and the admission of requests, as pure functions of times that a test makes up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise.serve.admission import Admission
from rowwise.serve.queue import RequestQueue

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 30), st.sampled_from([1, 1, 2, 5, 20])),
        st.tuples(st.just("take"), st.just(0), st.just(0), st.just(1)),
        st.tuples(st.just("remove"), st.integers(0, 20), st.just(0), st.just(1)),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 16))
def test_each_row_is_computed_once_or_its_request_is_over(events, rows_at_once):
    queue, now_s, added, left, done, costs = RequestQueue(rows_at_once), 0.0, {}, {}, {}, {}

    def take():
        batch = queue.take(now_s)
        cost = sum(costs[number][end] - costs[number][begin] for number, begin, end in batch.slices)
        assert cost <= rows_at_once or sum(end - begin for _, begin, end in batch.slices) == 1
        assert len({number for number, _, _ in batch.slices}) == len(batch.slices)
        for number in batch.expired:
            assert left.pop(number) <= now_s
        for number, begin, end in batch.slices:
            assert left[number] > now_s
            assert begin == done[number] < end <= added[number]
            done[number] = end
            if end == added[number]:
                del left[number]
        return batch

    for kind, number, time_s, weight in events:
        now_s += 1
        if kind == "add":
            request = len(added)
            added[request], left[request], done[request] = number, now_s + time_s, 0
            costs[request] = np.concatenate([[0], np.cumsum(np.resize([1, weight, 3], number))])
            plain = weight == 1 and number == 1
            queue.add(request, number, now_s + time_s, None if plain else costs[request])
        elif kind == "remove":
            queue.remove(number)
            left.pop(number, None)
        else:
            take()
        assert queue.rows == sum(added[number] - done[number] for number in left)
        assert len(queue) == len(left)
    while len(queue):
        assert any(take())
    assert queue.rows == 0
    assert take() == ((), ())


def test_short_requests_pass_a_long_one():
    queue = RequestQueue(8)
    queue.add(0, 40, 99)
    assert queue.take(0).slices == ((0, 0, 8),)
    queue.add(1, 2, 99)
    queue.add(2, 3, 99)
    assert queue.take(0).slices == ((0, 8, 16),)
    assert queue.take(0).slices == ((1, 0, 2), (2, 0, 3), (0, 16, 19))
    assert queue.take(0).slices == ((0, 19, 27),)


def test_a_request_that_a_batch_cuts_is_first_in_the_next():
    """At the back it would wait for the whole queue a second time."""
    queue = RequestQueue(8)
    for number in range(3):
        queue.add(number, 5, 99)
    assert queue.take(0).slices == ((0, 0, 5), (1, 0, 3))
    assert queue.take(0).slices == ((1, 3, 5), (2, 0, 5))


def test_a_batch_costs_a_fixed_time_and_a_time_for_each_row():
    admission = Admission(256)
    assert admission.seconds(1000) == 0.0
    for rows in (1, 256, 16, 100, 3, 256):
        admission.observe(rows, 1e-3 + 1e-5 * rows)
    assert admission.seconds(1) == pytest.approx(1.01e-3)
    assert admission.seconds(512) == pytest.approx(2e-3 + 5.12e-3)
    assert admission.delay_s(12, 500, 1.0) is None
    assert admission.delay_s(12, 500, 9.4e-3) == pytest.approx(1e-3)  # never less than a millisecond
    assert admission.delay_s(12, 500, 4e-3) == pytest.approx(7.12e-3 - 3e-3)  # a quarter is kept back


def test_rows_of_a_body_are_estimated_by_its_size():
    admission = Admission(256)
    assert admission.expected_rows("json", 10**6) == 1
    for rows in (1, 50, 200, 3):
        admission.observe_body("json", 40 * rows, rows)
        admission.observe_body("arrow", rows, 1000 * rows)  # of another kind
    assert admission.expected_rows("json", 4000) in (99, 100)
    assert admission.expected_rows("json", 0) == 1


def test_an_overloaded_worker_answers_nearly_what_it_can():
    """Of three times as many requests as it can answer, each with 100 rows; reading one takes as long as its rows."""
    admission, queue, now_s, number, good = Admission(256), RequestQueue(256), 0.0, 0, 0
    read_s, row_s, http_s, time_s = 6e-4, 1e-5, 1e-4, 0.1
    every_s = (read_s + 100 * row_s + http_s) / 3
    left_at_s: float | None = None
    while now_s < 5.0:
        looked_s = now_s
        while number * every_s <= looked_s:  # what has arrived is read, then a batch is computed
            arrived_s, now_s = number * every_s, now_s + http_s
            if admission.delay_s(admission.expected_rows("json", 8000), queue.rows, time_s) is None:
                now_s += read_s
                admission.observe_body("json", 8000, 100)
                if admission.delay_s(100, queue.rows, time_s) is None:
                    queue.add(number, 100, max(arrived_s, now_s) + time_s)
            number += 1
        begin_s = now_s if left_at_s is None else left_at_s
        batch = queue.take(now_s)
        rows = sum(end - begin for _, begin, end in batch.slices)
        now_s += rows * row_s + 1e-5
        good += sum(end == 100 for _, _, end in batch.slices)
        if rows:
            admission.observe(rows, now_s - begin_s)
        left_at_s = now_s if len(queue) else None
    possible = 5.0 / (read_s + 100 * row_s + 3 * http_s)  # it refuses two for each that it answers
    assert good > 0.9 * possible


@given(st.lists(st.tuples(st.integers(1, 256), st.floats(1e-6, 10)), min_size=1, max_size=50), st.integers(1, 2000))
def test_estimates_are_never_negative_and_grow_with_rows(batches, rows):
    admission = Admission(256)
    for size, seconds in batches:
        admission.observe(size, seconds)
    assert 0 <= admission.seconds(rows) <= admission.seconds(rows + 1) * (1 + 1e-9)
