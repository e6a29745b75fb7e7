"""From the samples of a probe to a network: rates, groups and uplinks are those that the samples were made of."""

import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rowwise.base.errors import SpecError
from rowwise.parallel.comm.probe import ProbeSample, ProbeSamples, tournament
from rowwise.planning.calibrate.net import find_groups, make_network, number_racks, read_racks
from rowwise.planning.perf.collective import message_s
from rowwise.planning.perf.links import LinkArrays, NetworkHost

SMALL, LARGE = 1 << 17, 1 << 19


def probed(net, rng, passes=6, noise=0.05):
    """What a probe of a network measures, by its own model of flows, with noise that only adds."""
    samples, number, hosts = [], 0, list(range(net.hosts))

    def add(kind, size, pairs):
        flows = [flow for a, b in pairs for flow in ((a, b), (b, a))]
        ends = [np.array(side) for side in zip(*flows, strict=True)]
        for (a, b), seconds in zip(flows, message_s(net, *ends, size), strict=True):
            samples.append(ProbeSample(kind, size, number, a, b, float(seconds) * (1 + noise * rng.random())))

    for _ in range(passes):
        rng.shuffle(hosts)
        for pairs in tournament(hosts):
            number += 1
            for pair in pairs:
                for kind, size in (("ping", 4), ("alone", SMALL), ("alone", LARGE)):
                    add(kind, size, [pair])
            add("loaded", LARGE, pairs)
    return ProbeSamples(tuple(samples), tuple(f"10.0.0.{k}" for k in range(net.hosts)), 1.0)


def equal_links(group_H, uplink_Bps, rate_Bps=25e6):
    hosts, groups = len(group_H), max(group_H) + 1
    latency_HH, rate_HH = np.full((hosts, hosts), 1e-4), np.full((hosts, hosts), rate_Bps)
    np.fill_diagonal(latency_HH, 0.0)
    np.fill_diagonal(rate_HH, math.inf)
    return LinkArrays(latency_HH, rate_HH, np.array(group_H), np.full(groups, uplink_Bps))


def names(count):
    return tuple(NetworkHost(name=f"h{k}") for k in range(count))


@example(seed=108, racks=(3, 5))  # two hosts of different racks met in rounds with no other pair between them
@given(seed=st.integers(0, 10**6), racks=st.sampled_from([(4, 4), (3, 5), (3, 3, 3), (8, 8)]))
def test_groups_uplinks_and_rates_are_found(seed, racks):
    rng = random.Random(seed)
    group_H = [rack for rack, count in enumerate(racks) for _ in range(count)]
    rng.shuffle(group_H)
    made = equal_links(group_H, 25e6 * min(racks) / 4)
    network = make_network(probed(made, rng), names(len(group_H)))
    numbers = list(dict.fromkeys(group_H))  # groups are numbered by their first host
    assert network.groups == tuple(numbers.index(group) for group in group_H)
    found = network.arrays()
    assert found.uplink_G == pytest.approx(made.uplink_G, rel=0.15)
    away_HH = np.isfinite(made.rate_HH)
    assert np.median(found.rate_HH[away_HH] / np.minimum(25e6, made.uplink_G[0])) == pytest.approx(1, rel=0.15)


@given(seed=st.integers(0, 10**6), hosts=st.integers(2, 9))
def test_hosts_that_share_no_uplink_are_one_group(seed, hosts):
    network = make_network(probed(equal_links([0] * hosts, math.inf), random.Random(seed)), names(hosts))
    assert (network.groups, network.uplink_Bps) == ((), ())
    assert network.probed is not None
    assert network.probed.sizes == (SMALL, LARGE)


def test_pairs_that_did_not_meet_get_the_usual_numbers():
    samples = probed(equal_links([0, 0, 1, 1, 0, 1, 0, 1], 25e6), random.Random(0))
    some = [s for s in samples.samples if {s.sender, s.receiver} != {0, 3}]
    network = make_network(samples._replace(samples=tuple(some)), names(8))
    assert network.arrays().rate_HH[0, 3] == pytest.approx(25e6, rel=0.1)


def test_a_probe_that_has_measured_nothing_says_so():
    with pytest.raises(SpecError, match=r"nothing in 1\.0 s"):
        make_network(ProbeSamples((), ("a", "b"), 1.0), names(2))


def test_one_host_is_one_group():
    assert find_groups(np.ones((1, 1))) == (0,)


def test_racks_come_from_a_file(tmp_path):
    racks = tmp_path / "racks.csv"
    racks.write_text("b,left\na,right\nc,left\nspare,right\n")
    assert number_racks(read_racks(racks), ["a", "b", "c"]) == (0, 1, 1)
    with pytest.raises(SpecError, match="'d' is missing"):
        number_racks(read_racks(racks), ["a", "d"])
    racks.write_text("a,left\nb\n")
    with pytest.raises(SpecError, match="line 2 has 1"):
        read_racks(racks)
