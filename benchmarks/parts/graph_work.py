"""A power-law graph; and LightGCN on the ratings of MovieLens-100k."""

import time
from pathlib import Path
from typing import NamedTuple

import torch
from pyarrow import parquet as pq
from torch import Tensor
from torch.nn import functional as F

from rowwise import Adam, Embeddings, GraphTower, LightGCN, Normal, Table, user_item_graph
from rowwise.tables.ops.graph import Graph

DIM, LAYERS, BATCH, RATE = 64, 3, 2048, 0.005
DECAY = 1e-4  # of the rows of a batch
TESTED = 0.25  # of each user's ratings


def power_law(nodes: int, edges: int) -> Graph:
    """Edges whose ends are drawn with weight rank ** (-2 / 3); ranks have nothing to do with the order of nodes."""
    draw = torch.Generator().manual_seed(0)

    def ends() -> Tensor:
        ranks_E = (torch.rand(edges, generator=draw).pow_(3) * nodes).long().clamp_(max=nodes - 1)
        return torch.randperm(nodes, generator=draw)[ranks_E]

    return Graph.of_edges(ends(), ends(), (nodes, nodes), torch.rand(edges, generator=draw))


class Ratings(NamedTuple):
    """Pairs to train on, and which films each user has in the training and in the test pairs."""

    users_E: Tensor
    films_E: Tensor
    seen_UF: Tensor
    tested_UF: Tensor


def split_ratings(data: Path, seed: int) -> Ratings:
    parts = [pq.read_table(data / "movielens-100k" / f"{part}.parquet") for part in ("train", "valid", "test")]
    users_E, films_E = (
        torch.cat([torch.from_numpy(part[name].to_numpy().copy()).long() for part in parts])
        for name in ("user_id", "movie_id")
    )
    draw = torch.Generator().manual_seed(seed)
    shuffled_E = torch.randperm(len(users_E), generator=draw)
    order_E = shuffled_E[users_E[shuffled_E].argsort(stable=True)]
    counts_U = torch.bincount(users_E)
    firsts_U = counts_U.cumsum(0) - counts_U
    places_E = torch.arange(len(users_E)) - firsts_U[users_E[order_E]]
    trains_E = torch.empty(len(users_E), dtype=torch.bool)
    trains_E[order_E] = places_E >= TESTED * counts_U[users_E[order_E]]
    shape = int(users_E.max()) + 1, int(films_E.max()) + 1
    seen_UF, tested_UF = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    seen_UF[users_E[trains_E], films_E[trains_E]] = True
    tested_UF[users_E[~trains_E], films_E[~trains_E]] = True
    return Ratings(users_E[trains_E], films_E[trains_E], seen_UF, tested_UF & ~seen_UF)


def train(ratings: Ratings, seed: int, epochs: int) -> tuple[GraphTower, float]:
    """A model, and the seconds of its training: BPR with one film a pair that the user has not seen, drawn evenly."""
    torch.manual_seed(seed)
    users, films = ratings.seen_UF.shape
    tables = [
        Table(name=name, rows=rows, dim=DIM, optimizer=Adam(lr=RATE), init=Normal(std=0.1))
        for name, rows in (("user", users), ("film", films))
    ]
    graph = user_item_graph(ratings.users_E, ratings.films_E, users, films)
    model, begin_s = GraphTower(Embeddings(tables, seed=seed), graph, LightGCN(LAYERS)), time.perf_counter()
    for _ in range(epochs):
        for batch_B in torch.randperm(len(ratings.users_E)).split(BATCH):
            users_B, films_B = ratings.users_E[batch_B], ratings.films_E[batch_B]
            others_B = draw_unseen(ratings, users_B)
            users_UD, films_FD = model.node_vectors()
            vectors = users_UD[users_B], films_FD[films_B], films_FD[others_B]
            loss = -F.logsigmoid((vectors[0] * (vectors[1] - vectors[2])).sum(1)).mean()
            loss = loss + DECAY * sum(x_BD.square().sum(1).mean() for x_BD in vectors) / 2
            loss.backward()
            model.embeddings.update()
    return model, time.perf_counter() - begin_s


def draw_unseen(ratings: Ratings, users_B: Tensor) -> Tensor:
    """A film for each user, drawn evenly from those that the user has not seen."""
    films = ratings.seen_UF.shape[1]
    drawn_B = torch.randint(films, (len(users_B),))
    while bool((again_B := ratings.seen_UF[users_B, drawn_B]).any()):
        drawn_B[again_B] = torch.randint(films, (int(again_B.sum()),))
    return drawn_B


@torch.no_grad()
def evaluate(model: GraphTower, ratings: Ratings) -> dict[str, float]:
    """Means over the users who have films to test on; films of their training pairs are not ranked."""
    model.eval()
    users_UD, films_FD = model.node_vectors()
    scores_UF = model.scores(users_UD, films_FD).masked_fill(ratings.seen_UF, -torch.inf)
    tested_UF = ratings.tested_UF[ratings.tested_UF.any(1)]
    top_UK = scores_UF[ratings.tested_UF.any(1)].topk(20).indices
    hits_UK, wanted_U = tested_UF.gather(1, top_UK).double(), tested_UF.sum(1)
    discount_K = 1 / torch.log2(torch.arange(10) + 2.0)
    ideal_U = discount_K.cumsum(0)[wanted_U.clamp(max=10) - 1]
    return {
        "ndcg@10": float((hits_UK[:, :10] @ discount_K.double() / ideal_U).mean()),
        "precision@10": float(hits_UK[:, :10].mean()),
        "recall@10": float((hits_UK[:, :10].sum(1) / wanted_U).mean()),
        "recall@20": float((hits_UK.sum(1) / wanted_U).mean()),
    }
