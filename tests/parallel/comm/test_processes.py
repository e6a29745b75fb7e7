"""Worlds of real processes: the same suite over gloo and over shared memory, and what is said when a process fails."""

import os
import re
import subprocess
import sys
import time

import comm_ranks
import pytest
from comm_suite import MISMATCHES
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import PeerError, SpecError
from rowwise.parallel.comm.launch import connect, find_topology
from rowwise.parallel.comm.simulated_link import SimulatedLink
from rowwise.parallel.comm.spawn import run_processes
from rowwise.tables.spec import Topology

SLOW = SimulatedLink(latency_s=2e-4, bytes_s=1e8)
WORLDS = {2: Topology(devices=2), 3: Topology(devices=3), "2 x 2": Topology(hosts=2, devices=2)}
linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name needs Linux")
ways = pytest.mark.parametrize("shared", [False, pytest.param(True, marks=linux)], ids=["gloo", "shared memory"])


@pytest.mark.dist
@ways
@pytest.mark.parametrize(("world", "link"), [*((world, None) for world in WORLDS), (2, SLOW), ("2 x 2", SLOW)])
def test_every_way_between_processes_passes_the_suite(world, link, shared):
    topology = WORLDS[world]
    exact = shared and topology.hosts == 1  # else an all-reduce is gloo's, which adds in an order of its own
    ranks = run_processes(topology, comm_ranks.suite, exact, timeout_s=200, shared_memory=shared, link=link)
    assert ranks == list(range(topology.world))


SAID = {
    "is killed": r"^rank 2 was killed by SIGKILL \(out of memory\?\)",
    "raises": r"^rank 2 failed: Traceback[\s\S]*IdError: id 7 of feature 'a'",
    "returns": r"^rank [01] failed",
}


@pytest.mark.dist
@ways
@pytest.mark.parametrize("how", SAID)
def test_a_process_that_fails_is_named_by_those_that_wait(how, shared):
    begin = time.monotonic()
    with pytest.raises(PeerError, match=SAID[how]) as raised:
        run_processes(3, comm_ranks.fail, how, timeout_s=60, shared_memory=shared)
    assert time.monotonic() - begin < 30
    for rank in (0, 1):
        assert re.search(rf"PeerError: rank {rank}\b.* all_gather of '[xyz]'.*rank 2\b", str(raised.value))
    assert len(re.findall(r"process \d+\) has (?:ended|closed its side)", str(raised.value))) >= 2


@linux
@pytest.mark.dist
def test_a_rank_that_waits_for_one_that_ended_because_of_another_names_both():
    with pytest.raises(PeerError) as raised:
        run_processes(3, comm_ranks.fail_in_turn, timeout_s=60, shared_memory=True)
    ends = r"rank 0 \(process \d+\) has ended; rank 2 \(process \d+\) has ended"
    said = str(raised.value)
    assert re.search(rf"rank 1 waits for all_gather of 'z', which rank 0 never called: {ends}", said), said
    assert re.search(r"PeerError: rank 0: all_gather of 'y', from rank 2: .*rank 2 \(process \d+\) has ended", said), (
        said
    )


@linux
@pytest.mark.dist
@pytest.mark.parametrize("how", [how for how in MISMATCHES if how != "other groups"])
def test_calls_that_do_not_match_are_named_over_shared_memory(how):
    with pytest.raises(PeerError) as raised:
        run_processes(3, comm_ranks.differ, how, timeout_s=60, shared_memory=True)
    assert str(raised.value).count(f"PeerError: {MISMATCHES[how][2]}") >= 2


@pytest.mark.dist
@ways
def test_a_rank_that_never_comes_ends_the_others_and_is_stopped(shared):
    begin = time.monotonic()
    with pytest.raises(PeerError) as raised:
        run_processes(2, comm_ranks.come_late, timeout_s=3, shared_memory=shared)
    assert time.monotonic() - begin < 30
    assert re.search(r"rank 0.* all_gather of 'y'.*(rank 1|Timed out)", str(raised.value))
    assert "rank 1 has not ended, and was stopped" in str(raised.value)


@linux
@pytest.mark.dist
def test_too_little_shared_memory_is_an_error_with_sizes():
    want = (
        r"rank 0: all_reduce of 'grads' needs 22 MB of shared memory more than the 0 MB in use: .*shared_memory=False"
    )
    with pytest.raises(PeerError, match=want):
        run_processes(2, comm_ranks.too_large, timeout_s=60, shared_memory=True)


@linux
@pytest.mark.dist
def test_too_many_collectives_under_way_are_refused():
    found = run_processes(2, comm_ranks.too_many, timeout_s=60, shared_memory=True)
    refused = [f"rank {r}: 64 collectives are pending: wait() for one before all_gather of 'x'" for r in range(2)]
    assert found == [(said, [1.0] * 4) for said in refused]


@linux
@pytest.mark.dist
def test_shared_memory_stays_small_and_is_given_back():
    for held, left, files in run_processes(2, comm_ranks.grow_and_leave, timeout_s=60, shared_memory=True):
        assert held < 8 * 4_000_000  # of messages up to 4 MB, two or three blocks each way
        assert (left, files) == (0, 0)


@pytest.mark.dist
def test_processes_take_arguments_and_answer_in_rank_order():
    assert run_processes(3, comm_ranks.answer, "x") == [(0, "x", 1), (1, "x", 1), (2, "x", 1)]
    assert run_processes(1, comm_ranks.answer, "x", threads=2) == [(0, "x", 2)]


@given(st.integers(1, 5), st.integers(1, 5))
def test_hosts_and_devices_are_found_from_names(hosts, devices):
    names = [f"host{h}" for h in range(hosts) for _ in range(devices)]
    assert find_topology(names) == Topology(hosts=hosts, devices=devices)


def test_ranks_of_a_host_must_be_consecutive_and_equally_many():
    with pytest.raises(SpecError, match="ranks run on a"):
        find_topology(["a", "b", "a"])
    with pytest.raises(SpecError, match="2 on a, 1"):
        find_topology(["a", "a", "b"])


def test_a_program_that_torchrun_did_not_start_is_told_so(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SpecError, match="with torchrun, which"):
        connect()


PROGRAM = """
import os, sys, torch
from rowwise.parallel.comm.launch import connect
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
comm = connect(timeout_s=60, attempt=attempt)
for n in (1, 1000):
    came = comm.all_reduce(torch.full((n,), comm.rank + 1.0), "x").wait()
    assert (came == 3).all()
if attempt == 0 and comm.rank == 1:
    os._exit(3)
assert comm.all_gather(torch.tensor([comm.rank]), [1, 1], "y").wait().tolist() == [0, 1]
print(f"rank {comm.rank} of {comm.topology} in attempt {attempt} by {type(comm.transport).__name__}")
comm.close()
"""


@pytest.mark.dist
def test_torchrun_starts_a_world_and_restarts_it_after_a_rank_died(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--no-python"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*python, *launcher, *python, str(tmp_path / "program.py")],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of Topology(hosts=1, devices=2, groups=()) in attempt 1 by " in done.stdout
