"""Row optimizers: hyperparameters, state slots, and the kernels' arguments of an update; without torch.

The arithmetic is in `tables/ops/reference/apply.py` and `tables/ops/_cpp/apply.h`; a new optimizer has a part in each
of the three.
"""

import math
from typing import ClassVar, Literal, NamedTuple, get_args

import msgspec

from rowwise.base.value import Value

SMALLEST = 2.0**-126  # smallest normal float32, in which kernels compute
LARGEST = 3e38
LIMITS: dict[str, tuple[float, float, str]] = {  # by name: minimum, maximum, message
    "value": (-LARGEST, LARGEST, ""),
    "eps": (SMALLEST, LARGEST, "more than 0 in 32 bits, or a gradient of 0 is divided by 0"),
    "clip": (SMALLEST, LARGEST, "more than 0 in 32 bits; None does not clip"),
    "beta1": (0.0, 1 - 2.0**-24, "less than 1 in 32 bits"),
    "beta2": (0.0, 1 - 2.0**-24, "less than 1 in 32 bits"),
}


def hyperparameter_fault(field: str, value: float | None) -> str | None:
    """The message for a hyperparameter or a number of `init` that is out of range, else None."""
    if value is None:  # a bound derived from the table's rows, or no clipping
        return None
    low, high, expected = LIMITS.get(field, (0.0, LARGEST, ""))
    if not abs(value) < LARGEST or value < min(0.0, low):
        return "a finite number that is not negative"
    return None if low <= value <= high else expected


class Schedule(Value, frozen=True, kw_only=True):
    """A factor on the learning rate: it rises over `warmup_steps`, then falls over `decay_steps` to `end`."""

    warmup_steps: int = 0
    decay_start: int = 0  # last step at full rate, at least `warmup_steps`
    decay_steps: int = 0  # 0: no decay
    shape: Literal["linear", "cosine", "quadratic"] = "linear"
    end: float = 0.0

    @property
    def problem(self) -> str:
        """The message if a number is invalid, else empty."""
        for field, value in msgspec.structs.asdict(self).items():
            if field != "shape" and not 0 <= value < LARGEST:
                return f"{field}={value}: expected a number that is not negative"
        return ""

    def factor(self, step: int) -> float:
        """The factor at a step; the first update is step 1."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        decayed = step - max(self.decay_start, self.warmup_steps)
        if not self.decay_steps or decayed <= 0:
            return 1.0
        remaining = max(0.0, 1.0 - decayed / self.decay_steps)
        match self.shape:
            case "cosine":
                remaining = (1.0 - math.cos(math.pi * remaining)) / 2
            case "quadratic":
                remaining = remaining * remaining
            case "linear":
                pass
        return self.end + (1.0 - self.end) * remaining


class Slot(NamedTuple):
    """A named part of a row's optimizer state."""

    width: int
    initial: float = 0.0


class KernelHyperparameters(NamedTuple):
    """The hyperparameters of one update as the kernels read them (`tables/ops/_cpp/tables.h`): a row of `hyper_TH`."""

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # 0: none
    a: float = 0.0  # a to d: see `hyper` of the optimizer
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0


class RowUpdate(Value, frozen=True, kw_only=True):
    """Base of the row optimizers."""

    sums_columns: ClassVar[int] = 0  # number of sums over a row's columns that its update needs

    def slots(self, dim: int) -> dict[str, Slot]:
        """The state of a row of `dim` columns, in order, by the names of torch's optimizers."""
        raise NotImplementedError

    def hyper(self, step: int) -> KernelHyperparameters:
        """Hyperparameters of the update at a step, bias corrections included; the first is step 1."""
        raise NotImplementedError

    @property
    def hyper_depends_on_step(self) -> bool:
        """Whether `hyper` differs from step to step."""
        return getattr(self, "schedule", None) is not None

    def with_row_state(self) -> "RowUpdate":
        """The variant with one float of state per row instead of one per weight; itself if there is none."""
        return self

    @property
    def problem(self) -> str:
        """The message if the hyperparameters are invalid together, else empty."""
        schedule: Schedule | None = getattr(self, "schedule", None)
        return f"schedule: {schedule.problem}" if schedule and schedule.problem else ""


def _scheduled_lr(lr: float, schedule: Schedule | None, step: int) -> float:
    return lr * (schedule.factor(step) if schedule else 1.0)


class Sgd(RowUpdate, frozen=True, kw_only=True, tag="sgd", tag_field="kind"):
    """w -= lr * g."""

    lr: float = 0.01
    weight_decay: float = 0.0  # added to the gradient, times the weight
    clip: float | None = None  # largest L2 norm of a row's gradient, before weight decay
    schedule: Schedule | None = None

    def slots(self, dim: int) -> dict[str, Slot]:
        return {}

    def hyper(self, step: int) -> KernelHyperparameters:
        lr = _scheduled_lr(self.lr, self.schedule, step)
        return KernelHyperparameters(lr, weight_decay=self.weight_decay, clip=self.clip or 0.0)


