"""Bytes of vectors and of sums on wires, and the share of a rank's vectors that crosses each class of links.

Both ways of predicting exchanges, rates and networks, use these counts. Not supported: int8 scales that are shared by
vectors, or several per vector.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.hardware import FLOAT_bytes
from rowwise.tables.spec import LINKS, RUN, FarType, Link, Topology, VectorExchange, WireType


def vector_bytes(kind: WireType, dim_N: Floats) -> Floats:
    """Bytes of vectors on a wire; int8 adds a scale and an offset to each, so below 3 columns it is more than fp32."""
    dims, index_N = np.unique(dim_N, return_inverse=True)
    return np.array([kind.vector_bytes(int(dim)) for dim in dims], dtype=float)[index_N]


def two_level_bytes(topology: Topology, numbers: int, far: FarType) -> list[Counter[Link]]:
    """Bytes that each rank sends by link for a sum in two levels: see `train/two_level.py`."""
    sent_W: list[Counter[Link]] = [Counter() for _ in range(topology.world)]

    def send(rank: int, to: Iterable[int], size_bytes: int) -> None:
        for peer in to:
            if peer != rank:
                sent_W[rank][topology.link(rank, peer)] += size_bytes

    groups = topology.near_ranks
    holders = min(map(len, groups))
    runs = -(-numbers // (holders * RUN))
    share_bytes = FLOAT_bytes * runs * RUN
    for ranks in groups:
        for k, rank in enumerate(ranks):
            send(rank, ranks[:holders], share_bytes)  # reduce-scatter to the holders of shares
            send(rank, ranks if k < holders else (), share_bytes)  # all-gather of the sums
    bounds = [runs * g // len(groups) for g in range(len(groups) + 1)]
    parts = [end - begin for begin, end in pairwise(bounds)]
    for k in range(holders):
        for g, ranks in enumerate(groups):
            for h, peers in enumerate(groups):
                send(ranks[k], (peers[k],), (parts[g] + parts[h]) * far.run_bytes)
    return sent_W


def link_shares(exchange: VectorExchange, topology: Topology) -> dict[Link, float]:
    """The share of a rank's vectors that crosses links of each class, as the mean over ranks.

    Replicated tables send no vectors.
    """
    world, devices = topology.world, topology.devices
    groups = topology.groups or (topology.hosts,)
    near = devices * sum(hosts * hosts for hosts in groups) / topology.hosts  # ranks of a rank's group
    match exchange:
        case "all_to_all" | "all_to_all_sum":
            shares = (devices - 1) / world, (near - devices) / world, (world - near) / world
        case "hierarchical":
            shares = (devices - 1) / devices, (near - devices) / world / devices, (world - near) / world / devices
        case "replicated":
            shares = 0.0, 0.0, 0.0
    return dict(zip(LINKS, shares, strict=True))
