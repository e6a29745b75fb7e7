"""Vectors on wires of fewer bits: how many bytes they are there, and which share of a rank's crosses which link.

A file of its own because both ways of predicting exchanges, rates and networks, count the same bytes. Known limits:
vectors that share an int8 scale, or have more than one.
"""

import numpy as np

from rowwise.perf.access import Floats
from rowwise.spec import Link, RowType, Topology, VectorExchange, WireType, row_bytes


def bytes_of(kind: WireType, dim: int) -> int:
    match kind:
        case WireType.FP32:
            return 4 * dim
        case WireType.FP16 | WireType.BF16:
            return 2 * dim
        case WireType.INT8:
            return row_bytes(RowType.INT8, dim)


def vector_bytes(kind: WireType, dim_N: Floats) -> Floats:
    """Of vectors on a wire; int8 has a scale and an offset for each, so it is more than fp32 below 3 columns."""
    dims, index_N = np.unique(dim_N, return_inverse=True)
    return np.array([bytes_of(kind, int(dim)) for dim in dims], dtype=float)[index_N]


def link_shares(exchange: VectorExchange, topology: Topology) -> dict[Link, float]:
    """The share of a rank's vectors that crosses links of each class; copies send no vectors."""
    world, devices = topology.world, topology.devices
    match exchange:
        case "all_to_all" | "reduce_scatter":
            return {"host": (devices - 1) / world, "network": (world - devices) / world}
        case "two_level":
            return {"host": (devices - 1) / devices, "network": (world - devices) / world / devices}
        case "all_reduce":
            return {"host": 0.0, "network": 0.0}
