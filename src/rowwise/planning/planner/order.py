"""Searches the order of hosts in which a collective is fastest, on a network as data.

Collectives pass messages between ranks by their numbers, so the order of hosts decides which links they use, and how
many of their messages share an uplink. Below 9 hosts every order is tried; beyond, orders are annealed from several
starts ([Note: Orders of hosts] in `_c/order.c`). Suffixes: H hosts, G groups.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.collective import Order, halving_doubling_s, ring_s, tree_s
from rowwise.planning.perf.cost import Ints
from rowwise.planning.perf.links import LinkArrays
from rowwise.planning.planner.machines import parse_size
from rowwise.planning.planner.native import AnnealingEffort, OrderProblem

COLLECTIVES: dict[str, Callable[[LinkArrays, Order, float], float]] = {  # in the order of the enum in `_c/order.c`
    "all_reduce": ring_s,  # gloo's ring
    "halving_doubling": halving_doubling_s,
    "tree": tree_s,
}
MAX_EXACT = 8  # hosts of which every order is tried
RANDOM_ORDERS, MOVES_A_HOST = 100, 20_000
HOT, COLD = 0.05, 1e-4  # temperatures of annealing, as shares of the start's seconds
# Orders of trees and of halving and doubling are for small sums, where latencies count as well as rates; the algorithm
# is chosen for sizes up to a power of two.
SMALL_bytes, MAX_POWER = 1 << 16, 27
OWN_STEP_s = 2e-4  # what a step of those, in a thread of Python, takes beyond one of gloo's ring
MIN_GAIN = 1.1  # probes of one network differ by several percent


class Sum(NamedTuple):
    """A collective, and its input bytes of each host."""

    collective: str
    size_bytes: float

    def seconds(self, net: LinkArrays, order: Order) -> float:
        return COLLECTIVES[self.collective](net, order, self.size_bytes)


class HostOrdering(NamedTuple):
    """An order of hosts, with the seconds of the collective in it and in others."""

    order: tuple[int, ...]  # the host that comes k-th
    seconds: float
    given_s: float  # in the order of the network
    random_s: float  # mean of random orders
    bound_s: float  # lower bound on any order
    min_gain: float = MIN_GAIN  # for another order than the network's to be worthwhile

    @property
    def gain(self) -> float:
        return self.given_s / self.seconds if self.seconds else 1.0

    @property
    def kept(self) -> tuple[int, ...]:
        """The order to use: the network's own if the gain is too small."""
        return self.order if self.is_worthwhile else tuple(range(len(self.order)))

    @property
    def is_worthwhile(self) -> bool:
        """Whether the gain is more than what probes differ by."""
        return self.gain >= self.min_gain


def parse_sum(text: str) -> Sum:
    """A collective and its size, such as all_reduce=4MB."""
    collective, equals, size = text.partition("=")
    if collective not in COLLECTIVES or not equals:
        raise SpecError(f"--for {text}", f"{' or '.join(COLLECTIVES)}, and a size: all_reduce=4MB")
    size_bytes = parse_size(size, f"--for {collective}")
    if size_bytes < 1:
        raise SpecError(f"--for {text}", "a size of at least 1 byte")
    return Sum(collective, size_bytes)


