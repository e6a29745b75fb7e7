"""A device as three resources that overlap: its memory, its cache, and the instructions it can issue.

For n lookups of u distinct rows, with m the share of repeated lookups that misses the cache (the hottest rows are in
it), b vectors of d columns and rows of r bytes, rounded up to 32, seconds are

             forward                                             backward
    memory   (8n + 8b + r (u + (n - u) m) + 4bd) / device_Bps    (48n + 4bd + 2u (r + s)) / device_Bps
    cache    (8n + 8b + r n + 4bd) / cache_Bps                   (r n + 2u r) / cache_Bps
    issue    (n ceil(d / 128) + b) forward_issue_s               (n ceil(d / 128) + u) backward_issue_s

with s the bytes of optimizer state. Rows below device memory add a fourth resource: the rows of a step that the cache
misses (tables/store/hit_rate.py) are fetched, and as many written back. A host's disks are shared by its devices.
Each direction costs its launch and the 6-norm of its loads, a soft maximum. See [Note: Cost] for how ranks add up.
It needs a data sheet only. Ignored: contention between operators.
"""

from dataclasses import dataclass, replace

import numpy as np

from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.cost import AccessCounts, CostStage, Phi, Shards
from rowwise.planning.perf.hardware import Hardware
from rowwise.planning.perf.wires import link_shares, vector_bytes
from rowwise.tables.spec import FLOATS, Link, Topology, VectorExchange, Wire
from rowwise.tables.store.sizes import BLOCK_bytes, HEADER_bytes, stored_bytes

SECTOR_bytes = 32
LANES = 128  # columns that one instruction of a warp moves
FLOAT_bytes = 4
COLLECTIVES = 3  # of a step: ids, vectors, gradients


