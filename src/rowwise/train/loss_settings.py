"""Losses of clicks as frozen values: `train.objective` of a recipe. This module does not import torch."""

import math

from rowwise.errors import SpecError
from rowwise.spec import Value
from rowwise.value import MOST_STEPS, check_most


class LogLoss(Value, frozen=True, tag="log_loss", tag_field="kind"):
    """The log loss of each label."""


class Bootstrap(Value, frozen=True, tag="bootstrap", tag_field="kind"):
    """The log loss of labels that are mixed with the model's own probabilities (Reed et al. 2014)."""

    beta: float = 0.8  # share of the given label; the rest is the model's probability
    hard: bool = False  # whether the model's probability is rounded to 0 or 1 first

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise SpecError(f"train.objective.beta={self.beta}: want more than 0 and at most 1")


class GeneralisedCrossEntropy(Value, frozen=True, tag="gce", tag_field="kind"):
    """(1 - p ** q) / q of the label's probability p: between log loss, q near 0, and absolute error, q = 1.

    Where nearly all labels of a task are 0 it may end with all predictions near 0, as with each label of ten classes.
    """

    q: float = 0.7  # the larger, the less a label counts that the model finds unlikely

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise SpecError(f"train.objective.q={self.q}: want more than 0 and at most 1")


class Smc(Value, frozen=True, tag="smc", tag_field="kind"):
    """Log loss and the divergence from a second pass over the batch: "Self-discipline on multiple channels"."""

    steps: int  # over which the weight of the divergence rises from 0 to alpha; about those of the run
    alpha: float = 0.9  # that of the log loss is 1 - alpha at the end
    temperature: float = 1.5  # divides both passes' logits in the divergence

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise SpecError(f"train.objective.alpha={self.alpha}: want 0 to 1")
        if not 0 < self.temperature < math.inf:
            raise SpecError(f"train.objective.temperature={self.temperature}: want a finite number above 0")
        if self.steps < 1:
            raise SpecError(f"train.objective.steps={self.steps}: want at least 1")
        check_most("train.objective.", self, steps=MOST_STEPS)


class CoTeaching(Value, frozen=True, tag="co_teaching", tag_field="kind"):
    """The log loss of two copies of the model, each of the samples with the other's least loss (Han et al. 2018)."""

    steps: int  # over which the share of samples that are left out rises from 0 to `forget`
    forget: float = 0.2  # share of a batch's samples that are left out in the end; about that of wrong labels

    def __post_init__(self) -> None:
        if not 0 <= self.forget < 1:
            raise SpecError(f"train.objective.forget={self.forget}: want at least 0 and less than 1")
        if self.steps < 1:
            raise SpecError(f"train.objective.steps={self.steps}: want at least 1")
        check_most("train.objective.", self, steps=MOST_STEPS)


ClickLoss = LogLoss | Bootstrap | GeneralisedCrossEntropy | Smc  # of one model
ClickObjective = ClickLoss | CoTeaching
