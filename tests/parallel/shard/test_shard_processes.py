"""Real processes, over gloo and over shared memory, do what threads do."""

import os

import pytest
from parallel.shard import shard_ranks
from parallel.shard.jobs import WORLDS

from rowwise.parallel.comm.spawn import run_processes

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name needs Linux")
ways = pytest.mark.parametrize("shared", [False, pytest.param(True, marks=linux)], ids=["gloo", "shared memory"])


@pytest.mark.dist
@ways
@pytest.mark.parametrize(("world", "jobs"), [("2", 60), ("3", 40), ("2x2", 30)])
def test_sharded_is_unsharded(world, jobs, shared):
    """To the bit where threads are: also all-reduced copies aside, which are no part of these jobs."""
    found = run_processes(
        WORLDS[world], shard_ranks.everything, world, range(jobs), timeout_s=250, shared_memory=shared
    )
    assert not [text for differences, *_ in found for text in differences]
    for _, (apart, differences), (rounded, (exact, half)), _ in found:
        assert apart == 0
        assert not differences
        assert 0 < rounded < 2**-9
        assert exact == 2 * half > 0
    for rank, (*_, met) in enumerate(found):
        assert met.startswith("" if rank == 1 else "rank 1 (ids of a batch): IdError: ")
        assert "table 'a': feature 'a', sample 0, position 0: id 400 is not in 0..399" in met
