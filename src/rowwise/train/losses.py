"""Losses of clicks whose labels may be wrong, one number for each sample and label.

With z a logit, p = sigmoid(z), y the label and H(y, z) = -y log p - (1 - y) log(1 - p):

    bootstrap   H(beta y + (1 - beta) p, z)
    gce         y (1 - p**q) / q + (1 - y) (1 - (1 - p)**q) / q
    smc         (1 - a) H(y, z) + a KL(sigmoid(z' / T), sigmoid(z / T)),    KL(t, s) = H(t, logit s) - H(t, logit t)

In smc, z' are the soft labels: logits of a pass without gradient over the same samples, with other dropout and another
augmentation, before the last update (see `soft_labels.py`); a is `smc_weight`. Labels between 0 and 1, from label
smoothing, are accepted. Losses of amounts are in `amounts.py`.

- bootstrap: Reed et al. 2014, arXiv 1412.6596
- gce: Zhang & Sabuncu 2018, arXiv 1805.07836
- smc, with two channels: Zhao, Luo & Wang 2023, arXiv 2304.14224. There the pass without gradient updates running
  statistics, here the one with gradient: both count each batch once
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from rowwise.tables.batch import Batch
from rowwise.train.amounts import amount_loss
from rowwise.train.loss_settings import (
    Bootstrap,
    GeneralisedCrossEntropy,
    LabelLoss,
    LogLoss,
    Poisson,
    Smc,
    Squared,
)


def click_loss(
    settings: LabelLoss, logits_BK: Tensor, labels_BK: Tensor, step: int, soft_BK: Tensor | None = None
) -> Tensor:
    """The loss [B, K] of a batch; smc requires soft labels."""
    match settings:
        case LogLoss():
            return log_loss(logits_BK, labels_BK)
        case Bootstrap(beta=beta, hard=hard):
            return bootstrap_loss(logits_BK, labels_BK, beta, hard=hard)
        case GeneralisedCrossEntropy(q=q):
            return generalised_cross_entropy(logits_BK, labels_BK, q)
        case Smc():
            assert soft_BK is not None
            weight = smc_weight(settings.alpha, step, settings.steps)
            return smc_loss(logits_BK, soft_BK, labels_BK, weight, settings.temperature)
        case Squared() | Poisson():
            return amount_loss(settings, logits_BK, labels_BK)


def log_loss(logits_BK: Tensor, labels_BK: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits_BK, labels_BK, reduction="none")


def bootstrap_loss(logits_BK: Tensor, labels_BK: Tensor, beta: float, *, hard: bool = False) -> Tensor:
    """The log loss of labels mixed with the model's own probability, which `hard` rounds to 0 or 1."""
    predicted_BK = (logits_BK > 0).to(logits_BK.dtype) if hard else logits_BK.sigmoid()
    mixed_BK = beta * labels_BK + (1 - beta) * predicted_BK
    # Not log_loss: torch does not differentiate by its labels, and here they depend on the logits.
    return -mixed_BK * F.logsigmoid(logits_BK) - (1 - mixed_BK) * F.logsigmoid(-logits_BK)


def generalised_cross_entropy(logits_BK: Tensor, labels_BK: Tensor, q: float) -> Tensor:
    """(1 - p ** q) / q, p the probability of the label."""
    loss_1_BK, loss_0_BK = (-torch.expm1(q * F.logsigmoid(z_BK)) / q for z_BK in (logits_BK, -logits_BK))
    return labels_BK * loss_1_BK + (1 - labels_BK) * loss_0_BK


def smc_loss(logits_BK: Tensor, soft_BK: Tensor, labels_BK: Tensor, weight: float, temperature: float) -> Tensor:
    """Log loss, and with `weight` the divergence from the soft labels, given as logits."""
    soft_BK, sharp_BK = soft_BK / temperature, logits_BK / temperature
    targets_BK = soft_BK.sigmoid()
    divergence_BK = log_loss(sharp_BK, targets_BK) - log_loss(soft_BK, targets_BK)
    return (1 - weight) * log_loss(logits_BK, labels_BK) + weight * divergence_BK


def smc_weight(alpha: float, step: int, steps: int) -> float:
    """Half-cosine ramp from 0 at the first step to alpha after `steps`."""
    done = min((step - 1) / steps, 1.0)
    return alpha * (1 - math.cos(math.pi * done)) / 2


@torch.no_grad()
def second_pass(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of the batch, without an update of running statistics."""
    with _fixed_statistics(model):
        return model(batch).float()


@contextmanager
def _fixed_statistics(model: nn.Module) -> Iterator[None]:
    """Normalise by batch statistics, as in training, without an update of running statistics."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
