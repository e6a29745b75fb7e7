"""The lab of hosts in racks: its links have the rates that they are given, and nothing of it is left."""

import socket
from pathlib import Path

import lab
import pytest
import torch
from lab import Lab

from rowwise.parallel.comm.launch import connect

pytestmark = [pytest.mark.dist, pytest.mark.skipif(bool(lab.missing()), reason=f"no lab: {lab.missing()}")]


def greet(rank):
    comm = connect(timeout_s=30)
    total = comm.all_reduce(torch.tensor([float(rank)]), "greeting").wait()
    comm.close()
    return socket.gethostname(), comm.topology.hosts, total.item()


def test_ranks_meet_on_hosts_of_their_own():
    order = [2, 0, 1]
    with Lab((2, 1)) as racks:
        found = racks.run(greet, order=order)
        holders = [Path(f"/proc/{host.pid}") for host in racks.hosts]
        assert all(holder.exists() for holder in holders)
    assert found == [(f"h{host}", 3, 3.0) for host in order]
    assert not any(holder.exists() for holder in holders)


def test_a_rank_that_fails_is_named():
    with Lab((2,)) as racks, pytest.raises(AssertionError, match=r"(?s)rank [01]: .*TypeError"):
        racks.run(greet, "too many")