@dataclass(frozen=True, slots=True)
class Roofline:
    """The roofline of one kind of device, by published or fitted rates."""

    hardware: Hardware
    topology: Topology
    wire: Wire = FLOATS

    @property
    def name(self) -> str:
        return f"roofline of {self.hardware.name}"

    @property
    def phi(self) -> Phi:
        """Two launches and two soft maxima; with several ranks, also the latency of the collectives."""
        slowest = self.hardware.slowest_link(self.topology)
        latency_s = COLLECTIVES * slowest.latency_s if self.topology.world > 1 else 0.0
        return Phi(constant=2 * self.hardware.launch_s + latency_s, ends=(4, 8), powers=(6.0, 6.0))

    @property
    def stages(self) -> tuple[CostStage, ...]:
        return CostStage("lookup", (0, 1, 2, 3), self.hardware.launch_s), CostStage(
            "update", (4, 5, 6, 7), self.hardware.launch_s
        )

    @property
    def lower_tiers(self) -> tuple[int, int]:
        return 3, 7

    def on(self, topology: Topology) -> "Roofline":
        return replace(self, topology=topology)

    def loads(self, shards: Shards, curves: Curves) -> Floats:
        """Seconds of memory, cache, issue and lower tiers, for forward and then backward."""
        table_N, hw = shards.table_N, self.hardware
        (n, u, written, b), d = AccessCounts.of(shards, curves), shards.dim_N
        row, state = _round_up_to_sectors(shards.row_bytes_N), _round_up_to_sectors(shards.state_bytes_N)
        in_cache = hw.cache_bytes / row * shards.row_parts
        m = 1 - curves.head(table_N, in_cache)
        wide, vectors = np.ceil(d / LANES), FLOAT_bytes * b * d
        fetched, stored = self.lower_tier_s(shards, curves)
        return np.stack(
            [
                (8 * n + 8 * b + row * (u + (n - u) * m) + vectors) / hw.device_Bps,
                (8 * n + 8 * b + row * n + vectors) / hw.cache_Bps,
                hw.forward_issue_s * (n * wide + b),
                fetched,
                (48 * n + vectors + 2 * written * (row + state)) / hw.device_Bps,
                (row * n + 2 * written * row) / hw.cache_Bps,
                hw.backward_issue_s * (n * wide + written),
                stored,
            ],
            axis=1,
        )

    def lower_tier_s(self, shards: Shards, curves: Curves) -> tuple[Floats, Floats]:
        """Seconds to fetch rows of lower tiers, and to write them back."""
        if shards.tier == "device":
            return np.zeros(len(shards.table_N)), np.zeros(len(shards.table_N))
        n, u, _, _ = AccessCounts.of(shards, curves)
        hw, row = self.hardware, _round_up_to_sectors(shards.row_bytes_N + shards.state_bytes_N)
        hit = curves.hit_rate(shards.table_N, shards.cached * shards.rows_N * shards.row_parts)
        missed = np.minimum(n * (1 - hit), u)
        if shards.tier == "host":
            return missed * row / hw.host_Bps, missed * row / hw.host_Bps
        record = shards.row_bytes_N + shards.state_bytes_N + HEADER_bytes
        devices, cached_s = self.topology.devices, (u - missed) * row / hw.host_Bps * (shards.cache_tier == "host")
        read_s = missed * np.ceil(record / BLOCK_bytes) * devices / hw.disk_reads_s
        return read_s + cached_s, missed * stored_bytes(record) * devices / hw.disk_write_Bps + cached_s

    def links_s(self, shards: Shards, curves: Curves) -> Floats:
        """Seconds for vectors out and gradients back, coded for the wire, and ids in; for a replica, its gradient."""
        if self.topology.world == 1:
            return np.zeros(len(shards.table_N))
        samples = curves.batch * shards.share
        ids = curves.pooling_T[shards.table_N] * samples / shards.row_parts * self.hardware.id_bytes
        vectors = 2 * FLOAT_bytes * shards.bags_N * samples * shards.dim_N
        if shards.exchange == "replicated":
            return self._replicated_s(shards, curves)
        seconds_N = ids * self._byte_of_rank_s("all_to_all") + vectors * self._byte_of_rank_s(shards.exchange)
        return seconds_N + self._coding_added_s(shards, shards.bags_N * samples)

    def _coding_added_s(self, shards: Shards, vectors_N: Floats) -> Floats:
        """Seconds that narrower wires add to vectors of floats: coding, minus the bytes saved.

        Both ends code. Coding at the samples is equal on all ranks, so it is charged to the rank of the rows.
        """
        added_N = np.zeros(len(vectors_N))
        for link, share in link_shares(shards.exchange, self.topology).items():
            codecs, byte_s = self.wire.codecs(link), self._byte_s(link, shards.exchange)
            for kind in (codecs.forward, codecs.backward):
                saved = FLOAT_bytes * shards.dim_N - vector_bytes(kind, shards.dim_N)
                added_N += vectors_N * share * (shards.dim_N * self.hardware.coding_s(kind) - saved * byte_s)
        return added_N

    def _byte_s(self, link: Link, exchange: VectorExchange) -> float:
        summed = exchange == "all_to_all_sum" or (exchange == "hierarchical" and link == "host")
        return self.hardware.link(link).seconds_a_byte("reduce_scatter" if summed else "all_to_all")

    def _byte_of_rank_s(self, exchange: VectorExchange) -> float:
        """Seconds of a byte of a rank's vectors, weighted by the share that crosses each class of links."""
        shares = link_shares(exchange, self.topology)
        return sum(share * self._byte_s(link, exchange) for link, share in shares.items())

    def _replicated_s(self, shards: Shards, curves: Curves) -> Floats:
        """Seconds to all-reduce a table's gradient in a ring, or only the rows that ranks touched if that is less."""
        world, link = self.topology.world, self.hardware.slowest_link(self.topology)
        dense = 2 * (world - 1) / world * shards.rows_N * shards.dim_N * FLOAT_bytes
        touched = np.minimum(curves.unique_of(1 / world)[shards.table_N], shards.rows_N)
        rows = (world - 1) * touched * (shards.dim_N * FLOAT_bytes + 8)
        return np.minimum(dense, rows) / link.all_reduce_Bps


def _round_up_to_sectors(size_N: Floats) -> Floats:
    return np.ceil(size_N / SECTOR_bytes) * SECTOR_bytes
