"""A slower link changes when collectives end, and nothing else: not results, errors or the order of calls."""

import gc
import math
import threading

import comm_ranks
import pytest
import torch
from comm_suite import CHECKS
from test_processes import SAID, SLOW, ways

from rowwise.base.errors import IdError, PeerError, SpecError
from rowwise.parallel.comm.delayed import LinkQueue
from rowwise.parallel.comm.simulated_link import SimulatedLink
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.comm.thread import run_threads
from rowwise.tables.spec import Topology


@pytest.mark.few(3)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", [Topology(), Topology(devices=3), Topology(hosts=2, devices=2)], ids=str)
def test_ranks_that_are_threads_pass_the_suite(world, check):
    run_threads(world, lambda comm: check(comm, True), timeout_s=60, link=SLOW)


@pytest.mark.dist
@ways
@pytest.mark.parametrize("how", SAID)
def test_a_process_that_fails_ends_those_that_wait(how, shared):
    with pytest.raises(PeerError, match=SAID[how]) as raised:
        run_processes(3, comm_ranks.fail, how, timeout_s=60, shared_memory=shared, link=SLOW)
    for rank in (0, 1):
        assert f"PeerError: rank {rank}" in str(raised.value)


def test_a_thread_that_fails_ends_those_that_wait():
    def function(comm):
        if comm.rank == 2:
            raise IdError("id 7")
        comm_ranks.gather(comm)

    with pytest.raises(IdError, match="id 7"):
        run_threads(3, function, timeout_s=60, link=SLOW)


def test_no_rank_ends_a_collective_before_the_latency():
    for started, ended in run_threads(2, comm_ranks.time_a_gather, timeout_s=60, link=SimulatedLink(0.05)):
        assert started <= ended
        assert ended >= 0.05


def test_latencies_overlap_and_bytes_queue():
    queue = LinkQueue(SimulatedLink(latency_s=1e6, bytes_s=10.0))
    first, second = queue.send(0), queue.send(0)
    assert 0 <= second - first < 1e6
    third, fourth = queue.send(1_000_000), queue.send(1_000_000)
    assert third - second >= 1e5 - 1e-3
    assert fourth - third == pytest.approx(1e5)


def test_groups_share_the_bandwidth_of_a_link():
    def function(comm):
        groups = comm, comm.split([comm.ranks])
        handles = [group.all_gather(torch.ones(500), [500] * 2, "x") for group in groups]
        return [handle.wait().tolist() for handle in handles], comm.transport.queue is groups[1].transport.queue

    assert run_threads(2, function, timeout_s=60, link=SimulatedLink(0.0, 1e6)) == [([[1.0] * 1000] * 2, True)] * 2


def test_a_transport_that_is_unused_has_no_thread():
    before = set(threading.enumerate())
    run_threads(2, comm_ranks.gather, timeout_s=60, link=SLOW)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "delayed link":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize(("latency_s", "bytes_s"), [(-1.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (0.0, 0.0)])
def test_a_link_that_cannot_be_is_refused(latency_s, bytes_s):
    with pytest.raises(SpecError, match="finite latency_s >= 0"):
        SimulatedLink(latency_s, bytes_s)
