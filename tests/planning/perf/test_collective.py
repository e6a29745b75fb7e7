"""Collectives on a network: closed forms where links are alike, and an exact recursion where they are not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_networks import networks

from rowwise.planning.perf.collective import (
    all_to_all_s,
    flow_rates,
    halving_doubling_s,
    message_s,
    ring_s,
    tree_s,
    two_level_s,
)
from rowwise.planning.perf.links import Network, NetworkHost, PairLink

sizes = st.floats(1e3, 1e8)


def equal_hosts(count, latency_s=0.0, groups=(), uplink_Bps=()):
    hosts = tuple(NetworkHost(name=str(k)) for k in range(count))
    return Network(hosts=hosts, link=PairLink(latency_s, 1e9), groups=groups, uplink_Bps=uplink_Bps).arrays()


@given(networks(least=2), st.data())
def test_flows_fit_links_and_uplinks(network, data):
    net = network.arrays()
    pairs = [(a, b) for a in range(net.hosts) for b in range(net.hosts) if a != b]
    flows = data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=12))
    source_F, target_F = np.array(flows).T
    rate_F = flow_rates(net, source_F, target_F)
    assert (rate_F <= net.rate_HH[source_F, target_F]).all()
    far_F = net.group_H[source_F] != net.group_H[target_F]
    for group, uplink in enumerate(net.uplink_G):
        for end_F in (source_F, target_F):
            assert rate_F[far_F & (net.group_H[end_F] == group)].sum() <= uplink * (1 + 1e-9)


@given(networks(least=2), sizes, st.data())
def test_ring_turns(network, size, data):
    net = network.arrays()
    order = data.draw(st.permutations(range(net.hosts)))
    turned = np.roll(order, data.draw(st.integers(0, net.hosts)))
    assert ring_s(net, turned, size) == pytest.approx(ring_s(net, order, size), rel=1e-9)


@given(networks(least=2), sizes, st.data())
def test_ring_against_recursion(network, size, data):
    """A host sends its next share when it has sent the last one and has received what it adds."""
    net = network.arrays()
    order = np.array(data.draw(st.permutations(range(net.hosts))))
    after = np.roll(order, -1)
    sending_H = size / net.hosts / flow_rates(net, order, after)
    latency_H = net.latency_HH[order, after]
    sent_H, arrived_H = np.zeros(net.hosts), np.zeros(net.hosts)
    for _ in range(2 * (net.hosts - 1)):
        sent_H = np.maximum(sent_H, arrived_H) + sending_H
        arrived_H = np.roll(sent_H + latency_H, 1)
    exact_s = arrived_H.max()
    found_s = ring_s(net, order, size)
    assert found_s <= exact_s * (1 + 1e-9)
    assert found_s >= exact_s * 0.75


@given(st.integers(2, 9), sizes)
def test_equal_links(hosts, size):
    net = equal_hosts(hosts, 1e-5)
    steps, order = 2 * (hosts - 1), range(hosts)
    assert ring_s(net, order, size) == pytest.approx(steps * (1e-5 + size / hosts / 1e9))
    assert all_to_all_s(net, np.full((hosts, hosts), size)) == pytest.approx(1e-5 + (hosts - 1) * size / 1e9)
    assert two_level_s(net, size, size) == pytest.approx(2e-5 + steps * size / hosts / 1e9)


def test_power_of_two():
    net = equal_hosts(8, 1e-5)
    assert halving_doubling_s(net, range(8), 8e6) == pytest.approx(2 * (3e-5 + (4e6 + 2e6 + 1e6) / 1e9))
    # Two children share their parent's link, on two levels.
    assert tree_s(net, range(7), 8e6) == pytest.approx(2 * (2e-5 + 2 * 8e6 / 1e9))


def test_crossing_twice_halves_the_ring():
    net = equal_hosts(4, groups=(0, 0, 1, 1), uplink_Bps=(1e8, 1e8))
    near, mixed = ring_s(net, [0, 1, 2, 3], 4e6), ring_s(net, [0, 2, 1, 3], 4e6)
    assert near == pytest.approx(6 * 1e6 / 1e8)
    assert mixed == pytest.approx(2 * near)


def test_all_to_all_is_limited_by_the_uplink():
    net = equal_hosts(4, groups=(0, 0, 1, 1), uplink_Bps=(1e8, 1e8))
    assert all_to_all_s(net, np.full((4, 4), 1e6)) == pytest.approx(4e6 / 1e8)


def test_two_levels_send_the_numbers_once_over_the_uplink():
    net = equal_hosts(4, groups=(0, 0, 1, 1), uplink_Bps=(1e8, 1e8))
    near_s = 2e6 / 1e9
    assert two_level_s(net, 4e6, 4e6) == pytest.approx(2 * near_s + 4e6 / 1e8)
    assert two_level_s(net, 4e6, 1e6) == pytest.approx(2 * near_s + 1e6 / 1e8)


def test_unequal_groups():
    net = equal_hosts(5, groups=(0, 0, 0, 1, 1), uplink_Bps=(1e8, 1e8))
    near_s = 2 * 2e6 / 1e9  # the host without a share sends two
    assert two_level_s(net, 4e6, 4e6) == pytest.approx(2 * near_s + 4e6 / 1e8)


def test_one_host():
    net = equal_hosts(1)
    assert ring_s(net, [0], 1e6) == all_to_all_s(net, np.zeros((1, 1))) == two_level_s(net, 1e6, 1e6) == 0.0
    assert tree_s(net, [0], 1e6) == halving_doubling_s(net, [0], 1e6) == 0.0


def test_messages():
    net = equal_hosts(2, 1e-3)
    assert message_s(net, np.array([0]), np.array([1]), 1e6) == pytest.approx([2e-3])
