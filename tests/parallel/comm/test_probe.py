"""Probes of links: every pair meets once, and what ranks measure comes together on the first one."""

import itertools
import os

import pytest
import torch.distributed as dist

from rowwise.base.errors import SpecError
from rowwise.parallel.comm.probe import ProbeSamples, probe, tournament
from rowwise.parallel.comm.spawn import RanksFailed, run_processes
from rowwise.parallel.comm.torch import Rendezvous
from rowwise.tables.spec import Topology


@pytest.mark.parametrize("players", [2, 3, 4, 5, 8, 31, 64, 65])
def test_every_pair_meets_once_and_rounds_are_disjoint(players):
    rounds = list(tournament(range(players)))
    pairs = [tuple(sorted(pair)) for pairs in rounds for pair in pairs]
    assert sorted(pairs) == list(itertools.combinations(range(players), 2))
    assert all(len({player for pair in pairs for player in pair}) == 2 * len(pairs) for pairs in rounds)


def probe_between(comm, limit_s, ends=None):
    """What a probe finds; rank `ends` ends after the first messages, as a host that is lost."""
    told = []

    def on_progress(share):
        told.append(share)
        if ends == comm.rank and share > 0:
            os._exit(1)

    return probe(comm.transport.world, limit_s, on_progress=on_progress), told


@pytest.mark.dist
@pytest.mark.parametrize("hosts", [2, 3])
def test_the_first_rank_gets_all_samples(hosts):
    (found, told), *others = run_processes(Topology(hosts=hosts), probe_between, 20.0)
    assert isinstance(found, ProbeSamples)
    assert all(samples is None for samples, _ in others)
    assert (told[-1], found.dead, found.addresses) == (1.0, (), ("127.0.0.1",) * hosts)
    for kind in ("alone", "loaded"):
        met = {(s.sender, s.receiver) for s in found.samples if s.kind == kind}
        assert met == set(itertools.permutations(range(hosts), 2))
    rounds = {s.round: [] for s in found.samples if s.kind == "loaded"}
    for sample in found.samples:
        if sample.kind == "loaded":
            rounds[sample.round].append(sample)
    assert all(len(samples) == hosts // 2 * 2 for samples in rounds.values())


def test_hosts_out_of_reach_are_named():
    store = dist.HashStore()
    store.set("job/address/1", "127.0.0.1 1")  # nothing listens there
    store.set("job/reached/1", "[]")
    world = Rendezvous(store, "job", (0, 1), 0, {}, 5.0, "127.0.0.1")
    with pytest.raises(SpecError, match=r"rank 0 \(127\.0\.0\.1\) cannot"):
        probe(world, 1.0)


@pytest.mark.dist
def test_a_probe_ends_in_time():
    (found, _), *_ = run_processes(Topology(hosts=3), probe_between, 0.0)
    assert found.samples == ()


@pytest.mark.dist
def test_samples_outlive_a_rank_that_dies(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_processes(Topology(hosts=3), keep_samples, tmp_path / "samples")
    assert failed.value.failures[0].rank == 2
    count, dead = (tmp_path / "samples").read_text().split()
    assert int(count) > 0
    assert dead == "2"


def keep_samples(comm, path):
    found, _ = probe_between(comm, 20.0, ends=2)
    if found is not None:
        path.write_text(f"{len(found.samples)} {','.join(map(str, found.dead))}")
