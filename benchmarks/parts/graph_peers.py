"""Sums over neighbours by PyTorch Geometric: its product of sparse matrices, and its messages along edges."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from rowwise.planning.perf.host_memory import free_bytes
from rowwise.tables.ops.graph import Graph

SPMM, EDGES = "PyG spmm", "PyG edges"


def pyg_ways(graph: Graph, sparse: Tensor, vectors_SD: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each way of PyTorch Geometric; a line says what is left out. `sparse` is the graph in torch's CSR form."""
    if find_spec("torch_geometric") is None:
        print("left out: torch-geometric is not installed (`make bench` installs it)", flush=True)
        return {}
    from torch_geometric.nn import SimpleConv
    from torch_geometric.utils import spmm

    ways: dict[str, Callable[[], Tensor]] = {SPMM: lambda: spmm(sparse, vectors_SD)}
    messages_bytes = len(graph.sources_E) * vectors_SD.shape[1] * vectors_SD.element_size()
    needed, free = 2.5 * messages_bytes, free_bytes()  # of the rows of sources, and of these times the weights
    if free is not None and needed > free:
        print(f"left out: {EDGES}, whose messages need {needed / 1e9:.0f} GB, of {free / 1e9:.0f} GB", flush=True)
        return ways
    edges_2E, layer = torch.stack((graph.sources_E.long(), graph.targets_E)), SimpleConv(aggr="sum")

    def along_edges() -> Tensor:
        return layer(vectors_SD, edges_2E, graph.weights_E)

    return ways | {EDGES: along_edges}
