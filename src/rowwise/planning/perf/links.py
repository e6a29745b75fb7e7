"""A network as data: its hosts, latency and rate between two of them, and groups that share an uplink.

`net.json` is such a network, probed or made by hand:

    {"hosts": [{"name": "a", "address": "10.0.0.1", "devices": 8}, ...],
     "latency_s": [[null, 2e-05], ...], "rate_Bps": [[null, 1.2e9], ...],
     "groups": [0, 0, 1, 1], "uplink_Bps": [6e8, 6e8]}

Matrices are [from][to], with null on the diagonal. A file made by hand may give one `link` for all pairs instead.
An uplink carries its bytes a second each way.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.base.value import MAX_RANKS, Value
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.cost import Ints
from rowwise.planning.perf.hardware import Hardware
from rowwise.tables.spec import Topology

OLD_days = 7
Matrix = tuple[tuple[float | None, ...], ...]


class NetworkHost(Value, frozen=True, omit_defaults=True):
    """A host of a network."""

    name: str
    address: str = ""
    devices: int = 1


class PairLink(Value, frozen=True):
    """Latency and rate between any two hosts."""

    latency_s: float
    rate_Bps: float


class NetworkProbe(Value, frozen=True, omit_defaults=True):
    """How the numbers of a network were measured."""

    when: str  # date and time in ISO 8601, with its time zone
    seconds: float
    sizes: tuple[int, ...]  # bytes of the messages
    rounds: int
    noise: float = 0.0  # median relative spread of a pair's repetitions

    def __post_init__(self) -> None:
        try:
            _ = self.time
        except (OverflowError, ValueError):
            raise SpecError(
                f"network: probed.when is {self.when!r}", "a date and time, such as 2026-01-31T12:00:00+00:00"
            ) from None

    @property
    def time(self) -> datetime:
        return datetime.fromisoformat(self.when).astimezone()


class LinkArrays(NamedTuple):
    """A network for computations; H hosts, G groups."""

    latency_HH: Floats
    rate_HH: Floats
    group_H: Ints
    uplink_G: Floats  # bytes a second each way; infinite without an uplink

    @property
    def hosts(self) -> int:
        return len(self.group_H)

    def among(self, hosts: Sequence[int]) -> "LinkArrays":
        """The links between the given hosts, in their order, and their groups."""
        groups, group_H = np.unique(self.group_H[list(hosts)], return_inverse=True)
        pair_HH = np.ix_(hosts, hosts)
        return LinkArrays(
            self.latency_HH[pair_HH], self.rate_HH[pair_HH], group_H.astype(np.int64), self.uplink_G[groups]
        )  # fmt: skip


class Network(Value, frozen=True, omit_defaults=True):
    """Hosts and the links between them."""

    hosts: tuple[NetworkHost, ...]
    link: PairLink | None = None  # of all pairs; None if the matrices give them
    latency_s: Matrix = ()  # [from][to]
    rate_Bps: Matrix = ()
    groups: tuple[int, ...] = ()  # the group of each host; empty for one group
    uplink_Bps: tuple[float, ...] = ()  # of each group; empty if uplinks never limit
    probed: NetworkProbe | None = None  # None if not measured

    @property
    def noise(self) -> float:
        return 0.0 if self.probed is None else self.probed.noise

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names:
            raise SpecError("network: no hosts", "at least one host")
        if len(names) > MAX_RANKS:
            raise SpecError(f"network: {len(names):,} hosts", f"at most {MAX_RANKS:,}")
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise SpecError(f"network: host {name!r} is listed twice", "each host once")
        for host in self.hosts:
            if host.devices < 1:
                raise SpecError(f"network: host {host.name!r} has {host.devices} devices", "at least 1")
        if (self.link is None) == (not self.latency_s or not self.rate_Bps):
            raise SpecError("network", "either `link`, or both `latency_s` and `rate_Bps`")
        if self.link is None:
            self._check_matrix("latency_s", self.latency_s, least=0.0)
            self._check_matrix("rate_Bps", self.rate_Bps)
        elif self.latency_s or self.rate_Bps:
            raise SpecError("network: `link` and a matrix", "one of them")
        else:
            _check_number("link.latency_s", self.link.latency_s, least=0.0)
            _check_number("link.rate_Bps", self.link.rate_Bps)
        self._check_groups()

    def _check_matrix(self, field: str, matrix: Matrix, least: float | None = None) -> None:
        size = len(self.hosts)
        if len(matrix) != size or any(len(row) != size for row in matrix):
            shape = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})} numbers"
            raise SpecError(f"network: {field} has {shape}", f"{size} rows of {size}, a number for each pair of hosts")
        for a, row in enumerate(matrix):
            for b, number in enumerate(row):
                where = f"{field} from {self.hosts[a].name!r} to {self.hosts[b].name!r}"
                if a == b:
                    if number is not None:
                        raise SpecError(f"network: {where} is {number}", "null on the diagonal")
                elif number is None:
                    raise SpecError(f"network: {where} is null", "a number")
                else:
                    _check_number(where, number, least)

    def _check_groups(self) -> None:
        if self.groups and len(self.groups) != len(self.hosts):
            raise SpecError(f"network: {len(self.groups)} groups for {len(self.hosts)} hosts", "one for each host")
        count = self.group_count
        if set(self.groups) not in (set(), set(range(count))):
            raise SpecError(f"network: groups {sorted(set(self.groups))}", "numbers from 0 on without a gap")
        if self.uplink_Bps and len(self.uplink_Bps) != count:
            raise SpecError(f"network: {count} groups and {len(self.uplink_Bps)} uplinks", "one for each group")
        for group, rate in enumerate(self.uplink_Bps):
            _check_number(f"uplink_Bps of group {group}", rate)

    @property
    def group_count(self) -> int:
        return max(self.groups, default=0) + 1

    def arrays(self) -> LinkArrays:
        size = len(self.hosts)
        if self.link is None:
            latency_HH, rate_HH = (np.array(m, dtype=float) for m in (self.latency_s, self.rate_Bps))
        else:
            latency_HH = np.full((size, size), self.link.latency_s)
            rate_HH = np.full((size, size), self.link.rate_Bps)
        np.fill_diagonal(latency_HH, 0.0)
        np.fill_diagonal(rate_HH, np.inf)
        group_H = np.array(self.groups or [0] * size, dtype=np.int64)
        uplink_G = np.array(self.uplink_Bps or [math.inf] * self.group_count)
        return LinkArrays(latency_HH, rate_HH, group_H, uplink_G)

    def among(self, names: Sequence[str]) -> "Network":
        """The network between some of its hosts, in this order."""
        place_of = {host.name: place for place, host in enumerate(self.hosts)}
        places = [place_of[name] for name in names]
        numbers = list(dict.fromkeys(self.groups[place] for place in places)) if self.groups else []

        def between(matrix: Matrix) -> Matrix:
            return tuple(tuple(matrix[a][b] for b in places) for a in places) if matrix else ()

        return structs.replace(
            self,
            hosts=tuple(self.hosts[place] for place in places),
            latency_s=between(self.latency_s),
            rate_Bps=between(self.rate_Bps),
            groups=tuple(numbers.index(self.groups[place]) for place in places) if numbers else (),
            uplink_Bps=tuple(self.uplink_Bps[number] for number in numbers) if numbers and self.uplink_Bps else (),
        )

    def topology(self, order: Sequence[int] | None = None) -> Topology:
        """Hosts in an order, and the runs of hosts of one group; hosts have to have equally many devices."""
        order = range(len(self.hosts)) if order is None else order
        runs = group_runs(self.groups[host] for host in order) if self.groups else ()
        devices = {self.hosts[host].devices for host in order}
        if len(devices) > 1:
            raise SpecError(f"network: hosts of {sorted(devices)} devices", "equally many devices on each host")
        return Topology(hosts=len(order), devices=devices.pop(), groups=runs if len(runs) > 1 else ())

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def group_runs(groups: Iterable[int]) -> tuple[int, ...]:
    """Lengths of the runs of hosts of one group, from the group of each host."""
    return tuple(len(list(run)) for _, run in groupby(groups))


def read_network(path: str | Path) -> Network:
    try:
        return decode_json(read_bytes(path), Network)
    except (msgspec.DecodeError, SpecError) as error:
        raise SpecError(f"{path}: not a network: {error}") from None


def age_notes(network: Network, source: str) -> list[str]:
    """Warnings about a network that was never measured, or whose probe is old."""
    if network.probed is None:
        return [f"{source}: this network was not measured"]
    age = (datetime.now().astimezone() - network.probed.time).total_seconds() / 86_400
    old = f"{source}: the network was probed {age:.0f} days ago; probe again, as links and hosts change"
    return [old] if age > OLD_days else []


def uniform_network(topology: Topology, hardware: Hardware) -> Network:
    """The network between the hosts of a machine whose links are those of a hardware profile."""
    rates = hardware.network
    hosts = tuple(NetworkHost(name=f"host-{h}", devices=topology.devices) for h in range(topology.hosts))
    groups = tuple(topology.group_of(h) for h in range(topology.hosts)) if topology.groups else ()
    # The uplink of a group is the sum of what its hosts send if all do.
    each_Bps = None if hardware.uplink is None else hardware.uplink.all_to_all_Bps * topology.devices
    uplink = () if each_Bps is None else tuple(each_Bps * size for size in topology.groups)
    link = PairLink(latency_s=rates.latency_s, rate_Bps=rates.all_to_all_Bps * topology.devices)
    return Network(hosts=hosts, link=link, groups=groups, uplink_Bps=uplink)


def _check_number(where: str, number: float, least: float | None = None) -> None:
    """Raise unless a number is finite and at least `least`, or above 0 without it."""
    if not math.isfinite(number) or (number <= 0 if least is None else number < least):
        raise SpecError(f"network: {where} is {number}", f"a number {('above 0' if least is None else 'of 0 or more')}")
