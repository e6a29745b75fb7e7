"""Transports count how long a rank waits for others to begin, for the thread that waits, and no more than went by."""

import threading
import time

import pytest
import torch
import waited_ranks

from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.comm.thread import run_threads


def test_one_rank_waits_for_nobody():
    comm = solo()
    comm.all_reduce(torch.ones(2), "x").wait()
    assert comm.waited.seconds == 0


def test_ranks_that_are_threads():
    for waited, took in run_threads(3, waited_ranks.meet, timeout_s=60):
        assert all(0 < w <= t for w, t in zip(waited, took, strict=True))


def test_a_group_counts_with_its_parent_and_threads_apart():
    def on_a_rank(comm):
        part = comm.split([comm.ranks])
        before = comm.waited.seconds
        part.all_reduce(torch.ones(1), "x").wait()
        assert comm.waited.seconds == part.waited.seconds > before
        found = []
        other = threading.Thread(target=lambda: found.append(comm.waited.seconds))
        other.start()
        other.join()
        assert found == [0.0]

    run_threads(2, on_a_rank, timeout_s=60)


@pytest.mark.dist
def test_ranks_that_share_memory():
    begin = time.perf_counter()
    ranks = run_processes(2, waited_ranks.meet, timeout_s=60, shared_memory=True)
    whole = time.perf_counter() - begin
    for waited, took in ranks:
        assert all(0 < w <= t for w, t in zip(waited, took, strict=True))
        assert sum(took) <= whole


@pytest.mark.dist
def test_gloo_does_not_tell():
    for waited, _ in run_processes(2, waited_ranks.meet, timeout_s=60, shared_memory=False):
        assert set(waited) == {0.0}
