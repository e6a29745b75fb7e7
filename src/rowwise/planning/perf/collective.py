"""Seconds of collectives on a network, for hosts in an order: `order[k]` is the host that comes k-th.

[Note: Flows] Messages that travel at once share links and uplinks: a flow gets an equal share of its link among those
that its host sends or receives, or of the uplink that it leaves its group by and of the one that it enters a group by,
whichever is least. A message takes its latency, and its bytes at that rate.

Sizes are bytes of the numbers that each host has at the beginning. Hosts count once, whatever their devices.
"""

from collections.abc import Sequence

import numpy as np

from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.cost import Ints
from rowwise.planning.perf.links import LinkArrays

Order = Sequence[int] | Ints


def flow_rates(net: LinkArrays, source_F: Ints, target_F: Ints) -> Floats:
    """Bytes a second of flows that travel at once; see [Note: Flows]."""
    from_F, to_F = net.group_H[source_F], net.group_H[target_F]
    far_F = from_F != to_F
    groups = len(net.uplink_G)
    leaving_G = np.bincount(from_F[far_F], minlength=groups)
    entering_G = np.bincount(to_F[far_F], minlength=groups)
    sent_H, received_H = (np.bincount(host_F, minlength=net.hosts) for host_F in (source_F, target_F))
    rate_F = net.rate_HH[source_F, target_F] / np.maximum(sent_H[source_F], received_H[target_F])
    out_F = net.uplink_G[from_F[far_F]] / leaving_G[from_F[far_F]]
    in_F = net.uplink_G[to_F[far_F]] / entering_G[to_F[far_F]]
    rate_F[far_F] = np.minimum(rate_F[far_F], np.minimum(out_F, in_F))
    return rate_F


def message_s(net: LinkArrays, source_F: Ints, target_F: Ints, size_bytes: float) -> Floats:
    """Seconds of equal messages that travel at once."""
    return net.latency_HH[source_F, target_F] + size_bytes / flow_rates(net, source_F, target_F)


def ring_s(net: LinkArrays, order: Order, size_bytes: float) -> float:
    """An all-reduce round a ring: each host sends a share to the next, twice round but for two steps.

    Hosts do not wait for each other beyond their neighbours, so a latency is paid once on the way round and not in each
    step where another link limits: the time is that of the slowest sender, or that of a share on its way over
    2 (H - 1) links in a row, whichever is more.
    """
    order_H = np.asarray(order)
    hosts = len(order_H)
    if hosts < 2:
        return 0.0
    order_H, next_H = ring_flows(order_H)
    sending_H = size_bytes / hosts / flow_rates(net, order_H, next_H)
    steps = 2 * (hosts - 1)
    way_H = net.latency_HH[order_H, next_H] + sending_H
    # Once round, and then the most costly run of the steps that remain: 2 (H - 1) = H + (H - 2).
    runs_H = np.convolve(np.concatenate([way_H, way_H]), np.ones(hosts - 2), "valid") if hosts > 2 else np.zeros(1)
    return float(max(steps * sending_H.max(), way_H.sum() + runs_H.max()))


def all_to_all_s(net: LinkArrays, bytes_HH: Floats) -> float:
    """Every host sends each other host its bytes, [from][to]; the order does not matter."""
    hosts = net.hosts
    if hosts < 2:
        return 0.0
    remote_HH = ~np.eye(hosts, dtype=bool)
    time_HH = np.where(remote_HH, bytes_HH / net.rate_HH, 0.0)
    slowest_s = float(max(time_HH.sum(axis=1).max(), time_HH.sum(axis=0).max()))
    for group, uplink_Bps in enumerate(net.uplink_G):
        inside_H = net.group_H == group
        out_bytes = float(bytes_HH[np.ix_(inside_H, ~inside_H)].sum())
        in_bytes = float(bytes_HH[np.ix_(~inside_H, inside_H)].sum())
        slowest_s = max(slowest_s, max(out_bytes, in_bytes) / uplink_Bps)
    return slowest_s + float(net.latency_HH[remote_HH].max())


def two_level_s(net: LinkArrays, size_bytes: float, far_bytes: float) -> float:
    """An all-reduce in groups: reduce-scatter near, sums of equal shares far, all-gather near.

    Each group has as many holders of shares as the smallest group has hosts. `far_bytes` is the size of all numbers as
    they are encoded between groups.
    """
    return 2 * near_scatter_s(net, size_bytes) + far_sum_s(net, far_bytes)


def near_scatter_s(net: LinkArrays, size_bytes: float) -> float:
    """The first step of `two_level_s`, which takes as long as its last: that of the slowest group."""
    groups = _hosts_by_group(net)
    holders = min(map(len, groups))
    return max(_scatter_s(net, hosts, size_bytes, holders) for hosts in groups)


def far_sum_s(net: LinkArrays, far_bytes: float) -> float:
    """The second step of `two_level_s`: rings of the hosts that hold the same share, at once."""
    groups = _hosts_by_group(net)
    if len(groups) == 1:
        return 0.0
    holders = min(map(len, groups))
    rings = [ring_flows([hosts[k] for hosts in groups]) for k in range(holders)]
    source_F, target_F = (np.concatenate(ends) for ends in zip(*rings, strict=True))
    step_s = message_s(net, source_F, target_F, far_bytes / holders / len(groups)).max()
    return 2 * (len(groups) - 1) * float(step_s)


def _hosts_by_group(net: LinkArrays) -> list[Ints]:
    return [np.flatnonzero(net.group_H == group) for group in range(len(net.uplink_G))]


def ring_flows(order: Order) -> tuple[Ints, Ints]:
    """Senders and receivers of one step round a ring."""
    order_H = np.asarray(order)
    return order_H, np.roll(order_H, -1)


def halving_doubling_s(net: LinkArrays, order: Order, size_bytes: float) -> float:
    """An all-reduce between partners at doubled distances; a power of two of hosts."""
    order_H = np.asarray(order)
    hosts, distance, total_s = len(order_H), 1, 0.0
    while distance < hosts:
        partner_H = order_H[np.arange(hosts) ^ distance]
        total_s += 2 * float(message_s(net, order_H, partner_H, size_bytes / (2 * distance)).max())
        distance *= 2
    return total_s


def tree_s(net: LinkArrays, order: Order, size_bytes: float) -> float:
    """An all-reduce up and down a binary tree, in chunks: the latencies of its deepest path, and its slowest link."""
    order_H = np.asarray(order)
    hosts = len(order_H)
    if hosts < 2:
        return 0.0
    child_F = np.arange(1, hosts)
    parent_F = (child_F - 1) // 2
    latency_F = net.latency_HH[order_H[child_F], order_H[parent_F]]
    depth_H = np.zeros(hosts)
    for child in child_F:
        depth_H[child] = depth_H[parent_F[child - 1]] + latency_F[child - 1]
    slowest_s = (size_bytes / flow_rates(net, order_H[child_F], order_H[parent_F])).max()
    return 2 * float(depth_H.max() + slowest_s)


def _scatter_s(net: LinkArrays, host_H: Ints, size_bytes: float, holders: int) -> float:
    """A reduce-scatter inside a group: each of its hosts sends every holder its share, one after the other."""
    if len(host_H) < 2:
        return 0.0
    shares_HK = size_bytes / holders / net.rate_HH[np.ix_(host_H, host_H[:holders])]
    latency_s = float(net.latency_HH[np.ix_(host_H, host_H)].max())
    return latency_s + float(max(shares_HK.sum(axis=1).max(), shares_HK.sum(axis=0).max()))
