"""Seconds of collectives by cause: links inside hosts, the network, uplinks, and latency.

Rates are those of a hardware profile or, between hosts, of a network. With a network, messages are gloo's: every host
sends each other one, empty or not, and sums go round a ring.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.collective import all_to_all_s, far_sum_s, near_scatter_s, ring_s
from rowwise.planning.perf.hardware import FLOAT_bytes, Machine
from rowwise.planning.perf.links import LinkArrays, uniform_network
from rowwise.planning.simulate.traffic import Flow
from rowwise.tables.spec import LINKS, RUN, FarType, Link, Topology, WireType

Cause = Literal["device", "memory", "host link", "links in hosts", "network", "uplink", "latency", "batches"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
CAUSE_OF: Mapping[Link, Cause] = {"host": "links in hosts", "network": "network", "uplink": "uplink"}
RATES = {"all_to_all": "all_to_all_Bps", "all_reduce": "all_reduce_Bps"}
Seconds = dict[Cause, float]


@dataclass(frozen=True, slots=True)
class Links:
    """The links between the ranks of a machine."""

    machine: Machine
    net: LinkArrays | None = None  # between hosts; None takes the rates of the profile

    @property
    def topology(self) -> Topology:
        return self.machine.topology

    @property
    def by_processor(self) -> frozenset[Cause]:
        """Causes of transfers that occupy the processor, which then computes nothing beside them."""
        if not self.machine.hardware.copies_inside:
            return frozenset({"device"})
        return frozenset({"device", "links in hosts", *(("latency",) if self.topology.hosts == 1 else ())})

    def flow(self, flow: Flow) -> Seconds:
        """Seconds of the slowest rank; empty without bytes."""
        busier = {link: np.maximum(flow.sent[link], flow.received[link]) for link in LINKS}
        if not any(x.any() for x in busier.values()):
            return {}
        over_network = self.net is not None and self.topology.hosts > 1
        near: tuple[Link, ...] = ("host",) if over_network else LINKS
        link_s = {link: busier[link] / self._rate(link, flow.collective) for link in near}
        slowest = int(np.argmax(sum(link_s.values())))
        seconds: Seconds = {CAUSE_OF[link]: float(x[slowest]) for link, x in link_s.items()}
        sent: tuple[Link, ...] = ("network", "uplink") if self.machine.hardware.copies_inside else LINKS
        moved = np.sum([flow.sent[link] + flow.received[link] for link in sent], axis=0)
        seconds |= self._processor_s(float(moved.max()))
        farthest = next(link for link in reversed(LINKS) if busier[link].any())
        if self.net is None or not over_network:
            return seconds | {"latency": self.machine.hardware.link(farthest).latency_s}
        if flow.collective == "all_reduce":
            bus_bytes = float(np.sum(list(flow.sent.values()), axis=0).max())
            size_bytes = bus_bytes / 2 * self.topology.world / (self.topology.world - 1)
            return add_seconds(seconds, self._ring(size_bytes))
        return add_seconds(seconds, self._between_hosts(flow, self.net))

    def all_reduce(self, size_bytes: float, ranks: int, *, inside: bool) -> Seconds:
        """Ring all-reduce over `ranks`, inside a host or across hosts."""
        if ranks == 1 or not size_bytes:
            return {}
        if self.net is not None and not inside:
            return self._ring(size_bytes)
        sums = self.machine.hardware.sums
        if inside and sums is not None and sums.ranks == ranks:
            return {"links in hosts": sums.of(size_bytes)}
        return self._at_rates(2 * (ranks - 1) / ranks * size_bytes, "all_reduce", inside=inside)

    def gather(self, size_bytes: float, ranks: int, *, inside: bool) -> Seconds:
        """All-gather over `ranks`, or a reduce-scatter."""
        if ranks == 1 or not size_bytes:
            return {}
        if self.net is not None and not inside:
            return scale_seconds(self._ring(size_bytes), 0.5)  # half of an all-reduce
        return self._at_rates((ranks - 1) / ranks * size_bytes, "reduce_scatter", inside=inside)

    def dense_sum(self, numbers: float, kind: WireType, ranks: int, *, inside: bool) -> Seconds:
        """All-reduce of dense gradients; lossy types as an all-to-all of shares and an all-gather of their sums."""
        if kind.facts.exact:
            return self.all_reduce(FLOAT_bytes * numbers, ranks, inside=inside)
        coded = kind.vector_bytes(RUN) * -(-numbers // RUN)
        transfer = add_seconds(
            self.gather(coded, ranks, inside=inside),
            self._all_to_all(coded * (ranks - 1) / ranks, ranks, inside=inside),
        )
        return add_seconds(transfer, {"device": self.machine.hardware.coding_s(kind) * numbers})

    def two_level_sum(self, numbers: float, far: FarType) -> tuple[Seconds, Seconds]:
        """A sum in two levels: the near reduce-scatter, which overlaps with the backward, and the rest after it.

        See `train/two_level.py`. Without a network, that between hosts has the rates of the profile.
        """
        topology, hardware = self.topology, self.machine.hardware
        net = uniform_network(topology, hardware).arrays() if self.net is None else self.net
        size_bytes, far_bytes = FLOAT_bytes * numbers, numbers / RUN * far.run_bytes
        if len(topology.groups) > 1:
            near = seconds_by_cause(net, lambda net: near_scatter_s(net, topology.devices * size_bytes))
            between = seconds_by_cause(net, lambda net: far_sum_s(net, far_bytes))
        else:
            scattered_s = size_bytes * (1 - 1 / topology.devices) / hardware.host.reduce_scatter_Bps
            near: Seconds = {"links in hosts": scattered_s, "latency": hardware.host.latency_s}
            between = seconds_by_cause(net, lambda net: ring_s(net, np.arange(topology.hosts), far_bytes))
        holders = min(map(len, topology.near_ranks))
        coding: Seconds = {"device": 2 * numbers / holders * hardware.coding_s(far)}
        near = add_seconds(near, self._processor_s(2 * size_bytes, inside=len(topology.groups) < 2))
        return near, add_seconds(
            add_seconds(between, near), add_seconds(coding, self._processor_s(4 * far_bytes / holders))
        )

    def send(self, sent_bytes: float, *, inside: bool) -> Seconds:
        """Each rank sends bytes to others."""
        if self.net is not None and not inside:
            hosts, devices = self.topology.hosts, self.topology.devices
            bytes_HH = np.full((hosts, hosts), devices * sent_bytes / max(hosts - 1, 1))
            return seconds_by_cause(self.net, lambda net: all_to_all_s(net, bytes_HH))
        return self._at_rates(sent_bytes, "all_to_all", inside=inside)

    def _all_to_all(self, sent_bytes: float, ranks: int, *, inside: bool) -> Seconds:
        if ranks == 1 or (self.net is not None and not inside):
            return self.gather(sent_bytes * ranks / max(ranks - 1, 1), ranks, inside=inside)
        return self.send(sent_bytes, inside=inside)

    def _at_rates(self, sent_bytes: float, collective: str, *, inside: bool) -> Seconds:
        link: Link = "host" if inside else "network"
        sending: Seconds = {CAUSE_OF[link]: sent_bytes / self._rate(link, collective)}
        copying = self._processor_s(2 * sent_bytes, inside=inside)
        return sending | {"latency": self.machine.hardware.link(link).latency_s} | copying

    def _processor_s(self, moved_bytes: float, *, inside: bool = False) -> Seconds:
        """Processor seconds of sending and receiving, beside the time of the link."""
        if inside and self.machine.hardware.copies_inside:
            return {}
        taken_s = self.machine.hardware.cpu_s_per_byte * moved_bytes
        return {"device": taken_s} if taken_s else {}

    def _rate(self, link: Link, collective: str) -> float:
        return getattr(self.machine.hardware.link(link), RATES.get(collective, "reduce_scatter_Bps"))

    def _ring(self, size_bytes: float) -> Seconds:
        assert self.net is not None
        order = np.arange(self.topology.hosts)
        sending = seconds_by_cause(self.net, lambda net: ring_s(net, order, size_bytes))
        return sending | self._processor_s(4 * size_bytes)

    def _between_hosts(self, flow: Flow, net: LinkArrays) -> Seconds:
        bytes_HH = between_hosts(flow, self.topology)
        latency_s = float(net.latency_HH.max())
        sent_s = all_to_all_s(net, bytes_HH) - latency_s
        free_s = all_to_all_s(net._replace(uplink_G=np.full_like(net.uplink_G, np.inf)), bytes_HH) - latency_s
        return {"network": free_s, "uplink": sent_s - free_s, "latency": latency_s * self.topology.world}


def between_hosts(flow: Flow, topology: Topology) -> Floats:
    """Bytes [from][to]: what a host sends by a class of links is divided among the others as they receive."""
    total_HH = np.zeros((topology.hosts, topology.hosts))
    group_H = np.array([topology.group_of(host) for host in range(topology.hosts)])
    for link in ("network", "uplink"):
        sent_H, received_H = (
            x[link].reshape(topology.hosts, topology.devices).sum(1) for x in (flow.sent, flow.received)
        )
        mask_HH = (group_H[:, None] == group_H[None]) == (link == "network")
        share_HH = np.where(mask_HH & ~np.eye(topology.hosts, dtype=bool), received_H[None], 0.0)
        total_H = share_HH.sum(1, keepdims=True)
        total_HH += sent_H[:, None] * np.divide(share_HH, total_H, out=np.zeros_like(share_HH), where=total_H > 0)
    return total_HH


def seconds_by_cause(net: LinkArrays, seconds: Callable[[LinkArrays], float]) -> Seconds:
    """Seconds on a network by cause: by how much they fall without latencies, and without uplinks."""
    all_s = seconds(net)
    no_latency = net._replace(latency_HH=np.zeros_like(net.latency_HH))
    sent_s = seconds(no_latency)
    free_s = seconds(no_latency._replace(uplink_G=np.full_like(net.uplink_G, np.inf)))
    return {"network": free_s, "uplink": sent_s - free_s, "latency": all_s - sent_s}


def add_seconds(a: Seconds, b: Seconds) -> Seconds:
    return {cause: a.get(cause, 0.0) + b.get(cause, 0.0) for cause in CAUSES if cause in a or cause in b}


def scale_seconds(seconds: Seconds, factor: float) -> Seconds:
    return {cause: taken_s * factor for cause, taken_s in seconds.items()}
