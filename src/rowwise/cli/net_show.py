"""Prints networks and orders of hosts as text, and renders a network as a page."""

import numpy as np
from rich.console import Console
from rich.table import Table

from rowwise.base.quantity import format_bytes, format_seconds
from rowwise.cli.terminal import say
from rowwise.planning.perf.links import LinkArrays, Network, age_notes
from rowwise.planning.planner.order import MIN_GAIN, HostOrdering, SumSizes
from rowwise.report.markup import Html, join, note, section, tag, text, text_table
from rowwise.report.page import draw_page

SLOW_SHARE = 0.6  # of the median host's rate, below which a host is slow
MAX_SHOWN = 64  # hosts in the matrices of a page
HEADERS = ("host", "address", "group", "latency", "rate", "")


def show_network(network: Network, source: str, console: Console) -> None:
    """Print slow hosts first, then all hosts, and a diagram of groups."""
    for line in describe(network, source):
        say(console, line)
    table = Table(*HEADERS, box=None, pad_edge=False)
    for row in _host_rows(network):
        table.add_row(*row)
    console.print(table)
    for line in _picture(network):
        say(console, line)


def show_order(
    ordering: HostOrdering, names: list[str], sums: list[SumSizes], notes: list[str], console: Console
) -> None:
    lines = [f"order      {' '.join(names)}"] if ordering.is_worthwhile else []
    gain = f"{ordering.gain:.1f}x as fast as in the given order"
    if not ordering.is_worthwhile:
        gain = (
            "nothing to gain: 1.0x"
            if ordering.gain < MIN_GAIN
            else f"{gain}, but within the noise: keep the given order"
        )
    lines += [
        f"predicted  {format_seconds(ordering.seconds)}, {gain}",
        f"given      {format_seconds(ordering.given_s)}",
        f"random     {format_seconds(ordering.random_s)}, mean of 100 orders",
        f"bound      {format_seconds(ordering.bound_s)}, a lower bound for any order",
        *([f"by size    {', '.join(f'{s.collective} from {s.min_bytes:,} bytes' for s in sums)}"] if sums else []),
        *(f"note       {age_note}" for age_note in notes),
    ]
    for line in lines:
        say(console, line)


def describe(network: Network, source: str) -> list[str]:
    """Slow hosts, the number of groups, and the source of the measurements."""
    net, probed = network.arrays(), network.probed
    lines = [
        f"slow host: {network.hosts[host].name} has {share:.0%} of the median host's rate"
        for host, share in slow_hosts(net)
    ]
    groups = f"{network.group_count} groups" if network.group_count > 1 else "one group"
    lines.append(f"{source}: {len(network.hosts)} hosts in {groups}")
    lines += age_notes(network, source)
    if probed is None:
        return lines
    sizes = " and ".join(format_bytes(size) for size in probed.sizes)
    measured = f"messages of {sizes}, {probed.rounds} rounds under load, noise {probed.noise:.0%}"
    return [*lines, f"probed {probed.when} for {probed.seconds:g} s: {measured}"]


def slow_hosts(net: LinkArrays) -> list[tuple[int, float]]:
    """Hosts with a median rate far below that of the median host, and their share of it."""
    if net.hosts < 3:
        return []
    rate_H = _median_rates(net)
    shares_H = rate_H / np.median(rate_H)
    return [(host, float(share)) for host, share in enumerate(shares_H) if share < SLOW_SHARE]


def draw_network(network: Network, source: str) -> str:
    """A page with all hosts, and matrices of rate and latency between the first MAX_SHOWN hosts."""
    net, hosts = network.arrays(), network.hosts[:MAX_SHOWN]
    head = tag("header", None, tag("h1", None, text("Network")), *map(note, describe(network, source)))
    names = [host.name for host in hosts]
    matrices: list[Html] = []
    for key, title, matrix_HH, show in (
        ("rates", "Rate, from row to column", net.rate_HH, _format_rate),
        ("latencies", "Latency, from row to column", net.latency_HH, format_seconds),
    ):
        rows = [
            [names[a], *("" if a == b else show(float(matrix_HH[a, b])) for b in range(len(hosts)))]
            for a in range(len(hosts))
        ]
        matrices.append(section(key, title, text_table(["", *names], rows)))
    if len(network.hosts) > MAX_SHOWN:
        matrices.append(note(f"The first {MAX_SHOWN} hosts are shown."))
    picture = tag("pre", None, text("\n".join(_picture(network))))
    hosts_section = section("hosts", "Hosts", text_table(HEADERS, _host_rows(network)), picture)
    return draw_page(f"Network {source}", head, hosts_section, join(matrices))


def _format_rate(rate_Bps: float) -> str:
    return f"{format_bytes(rate_Bps)}/s"


def _median_rates(net: LinkArrays) -> np.ndarray:
    rate_HH = np.where(np.eye(net.hosts, dtype=bool), np.nan, np.minimum(net.rate_HH, net.rate_HH.T))
    return np.nanmedian(rate_HH, axis=1) if net.hosts > 1 else np.full(net.hosts, np.inf)


def _host_rows(network: Network) -> list[tuple[str, ...]]:
    net = network.arrays()
    slow, rate_H = dict(slow_hosts(net)), _median_rates(net)
    remote_HH = ~np.eye(net.hosts, dtype=bool)
    return [
        (
            host.name,
            host.address,
            str(net.group_H[index]),
            format_seconds(float(np.median(net.latency_HH[index][remote_HH[index]]))) if net.hosts > 1 else "",
            _format_rate(float(rate_H[index])) if net.hosts > 1 else "",
            f"slow: {slow[index]:.0%}" if index in slow else "",
        )
        for index, host in enumerate(network.hosts)
    ]


def _picture(network: Network) -> list[str]:
    """Each group with its uplink and its hosts."""
    if network.group_count == 1:
        return []
    lines: list[str] = []
    for group in range(network.group_count):
        names = [host.name for host, number in zip(network.hosts, network.groups, strict=True) if number == group]
        uplink = _format_rate(network.uplink_Bps[group]) if network.uplink_Bps else "never limits"
        lines.append(f"==[ uplink {uplink} ]==[ group {group} ]-- {' '.join(names)}")
    return lines
