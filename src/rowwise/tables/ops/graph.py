"""`Graph`: weighted edges between nodes, and sums over the neighbours of each node by the lookup kernel.

A graph is a sparse matrix A [T, S] in CSR form, and `aggregate` is its product with the vectors of the sources: row t
is the sum of weight * vector over the edges into target t. To the kernel the edges into a target are a bag of weighted
ids, and the vectors are a table. Edges are added up in their order, so the bits do not depend on threads. The backward
is the same kernel over the transposed graph.

Large vectors are copied to huge pages first, as the rows of tables lie: a row that is read at random from a page of
4 kB misses the translation cache of the processor, which takes as long as the read itself.

`Graph.sampled` is the same graph, of which a product reads at most n edges into each target, as in ES-SpMM (Lin, Luo &
Ceze 2021, arXiv 2104.10716). The kernel chooses them while it reads, and no sampled graph is in memory. A backward
lists the chosen edges by source, once, as the backward of all edges lists all. The paper's choices are `first` and
`stride`, edge 577 k modulo the degree for k = 0, 1, ...; it repeats edges of a degree that 577 divides, so there each
round starts one edge further. `spread` is ours: evenly spaced edges. Weights of the edges kept grow, so that sums keep
their size; the paper's code has that for means only, and takes other weights as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor

import rowwise.tables.ops  # noqa: F401 - loads the operators
from rowwise.base.errors import BatchError, SpecError
from rowwise.tables.ops import reference
from rowwise.tables.ops.layout import TYPES, Choice, FeatureDescriptor, Mode
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.spec import RowType

SampledBy = Literal["first", "spread", "stride"]
# Least bytes, and least reads per row, of vectors that are copied: fewer bytes are mostly cached, and fewer reads
# do not pay for the copy.
COPIED_BYTES, COPIED_READS = 16 << 20, 8
MAX_SAMPLED = 1 << 22  # kernels of GPUs count in 32 bits


class EdgeSampling(NamedTuple):
    """Which edges of a graph a product reads."""

    most: int  # edges into a target
    choice: Choice
    rescaled: bool  # whether weights of cut targets grow


@final
@dataclass(frozen=True, eq=False)
class Graph:
    """Edges by target, with a weight each; `of_edges` makes one."""

    starts_T1: Tensor  # int64; the edges into target t are starts[t] to starts[t + 1]
    sources_E: Tensor  # int32, or int64 where ids need it
    weights_E: Tensor  # float32
    sources: int  # nodes that edges may come from
    gather: Callable[[Tensor], Tensor] | None = None  # in a part: its vectors -> those of all sources
    sampling: EdgeSampling | None = None  # None: all edges

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
    def edges_read(self) -> int:
        """The number of edges that a product reads."""
        return len(self.sources_E) if self.sampling is None else int(self.degrees_T.clamp(max=self.sampling.most).sum())

    @cached_property
    def transposed(self) -> "Graph":
        """The graph with the direction of all edges reversed; of a sampled one the edges that products read."""
        shape = self.sources, self.targets
        if self.sampling is None:
            return Graph.of_edges(self.sources_E, self.targets_E, shape, self.weights_E)
        chosen_M, scales_M, counts_T = reference.choose_edges(self.starts_T1, *self.sampling)
        targets_M = torch.arange(self.targets, device=counts_T.device).repeat_interleave(counts_T)
        return Graph.of_edges(self.sources_E[chosen_M], targets_M, shape, self.weights_E[chosen_M] * scales_M)

    def cuts(self, parts: int) -> list[int]:
        """Bounds that cut the targets into `parts` ranges of about equal edges plus targets."""
        before_T1 = self.starts_T1 + torch.arange(self.targets + 1, device=self.starts_T1.device)
        even_P1 = before_T1[-1] * torch.arange(parts + 1, device=before_T1.device) // parts
        return torch.searchsorted(before_T1, even_P1).tolist()

    def part(self, begin: int, end: int, gather: Callable[[Tensor], Tensor]) -> "Graph":
        """The edges into some of the targets; `aggregate` takes the vectors of these and gathers those of all nodes."""
        edges = slice(int(self.starts_T1[begin]), int(self.starts_T1[end]))
        starts_T1 = self.starts_T1[begin : end + 1] - self.starts_T1[begin]
        return replace(
            self, starts_T1=starts_T1, sources_E=self.sources_E[edges], weights_E=self.weights_E[edges], gather=gather
        )

    def sampled(self, max_edges: int, how: SampledBy = "spread", *, rescaled: bool = True) -> "Graph":
        """The same graph, with at most max_edges edges into each target in products; shares the memory of the edges.

        Args:
            max_edges: of a target. The kernel of CPUs lists the edges that it chose in 8 or 12 bytes each: up to
                2,000 are in a first-level cache beside the vectors.
            how: `first` reads the first edges of a target, `spread` evenly spaced ones, `stride` every 577th modulo
                the degree.
            rescaled: whether weights of cut targets grow by degree / max_edges.
        """
        if not 1 <= max_edges <= MAX_SAMPLED:
            raise SpecError(f"max_edges={max_edges}", f"1 to {MAX_SAMPLED:,} edges into a node")
        if how not in get_args(SampledBy):
            raise SpecError(f"how={how!r}", "'first', 'spread' or 'stride'")
        return replace(self, sampling=EdgeSampling(max_edges, Choice[how.upper()], rescaled))


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
        return _product(ctx.graph, vectors_SD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return _product(ctx.graph.transposed, grad_outputs[0]), None


def _product(graph: Graph, vectors_SD: Tensor) -> Tensor:
    """The lookup kernel over the vectors as a table of fp32 rows, or the kernel that samples edges."""
    rows, dim = vectors_SD.shape
    if not rows:  # a part without nodes
        return vectors_SD.new_zeros(graph.targets, dim)
    vectors_SD = vectors_SD.contiguous()
    if vectors_SD.nbytes >= COPIED_BYTES and graph.edges_read >= COPIED_READS * rows and vectors_SD.is_cpu:
        vectors_SD = empty_cached(vectors_SD.shape, vectors_SD).copy_(vectors_SD)  # large blocks are on huge pages
    edges = graph.sources_E, graph.starts_T1, graph.weights_E
    if graph.sampling is not None:
        return torch.ops.rowwise.sum_sampled(vectors_SD, *edges, *graph.sampling)
    feature = FeatureDescriptor(
        source=0, table=0, base=0, rows=rows, dim=dim, column=0, mode=Mode.WEIGHTED, type=TYPES.index(RowType.FP32),
        scale_group=0,
    )  # fmt: skip
    table, features_FC = vectors_SD.view(torch.uint8).flatten(), torch.tensor([feature])
    return torch.ops.rowwise.pool(table, features_FC, *edges, graph.targets, dim)
