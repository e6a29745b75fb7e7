"""Seconds of a sum of dense gradients over all ranks, by the wire that it travels on.

    ring         floats around all hosts, as gloo's all-reduce; on one host, by its rate of all-reduce
    flat         encoded shares to and from all ranks (`train/coded.py`)
    two levels   floats near, encoded shares between groups or hosts (`train/two_level.py`)

Transfers of buckets follow one another, and nothing overlaps with the backward. `planning/perf/collective.py` has the
formulas.
"""

from dataclasses import dataclass

import numpy as np

from rowwise.planning.perf.collective import all_to_all_s, ring_s, two_level_s
from rowwise.planning.perf.hardware import FLOAT_bytes, Hardware
from rowwise.planning.perf.links import LinkArrays
from rowwise.tables.spec import RUN, FarType, Topology, Wire, WireType


@dataclass(frozen=True, slots=True)
class SumCosts:
    """Sums of buckets of `bucket_numbers` floats, on hosts in the order of the network."""

    topology: Topology
    net: LinkArrays
    hardware: Hardware  # inside hosts, and of coding
    bucket_numbers: tuple[int, ...]

    def seconds(self, wire: Wire) -> float:
        """Of all buckets of a step."""
        if self.topology.world == 1:
            return 0.0
        return sum(self._bucket_s(numbers, wire) for numbers in self.bucket_numbers)

    def _bucket_s(self, numbers: int, wire: Wire) -> float:
        if wire.far is not None and len(self.topology.near_ranks) > 1:
            return self._two_level_s(numbers, FarType.parse(wire.far))
        if wire.dense is not WireType.FP32:
            return self._flat_s(numbers, FarType.parse(wire.dense))
        size_bytes = FLOAT_bytes * numbers
        if self.topology.hosts > 1:
            return ring_s(self.net, range(self.net.hosts), size_bytes)
        world = self.topology.world
        return self.hardware.host.latency_s + 2 * (world - 1) / world * size_bytes / self.hardware.host.all_reduce_Bps

    def _flat_s(self, numbers: int, kind: FarType) -> float:
        world, devices = self.topology.world, self.topology.devices
        share_bytes = numbers / RUN * kind.run_bytes / world
        coding_s = 2 * numbers * self.hardware.coding_s(kind)
        host = self.hardware.host
        if self.topology.hosts == 1:
            return coding_s + 2 * (host.latency_s + (world - 1) * share_bytes / host.all_to_all_Bps)
        hosts = self.net.hosts
        return coding_s + 2 * all_to_all_s(self.net, np.full((hosts, hosts), devices * devices * share_bytes))

    def _two_level_s(self, numbers: int, far: FarType) -> float:
        devices, size_bytes, far_bytes = self.topology.devices, FLOAT_bytes * numbers, numbers / RUN * far.run_bytes
        holders = min(map(len, self.topology.near_ranks))
        coding_s = 2 * numbers / holders * self.hardware.coding_s(far)
        if len(self.topology.groups) > 1:  # each device sends its own numbers to the group
            return coding_s + two_level_s(self.net, devices * size_bytes, far_bytes)
        near_s = self.hardware.host.latency_s + size_bytes * (1 - 1 / devices) / self.hardware.host.reduce_scatter_Bps
        return coding_s + 2 * near_s + ring_s(self.net, range(self.net.hosts), far_bytes)
