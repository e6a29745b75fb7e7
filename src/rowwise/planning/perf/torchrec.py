"""The cost estimates of TorchRec's planner with its default constants, for comparing like with like.

Purely additive: a rank takes the sum over its shards, and nothing waits for anything. With b samples
of a rank, W ranks, n ids and v vectors a sample (where n is under 1, as many vectors), d columns of e bytes, and rows
cut into p parts, bytes are

    read        8 n b W / p        replicas 8 n b
    looked up   n b W d e / p      replicas n b d e; full rows count at least 32 columns
    output      v b W d e          replicas v b d e

Forward is their sum over the rate of device memory, more for narrow rows that are whole, twice as much for replicas;
backward is twice that. Output vectors then cross the links, and back: whole rows all to all; cut rows
reduce-scattered, gathered and copied; those cut inside a host also to as many vectors of the other hosts. A replica's
gradient is reduced by all ranks and written. Ids on links are estimated, but not counted.

Not supported: tiers below device memory, weights of ids, and what TorchRec itself leaves out (latency, skew, repeated
ids).
"""

from dataclasses import dataclass

import numpy as np

from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.cost import CostStage, Phi, Shards
from rowwise.tables.spec import FLOATS, Topology, Wire

GiB = 1024**3
DEVICE_Bps = 897 * GiB
HOST_LINK_Bps = 600 * GiB
NETWORK_Bps = 12.5 * GiB
ID_bytes = 8
MIN_DIM = 32
COPIED = 2.455  # passes over the gradients that are gathered for cut rows
ELEMENTWISE = 9.22  # passes over a replica's gradient
DENSE = 0.5  # share of the rate of device memory that replicas reach, as their operators are not fused
PASSES = 3  # forward, and twice that backward


@dataclass(frozen=True, slots=True)
class TorchRecModel:
    """TorchRec 1.8.0's estimates of pooled tables in device memory, in seconds (there: milliseconds)."""

    topology: Topology

    @property
    def wire(self) -> Wire:
        """Floats: the estimates have no narrow wires."""
        return FLOATS

    @property
    def stages(self) -> tuple[CostStage, ...]:
        """Empty: the estimates have no stages."""
        return ()

    @property
    def name(self) -> str:
        return "torchrec"

    @property
    def phi(self) -> Phi:
        return Phi(constant=0.0, ends=(1,), powers=(1.0,))

    def on(self, topology: Topology) -> "TorchRecModel":
        return TorchRecModel(topology)

    def links_s(self, shards: Shards, curves: Curves) -> Floats:
        """Zeros, as links are part of `loads`."""
        return np.zeros(len(shards.table_N))

    def loads(self, shards: Shards, curves: Curves) -> Floats:
        """All seconds of a shard, as TorchRec's planner rates it."""
        topology, world = self.topology, self.topology.world
        b = curves.batch / world
        pooling_N, d = curves.pooling_T[shards.table_N], shards.dim_N
        e = shards.row_bytes_N / d
        ids, vectors = pooling_N * b, np.minimum(shards.bags_N, pooling_N) * b
        if shards.exchange == "replicated":
            return self._replicated(ids, vectors, shards)[:, None]
        output = vectors * world * d * e
        read = np.ceil(ids * world * ID_bytes / shards.row_parts)
        if shards.exchange == "all_to_all":
            looked_up = ids * world * np.maximum(d, MIN_DIM) * e
            forward = (read + looked_up + output) * _narrow_row_penalty(d) / DEVICE_Bps
            return (PASSES * forward + 2 * output / self._link_Bps)[:, None]
        looked_up = ids * world * d * e / shards.row_parts
        forward = (read + looked_up + output) / DEVICE_Bps
        links = 2 * output / self._link_Bps
        if shards.exchange == "hierarchical":
            across = vectors * topology.hosts * d * e / NETWORK_Bps if topology.hosts > 1 else 0.0
            links = 2 * (output / HOST_LINK_Bps + across)
        return (PASSES * forward + links + COPIED * output / DEVICE_Bps)[:, None]

    @property
    def _link_Bps(self) -> float:
        return HOST_LINK_Bps if self.topology.hosts == 1 else NETWORK_Bps

    def _replicated(self, ids: Floats, vectors: Floats, shards: Shards) -> Floats:
        topology, d = self.topology, shards.dim_N
        e = shards.row_bytes_N / d
        forward = (np.ceil(ids * ID_bytes) + ids * d * e + vectors * d * e) / (DENSE * DEVICE_Bps)
        hosts = min(topology.hosts, 2)
        size = shards.rows_N * shards.row_bytes_N
        spread = (2 * hosts - 1) / hosts * (2 if topology.hosts > 2 else 1)
        reduced = size * spread / (NETWORK_Bps * topology.devices)  # a network card for each device, on one host too
        return PASSES * forward + reduced + ELEMENTWISE * size / (DENSE * DEVICE_Bps)


def _narrow_row_penalty(dim_N: Floats) -> Floats:
    return np.where(dim_N >= 128, 1.0, np.where(dim_N >= 64, 1.15, 1.75))
