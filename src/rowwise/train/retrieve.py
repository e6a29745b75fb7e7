"""Evaluates two towers on finding the chosen item among all: recall@k, NDCG@k and MRR.

The items are those that occur in the training rows or in the rows asked about, each by the features of the row in
which it came first. Memory: one vector an item. A row whose label is 1 is a question: which items come before its own.
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

AT_ONCE = 512  # questions


def ranking_metrics(ks: Sequence[int]) -> tuple[str, ...]:
    """Names of the metrics for these k; larger is better for all."""
    return (*(f"recall@{k}" for k in ks), *(f"ndcg@{k}" for k in ks), "mrr")


@final
class RetrievalEvaluator:
    """Ranks all items for the user of each row whose label is 1.

    Args:
        model: the towers.
        item: the feature that says which item it is.
        known: makes the rows anew in which items are looked for, beside those asked about.
        asked: makes the rows anew that ask.
        task: under which name the metrics are.
        ks: of recall@k and NDCG@k.
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
                want = "want one process, as each question is put to all items in one place"
                raise SpecError(f"two towers whose tables are on {module.routes.world} ranks: {want}")

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*ranking_metrics(self._ks), "count")

    def __call__(self) -> Scores:
        """One pass for the items, one for the questions."""
        with evaluation_mode(self._model):
            ids_I, items_ID = self._items()
            ranking = Ranking(self._ks)
            for batch in self._to_device(self._asked):
                chosen_B = batch.labels_BK[:, 0] == 1
                users_BD, _ = self._model.vectors(batch)
                places_B = torch.searchsorted(ids_I, single_ids(batch, self._item))
                users_UD, places_U = users_BD[chosen_B], places_B[chosen_B]
                for begin in range(0, len(users_UD), AT_ONCE):
                    some = slice(begin, begin + AT_ONCE)
                    ranking.update(users_UD[some] @ items_ID.t(), places_U[some])
        found = ranking.value()
        values = {f"recall@{k}": v for k, v in found.recall.items()} | {f"ndcg@{k}": v for k, v in found.ndcg.items()}
        return Scores({self._task: {**values, "mrr": found.mrr, "count": float(found.lists)}})

    def _items(self) -> tuple[Tensor, Tensor]:
        """The ids of all items, ascending, and their vectors."""
        device = self._device()
        ids_I = torch.empty(0, dtype=torch.int64, device=device)
        items_ID = torch.empty(0, self._model.item.dim, device=device)
        for make in (self._known, self._asked):
            for batch in self._to_device(make):
                found_B = single_ids(batch, self._item).long()
                new_B = ~torch.isin(found_B, ids_I)
                if new_B.any():
                    _, vectors_BD = self._model.vectors(batch)
                    fresh_N, first_N = _first(found_B[new_B])
                    ids_I = torch.cat((ids_I, fresh_N))
                    items_ID = torch.cat((items_ID, vectors_BD[new_B][first_N]))
        order_I = ids_I.argsort()
        return ids_I[order_I], items_ID[order_I]

    def _to_device(self, make: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        device = self._device()
        return (batch.to(device) for batch in make())

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _first(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """The different ids, and where each comes first."""
    fresh_U, which_N = ids_N.unique(return_inverse=True)
    first_U = torch.full_like(fresh_U, len(ids_N))
    return fresh_U, first_U.scatter_reduce(0, which_N, torch.arange(len(ids_N), device=ids_N.device), "amin")