def find_order(
    net: LinkArrays, target: Sum, *, noise: float = 0.0, limit_s: float = 3.0, seed: int = 0
) -> HostOrdering:
    """The best order of the search, or the network's own if none is better.

    In an order for all-reduces the first host stays first, and the hosts of each group come one after the other.
    `noise`: relative, of the probe. Where all hosts are in one group, a smaller gain is only noise.
    """
    hosts = net.hosts
    if target.collective == "halving_doubling" and hosts & (hosts - 1):
        raise SpecError(f"halving_doubling on {hosts} hosts", "a power of two, or --for all_reduce or tree")
    rng, identity = np.random.default_rng(seed), np.arange(hosts)
    random_s = float(np.mean([target.seconds(net, rng.permutation(hosts)) for _ in range(RANDOM_ORDERS)]))
    searched = search_order(net, target, keep_first=target.collective == "all_reduce", limit_s=limit_s, seed=seed)
    given_s = target.seconds(net, identity)
    order, seconds = min(
        ((identity, given_s), (searched, target.seconds(net, searched))), key=lambda candidate: candidate[1]
    )
    min_gain = max(MIN_GAIN, 1 + noise) if len(net.uplink_G) == 1 else MIN_GAIN
    return HostOrdering(tuple(map(int, order)), seconds, given_s, random_s, bound_s(net, target), min_gain)


class SumSizes(NamedTuple):
    """The algorithm of all-reduces from a size on, and its order of hosts; `all_reduce` keeps the network's."""

    min_bytes: int
    collective: str
    order: tuple[int, ...]


def sums_by_size(net: LinkArrays, *, noise: float = 0.0, limit_s: float = 1.0) -> list[SumSizes]:
    """The predicted fastest algorithm by size, each in an order of its own.

    Gloo's ring in the order of the network is kept where the others gain less than `MIN_GAIN`; the result is empty if
    it is kept for all sizes.
    """
    steps = 2 * (net.hosts.bit_length() - 1)  # of a tree or of halving and doubling
    orders = {"all_reduce": tuple(range(net.hosts))}
    for collective in ("halving_doubling", "tree"):
        if collective == "tree" or net.hosts & (net.hosts - 1) == 0:
            orders[collective] = find_order(net, Sum(collective, SMALL_bytes), noise=noise, limit_s=limit_s).kept
    chosen: list[SumSizes] = []
    for size_bytes in (0, *(1 << power for power in range(8, MAX_POWER))):
        seconds = {collective: Sum(collective, size_bytes).seconds(net, order) for collective, order in orders.items()}
        ring_s = seconds.pop("all_reduce")
        seconds = {collective: own_s + steps * OWN_STEP_s for collective, own_s in seconds.items()}
        seconds["all_reduce"] = ring_s / MIN_GAIN
        fastest = min(seconds, key=lambda collective: seconds[collective])
        if fastest != (chosen[-1].collective if chosen else "all_reduce"):
            chosen.append(SumSizes(size_bytes, fastest, orders[fastest] if fastest != "all_reduce" else ()))
    return chosen


def search_order(
    net: LinkArrays, target: Sum, *, keep_first: bool = False, limit_s: float = 3.0, seed: int = 0
) -> Ints:
    """The best order of all, or beyond 8 hosts of those that annealing meets.

    `keep_first`: of those that begin with host 0 and have the hosts of each group one after the other.
    """
    problem = OrderProblem(net, list(COLLECTIVES).index(target.collective), target.size_bytes, keep_first=keep_first)
    starts = _starts(net, target, seed)
    if keep_first:
        starts = [begin_with_first(start, net.group_H) for start in starts]
    if net.hosts <= MAX_EXACT:
        return problem.exact(starts[0])
    effort = AnnealingEffort(MOVES_A_HOST * net.hosts, seed, hot=HOT, cold=COLD, limit_s=limit_s / len(starts))
    orders = [problem.anneal(start, effort._replace(seed=seed + k)) for k, start in enumerate(starts)]
    return min(orders, key=lambda order: target.seconds(net, order))


def _starts(net: LinkArrays, target: Sum, seed: int) -> list[Ints]:
    hosts = net.hosts
    by_group = np.argsort(net.group_H, kind="stable")
    if target.collective == "tree":
        by_group = by_group[np.argsort(_subtree_order(hosts))]
    near = _nearest_neighbours(net, target.size_bytes / hosts)
    return [np.arange(hosts), by_group, near, np.random.default_rng(seed).permutation(hosts)]


