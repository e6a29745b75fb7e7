"""Objectives: functions from a batch and the number of a step to a loss, and to the logits that metrics need.

`Clicks` is a loss of labels 0 and 1, or of amounts (see `losses.py`), `TwoCopies` the log loss of two copies of a
model, `InBatch` the loss of two towers over the items of a batch, `NextItems` the loss of a sequence model over the
items of its table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import BatchError
from rowwise.models.frequency import ItemFrequency
from rowwise.models.histories import single_ids
from rowwise.models.next_item import NextItem, mean_over_lists, sampled_softmax_loss, softmax_loss
from rowwise.models.retrieval import Candidates, in_batch_softmax
from rowwise.models.second_copy import second_copy_of
from rowwise.models.two_tower import VectorModel
from rowwise.parallel.comm.gather import all_gather_rows
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import all_gather_uneven, raising_on_all_ranks
from rowwise.tables.batch import Batch
from rowwise.train.loss_settings import CoTeaching, LabelLoss, LogLoss, Smc
from rowwise.train.losses import click_loss, second_pass
from rowwise.train.soft_labels import SoftLabels


@dataclass(frozen=True, slots=True)
class Outcome:
    """The mean loss of a batch, and its logits [B, K] if the objective has logits."""

    loss: Tensor
    logits_BK: Tensor | None = None


Objective = Callable[[Batch, int], Outcome]  # (batch, number of the step, from 1)
LOG_LOSS = LogLoss()
InBatchLoss = Callable[[Tensor, Tensor | Candidates, Tensor | None, Tensor | None, int | None], Tensor]


@final
class Clicks:
    """A loss summed over labels, times the sample's weight; the mean over samples.

    A model with `take_auxiliary`, such as `DIEN`, has losses [B] of its own, which are added to those of the labels.

    Args:
        model: returns logits.
        task_weights: weight of each label; all 1 by default.
        label_smoothing: s: labels count as s / 2 and 1 - s / 2.
        loss: the loss of each label.
    """

    def __init__(
        self,
        model: nn.Module,
        task_weights: Sequence[float] = (),
        label_smoothing: float = 0.0,
        loss: LabelLoss = LOG_LOSS,
    ) -> None:
        self._model, self._smoothing, self._loss = model, label_smoothing, loss
        self._take_auxiliary: Callable[[], Tensor | None] = getattr(model, "take_auxiliary", lambda: None)
        self.soft = SoftLabels() if isinstance(loss, Smc) else None
        self._weights_K = torch.tensor(task_weights) if any(w != 1 for w in task_weights) else None

    def __call__(self, batch: Batch, step: int = 1) -> Outcome:
        if self._weights_K is None and batch.weights_B is None and isinstance(self._loss, LogLoss):
            logits_BK, labels_BK, more_B = self._forward(batch)
            loss = F.binary_cross_entropy_with_logits(logits_BK.float(), labels_BK) * labels_BK.shape[1]
            return Outcome(loss if more_B is None else loss + more_B.mean(), logits_BK)
        loss_B, logits_BK = self.losses(batch, step)
        # Divided by the number of samples, not by their weights: a sample's gradient must not depend on its neighbours.
        return Outcome((loss_B if batch.weights_B is None else loss_B * batch.weights_B).mean(), logits_BK)

    def losses(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """The loss [B] of each sample without its weight, and the logits [B, K]."""
        logits_BK, labels_BK, more_B = self._forward(batch)
        soft_BK = None if self.soft is None else self.soft.take(step, len(labels_BK))
        if self.soft is not None and soft_BK is None:  # called without a trainer
            soft_BK = second_pass(self._model, batch)
        loss_BK = click_loss(self._loss, logits_BK.float(), labels_BK, step, soft_BK)
        if self._weights_K is None:
            loss_B = loss_BK.sum(1)
        else:
            self._weights_K = self._weights_K.to(loss_BK.device)
            loss_B = loss_BK @ self._weights_K
        return loss_B if more_B is None else loss_B + more_B, logits_BK

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits, smoothed labels, and the auxiliary losses [B] of the model."""
        logits_BK, labels_BK = self._model(batch), batch.labels_BK
        more_B = self._take_auxiliary()
        if logits_BK.shape != labels_BK.shape:
            raise BatchError(
                f"the model gave logits {tuple(logits_BK.shape)} for labels {tuple(labels_BK.shape)}",
                "one logit for each label",
            )
        if self._smoothing:
            labels_BK = labels_BK * (1 - self._smoothing) + self._smoothing / 2
        return logits_BK, labels_BK, more_B


