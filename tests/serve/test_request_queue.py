"""The queue and the admission of requests, as pure functions of times that a test makes up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise.serve.admission import Admission
from rowwise.serve.queue import RequestQueue

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 30)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 16))
def test_each_row_is_computed_once_or_its_request_is_over(events, rows_at_once):
    queue, now_s, added, left, done = RequestQueue(rows_at_once), 0.0, {}, {}, {}

    def take():
        batch = queue.take(now_s)
        assert sum(end - begin for _, begin, end in batch.slices) <= rows_at_once
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

    for kind, number, time_s in events:
        now_s += 1
        if kind == "add":
            request = len(added)
            added[request], left[request], done[request] = number, now_s + time_s, 0
            queue.add(request, number, now_s + time_s)
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
    queue.add(0, 20, 99)
    assert queue.take(0).slices == ((0, 0, 8),)
    queue.add(1, 2, 99)
    queue.add(2, 3, 99)
    assert queue.take(0).slices == ((0, 8, 16),)
    assert queue.take(0).slices == ((1, 0, 2), (2, 0, 3), (0, 16, 19))
    assert queue.take(0).slices == ((0, 19, 20),)


def test_a_batch_costs_a_fixed_time_and_a_time_for_each_row():
    admission = Admission(256)
    assert admission.seconds(1000) == 0.0
    for rows in (1, 256, 16, 100, 3, 256):
        admission.observe(rows, 1e-3 + 1e-5 * rows)
    assert admission.seconds(1) == pytest.approx(1.01e-3)
    assert admission.seconds(512) == pytest.approx(2e-3 + 5.12e-3)
    assert admission.delay_s(12, 500, 1.0) is None
    assert admission.delay_s(12, 500, 7e-3) == pytest.approx(1e-3)  # never less than a millisecond


@given(st.lists(st.tuples(st.integers(1, 256), st.floats(1e-6, 10)), min_size=1, max_size=50), st.integers(1, 2000))
def test_estimates_are_never_negative_and_grow_with_rows(batches, rows):
    admission = Admission(256)
    for size, seconds in batches:
        admission.observe(size, seconds)
    assert 0 <= admission.seconds(rows) <= admission.seconds(rows + 1) * (1 + 1e-9)