def _nearest_neighbours(net: LinkArrays, share_bytes: float) -> Ints:
    """Greedy nearest neighbours: each host is followed by the nearest of those left, its own group first."""
    seconds_HH = net.latency_HH + share_bytes / net.rate_HH
    seconds_HH = seconds_HH + (net.group_H[:, None] != net.group_H) * seconds_HH.max()
    order, left = [0], set(range(1, net.hosts))
    while left:
        order.append(min(left, key=lambda host: (seconds_HH[order[-1], host], host)))
        left.remove(order[-1])
    return np.array(order)


def _subtree_order(hosts: int) -> Ints:
    """The places of a binary tree in post-order."""
    places: list[int] = []

    def walk(place: int) -> None:
        if place < hosts:
            walk(2 * place + 1)
            walk(2 * place + 2)
            places.append(place)

    walk(0)
    return np.array(places)


def begin_with_first(order: Order, group_H: Ints) -> Ints:
    """A ring turned so that the first host begins it, with the hosts of each group one after the other."""
    order_H = np.asarray(order)
    order_H = np.roll(order_H, -int(np.flatnonzero(order_H == 0)[0]))
    groups = list(dict.fromkeys(group_H[order_H].tolist()))
    return np.concatenate([order_H[group_H[order_H] == group] for group in groups])


def bound_s(net: LinkArrays, target: Sum) -> float:
    """A lower bound: each host sends and receives once on its best link, and each group is left and entered once."""
    hosts, size = net.hosts, target.size_bytes
    if hosts < 2:
        return 0.0
    match target.collective:
        case "all_reduce":
            steps = 2 * (hosts - 1)
            sending_HH, way_HH = _message_s(net, size / hosts, latency=False), _message_s(net, size / hosts)
            slowest_s = max(float(sending_HH.min(axis).max()) for axis in (0, 1))
            slowest_s = max([slowest_s, *_fastest_crossings(net, sending_HH), *_fastest_crossings(net, sending_HH.T)])
            return max(steps * slowest_s, steps / hosts * max(float(way_HH.min(axis).sum()) for axis in (0, 1)))
        case "halving_doubling":
            distances = [1 << k for k in range(hosts.bit_length() - 1)]
            return sum(2 * float(_message_s(net, size / (2 * d)).min(axis=1).max()) for d in distances)
        case "tree":
            sending_HH = _message_s(net, size, latency=False)
            # All but the root send to a parent, and all groups but the root's are left.
            slowest = np.sort(sending_HH.min(axis=1))[-2], *sorted(_fastest_crossings(net, sending_HH))[-2:-1]
            latency_s = float(np.where(np.eye(hosts, dtype=bool), np.inf, net.latency_HH).min())
            return 2 * ((hosts.bit_length() - 1) * latency_s + float(max(slowest)))
        case other:
            raise SpecError(f"{other!r}", f"one of {', '.join(COLLECTIVES)}")


def _message_s(net: LinkArrays, size_bytes: float, *, latency: bool = True) -> Floats:
    """Seconds of a message that is alone on its link and its uplinks; infinite on the diagonal."""
    from_HH, to_HH = net.group_H[:, None], net.group_H[None, :]
    uplink_HH = np.minimum(net.uplink_G[from_HH], net.uplink_G[to_HH])
    rate_HH = np.where(from_HH == to_HH, net.rate_HH, np.minimum(net.rate_HH, uplink_HH))
    time_HH = size_bytes / rate_HH + (net.latency_HH if latency else 0.0)
    np.fill_diagonal(time_HH, np.inf)
    return time_HH


def _fastest_crossings(net: LinkArrays, time_HH: Floats) -> list[float]:
    """Seconds of the fastest message out of each group; empty for one group."""
    inside_GH = [net.group_H == group for group in range(len(net.uplink_G))]
    return [float(time_HH[np.ix_(inside, ~inside)].min()) for inside in inside_GH if not inside.all()]
