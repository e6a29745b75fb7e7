"""`Graph`: weighted edges between nodes, and sums over the neighbours of each node by the lookup kernel.

A graph is a sparse matrix A [T, S] in CSR form, and `aggregate` is its product with the vectors of the sources: row t
is the sum of weight * vector over the edges into target t. To the kernel the edges into a target are a bag of weighted
ids, and the vectors are a table. Edges are added up in their order, so the bits do not depend on threads. The backward
is the same kernel over the transposed graph.

Large vectors are copied to huge pages first, as the rows of tables lie: a row that is read at random from a page of
4 kB misses the translation cache of the processor, which takes as long as the read itself.

`Graph.sampled` keeps at most n edges into each target, as ES-SpMM does (Lin, Luo & Ceze 2021, arXiv 2104.10716),
with three differences. The edges are chosen once, not in each product. Weights of the edges kept grow, so that sums
keep their size; the paper's code has that for means only. The paper's second way of choosing takes edge 577 k modulo
the degree for k = 0, 1, ..., which repeats edges of a degree that 577 divides, and takes the first edges of degree 576;
`spread` takes evenly spaced edges.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, final

import torch
from torch import Tensor

import rowwise.tables.ops  # noqa: F401 - loads the operators
from rowwise.base.errors import BatchError, SpecError
from rowwise.tables.ops.layout import TYPES, FeatureDescriptor, Mode
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.spec import RowType

Sampling = Literal["first", "spread"]
# Least bytes, and least reads per row, of vectors that are copied: fewer bytes are mostly cached, and fewer reads
# do not pay for the copy.
COPIED_BYTES, COPIED_READS = 16 << 20, 8


@final
@dataclass(frozen=True, eq=False)
class Graph:
    """Edges by target, with a weight each; `of_edges` makes one."""

    starts_T1: Tensor  # int64; the edges into target t are starts[t] to starts[t + 1]
    sources_E: Tensor  # int32, or int64 where ids need it
    weights_E: Tensor  # float32
    sources: int  # nodes that edges may come from
    gather: Callable[[Tensor], Tensor] | None = None  # in a part: its vectors -> those of all sources

    @classmethod
    def of_edges(
        cls, targets_E: Tensor, sources_E: Tensor, shape: tuple[int, int], weights_E: Tensor | None = None
    ) -> "Graph":
        """A graph of edges in any order; edges into one target keep their order, and a repeated edge counts twice.

        Args:
            targets_E: the node that each edge leads into.
            sources_E: the node that each edge comes from.
            shape: the numbers of targets and of sources.
            weights_E: weight of each edge; None: all 1.
        """
        for name, nodes_E, count in (("target", targets_E, shape[0]), ("source", sources_E, shape[1])):
            if nodes_E.dim() != 1 or nodes_E.dtype not in (torch.int32, torch.int64):
                raise BatchError(
                    f"{name}s of edges: got {tuple(nodes_E.shape)} of {nodes_E.dtype}", "whole numbers [E]"
                )
            wrong = ((nodes_E < 0) | (nodes_E >= count)).nonzero()
            if len(wrong):
                at = int(wrong[0])
                raise BatchError(f"edge {at}: {name} {int(nodes_E[at])}", f"0 to {count - 1}")
        weights_E = torch.ones(len(targets_E), device=targets_E.device) if weights_E is None else weights_E.float()
        if not len(targets_E) == len(sources_E) == len(weights_E):
            raise BatchError(
                f"edges: got {len(targets_E)} targets, {len(sources_E)} sources and {len(weights_E)} weights",
                "one of each for every edge",
            )
        ordered_E, order_E = targets_E.long().sort(stable=True)
        starts_T1 = torch.searchsorted(ordered_E, torch.arange(shape[0] + 1, device=ordered_E.device))
        ids = torch.int32 if shape[1] <= torch.iinfo(torch.int32).max else torch.int64
        return cls(starts_T1, sources_E.to(ids)[order_E], weights_E[order_E], shape[1])

    @property
    def targets(self) -> int:
        return len(self.starts_T1) - 1

    @property
    def degrees_T(self) -> Tensor:
        """Edges into each target."""
        return self.starts_T1.diff()

    @cached_property
    def targets_E(self) -> Tensor:
        """The target of each edge."""
        targets_T = torch.arange(self.targets, device=self.sources_E.device)
        return targets_T.repeat_interleave(self.degrees_T, output_size=len(self.sources_E))

    @cached_property
    def transposed(self) -> "Graph":
        """The graph with the direction of all edges reversed."""
        return Graph.of_edges(self.sources_E, self.targets_E, (self.sources, self.targets), self.weights_E)

    def cuts(self, parts: int) -> list[int]:
        """Bounds that cut the targets into `parts` ranges of about equal edges plus targets."""
        before_T1 = self.starts_T1 + torch.arange(self.targets + 1, device=self.starts_T1.device)
        even_P1 = before_T1[-1] * torch.arange(parts + 1, device=before_T1.device) // parts
        return torch.searchsorted(before_T1, even_P1).tolist()

    def part(self, begin: int, end: int, gather: Callable[[Tensor], Tensor]) -> "Graph":
        """The edges into some of the targets; `aggregate` takes the vectors of these and gathers those of all nodes."""
        edges = slice(int(self.starts_T1[begin]), int(self.starts_T1[end]))
        starts_T1 = self.starts_T1[begin : end + 1] - self.starts_T1[begin]
        return Graph(starts_T1, self.sources_E[edges], self.weights_E[edges], self.sources, gather)

    def sampled(self, most: int, how: Sampling = "spread") -> "Graph":
        """The graph with min(degree, most) edges into each target; weights of cut targets grow by degree / most.

        `first` keeps the first edges of a target, `spread` every degree / most-th. Both keep the order of edges.
        """
        if most < 1:
            raise SpecError(f"most={most}", "at least one edge into a node")
        if how not in ("first", "spread"):
            raise SpecError(f"how={how!r}", "'first' or 'spread'")
        degrees_T = self.degrees_T
        large_R = (degrees_T > most).nonzero().squeeze(1)
        degrees_R = degrees_T[large_R]
        kept_M = torch.arange(most, device=large_R.device)
        span_R = degrees_R if how == "spread" else torch.full_like(degrees_R, most)
        places_RM = kept_M * span_R.unsqueeze(1) // most
        kept_E = (degrees_T <= most)[self.targets_E]
        kept_E[(self.starts_T1[large_R].unsqueeze(1) + places_RM).flatten()] = True
        weights_E = self.weights_E * (degrees_T / most).clamp(min=1)[self.targets_E]
        starts_T1 = torch.zeros_like(self.starts_T1)
        torch.cumsum(degrees_T.clamp(max=most), 0, out=starts_T1[1:])
        return Graph(starts_T1, self.sources_E[kept_E], weights_E[kept_E], self.sources)


def aggregate(graph: Graph, vectors_SD: Tensor) -> Tensor:
    """Sums [T, D] of the vectors of each target's neighbours, times the weights of the edges; 0 without edges.

    With a part of a graph the vectors are those of its targets, and this is a collective of all parts.
    """
    if graph.gather is not None:
        vectors_SD = graph.gather(vectors_SD)
    if vectors_SD.dim() != 2 or len(vectors_SD) != graph.sources or not vectors_SD.shape[1]:
        raise BatchError(
            f"aggregate got vectors {tuple(vectors_SD.shape)}", f"[{graph.sources}, D], one for each source"
        )
    if not vectors_SD.is_floating_point():
        raise BatchError(f"aggregate got vectors of {vectors_SD.dtype}", "floating point")
    return _Aggregate.apply(vectors_SD.float(), graph)


class _Aggregate(torch.autograd.Function):
    """The product with the graph; its backward is the product with the transposed one."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, vectors_SD, ctx.graph = args
        return _pool(ctx.graph, vectors_SD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return _pool(ctx.graph.transposed, grad_outputs[0]), None


def _pool(graph: Graph, vectors_SD: Tensor) -> Tensor:
    """The lookup kernel over the vectors as a table of fp32 rows."""
    rows, dim = vectors_SD.shape
    if not rows:  # a part without nodes
        return vectors_SD.new_zeros(graph.targets, dim)
    feature = FeatureDescriptor(
        source=0, table=0, base=0, rows=rows, dim=dim, column=0, mode=Mode.WEIGHTED, type=TYPES.index(RowType.FP32),
        scale_group=0,
    )  # fmt: skip
    is_large = vectors_SD.nbytes >= COPIED_BYTES and len(graph.sources_E) >= COPIED_READS * rows
    if is_large and vectors_SD.device.type == "cpu":
        vectors_SD = empty_cached(vectors_SD.shape, vectors_SD).copy_(vectors_SD)  # large blocks are on huge pages
    table, features_FC = vectors_SD.contiguous().view(torch.uint8).flatten(), torch.tensor([feature])
    return torch.ops.rowwise.pool(
        table, features_FC, graph.sources_E, graph.starts_T1, graph.weights_E, graph.targets, dim
    )
