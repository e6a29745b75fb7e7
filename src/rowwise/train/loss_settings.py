"""Losses of clicks and amounts as frozen values: `train.objective` of a recipe. This module does not import torch."""

import math

from rowwise.base.errors import SpecError
from rowwise.base.value import MAX_STEPS, check_max
from rowwise.ingest.labels import LabelValues
from rowwise.models.link import AmountLink
from rowwise.tables.spec import Value


class LogLoss(Value, frozen=True, tag="log_loss", tag_field="kind"):
    """The log loss of each label."""


class Bootstrap(Value, frozen=True, tag="bootstrap", tag_field="kind"):
    """The log loss of labels that are mixed with the model's own probabilities (Reed et al. 2014)."""

    beta: float = 0.8  # share of the observed label; the rest is the model's probability
    hard: bool = False  # whether the model's probability is rounded to 0 or 1 first

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise SpecError(f"train.objective.beta={self.beta}", "more than 0 and at most 1")


class GeneralisedCrossEntropy(Value, frozen=True, tag="gce", tag_field="kind"):
    """(1 - p ** q) / q of the label's probability p: between log loss, q near 0, and absolute error, q = 1.

    If nearly all labels of a task are 0, training may collapse to predictions near 0, as for one label of ten classes.
    """

    q: float = 0.7  # larger values reduce the weight of labels that the model finds unlikely

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise SpecError(f"train.objective.q={self.q}", "more than 0 and at most 1")


class Smc(Value, frozen=True, tag="smc", tag_field="kind"):
    """Log loss, and the divergence from predictions before the last update (Zhao, Luo & Wang 2023)."""

    steps: int  # over which the weight of the divergence rises from 0 to alpha; about the steps of the run
    alpha: float = 0.9  # final weight of the divergence; the log loss then has 1 - alpha
    temperature: float = 1.5  # divides the logits of both predictions in the divergence

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise SpecError(f"train.objective.alpha={self.alpha}", "0 to 1")
        if not 0 < self.temperature < math.inf:
            raise SpecError(f"train.objective.temperature={self.temperature}", "a finite number above 0")
        if self.steps < 1:
            raise SpecError(f"train.objective.steps={self.steps}", "at least 1")
        check_max("train.objective.", self, steps=MAX_STEPS)


class CoTeaching(Value, frozen=True, tag="co_teaching", tag_field="kind"):
    """The log loss of two copies of the model, each on the samples of least loss of the other (Han et al. 2018)."""

    steps: int  # over which the share of samples that are left out rises from 0 to `forget`
    forget: float = 0.2  # final share of a batch's samples that are left out; about the share of wrong labels

    def __post_init__(self) -> None:
        if not 0 <= self.forget < 1:
            raise SpecError(f"train.objective.forget={self.forget}", "at least 0 and less than 1")
        if self.steps < 1:
            raise SpecError(f"train.objective.steps={self.steps}", "at least 1")
        check_max("train.objective.", self, steps=MAX_STEPS)


ClickLoss = LogLoss | Bootstrap | GeneralisedCrossEntropy | Smc  # of one model
ClickObjective = ClickLoss | CoTeaching


class Squared(Value, frozen=True, tag="squared", tag_field="kind"):
    """The squared error of amounts: their mean is predicted, as mean + scale * output of the model."""

    mean: tuple[float, ...] = ()  # of each label; default: their means in the first training rows
    scale: tuple[float, ...] = ()  # divisor of the loss for each label; default: their standard deviations

    def __post_init__(self) -> None:
        _check_facts(mean=self.mean)
        _check_facts(positive=True, scale=self.scale)

    @property
    def link(self) -> AmountLink:
        return AmountLink(kind="linear", offset=self.mean, unit=self.scale)


class Poisson(Value, frozen=True, tag="poisson", tag_field="kind"):
    """The Poisson loss of counts and other amounts of at least 0: mean * exp(output of the model) is predicted."""

    mean: tuple[float, ...] = ()  # divisor of the loss for each label; default: their means in the first training rows

    def __post_init__(self) -> None:
        _check_facts(positive=True, mean=self.mean)

    @property
    def link(self) -> AmountLink:
        return AmountLink(kind="exp", offset=(0.0,) * len(self.mean), unit=self.mean)


def _check_facts(*, positive: bool = False, **facts: tuple[float, ...]) -> None:
    for name, values in facts.items():
        if any(not math.isfinite(value) or (positive and value <= 0) for value in values):
            expected = "finite numbers above 0" if positive else "finite numbers"
            raise SpecError(f"train.objective.{name}={list(values)}", f"{expected}, one for each label")


def first_label(loss: "AnyLoss") -> "AnyLoss":
    """The loss of the first label alone."""
    match loss:
        case Squared(mean=mean, scale=scale):
            return Squared(mean=mean[:1], scale=scale[:1])
        case Poisson(mean=mean):
            return Poisson(mean=mean[:1])
        case _:
            return loss


AmountLoss = Squared | Poisson
LabelLoss = ClickLoss | AmountLoss  # of one model
AnyLoss = ClickObjective | AmountLoss


def wanted_values(loss: AnyLoss) -> LabelValues:
    """The kind of label values that a loss accepts."""
    if not isinstance(loss, AmountLoss):
        return "clicks"
    return "amounts" if isinstance(loss, Poisson) else "numbers"


AMOUNT_METRICS = ("rmse", "mae", "r2", "poisson_deviance", "loss")  # metrics that may select the best checkpoint
