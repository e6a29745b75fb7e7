"""Graph towers: the vectors of users and items are mixed with those of their neighbours in the graph of both.

The graph has a node for each user, then one for each item, and an edge both ways for each pair that was seen. e_0 are
the rows of the tables, one for each node.

LightGCN (He et al. 2020, arXiv 2002.02126), without weights or activations, d the degree of a node:

    e_{k+1}(v) = sum of e_k(u) / sqrt(d_u d_v) over the neighbours u of v;    z = mean of e_0 .. e_K

GraphSAGE with means (Hamilton et al. 2017, arXiv 1706.02216):

    e_{k+1}(v) = relu(W e_k(v) + V mean of e_k(u) + b), the last without relu;    z = e_K / |e_K|

A model may be trained on the graph and evaluated on a sampled one (`Graph.sampled`), where fewer edges are read.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import BatchError, SpecError
from rowwise.models.histories import single_ids
from rowwise.models.inputs import Ids, check_dims, unpack
from rowwise.models.mlp import Linear, stack
from rowwise.models.two_tower import VectorModel
from rowwise.tables.batch import Batch, Jagged
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.ops.graph import Graph, aggregate
from rowwise.tables.spec import Pooling


class Pairs(NamedTuple):
    """Observed pairs of users and items; repeated pairs count once."""

    users_E: Tensor
    items_E: Tensor

    @classmethod
    def none(cls) -> "Pairs":
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))

    @classmethod
    def of_batches(cls, batches: Iterable[Batch], user: str, item: str) -> "Pairs":
        """The pairs of samples with label 1."""
        parts = [cls.none()]
        for batch in batches:
            positive_B = batch.labels_BK[:, 0] == 1
            ids = (single_ids(Jagged.from_keyed(batch.sparse), feature)[positive_B].long() for feature in (user, item))
            parts.append(cls(*ids))
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def user_item_graph(
    users_E: Tensor, items_E: Tensor, users: int, items: int, weights: Literal["symmetric", "mean"] = "symmetric"
) -> Graph:
    """The graph of pairs of a user and an item, users first; a repeated pair is one edge each way.

    Args:
        users_E: of each pair, from 0.
        items_E: of each pair, from 0.
        users: number of users; those without a pair have no edge.
        items: number of items.
        weights: 1 / sqrt(d_u d_v), as in LightGCN, or 1 / d_v for means, as in GraphSAGE.
    """
    if weights not in ("symmetric", "mean"):
        raise SpecError(f"weights={weights!r}", "'symmetric' or 'mean'")
    pairs = Graph.of_edges(users_E, items_E, (users, items))  # checks the ids
    distinct_E = (pairs.targets_E * items + pairs.sources_E).unique()
    users_E, items_E = distinct_E // items, distinct_E % items + users
    nodes, ends = users + items, (torch.cat((users_E, items_E)), torch.cat((items_E, users_E)))
    degrees_N = torch.bincount(ends[0], minlength=nodes).float()
    target_degrees_E, source_degrees_E = degrees_N[ends[0]], degrees_N[ends[1]]
    weights_E = 1 / target_degrees_E if weights == "mean" else (target_degrees_E * source_degrees_E).rsqrt()
    return Graph.of_edges(*ends, (nodes, nodes), weights_E)


class LightGCN(nn.Module):
    """The mean of a node's vector and of its sums over neighbours after each layer; has no weights.

    Args:
        layers: number of sums over neighbours.
    """

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        if layers < 1:
            raise SpecError(f"layers={layers}", "at least 1")
        self.layers = layers

    def forward(self, vectors_ND: Tensor, graph: Graph) -> Tensor:
        """[N, D] to [N, D]."""
        total_ND = vectors_ND
        for _ in range(self.layers):
            vectors_ND = aggregate(graph, vectors_ND)
            total_ND = total_ND + vectors_ND
        return total_ND / (self.layers + 1)


class GraphSage(nn.Module):
    """Layers over a node's vector and the mean of its neighbours'; outputs have length 1.

    Args:
        dim: of the input vectors.
        sizes: output dims of the layers.
    """

    def __init__(self, dim: int, sizes: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        if not sizes or min(sizes) < 1:
            raise SpecError(f"sizes={tuple(sizes)}", "at least one layer, each of 1 column or more")
        self.layers = stack(Linear(2 * before, after) for before, after in zip((dim, *sizes), sizes, strict=False))

    def forward(self, vectors_ND: Tensor, graph: Graph) -> Tensor:
        """[N, dim] to [N, sizes[-1]]."""
        for index, layer in enumerate(self.layers):
            vectors_ND = layer(torch.cat((vectors_ND, aggregate(graph, vectors_ND)), 1))
            if index < len(self.layers) - 1:
                vectors_ND = vectors_ND.relu()
        return F.normalize(vectors_ND)


class GraphTower(VectorModel):
    """Users and items by an encoder over their graph: logit = u . v / temperature.

    Each forward reads all rows of both tables, and each update changes all rows that have an edge to the batch within
    the encoder's layers. Several ranks can `share` this work.

    Args:
        embeddings: two tables of one dim that pool, with a feature each: of the users, then of the items.
        graph: of users and items, as `user_item_graph` makes it.
        encoder: maps vectors [N, D] and a graph to vectors of the nodes, as `LightGCN` and `GraphSage` do. It mixes
            nodes by `aggregate` only.
        sampled: the graph of evaluation, by default `graph`.
        temperature: divides dots.
    """

    def __init__(
        self,
        embeddings: AnyTables,
        graph: Graph,
        encoder: nn.Module,
        *,
        sampled: Graph | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        tables = embeddings.tables
        if len(tables) != 2 or any(len(t.feature_names) != 1 or t.pooling is Pooling.SEQUENCE for t in tables):
            listing = ", ".join(f"{t.name} of {', '.join(t.feature_names)}" for t in tables)
            raise SpecError(
                f"graph tower: tables {listing}", "a pooled table of users and one of items, each with one feature"
            )
        check_dims(tables, tables[0].dim, "as that of the users")
        nodes = sum(table.rows for table in tables)
        for name, nodes_graph in (("graph", graph), ("sampled", sampled or graph)):
            if (nodes_graph.targets, nodes_graph.sources) != (nodes, nodes):
                raise SpecError(
                    f"graph tower: {name} of {nodes_graph.targets} x {nodes_graph.sources} nodes",
                    f"{nodes}, one for each row of both tables",
                )
        if not temperature > 0:
            raise SpecError(f"temperature={temperature}", "more than 0")
        self.embeddings, self.encoder, self.temperature = embeddings, encoder, temperature
        self.graph, self.sampled = graph, sampled or graph
        self._parts: tuple[Graph, Graph] | None = None  # this rank's parts of `graph` and `sampled`, once shared
        self._nodes = 0, nodes  # range of nodes whose rows this rank reads
        self.user, self.item = (table.feature_names[0] for table in tables)

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Logits [B, 1]: of each user with the item of the same sample."""
        users_BD, items_BD = self.vectors(batch, sparse)
        return (users_BD * items_BD).sum(1, keepdim=True) / self.temperature

    def vectors(self, batch: Batch | Tensor, sparse: Ids | None = None) -> tuple[Tensor, Tensor]:
        """The vectors [B, D] of the users and of the items of a batch, which has one of each in a sample."""
        _, ids = unpack(batch, sparse, 0)
        jagged = Jagged.from_keyed(ids)
        users_UD, items_ID = self.node_vectors()
        users_BD, items_BD = (
            vectors_RD[_nodes_of(jagged, feature, len(vectors_RD))]
            for feature, vectors_RD in ((self.user, users_UD), (self.item, items_ID))
        )
        return users_BD, items_BD

    def share(self, rank: int, ranks: int, gather_rows: Callable[[Tensor, Sequence[int]], Tensor]) -> None:
        """Compute a part of the nodes on each rank; call it on all ranks. `node_vectors` is then collective.

        Args:
            rank: of this process, from 0.
            ranks: number of ranks.
            gather_rows: a differentiable all-gather of rows: (rows of this rank, row counts of all) to the rows of all.
        """
        ends = self.graph.cuts(ranks)
        counts = [end - begin for begin, end in pairwise(ends)]
        self._nodes = begin, end = ends[rank], ends[rank + 1]

        def gather(rows_PD: Tensor) -> Tensor:
            return gather_rows(rows_PD, counts)

        self._parts = self.graph.part(begin, end, gather), self.sampled.part(begin, end, gather)

    def node_vectors(self) -> tuple[Tensor, Tensor]:
        """The vectors of all users and of all items."""
        users, items = (table.rows for table in self.embeddings.tables)
        nodes_P = torch.arange(*self._nodes)
        # One batch reads the rows of these nodes: sample n has the n-th user and the n-th item, while there are any.
        users_U, items_I = nodes_P[nodes_P < users], nodes_P[nodes_P >= users] - users
        counts = len(users_U), len(items_I)
        lengths_FB = (torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)).long().flatten()
        batch = Jagged(features=(self.user, self.item), values_N=torch.cat((users_U, items_I)), lengths_FB=lengths_FB)
        vectors = self.embeddings(batch)
        rows_PD = torch.cat([vectors[name][:n] for name, n in zip((self.user, self.item), counts, strict=True)])
        graph = (self._parts or (self.graph, self.sampled))[0 if self.training else 1]
        encoded_ND = self.encoder(rows_PD, graph)
        if graph.gather is not None:
            encoded_ND = graph.gather(encoded_ND)
        users_UD, items_ID = encoded_ND.split((users, items))
        return users_UD, items_ID

    def scores(self, users_UD: Tensor, items_ID: Tensor) -> Tensor:
        """Logits [U, I] of every user with every item."""
        return users_UD @ items_ID.t() / self.temperature


def _nodes_of(jagged: Jagged, feature: str, nodes: int) -> Tensor:
    """The ids [B] of a feature; raises unless each sample has one, which is a node."""
    ids_B = single_ids(jagged, feature)
    wrong_B = (ids_B < 0) | (ids_B >= nodes)
    if bool(wrong_B.any()):
        at = int(wrong_B.nonzero()[0])
        raise BatchError(f"feature {feature!r} has id {int(ids_B[at])} in sample {at}", f"0 to {nodes - 1}")
    return ids_B.long()
