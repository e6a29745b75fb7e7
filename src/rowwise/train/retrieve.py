"""Evaluates by ranking all items: recall@k, NDCG@k and MRR of the positive item. Memory: one vector per item.

Two towers: the candidates are all items of the training rows and of the evaluation rows, each with the features of its
first row. Each evaluation row with label 1 is a query; its item is the positive.

Sequence models: the candidates are all items of the table. Each row is a query; the last item of its list is the
positive.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from rowwise.base.errors import BatchError
from rowwise.models.histories import items_of, sample_of_each, single_ids
from rowwise.models.inference import autocast, evaluation_mode
from rowwise.models.next_item import NextItem, last_of_each
from rowwise.models.two_tower import VectorModel
from rowwise.parallel.comm.gather import all_gather_rows
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import all_gather_uneven, broadcast_object, gather_object
from rowwise.tables.batch import Batch
from rowwise.train.evaluate import Scores
from rowwise.train.on_device import to_device
from rowwise.train.ranking import Ranking
from rowwise.train.ranks import Lockstep
from rowwise.train.settings import Training

QUERIES = 512  # ranked at once


def ranking_metrics(ks: Sequence[int]) -> tuple[str, ...]:
    """The names of the metrics for these k; higher is better for all."""
    return (*(f"recall@{k}" for k in ks), *(f"ndcg@{k}" for k in ks), "mrr")


@final
class RetrievalEvaluator:
    """Ranks all items for the user of each row whose label is 1.

    Args:
        model: the two towers.
        item: the feature with the item's id.
        train_batches: returns the training rows, whose items are candidates.
        query_batches: returns the evaluation rows, whose items are candidates, too.
        task: the task name of the metrics.
        ks: the k of recall@k and NDCG@k.
        comm: the ranks of the model, each with a part of every batch; a single rank by default.
    """

    def __init__(  # noqa: PLR0913 - two streams of batches, and options
        self,
        model: VectorModel,
        item: str,
        *,
        train_batches: Callable[[], Iterable[Batch]],
        query_batches: Callable[[], Iterable[Batch]],
        task: str,
        ks: Sequence[int] = (10, 50),
        comm: Comm | None = None,
    ) -> None:
        self._model, self._item, self._task, self._ks = model, item, task, tuple(ks)
        self._train_batches, self._query_batches = train_batches, query_batches
        self._comm = comm or solo()

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*ranking_metrics(self._ks), "count")

    def __call__(self) -> Scores:
        """One pass for the items, one for the queries."""
        steps = Lockstep(self._comm)
        with evaluation_mode(self._model):
            ids_I, items_ID = self._items(steps)
            ranking = Ranking(self._ks)
            for batch in self._to_device(self._query_batches, steps):
                users_BD, _ = self._model.vectors(batch)
                with steps.deferring_errors():
                    chosen_B = batch.labels_BK[:, 0] == 1
                    index_B = torch.searchsorted(ids_I, self._ids(batch))
                    users_UD, index_U = users_BD[chosen_B], index_B[chosen_B]
                    for begin in range(0, len(users_UD), QUERIES):
                        queries = slice(begin, begin + QUERIES)
                        ranking.update(users_UD[queries] @ items_ID.t(), index_U[queries])
        return _gather_scores(self._comm, ranking, self._task)

    def _items(self, steps: Lockstep) -> tuple[Tensor, Tensor]:
        """The ids of all items, ascending, and their vectors, gathered from all ranks."""
        device = self._device()
        ids_I = torch.empty(0, dtype=torch.int64, device=device)
        parts: list[Tensor] = []
        for make in (self._train_batches, self._query_batches):
            for batch in self._to_device(make, steps):
                ids_B = ids_I[:0]
                with steps.deferring_errors():  # this rank must still take part in the gather below
                    ids_B = self._ids(batch)
                first_B = _first_occurrences(ids_B)
                first_B = first_B[~torch.isin(ids_B[first_B], ids_I)]
                new_W = all_gather_uneven(self._comm, ids_B[first_B], "items")
                if not sum(map(len, new_W)):
                    continue
                _, vectors_BD = self._model.vectors(batch)
                counts_W = [len(new_N) for new_N in new_W]
                vectors_ND = all_gather_rows(self._comm, vectors_BD[first_B], counts_W, "items")
                new_N = torch.cat(new_W)
                first_U = _first_occurrences(new_N)  # rank order is row order
                ids_I = torch.cat((ids_I, new_N[first_U]))
                parts.append(vectors_ND[first_U])
        order_I = ids_I.argsort()
        return ids_I[order_I], torch.cat(parts)[order_I] if parts else torch.empty(0, 0, device=device)

    def _to_device(self, make: Callable[[], Iterable[Batch]], steps: Lockstep) -> Iterator[Batch]:
        device = self._device()
        return (to_device(batch, self._model, device) for batch in steps.iterate(make))

    def _ids(self, batch: Batch) -> Tensor:
        return single_ids(batch.sparse, self._item).long().to(self._device())

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _first_occurrences(ids_N: Tensor) -> Tensor:
    """The index [U] of the first occurrence of each distinct id, in ascending order of ids."""
    ids_U, inverse_N = ids_N.unique(return_inverse=True)
    first_U = torch.full_like(ids_U, len(ids_N))
    return first_U.scatter_reduce(0, inverse_N, torch.arange(len(ids_N), device=ids_N.device), "amin")


def _gather_scores(comm: Comm, ranking: Ranking, task: str) -> Scores:
    """The scores over the lists of all ranks; a collective."""
    states = gather_object(comm, ranking.state(), "scores")
    for state in states[1:] if states else ():
        ranking.merge(Ranking.from_state(state))
    means = broadcast_object(comm, ranking.value() if states else None, 0, "scores")
    values = {f"recall@{k}": v for k, v in means.recall.items()} | {f"ndcg@{k}": v for k, v in means.ndcg.items()}
    return Scores({task: {**values, "mrr": means.mrr, "count": float(means.lists)}})


@final
class NextItemEvaluator:
    """Ranks all items of the table as the last item of each list, from the items before it.

    Args:
        model: scores items.
        batches: called for each evaluation; returns this rank's batches.
        task: the task name of the metrics.
        training: device and precision, as in training.
        ks: the k of recall@k and NDCG@k.
        leave_out_history: whether items of the history are excluded from the candidates, except the positive.
        comm: the ranks of the model; a single rank by default.
    """

    def __init__(  # noqa: PLR0913 - options
        self,
        model: NextItem,
        batches: Callable[[], Iterable[Batch]],
        task: str,
        training: Training,
        *,
        ks: Sequence[int] = (10, 50),
        leave_out_history: bool = False,
        comm: Comm | None = None,
    ) -> None:
        self._model, self._batches, self._task, self._training = model, batches, task, training
        self._ks, self._leave_out, self._comm = tuple(ks), leave_out_history, comm or solo()

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*ranking_metrics(self._ks), "count")

    def __call__(self) -> Scores:
        ranking, steps = Ranking(self._ks), Lockstep(self._comm)
        with evaluation_mode(self._model):
            for host_batch in steps.iterate(self._batches):
                batch = to_device(host_batch, self._model, self._training.device)
                with steps.deferring_errors(), autocast(self._training.device, self._training.precision):
                    self._rank(batch, ranking)
        return _gather_scores(self._comm, ranking, self._task)

    def _rank(self, batch: Batch, ranking: Ranking) -> None:
        model, weights_B = self._model, batch.weights_B
        places, items_RD = model(batch)
        lists_N, lists_B = (x.to(items_RD.device) for x in items_of(batch.sparse, model.feature))
        if len(lists_B) and int(lists_B.min()) < 2:
            sample = int((lists_B < 2).nonzero()[0])
            raise BatchError(
                f"feature {model.feature!r} has {int(lists_B[sample])} items in sample {sample}",
                "at least 2, a history and the item that follows it",
            )
        queries_BD, end = last_of_each(places.vectors_ND, places.lengths_B), 0
        chosen_B1 = model.rows_of(lists_N[lists_B.cumsum(0) - 1]).unsqueeze(1)
        for begin in range(0, len(lists_B), QUERIES):
            queries = slice(begin, begin + QUERIES)
            scores_QR, chosen_Q1, lists_Q = queries_BD[queries] @ items_RD.t(), chosen_B1[queries], lists_B[queries]
            first, end = end, end + int(lists_Q.sum())
            if self._leave_out:
                positive_Q1 = scores_QR.gather(1, chosen_Q1)
                scores_QR[sample_of_each(lists_Q), model.rows_of(lists_N[first:end])] = -torch.inf
                scores_QR.scatter_(1, chosen_Q1, positive_Q1)
            ranking.update(scores_QR, chosen_Q1, None if weights_B is None else weights_B[queries])