@final
class TwoCopies:
    """Co-teaching (Han et al. 2018, arXiv 1804.06872): each copy learns from the samples of least loss of the other.

    A copy's loss is the mean log loss of the samples that the other copy selects from the global batch. The outcome has
    the sum of both losses, and the logits of the first copy. A sample with several labels is ranked by the sum of its
    losses.

    Args:
        model: the first copy, which has the second (`add_second_copy`).
        settings: the share of samples that are left out, by step.
        task_weights: weight of each label; all 1 by default.
        label_smoothing: s: labels count as s / 2 and 1 - s / 2.
        comm: the ranks of the model; a single rank by default.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: CoTeaching,
        task_weights: Sequence[float] = (),
        label_smoothing: float = 0.0,
        *,
        comm: Comm | None = None,
    ) -> None:
        self._copies = [Clicks(copy, task_weights, label_smoothing) for copy in (model, second_copy_of(model))]
        self._settings = settings
        self._comm = solo() if comm is None else comm.split([comm.ranks])

    def __call__(self, batch: Batch, step: int = 1) -> Outcome:
        (first_B, logits_BK), (second_B, _) = (copy.losses(batch, step) for copy in self._copies)
        factors_B2 = self._factors(torch.stack((first_B.detach(), second_B.detach()), 1), step)
        loss_B = first_B * factors_B2[:, 1] + second_B * factors_B2[:, 0]
        return Outcome((loss_B if batch.weights_B is None else loss_B * batch.weights_B).mean(), logits_BK)

    def _factors(self, losses_B2: Tensor, step: int) -> Tensor:
        """Weights [B, 2] of this rank's samples by copy: n / k for the k samples of least loss of all n, else 0."""
        flat_W = all_gather_uneven(self._comm, losses_B2.flatten(), "losses of samples")
        losses_N2, begin = torch.cat(flat_W).view(-1, 2), sum(map(len, flat_W[: self._comm.rank])) // 2
        samples = len(losses_N2)
        chosen = max(1, samples - int(samples * forgotten_share(self._settings, step)))
        factors_N2 = torch.zeros_like(losses_N2)
        # Stable: ties go to the first samples, whatever the number of ranks.
        factors_N2.scatter_(0, losses_N2.argsort(dim=0, stable=True)[:chosen], samples / chosen)
        return factors_N2[begin : begin + len(losses_B2)]


def forgotten_share(settings: CoTeaching, step: int) -> float:
    """The share of samples left out in a step: rises linearly from 0 at the first step to `forget` after `steps`."""
    return settings.forget * min((step - 1) / settings.steps, 1.0)


@final
class InBatch:
    """A loss over the items of a batch, for its samples whose label is 1 (see `models/two_tower.py`).

    With several ranks the items are those of all ranks' parts of the batch, so the loss is that of one process.

    Args:
        model: the two towers.
        item: the feature with the item's id.
        frequency: corrects the logits for popular items, if given.
        loss: `in_batch_softmax` or `in_batch_bpr`.
        hardest: number of negatives per sample, those of the largest corrected logits; all by default.
        comm: the ranks of the model; a single rank by default.
    """

    def __init__(
        self,
        model: VectorModel,
        item: str,
        frequency: ItemFrequency | None,
        loss: InBatchLoss = in_batch_softmax,
        *,
        hardest: int | None = None,
        comm: Comm | None = None,
    ) -> None:
        self._model, self._item, self._frequency, self._loss = model, item, frequency, loss
        self._hardest = hardest
        self._comm = solo() if comm is None else comm.split([comm.ranks])

    def __call__(self, batch: Batch, step: int = 1) -> Outcome:
        users_BD, items_BD = self._model.vectors(batch)
        with raising_on_all_ranks(self._comm, during="lookup of items"):
            ids_B = single_ids(batch.sparse, self._item).long()
        ids_W = all_gather_uneven(self._comm, ids_B, "items")
        counts_W, ids_N = [len(ids_B) for ids_B in ids_W], torch.cat(ids_W).to(items_BD.device)
        items_ND = all_gather_rows(self._comm, items_BD, counts_W, "items")
        log_q_N = None if self._frequency is None else self._frequency(ids_N)
        candidates = Candidates(ids_N, log_q_N, sum(counts_W[: self._comm.rank]))
        logits_BN = self._model.scores(users_BD, items_ND)
        loss = self._loss(logits_BN, candidates, None, batch.labels_BK[:, 0], self._hardest)
        extra = self._model.extra_loss(batch)
        return Outcome(loss if extra is None else loss + extra)


@final
class NextItems:
    """The softmax loss of the next item at each position of a list; the mean over positions, then over lists.

    Args:
        model: scores items.
        negatives: number of sampled negatives per batch, which each rank draws for itself; by default the softmax is
            over all items.
    """

    def __init__(self, model: NextItem, negatives: int | None = None) -> None:
        self._model, self._negatives = model, negatives

    def __call__(self, batch: Batch, step: int = 1) -> Outcome:
        rows, drawn_C = self._model.table.rows, None
        if self._negatives is not None:
            device = batch.labels_BK.device
            drawn_C = torch.randint(rows, (self._negatives,)).to(device)  # a checkpoint has the CPU's generator
        places, scored_CD = self._model(batch, drawn_C)
        if drawn_C is None:
            loss_N = softmax_loss(places, scored_CD)
        else:
            loss_N = sampled_softmax_loss(places, scored_CD, drawn_C, rows)
        return Outcome(mean_over_lists(loss_N, places.lengths_B, batch.weights_B))
