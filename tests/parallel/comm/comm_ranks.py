"""What the processes of `test_processes` run; light to import, as each of them does it anew."""

import os
import resource
import signal
import time
import warnings
from pathlib import Path

import torch
from comm_suite import MISMATCHES, every_check

from rowwise.base.errors import IdError, PeerError
from rowwise.parallel.comm.torch import is_alive


def suite(comm, exact):
    warnings.simplefilter("error")
    every_check(comm, exact, calls=200)
    return comm.rank


def gather(comm, what="x"):
    return comm.all_gather(torch.ones(2), [2] * len(comm.ranks), what).wait()


def fail(comm, how):
    gather(comm)
    if comm.rank == 2:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise IdError("id 7 of feature 'a'")
        return
    gather(comm, "y")
    gather(comm, "z")


def fail_in_turn(comm):
    """Rank 2 ends, rank 0 because of it, and only then does rank 1 wait for rank 0."""
    pids = gather_numbers(comm, os.getpid())
    pair = comm.split([[0], [1, 2]])
    handle = comm.all_gather(torch.ones(50_000), [50_000] * 3, "y")  # in memory that nobody has mapped before
    if comm.rank == 0:
        wait_for_end(pids[2])
    handle.wait()
    if comm.rank:
        gather(pair)
        handle = pair.all_gather(torch.ones(1), [1, 1], "done")  # rank 1 starts it with all that rank 2 sent in hand
    if comm.rank == 2:
        handle.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_end(pids[0])
    gather(comm, "z")


def gather_numbers(comm, number):
    return comm.all_gather(torch.tensor([number]), [1] * len(comm.ranks), "x").wait().tolist()


def wait_for_end(pid):
    while is_alive(pid):
        time.sleep(0.01)


def differ(comm, how):
    gather(comm)
    MISMATCHES[how][comm.rank == 1](comm)


def come_late(comm):
    gather(comm)
    if comm.rank == 1:
        time.sleep(60)
    gather(comm, "y")


def too_large(comm):
    gather(comm)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
    comm.all_reduce(torch.ones(5 << 20), "grads").wait()


def too_many(comm):
    handles = [comm.all_gather(torch.ones(2), [2, 2], "x") for _ in range(64)]
    try:
        comm.all_gather(torch.ones(2), [2, 2], "x")
    except PeerError as error:
        refused = str(error)
    for handle in handles:
        handle.wait()
    return refused, gather(comm).tolist()


def mapped_bytes():
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:rowwise" in line:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            total += last - first
    return total


def memory_files():
    return sum("memfd" in os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())


def grow_and_leave(comm):
    """Bytes that a group held more than the world did before, then bytes and files that it left."""
    bytes_before, files_before = mapped_bytes(), memory_files()
    group = comm.split([[0, 1]])
    for n in range(1, 200):
        group.all_reduce(torch.ones(n * 5000), "x").wait()
    held = mapped_bytes() - bytes_before
    group.close()
    del group
    return held, mapped_bytes() - bytes_before, memory_files() - files_before


def answer(comm, x):
    return comm.rank, x, torch.get_num_threads()


def time_a_gather(comm):
    """How long a small all-gather takes on this rank, and the time between a start and what follows it."""
    gather(comm)
    begin = time.monotonic()
    handle = comm.all_gather(torch.ones(2), [2] * len(comm.ranks), "x")
    started = time.monotonic() - begin
    handle.wait()
    return started, time.monotonic() - begin
