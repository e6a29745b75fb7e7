"""Evaluates two towers by ranking all items for each user: recall@k, NDCG@k and MRR of the item that the user chose.

The candidates are all items of the training rows and of the evaluation rows, each with the features of its first row.
Each evaluation row with label 1 is a query; its own item is the answer. Memory: one vector per item.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from rowwise.batch import Batch
from rowwise.errors import SpecError
from rowwise.models.two_tower import TwoTower
from rowwise.shard.embeddings import ShardedEmbeddings
from rowwise.train.evaluate import Scores, evaluation_mode
from rowwise.train.objective import single_ids
from rowwise.train.ranking import Ranking

QUERIES = 512  # ranked at a time


def ranking_metrics(ks: Sequence[int]) -> tuple[str, ...]:
    """The names of the metrics for these k; higher is better for all."""
    return (*(f"recall@{k}" for k in ks), *(f"ndcg@{k}" for k in ks), "mrr")


@final
class RetrievalEvaluator:
    """Ranks all items for the user of each row whose label is 1.

    Args:
        model: the two towers.
        item: the feature with the item's id.
        known: returns the training rows, whose items are candidates.
        asked: returns the evaluation rows, whose items are candidates and which are the queries.
        task: the name that the metrics are under.
        ks: the k of recall@k and NDCG@k.
    """

    def __init__(
        self,
        model: TwoTower,
        item: str,
        *,
        known: Callable[[], Iterable[Batch]],
        asked: Callable[[], Iterable[Batch]],
        task: str,
        ks: Sequence[int] = (10, 50),
    ) -> None:
        self._model, self._item, self._known, self._asked = model, item, known, asked
        self._task, self._ks = task, tuple(ks)
        for module in model.modules():
            if isinstance(module, ShardedEmbeddings) and module.routes.world > 1:
                got = f"two towers whose tables are on {module.routes.world} ranks"
                raise SpecError(f"{got}: want one process, which ranks all items for each user")

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*ranking_metrics(self._ks), "count")

    def __call__(self) -> Scores:
        """One pass for the items, one for the queries."""
        with evaluation_mode(self._model):
            ids_I, items_ID = self._items()
            ranking = Ranking(self._ks)
            for batch in self._to_device(self._asked):
                chosen_B = batch.labels_BK[:, 0] == 1
                users_BD, _ = self._model.vectors(batch)
                places_B = torch.searchsorted(ids_I, single_ids(batch, self._item))
                users_UD, places_U = users_BD[chosen_B], places_B[chosen_B]
                for begin in range(0, len(users_UD), QUERIES):
                    queries = slice(begin, begin + QUERIES)
                    ranking.update(users_UD[queries] @ items_ID.t(), places_U[queries])
        means = ranking.value()
        values = {f"recall@{k}": v for k, v in means.recall.items()} | {f"ndcg@{k}": v for k, v in means.ndcg.items()}
        return Scores({self._task: {**values, "mrr": means.mrr, "count": float(means.lists)}})

    def _items(self) -> tuple[Tensor, Tensor]:
        """The ids of all items, ascending, and their vectors."""
        device = self._device()
        ids_I = torch.empty(0, dtype=torch.int64, device=device)
        items_ID = torch.empty(0, self._model.item.dim, device=device)
        for make in (self._known, self._asked):
            for batch in self._to_device(make):
                ids_B = single_ids(batch, self._item).long()
                new_B = ~torch.isin(ids_B, ids_I)
                if new_B.any():
                    _, vectors_BD = self._model.vectors(batch)
                    new_U, first_U = _first_places(ids_B[new_B])
                    ids_I = torch.cat((ids_I, new_U))
                    items_ID = torch.cat((items_ID, vectors_BD[new_B][first_U]))
        order_I = ids_I.argsort()
        return ids_I[order_I], items_ID[order_I]

    def _to_device(self, make: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        device = self._device()
        return (batch.to(device) for batch in make())

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _first_places(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids, and the index of the first occurrence of each."""
    ids_U, inverse_N = ids_N.unique(return_inverse=True)
    first_U = torch.full_like(ids_U, len(ids_N))
    return ids_U, first_U.scatter_reduce(0, inverse_N, torch.arange(len(ids_N), device=ids_N.device), "amin")
