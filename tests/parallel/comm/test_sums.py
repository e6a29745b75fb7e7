"""All-reduces by halving and doubling and by a tree have the bits of an oracle that adds in their order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rowwise.base.errors import PeerError
from rowwise.parallel.comm.launch import Meeting
from rowwise.parallel.comm.spawn import RanksFailed, run_processes
from rowwise.parallel.comm.sums import AllReduceSizes
from rowwise.tables.spec import Topology

pytestmark = [pytest.mark.dist]
SIZES = (0, 1, 3, 7, 1000, 200_000)  # the last one is a tree's of several chunks


def numbers(rank, size):
    return torch.from_numpy(np.random.default_rng([rank, size]).normal(size=size).astype(np.float32))


def halving_doubling_oracle(parts):
    """A number's sum joins pairs at distance 1, then pairs of pairs, and so on."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def tree_oracle(parts, place=0):
    total = parts[place]
    for child in (2 * place + 1, 2 * place + 2):
        if child < len(parts):
            total = total + tree_oracle(parts, child)
    return total


ORACLES = {"halving_doubling": halving_doubling_oracle, "tree": tree_oracle}


def join(comm, algorithm, order, min_bytes=0, devices=1):
    """The same ranks, with an algorithm of their own."""
    sums = (AllReduceSizes(min_bytes=min_bytes, algorithm=algorithm, order=order),)
    topology = Topology(hosts=len(comm.ranks) // devices, devices=devices)
    meeting = Meeting(replace(comm.transport.world, name="with sums"), topology, ())
    return meeting.join(sums=sums)


def sum_all(comm, algorithm, order):
    joined = join(comm, algorithm, order)
    group = joined.split([joined.ranks])
    works = [group.all_reduce(numbers(comm.rank, size), "x") for size in SIZES]
    counts = joined.all_reduce(torch.full((5,), comm.rank), "counts")
    found = [work.wait() for work in works], counts.wait().tolist()
    joined.close()
    return found


def sum_ranks_of_hosts(comm):
    joined = join(comm, "tree", (1, 0), devices=2)
    total = joined.all_reduce(torch.full((4,), comm.rank), "x").wait().tolist()
    joined.close()
    return total


@pytest.mark.slow
def test_an_order_of_hosts_is_none_of_ranks_where_a_host_has_several():
    """As in a resume with more devices of each host than the run began with."""
    assert run_processes(Topology(hosts=4), sum_ranks_of_hosts, timeout_s=60) == [[6] * 4] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "order"),
    [
        ("halving_doubling", (0, 1)),
        ("halving_doubling", (2, 0, 3, 1)),
        ("tree", (1, 0)),
        ("tree", (2, 0, 1)),
        ("tree", (3, 1, 4, 0, 2)),
    ],
)
def test_all_ranks_have_the_bits_of_the_oracle(algorithm, order):
    results = run_processes(Topology(hosts=len(order)), sum_all, algorithm, order, timeout_s=60)
    for k, size in enumerate(SIZES):
        wanted = ORACLES[algorithm]([numbers(rank, size) for rank in order])
        for found, counts in results:
            assert torch.equal(found[k], wanted)
            assert counts == [sum(range(len(order)))] * 5


def sum_by_size(comm):
    joined = join(comm, "tree", (1, 2, 0), min_bytes=400)
    sizes = (99, 100)
    found = [joined.all_reduce(numbers(comm.rank, size), "x").wait() for size in sizes]
    gloo = [comm.all_reduce(numbers(comm.rank, size), "x").wait() for size in sizes]
    joined.close()
    return [torch.equal(a, b) for a, b in zip(found, gloo, strict=True)], found[1]


@pytest.mark.slow
def test_smaller_sums_than_the_least_size_are_gloos():
    for (small, _), found in run_processes(Topology(hosts=3), sum_by_size, timeout_s=60):
        assert small
        assert torch.equal(found, tree_oracle([numbers(rank, 100) for rank in (1, 2, 0)]))


def end_early(comm):
    joined = join(comm, "halving_doubling", (0, 1))
    joined.all_reduce(torch.ones(10), "first").wait()
    if comm.rank == 1:
        raise PeerError("rank 1 leaves")
    joined.all_reduce(torch.ones(10), "second").wait()


@pytest.mark.slow
def test_a_rank_that_ends_is_named():
    with pytest.raises(RanksFailed, match=r"all_reduce of 'second' with rank 1: rank 1 .* has ended"):
        run_processes(Topology(hosts=2), end_early, timeout_s=20)
