"""Words that processes share: what is published is waited for, in time, and outside of the tensor is refused."""

import threading
import time

import pytest
import torch

publish, wait_for = torch.ops.rowwise.publish, torch.ops.rowwise.wait_for


def test_what_is_published_ends_a_wait_in_another_thread():
    words, seen = torch.zeros(16, dtype=torch.int64), []
    waiter = threading.Thread(target=lambda: seen.append(wait_for(words, 3, 1 << 40, 10, 20.0)))
    waiter.start()
    for value in (1, 1 << 32, 1 << 40):
        time.sleep(0.01)  # this thread runs, so a wait holds no lock of Python
        publish(words, 3, value)
    waiter.join(10)
    assert seen == [True]
    assert words.tolist() == [0, 0, 0, 1 << 40] + [0] * 12


@pytest.mark.parametrize("spins", [0, 1000])
def test_a_wait_ends_after_its_time(spins):
    words, begin = torch.zeros(1, dtype=torch.int64), time.monotonic()
    publish(words, 0, 4)
    assert wait_for(words, 0, 4, spins, 0.0)
    assert not wait_for(words, 0, 5, spins, 0.05)
    assert time.monotonic() - begin >= 0.05


def test_words_that_are_not_there_are_refused():
    words = torch.zeros(4, dtype=torch.int64)
    for call in (lambda t, i: publish(t, i, 1), lambda t, i: wait_for(t, i, 1, 0, 0.0)):
        for index in (-1, 4):
            with pytest.raises(RuntimeError, match=f"word {index} of 4"):
                call(words, index)
        with pytest.raises(RuntimeError, match="must be a contiguous"):
            call(torch.zeros(4, dtype=torch.int32), 0)
        with pytest.raises(RuntimeError, match="must be a contiguous"):
            call(torch.zeros(8, dtype=torch.int64)[::2], 0)
