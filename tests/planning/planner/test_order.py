"""Orders of hosts: the search against all orders, the bound, and the compiled costs against those of `perf`."""

import itertools

import numpy as np
import pytest
from from_benchmarks import part
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import SpecError
from rowwise.planning.planner.native import AnnealingEffort, OrderProblem
from rowwise.planning.planner.order import (
    COLLECTIVES,
    Sum,
    begin_with_first,
    bound_s,
    find_order,
    parse_sum,
    search_order,
    sums_by_size,
)

make_links = part("network_lab").random_links
networks = st.builds(make_links, st.integers(2, 12), st.integers(0, 10**6), st.integers(1, 2), st.floats(0.5, 16))
sizes = st.floats(1e3, 1e8)


def usable(collective, hosts):
    return collective != "halving_doubling" or hosts & (hosts - 1) == 0


def is_whole(order, net):
    """Host 0 first, and the hosts of each group one after the other."""
    runs = [group for group, _ in itertools.groupby(net.group_H[order].tolist())]
    return order[0] == 0 and len(runs) == len(set(runs))


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(net=networks, size=sizes, seed=st.integers(0, 99))
def test_compiled_costs_are_those_of_the_definition_and_above_the_bound(collective, net, size, seed):
    if not usable(collective, net.hosts):
        return
    what, order = Sum(collective, size), np.random.default_rng(seed).permutation(net.hosts)
    problem = OrderProblem(net, list(COLLECTIVES).index(collective), size, keep_first=False)
    assert problem.seconds(order) == pytest.approx(what.seconds(net, order), rel=1e-12)
    assert bound_s(net, what) <= what.seconds(net, order) * (1 + 1e-12)


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(seed=st.integers(0, 10**6), hosts=st.integers(2, 6), size=sizes, keep_first=st.booleans())
def test_the_search_finds_the_best_of_all_orders(collective, seed, hosts, size, keep_first):
    if not usable(collective, hosts):
        return
    net, what = make_links(hosts, seed), Sum(collective, size)
    orders = [np.array(order) for order in itertools.permutations(range(hosts))]
    best_s = min(what.seconds(net, order) for order in orders if not keep_first or is_whole(order, net))
    found = search_order(net, what, keep_first=keep_first)
    assert what.seconds(net, found) == pytest.approx(best_s, rel=1e-8)
    assert not keep_first or is_whole(found, net)


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("seed", range(40))
def test_annealing_finds_the_best_of_all_orders_too(collective, seed):
    """What more hosts get: on 8 of them, from a random start."""
    net, what = make_links(8, seed, groups=1 + seed % 3), Sum(collective, 10.0 ** (4 + seed % 4))
    problem = OrderProblem(net, list(COLLECTIVES).index(collective), what.size_bytes, keep_first=False)
    effort = AnnealingEffort(200_000, seed, hot=0.05, cold=1e-4)
    starts = [np.random.default_rng(seed + k).permutation(8) for k in range(4)]
    annealed_s = min(what.seconds(net, problem.anneal(start, effort)) for start in starts)
    assert annealed_s == pytest.approx(what.seconds(net, problem.exact(np.arange(8))), rel=1e-8)


@given(net=networks, size=sizes, turn=st.integers(0, 11), seed=st.integers(0, 99))
def test_a_ring_may_begin_anywhere(net, size, turn, seed):
    what, order = Sum("all_reduce", size), np.random.default_rng(seed).permutation(net.hosts)
    assert what.seconds(net, np.roll(order, turn)) == pytest.approx(what.seconds(net, order), rel=1e-12)


@given(net=networks, seed=st.integers(0, 99))
def test_the_first_host_begins_and_groups_stay_together(net, seed):
    order = begin_with_first(np.random.default_rng(seed).permutation(net.hosts), net.group_H)
    assert sorted(order) == list(range(net.hosts))
    assert is_whole(order, net)


@pytest.mark.slow
def test_many_hosts_are_ordered_well_beside_random_orders_and_the_bound():
    found = find_order(make_links(64, 1, groups=8), Sum("all_reduce", 1e8), limit_s=60.0)
    assert found.random_s / found.seconds > 2.8
    assert found.seconds / found.bound_s < 1.15
    assert is_whole(np.array(found.order), make_links(64, 1, groups=8))


