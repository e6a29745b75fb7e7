"""Optimizers of table rows: their numbers, their state, and what an update has to be told.

A class here is all that is known of an optimizer without torch. What it computes is in `ops/reference/apply.py` and
`ops/_cpp/apply.h`, and a new one has a part in each of the three.
"""

import math
from typing import ClassVar, Literal, NamedTuple, get_args

import msgspec

from rowwise.value import Value

SMALLEST = 2.0**-126  # the kernels compute in 32 bits, where what is smaller than this rounds to nothing
LARGEST = 3e38
LIMITS: dict[str, tuple[float, float, str]] = {  # of some numbers: least, most, what to say
    "value": (-LARGEST, LARGEST, ""),
    "eps": (SMALLEST, LARGEST, "want more than 0 in 32 bits, or a gradient of 0 is divided by 0"),
    "clip": (SMALLEST, LARGEST, "want more than 0 in 32 bits; None does not clip"),
    "beta1": (0.0, 1 - 2.0**-24, "want less than 1 in 32 bits"),
    "beta2": (0.0, 1 - 2.0**-24, "want less than 1 in 32 bits"),
}


def wrong_number(field: str, value: float | None) -> str | None:
    """What a number of an optimizer or of an initial value should have been, if it is not that."""
    if value is None:  # a bound that the table's size will give, or no clipping
        return None
    least, most, want = LIMITS.get(field, (0.0, LARGEST, ""))
    if not abs(value) < LARGEST or value < min(0.0, least):
        return "want a finite number that is not negative"
    return None if least <= value <= most else want


class Schedule(Value, frozen=True, kw_only=True):
    """A factor on the learning rate: it rises over `warmup_steps`, then falls over `decay_steps` to `end`."""

    warmup_steps: int = 0
    decay_start: int = 0  # the last step at full rate; that of the warm-up, if it is later
    decay_steps: int = 0  # 0: never falls
    shape: Literal["linear", "cosine", "quadratic"] = "linear"
    end: float = 0.0

    @property
    def problem(self) -> str:
        """What is wrong with the numbers, if anything."""
        for field, value in msgspec.structs.asdict(self).items():
            if field != "shape" and not 0 <= value < LARGEST:
                return f"{field}={value}: want a number that is not negative"
        return ""

    def factor(self, step: int) -> float:
        """The factor at an update, the first of which is step 1."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        decaying = step - max(self.decay_start, self.warmup_steps)
        if not self.decay_steps or decaying <= 0:
            return 1.0
        left = max(0.0, 1.0 - decaying / self.decay_steps)
        match self.shape:
            case "cosine":
                left = (1.0 - math.cos(math.pi * left)) / 2
            case "quadratic":
                left = left * left
            case "linear":
                pass
        return self.end + (1.0 - self.end) * left


class Slot(NamedTuple):
    """A named part of a row's optimizer state."""

    width: int
    initial: float = 0.0


class KernelHyperparameters(NamedTuple):
    """The numbers of one update as the kernels take them: a row of `KernelHyperparameters` in `ops/_cpp/tables.h`."""

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # 0: none
    a: float = 0.0  # a to d: those that only some optimizers have
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0


class RowUpdate(Value, frozen=True, kw_only=True):
    """The properties of a row optimizer; its arithmetic is in `ops/reference/apply.py`."""

    sums_columns: ClassVar[bool] = False  # whether an update needs a sum over the columns of its row

    def slots(self, dim: int) -> dict[str, Slot]:
        """The state of a row of `dim` columns, in order; names are those of torch's optimizers."""
        raise NotImplementedError

    def hyper(self, step: int) -> KernelHyperparameters:
        """The numbers of an update, the first of which is step 1."""
        raise NotImplementedError

    @property
    def hyper_depends_on_step(self) -> bool:
        """Whether they differ from step to step."""
        return getattr(self, "schedule", None) is not None

    def with_row_state(self) -> "RowUpdate":
        """The optimizer of the same numbers that keeps one number a row where this keeps one a weight, or itself."""
        return self

    @property
    def problem(self) -> str:
        """What is wrong with the numbers together, if anything."""
        schedule: Schedule | None = getattr(self, "schedule", None)
        return f"schedule: {schedule.problem}" if schedule and schedule.problem else ""


def _scheduled(lr: float, schedule: Schedule | None, step: int) -> float:
    return lr * (schedule.factor(step) if schedule else 1.0)


class Sgd(RowUpdate, frozen=True, kw_only=True, tag="sgd", tag_field="kind"):
    """w -= lr * g."""

    lr: float = 0.01
    weight_decay: float = 0.0  # added to the gradient, times the weight
    clip: float | None = None  # longest gradient of a row (L2 norm), before any decay; longer ones are shortened
    schedule: Schedule | None = None

    def slots(self, dim: int) -> dict[str, Slot]:
        return {}

    def hyper(self, step: int) -> KernelHyperparameters:
        lr = _scheduled(self.lr, self.schedule, step)
        return KernelHyperparameters(lr, weight_decay=self.weight_decay, clip=self.clip or 0.0)


class SquareSums(RowUpdate, frozen=True, kw_only=True):
    """Rates fall with sums of squares of gradients, which begin at `initial`."""

    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0  # added to the gradient, times the weight
    initial: float = 0.0
    clip: float | None = None
    schedule: Schedule | None = None

    def hyper(self, step: int) -> KernelHyperparameters:
        return KernelHyperparameters(
            _scheduled(self.lr, self.schedule, step), self.eps, self.weight_decay, self.clip or 0.0
        )


