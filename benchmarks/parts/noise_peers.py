"""Two objectives that the paper of smc compares itself with, for `noise.py`."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rowwise import Batch
from rowwise.train.losses import log_loss, smc_loss
from rowwise.train.objective import Clicks, Outcome


class LastBatch:
    """Self-distillation from the last mini-batch (Shen et al. 2022, arXiv 2203.16172).

    A step repeats the samples of the step before: the log loss is that of both batches, and the repeated samples are
    drawn towards their logits of the step before. So a step has twice the samples of other losses.
    """

    def __init__(self, model: nn.Module, temperature: float = 3.0) -> None:
        self._model, self._temperature = model, temperature
        self._last: tuple[Batch, Tensor] | None = None  # and its logits

    def __call__(self, batch: Batch, step: int = 1) -> Outcome:
        last, logits_BK = self._last, self._model(batch)
        self._last = batch, logits_BK.detach()
        loss_BK = log_loss(logits_BK, batch.labels_BK)
        if last is None:
            return Outcome(loss_BK.sum(1).mean(), logits_BK)
        repeated, soft_BK = last
        again_BK = self._model(repeated)
        loss = torch.cat((loss_BK, log_loss(again_BK, repeated.labels_BK))).sum(1).mean()
        divergence = smc_loss(again_BK, soft_BK, repeated.labels_BK, 1.0, self._temperature).sum(1).mean()
        return Outcome(loss + self._temperature**2 * divergence, logits_BK)


class Sharpness:
    """Sharpness-aware minimisation (Foret et al. 2020, arXiv 2010.01412) of the dense parameters; rows stay in place.

    The gradient is that at the parameters moved by `distance` along the gradient.
    """

    def __init__(self, model: nn.Module, distance: float = 0.05) -> None:
        self._model, self._distance = model, distance

    def __call__(self, batch: Batch, step: int = 1) -> Outcome:
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        first = Clicks(self._model)(batch, step)
        gradients = torch.autograd.grad(first.loss, list(parameters.values()))
        scale = self._distance / (torch.nn.utils.get_total_norm(gradients) + 1e-12)
        moved = {name: p + scale * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        logits_BK = functional_call(self._model, moved, (batch,))
        return Outcome(log_loss(logits_BK, batch.labels_BK).sum(1).mean(), logits_BK)
