"""Evaluates two towers by ranking all items for each user: recall@k, NDCG@k and MRR of the item that the user chose.

The candidates are all items of the training rows and of the evaluation rows, each with the features of its first row.
Each evaluation row with label 1 is a query; its own item is the answer. Memory: one vector per item on each rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from rowwise.batch import Batch
from rowwise.comm.gather import all_gather_rows
from rowwise.comm.interface import Comm
from rowwise.comm.solo import solo
from rowwise.comm.status import all_gather_uneven, broadcast_object, gather_object
from rowwise.models.two_tower import VectorModel
from rowwise.train.evaluate import Scores, evaluation_mode
from rowwise.train.objective import single_ids
from rowwise.train.ranking import Ranking
from rowwise.train.ranks import Lockstep

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
        comm: the ranks of the model, each with a part of every batch; None: a single rank.
    """

    def __init__(  # noqa: PLR0913 - two streams of batches, and what is measured
        self,
        model: VectorModel,
        item: str,
        *,
        known: Callable[[], Iterable[Batch]],
        asked: Callable[[], Iterable[Batch]],
        task: str,
        ks: Sequence[int] = (10, 50),
        comm: Comm | None = None,
    ) -> None:
        self._model, self._item, self._known, self._asked = model, item, known, asked
        self._task, self._ks = task, tuple(ks)
        self._comm = comm or solo()

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*ranking_metrics(self._ks), "count")

    def __call__(self) -> Scores:
        """One pass for the items, one for the queries."""
        steps = Lockstep(self._comm, "evaluation")
        with evaluation_mode(self._model):
            ids_I, items_ID = self._items(steps)
            ranking = Ranking(self._ks)
            for batch in self._to_device(self._asked, steps):
                users_BD, _ = self._model.vectors(batch)
                with steps.deferring_errors():
                    chosen_B = batch.labels_BK[:, 0] == 1
                    places_B = torch.searchsorted(ids_I, single_ids(batch, self._item).long())
                    users_UD, places_U = users_BD[chosen_B], places_B[chosen_B]
                    for begin in range(0, len(users_UD), QUERIES):
                        queries = slice(begin, begin + QUERIES)
                        ranking.update(users_UD[queries] @ items_ID.t(), places_U[queries])
        return self._gather_scores(ranking)

    def _gather_scores(self, ranking: Ranking) -> Scores:
        states = gather_object(self._comm, ranking.state(), "scores")
        for state in states[1:] if states else ():
            ranking.merge(Ranking.from_state(state))
        return broadcast_object(self._comm, self._scores(ranking) if states else None, 0, "scores")

    def _scores(self, ranking: Ranking) -> Scores:
        means = ranking.value()
        values = {f"recall@{k}": v for k, v in means.recall.items()} | {f"ndcg@{k}": v for k, v in means.ndcg.items()}
        return Scores({self._task: {**values, "mrr": means.mrr, "count": float(means.lists)}})

    def _items(self, steps: Lockstep) -> tuple[Tensor, Tensor]:
        """The ids of all items, ascending, and their vectors; those of all ranks on each."""
        device = self._device()
        ids_I = torch.empty(0, dtype=torch.int64, device=device)
        parts: list[Tensor] = []
        for make in (self._known, self._asked):
            for batch in self._to_device(make, steps):
                ids_B = ids_I[:0]
                with steps.deferring_errors():  # this rank must still take part in the gather below
                    ids_B = single_ids(batch, self._item).long()
                first_B = _first_places(ids_B)
                first_B = first_B[~torch.isin(ids_B[first_B], ids_I)]
                new_W = all_gather_uneven(self._comm, ids_B[first_B], "items")
                if not sum(map(len, new_W)):
                    continue
                _, vectors_BD = self._model.vectors(batch)
                counts_W = [len(new_N) for new_N in new_W]
                vectors_ND = all_gather_rows(self._comm, vectors_BD[first_B], counts_W, "items")
                new_N = torch.cat(new_W)
                first_U = _first_places(new_N)  # ranks are in the order of their rows
                ids_I = torch.cat((ids_I, new_N[first_U]))
                parts.append(vectors_ND[first_U])
        order_I = ids_I.argsort()
        return ids_I[order_I], torch.cat(parts)[order_I] if parts else torch.empty(0, 0, device=device)

    def _to_device(self, make: Callable[[], Iterable[Batch]], steps: Lockstep) -> Iterator[Batch]:
        device = self._device()
        return (batch.to(device) for batch in steps.iterate(make))

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _first_places(ids_N: Tensor) -> Tensor:
    """The place [U] of the first occurrence of each distinct id."""
    ids_U, inverse_N = ids_N.unique(return_inverse=True)
    first_U = torch.full_like(ids_U, len(ids_N))
    return first_U.scatter_reduce(0, inverse_N, torch.arange(len(ids_N), device=ids_N.device), "amin")