class Adagrad(SquareSums, frozen=True, kw_only=True, tag="adagrad", tag_field="kind"):
    """s += g * g, w -= lr * g / (sqrt(s) + eps): one float of state for each weight."""

    def slots(self, dim: int) -> dict[str, Slot]:
        """The sum of squares of each weight's gradients."""
        return {"sum": Slot(dim, self.initial)}

    def with_row_state(self) -> "RowWiseAdagrad":
        """The optimizer of the same numbers that keeps one number of state a row."""
        return RowWiseAdagrad(**msgspec.structs.asdict(self))


class RowWiseAdagrad(SquareSums, frozen=True, kw_only=True, tag="rowwise_adagrad", tag_field="kind"):
    """s += mean(g * g), w -= lr * g / (sqrt(s) + eps): one float of state for each row."""

    sums_columns: ClassVar[bool] = True

    def slots(self, dim: int) -> dict[str, Slot]:
        """The sum of mean squares of the row's gradients."""
        return {"sum": Slot(1, self.initial)}


class Moments(RowUpdate, frozen=True, kw_only=True):
    """Base of optimizers that keep moving averages of g and g * g."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # of the weight itself, not by way of the gradient
    clip: float | None = None
    schedule: Schedule | None = None

    def slots(self, dim: int) -> dict[str, Slot]:
        return {"exp_avg": Slot(dim), "exp_avg_sq": Slot(dim)}

    def hyper(self, step: int) -> KernelHyperparameters:
        """With the betas, and the corrections of both means."""
        lr = _scheduled(self.lr, self.schedule, step)
        corrections = 1 / (1 - self.beta1**step), 1 / (1 - self.beta2**step)
        return KernelHyperparameters(
            lr, self.eps, self.weight_decay, self.clip or 0.0, self.beta1, self.beta2, *corrections
        )

    @property
    def hyper_depends_on_step(self) -> bool:
        return True


class Adam(Moments, frozen=True, kw_only=True, tag="adam", tag_field="kind"):
    """w -= lr * (m' / (sqrt(v') + eps) + weight_decay * w), with the bias-corrected means m' of g and v' of g * g.

    Rows that a step does not touch stay as they are, their means too; the correction counts all steps.
    Two floats of state for each weight. Source: Kingma and Ba 2015; Loshchilov and Hutter 2019 for the decay.
    """

    def with_row_state(self) -> "RowWiseAdam":
        """The optimizer of the same numbers that keeps one v a row."""
        return RowWiseAdam(**msgspec.structs.asdict(self))


class RowWiseAdam(Moments, frozen=True, kw_only=True, tag="rowwise_adam", tag_field="kind"):
    """Adam with one v for each row, the mean over its columns: one float of state for each weight, one for each row."""

    sums_columns: ClassVar[bool] = True

    def slots(self, dim: int) -> dict[str, Slot]:
        """m, and one v."""
        return {"exp_avg": Slot(dim), "exp_avg_sq": Slot(1)}


class Lamb(Moments, frozen=True, kw_only=True, tag="lamb", tag_field="kind"):
    """Adam's step r, in the length of the row: w -= lr * (|w| / |r|) * r, the factor being 1 where a length is 0.

    Two floats of state for each weight. Source: You et al. 2020, applied to each row.
    """

    sums_columns: ClassVar[bool] = True


class Ftrl(RowUpdate, frozen=True, kw_only=True, tag="ftrl", tag_field="kind"):
    """FTRL-Proximal: n += g * g, z += g - (sqrt(n) - sqrt(n before)) / lr * w, and with s the sign of z

    w = 0 where |z| <= l1, else -(z - s * l1) / ((beta + sqrt(n)) / lr + l2). Each weight has a rate of its own that
    only falls, so there is no schedule. `beta` is in the units of a gradient: with a loss that is a mean, 1
    holds weights back for long. Two floats of state for each weight. Source: McMahan et al. 2013.
    """

    lr: float = 0.05
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial: float = 0.0  # of n
    clip: float | None = None

    def slots(self, dim: int) -> dict[str, Slot]:
        return {"z": Slot(dim), "n": Slot(dim, self.initial)}

    def hyper(self, step: int) -> KernelHyperparameters:
        """With l1, l2 and beta."""
        return KernelHyperparameters(self.lr, clip=self.clip or 0.0, a=self.l1, b=self.l2, c=self.beta)

    @property
    def problem(self) -> str:
        """Numbers that a weight would be divided by 0 with."""
        if max(self.beta, self.initial) < SMALLEST:
            want = "want one of them more than 0, or the first weight is divided by 0"
            return f"beta={self.beta} and initial={self.initial}: {want}"
        return f"lr={self.lr}: FTRL divides by it; want more than 0" if self.lr < SMALLEST else ""


RowOptimizer = Sgd | Adagrad | RowWiseAdagrad | Adam | RowWiseAdam | Lamb | Ftrl
# By the names that files call them, in the order of `Optimizers` in `ops/_cpp/apply.h`.
OPTIMIZERS: dict[str, type[RowOptimizer]] = {str(kind.__struct_config__.tag): kind for kind in get_args(RowOptimizer)}


def couples_columns(optimizer: RowOptimizer) -> bool:
    """Whether the update of a weight depends on other columns of its row: by a mean, a length or clipping."""
    return optimizer.clip is not None or optimizer.sums_columns