class SquareSums(RowUpdate, frozen=True, kw_only=True):
    """Base of optimizers whose state is a sum of squared gradients, which starts at `initial`."""

    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0  # added to the gradient, times the weight
    initial: float = 0.0
    clip: float | None = None
    schedule: Schedule | None = None

    def hyper(self, step: int) -> KernelHyperparameters:
        return KernelHyperparameters(
            _scheduled_lr(self.lr, self.schedule, step), self.eps, self.weight_decay, self.clip or 0.0
        )


class Adagrad(SquareSums, frozen=True, kw_only=True, tag="adagrad", tag_field="kind"):
    """s += g * g, w -= lr * g / (sqrt(s) + eps): one float of state for each weight."""

    def slots(self, dim: int) -> dict[str, Slot]:
        return {"sum": Slot(dim, self.initial)}

    def with_row_state(self) -> "RowWiseAdagrad":
        return RowWiseAdagrad(**msgspec.structs.asdict(self))


class RowWiseAdagrad(SquareSums, frozen=True, kw_only=True, tag="rowwise_adagrad", tag_field="kind"):
    """s += mean(g * g), w -= lr * g / (sqrt(s) + eps): one float of state for each row."""

    sums_columns: ClassVar[int] = 1

    def slots(self, dim: int) -> dict[str, Slot]:
        return {"sum": Slot(1, self.initial)}


class Moments(RowUpdate, frozen=True, kw_only=True):
    """Base of optimizers with moving averages of g and g * g."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # decoupled: of the weight, not in the gradient
    clip: float | None = None
    schedule: Schedule | None = None

    def slots(self, dim: int) -> dict[str, Slot]:
        return {"exp_avg": Slot(dim), "exp_avg_sq": Slot(dim)}

    def hyper(self, step: int) -> KernelHyperparameters:
        lr = _scheduled_lr(self.lr, self.schedule, step)
        corrections = 1 / (1 - self.beta1**step), 1 / (1 - self.beta2**step)
        return KernelHyperparameters(
            lr, self.eps, self.weight_decay, self.clip or 0.0, self.beta1, self.beta2, *corrections
        )

    @property
    def hyper_depends_on_step(self) -> bool:
        return True


class Adam(Moments, frozen=True, kw_only=True, tag="adam", tag_field="kind"):
    """w -= lr * (m' / (sqrt(v') + eps) + weight_decay * w), with the bias-corrected means m' of g and v' of g * g.

    Rows that a step does not touch keep weights and means; the bias correction counts all steps.
    Two floats of state for each weight. Source: Kingma and Ba 2015; Loshchilov and Hutter 2019 for the decay.
    """

    def with_row_state(self) -> "RowWiseAdam":
        return RowWiseAdam(**msgspec.structs.asdict(self))


class RowWiseAdam(Moments, frozen=True, kw_only=True, tag="rowwise_adam", tag_field="kind"):
    """Adam with one v for each row, the mean over its columns: one float of state for each weight, one for each row."""

    sums_columns: ClassVar[int] = 1

    def slots(self, dim: int) -> dict[str, Slot]:
        return {"exp_avg": Slot(dim), "exp_avg_sq": Slot(1)}


class Lamb(Moments, frozen=True, kw_only=True, tag="lamb", tag_field="kind"):
    """Adam's step r scaled to the norm of the row: w -= lr * (|w| / |r|) * r, with factor 1 if a norm is 0.

    Two floats of state for each weight. Source: You et al. 2020, applied to each row.
    """

    sums_columns: ClassVar[int] = 2


class Ftrl(RowUpdate, frozen=True, kw_only=True, tag="ftrl", tag_field="kind"):
    """FTRL-Proximal: n += g * g, z += g - (sqrt(n) - sqrt(n before)) / lr * w, then w from z and n.

    w = 0 where |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2). Each weight's learning rate
    only falls, so there is no schedule. `beta` has the unit of a gradient: with a mean loss, 1 keeps weights at 0
    for long. Two floats of state for each weight. Source: McMahan et al. 2013.
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
        return KernelHyperparameters(self.lr, clip=self.clip or 0.0, a=self.l1, b=self.l2, c=self.beta)

    @property
    def problem(self) -> str:
        if max(self.beta, self.initial) < SMALLEST:
            expected = "expected at least one above 0, or the first weight is divided by 0"
            return f"beta={self.beta} and initial={self.initial}: {expected}"
        return f"lr={self.lr}: FTRL divides by it; expected more than 0" if self.lr < SMALLEST else ""


RowOptimizer = Sgd | Adagrad | RowWiseAdagrad | Adam | RowWiseAdam | Lamb | Ftrl
# By name in files, in the order of `Optimizers` in `tables/ops/_cpp/apply.h`.
OPTIMIZERS: dict[str, type[RowOptimizer]] = {str(kind.__struct_config__.tag): kind for kind in get_args(RowOptimizer)}


def needs_full_rows(optimizer: RowOptimizer) -> bool:
    """Whether a weight's update depends on other columns of its row, by a mean, a norm or clipping."""
    return optimizer.clip is not None or optimizer.sums_columns > 0
