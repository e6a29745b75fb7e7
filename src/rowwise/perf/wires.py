"""Bytes of vectors on wires, and the share of a rank's vectors that crosses each class of links.

Both ways of predicting exchanges, rates and networks, use these counts. Not supported: int8 scales that are shared by
vectors, or several per vector.
"""

import numpy as np

from rowwise.perf.access import Floats
from rowwise.spec import Link, RowType, Topology, VectorExchange, WireType, row_bytes


def wire_bytes(kind: WireType, dim: int) -> int:
    match kind:
        case WireType.FP32:
            return 4 * dim
        case WireType.FP16 | WireType.BF16:
            return 2 * dim
        case WireType.INT8:
            return row_bytes(RowType.INT8, dim)


def vector_bytes(kind: WireType, dim_N: Floats) -> Floats:
    """Bytes of vectors on a wire; int8 adds a scale and an offset to each, so below 3 columns it is more than fp32."""
    dims, index_N = np.unique(dim_N, return_inverse=True)
    return np.array([wire_bytes(kind, int(dim)) for dim in dims], dtype=float)[index_N]


def link_shares(exchange: VectorExchange, topology: Topology) -> dict[Link, float]:
    """The share of a rank's vectors that crosses links of each class; replicated tables send no vectors."""
    world, devices = topology.world, topology.devices
    match exchange:
        case "all_to_all" | "all_to_all_sum":
            return {"host": (devices - 1) / world, "network": (world - devices) / world}
        case "hierarchical":
            return {"host": (devices - 1) / devices, "network": (world - devices) / world / devices}
        case "replicated":
            return {"host": 0.0, "network": 0.0}