def test_equal_links_have_nothing_to_gain():
    net = make_links(8, 0, groups=1, oversubscription=1.0)
    net.rate_HH[:], net.latency_HH[:] = 1e9, 1e-5
    found = find_order(net, Sum("all_reduce", 1e6))
    assert found.order == tuple(range(8))
    assert not found.is_worthwhile


@pytest.mark.parametrize(("groups", "worthwhile"), [(1, False), (2, True)])
def test_an_order_of_one_group_gains_more_than_the_noise_of_the_probe(groups, worthwhile):
    """Links that were measured unequally by chance; racks are no chance."""
    net = make_links(8, 0, groups=groups)
    net.rate_HH[:] = np.random.default_rng(0).uniform(0.7e9, 1.3e9, (8, 8))
    quiet, noisy = (find_order(net, Sum("all_reduce", 1e8), noise=noise) for noise in (0.0, 5.0))
    assert quiet.is_worthwhile
    assert noisy.is_worthwhile == worthwhile
    assert noisy.order == quiet.order
    assert noisy.kept == (quiet.order if worthwhile else tuple(range(8)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all_gather=4MB", "--for all_gather=4MB: expected all_reduce or halving_doubling or tree, and a size"),
        ("all_reduce", "and a size: all_reduce=4MB"),
        ("tree=0", "--for tree=0: expected a size of at least 1 byte"),
        ("tree=much", "expected a size such as"),
    ],
)
def test_a_collective_that_is_none_is_refused(text, says):
    with pytest.raises(SpecError, match=says):
        parse_sum(text)


@given(hosts=st.integers(2, 8), seed=st.integers(0, 10**6), size=sizes)
def test_the_algorithm_of_a_size_is_the_fastest_but_for_the_gain_that_another_one_needs(hosts, seed, size):
    net = make_links(hosts, seed)
    ranges = sums_by_size(net)
    assert [one.min_bytes for one in ranges] == sorted({one.min_bytes for one in ranges})
    fitting = [one for one in ranges if one.min_bytes <= size]
    name, order = (fitting[-1].collective, fitting[-1].order) if fitting else ("all_reduce", ())
    chosen_s = Sum(name, size).seconds(net, order or tuple(range(hosts)))
    assert chosen_s <= Sum("all_reduce", size).seconds(net, tuple(range(hosts))) * 2.2  # a size in between two powers
    assert name == "all_reduce" or sorted(order) == list(range(hosts))
    assert hosts & (hosts - 1) == 0 or all(one.collective != "halving_doubling" for one in ranges)


def test_small_sums_are_halved_and_doubled_where_latencies_are_long():
    net = make_links(8, 0, groups=1, oversubscription=1.0)
    net.rate_HH[:], net.latency_HH[:] = 1e9, 1e-3
    small, large = sums_by_size(net)
    assert (small.min_bytes, small.collective, large.collective) == (0, "halving_doubling", "all_reduce")
    # 2 * 7 latencies against 2 log2 8 and as many steps in Python, and 7/4 of the bytes for both; a tenth is no gain.
    (ring_s, own_s), bytes_s = (14 * 1e-3, 6 * 1.2e-3), 1.75 / 1e9
    for size, gains in ((large.min_bytes // 2, True), (large.min_bytes, False)):
        assert (ring_s + bytes_s * size > 1.1 * (own_s + bytes_s * size)) == gains


def test_the_ring_is_kept_where_latencies_are_short():
    net = make_links(8, 0, groups=1, oversubscription=1.0)
    net.rate_HH[:], net.latency_HH[:] = 1e9, 5e-5
    assert sums_by_size(net) == []


def test_the_parent_of_two_shares_its_link():
    net = make_links(3, 0, groups=1, oversubscription=1.0)
    net.rate_HH[:], net.latency_HH[:] = 1e9, 1e-5
    assert Sum("tree", 1e6).seconds(net, (0, 1, 2)) == pytest.approx(2 * (1e-5 + 2e-3))


def test_halving_and_doubling_wants_a_power_of_two():
    with pytest.raises(SpecError, match="6 hosts"):
        find_order(make_links(6, 0), Sum("halving_doubling", 1e6))
