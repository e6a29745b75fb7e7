"""What exists: tables, how they are pooled, filled and updated.

Frozen values with a strict JSON round trip and no torch, so that a plan can be made, read and compared
without loading any tensor library. Where a table lives is `plan`'s business, its memory is `ops.arena`'s.
"""

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from rowwise.errors import SpecError
from rowwise.idmaps import AnyIdMap
from rowwise.inside import fault_of_name, has_control
from rowwise.value import MOST_DIM, MOST_RANKS, check_most
from rowwise.value import Value as Value


class Pooling(enum.StrEnum):
    """How the rows of one bag become one vector."""

    SUM = "sum"
    MEAN = "mean"
    WEIGHTED = "weighted"  # sum of rows times the per-id weights of the batch
    SEQUENCE = "sequence"  # not at all: one vector for each id


class RowType(enum.StrEnum):
    """How a row is stored. The arithmetic is in 32-bit floats whatever the type; updates are rounded stochastically."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # one byte a weight, and two floats (scale and offset) for each group of columns


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


class Sgd(Value, frozen=True, kw_only=True, tag="sgd", tag_field="kind"):
    """w -= lr * g."""

    lr: float = 0.01
    weight_decay: float = 0.0  # added to the gradient, times the weight
    clip: float | None = None  # longest gradient of a row (L2 norm), before any decay; longer ones are shortened
    schedule: Schedule | None = None


class Adagrad(Value, frozen=True, kw_only=True, tag="adagrad", tag_field="kind"):
    """s += g * g, w -= lr * g / (sqrt(s) + eps): one float of state for each weight."""

    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0  # added to the gradient, times the weight
    initial: float = 0.0
    clip: float | None = None
    schedule: Schedule | None = None


class RowWiseAdagrad(Value, frozen=True, kw_only=True, tag="rowwise_adagrad", tag_field="kind"):
    """s += mean(g * g), w -= lr * g / (sqrt(s) + eps): one float of state for each row."""

    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0  # added to the gradient, times the weight
    initial: float = 0.0
    clip: float | None = None
    schedule: Schedule | None = None


class Moments(Value, frozen=True, kw_only=True):
    """What optimizers share that keep moving averages of g and g * g."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # of the weight itself, not by way of the gradient
    clip: float | None = None
    schedule: Schedule | None = None


class Adam(Moments, frozen=True, kw_only=True, tag="adam", tag_field="kind"):
    """w -= lr * (m' / (sqrt(v') + eps) + weight_decay * w), with the bias-corrected means m' of g and v' of g * g.

    Rows that a step does not touch stay as they are, their means too; the correction counts all steps.
    Two floats of state for each weight. Source: Kingma and Ba 2015; Loshchilov and Hutter 2019 for the decay.
    """


class RowWiseAdam(Moments, frozen=True, kw_only=True, tag="rowwise_adam", tag_field="kind"):
    """Adam with one v for each row, the mean over its columns: one float of state for each weight, one for each row."""


class Lamb(Moments, frozen=True, kw_only=True, tag="lamb", tag_field="kind"):
    """Adam's step r, in the length of the row: w -= lr * (|w| / |r|) * r, the factor being 1 where a length is 0.

    Two floats of state for each weight. Source: You et al. 2020, applied to each row.
    """


class Ftrl(Value, frozen=True, kw_only=True, tag="ftrl", tag_field="kind"):
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


RowOptimizer = Sgd | Adagrad | RowWiseAdagrad | Adam | RowWiseAdam | Lamb | Ftrl


def couples_columns(optimizer: RowOptimizer) -> bool:
    """Whether the update of a weight depends on other columns of its row: by a mean, a length or clipping."""
    return optimizer.clip is not None or isinstance(optimizer, RowWiseAdagrad | RowWiseAdam | Lamb)


class Uniform(Value, frozen=True, tag="uniform", tag_field="kind"):
    """Uniform in [-bound, bound); without a bound, 1 / sqrt(rows)."""

    bound: float | None = None


class Normal(Value, frozen=True, tag="normal", tag_field="kind"):
    """Normal with mean 0."""

    std: float = 1.0


class Constant(Value, frozen=True, tag="constant", tag_field="kind"):
    """Every weight the same."""

    value: float = 0.0


Init = Uniform | Normal | Constant


class Table(Value, frozen=True):
    """One embedding table and the features that look rows up in it."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...] = ()  # none named: one feature, called like the table
    pooling: Pooling = Pooling.SUM
    optimizer: RowOptimizer = RowWiseAdagrad()
    init: Init = Uniform()
    unknown: Literal["raise", "last_row"] = "raise"  # what happens to an id outside 0 .. rows - 1
    row_type: RowType = RowType.FP32
    column_group: int | None = None  # int8: columns that share a scale, a multiple of 16; None: all of a row
    id_map: AnyIdMap | None = None  # `rows` ids in fewer rows than that; None: each has its own

    def __post_init__(self) -> None:
        """Refuse what no kernel could hold."""
        _check_types(self)
        fault = "it has a dot" if "." in self.name else fault_of_name(self.name)
        if fault:
            want = "want one without dots and slashes, as parameters and files are called by it"
            raise SpecError(f"table name {self.name[:80]!r}: {fault}: {want}")
        check_most(f"table {self.name!r}: ", self, dim=MOST_DIM, column_group=MOST_DIM)
        if self.rows < 1 or self.dim < 1:
            raise SpecError(f"table {self.name!r} is {self.rows} x {self.dim}: want at least one row and one column")
        # The update packs (row, contribution) into 64 bits and needs 24 of them for the contribution.
        if self.rows >= 1 << 40:
            raise SpecError(f"table {self.name!r} has {self.rows} rows: want fewer than 2**40; hash the ids")
        odd = [feature for feature in self.features if has_control(feature)]
        if odd:
            raise SpecError(f"table {self.name!r}: feature {odd[0][:80]!r}: want a name without control characters")
        if len(set(self.features)) != len(self.features):
            raise SpecError(f"table {self.name!r} names a feature twice: {', '.join(self.features)}")
        _check_numbers(self)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The features in lookup order."""
        return self.features or (self.name,)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it is stored, without optimizer state."""
        return row_bytes(self.row_type, self.dim, self.column_group or 0)


def row_bytes(row_type: RowType, dim: int, column_group: int = 0) -> int:
    """Bytes of one row of a type; a group of 0 columns is the whole row."""
    match row_type:
        case RowType.FP32:
            return 4 * dim
        case RowType.FP16 | RowType.BF16:
            return 2 * dim
        case RowType.INT8:
            groups = -(-dim // (column_group or dim))
            return 8 * groups + -(-dim // 4) * 4


Bits = Literal[8, 4]  # of each weight, where rows are written down rounded to fewer than they are trained with


def quantised_bytes(dim: int, bits: Bits) -> int:
    """Bytes of such a row: the two ends of its range as floats, then its codes."""
    return row_bytes(RowType.INT8, dim) if bits == 8 else 8 + -(-dim // 8) * 4


class Slot(NamedTuple):
    """A named part of a row's optimizer state."""

    width: int
    initial: float = 0.0


def state_slots(table: Table) -> dict[str, Slot]:
    """The optimizer state in each row, in order; names are those of torch's optimizers."""
    match table.optimizer:
        case Sgd():
            return {}
        case Adagrad(initial=initial):
            return {"sum": Slot(table.dim, initial)}
        case RowWiseAdagrad(initial=initial):
            return {"sum": Slot(1, initial)}
        case Adam() | Lamb():
            return {"exp_avg": Slot(table.dim), "exp_avg_sq": Slot(table.dim)}
        case RowWiseAdam():
            return {"exp_avg": Slot(table.dim), "exp_avg_sq": Slot(1)}
        case Ftrl(initial=initial):
            return {"z": Slot(table.dim), "n": Slot(table.dim, initial)}


def state_width(table: Table) -> int:
    """Floats of optimizer state in each row."""
    return sum(slot.width for slot in state_slots(table).values())


def _check_types(table: Table) -> None:
    """What a file is held to when it is read, code is held to as well; a pooling may be given by its name."""
    name = table.name
    for field, value in (("rows", table.rows), ("dim", table.dim)):
        if type(value) is not int:
            raise SpecError(f"table {name!r}: {field}={value!r}: want a whole number")
    if not isinstance(table.features, tuple) or not all(type(f) is str for f in table.features):
        raise SpecError(f"table {name!r}: features={table.features!r}: want a tuple of names, such as ('clicked',)")
    if table.unknown not in ("raise", "last_row"):
        raise SpecError(f"table {name!r}: unknown={table.unknown!r}: want 'raise' or 'last_row'")
    for field, kind in (("optimizer", RowOptimizer), ("init", Init)):
        try:
            msgspec.convert(msgspec.to_builtins(getattr(table, field)), kind)
        except (msgspec.ValidationError, TypeError) as error:
            raise SpecError(f"table {name!r}: {field}: {error}") from None
    _check_choice(table, "pooling", Pooling)
    _check_choice(table, "row_type", RowType)
    group = table.column_group
    if group is not None and (table.row_type is not RowType.INT8 or type(group) is not int or group < 16 or group % 16):
        want = "want a multiple of 16, for rows of type 'int8' only"
        raise SpecError(f"table {name!r}: column_group={group!r} with rows of type {str(table.row_type)!r}: {want}")


def _check_choice(table: Table, field: str, kind: type[enum.StrEnum]) -> None:
    value = getattr(table, field)
    try:
        msgspec.structs.force_setattr(table, field, kind(value))
    except ValueError:
        want = ", ".join(repr(str(choice)) for choice in kind)
        raise SpecError(f"table {table.name!r}: {field}={value!r}: want one of {want}") from None


SMALLEST = 2.0**-126  # the kernels compute in 32 bits, where what is smaller than this rounds to nothing


def _check_numbers(table: Table) -> None:
    name, optimizer = table.name, table.optimizer
    numbers = msgspec.structs.asdict(optimizer) | msgspec.structs.asdict(table.init)
    schedule: Schedule | None = numbers.pop("schedule", None)
    for field, value in numbers.items():
        want = _wanted(field, value)
        if want:
            raise SpecError(f"table {name!r}: {field}={value}: {want}")
    if isinstance(optimizer, Ftrl):
        if max(optimizer.beta, optimizer.initial) < SMALLEST:
            want = "want one of them more than 0, or the first weight is divided by 0"
            raise SpecError(f"table {name!r}: beta={optimizer.beta} and initial={optimizer.initial}: {want}")
        if optimizer.lr < SMALLEST:
            raise SpecError(f"table {name!r}: lr={optimizer.lr}: FTRL divides by it; want more than 0")
    if schedule is not None and schedule.problem:
        raise SpecError(f"table {name!r}: schedule: {schedule.problem}")


LARGEST = 3e38
LIMITS: dict[str, tuple[float, float, str]] = {  # of some numbers: least, most, what to say
    "value": (-LARGEST, LARGEST, ""),
    "eps": (SMALLEST, LARGEST, "want more than 0 in 32 bits, or a gradient of 0 is divided by 0"),
    "clip": (SMALLEST, LARGEST, "want more than 0 in 32 bits; None does not clip"),
    "beta1": (0.0, 1 - 2.0**-24, "want less than 1 in 32 bits"),
    "beta2": (0.0, 1 - 2.0**-24, "want less than 1 in 32 bits"),
}


def _wanted(field: str, value: float | None) -> str | None:
    """What a number of an optimizer or of an initial value should have been, if it is not that."""
    if value is None:  # a bound that the table's size will give, or no clipping
        return None
    least, most, want = LIMITS.get(field, (0.0, LARGEST, ""))
    if not abs(value) < LARGEST or value < min(0.0, least):
        return "want a finite number that is not negative"
    return None if least <= value <= most else want


Link = Literal["host", "network"]  # between two devices of one host, or of two
VectorExchange = Literal["all_to_all", "reduce_scatter", "two_level", "all_reduce"]
"""How vectors get to their samples: each from one rank; as sums over all ranks; as sums over a host, which then travel
between hosts; not at all, while gradients of copies are added up over all ranks."""


class Topology(Value, frozen=True):
    """Hosts of equally many devices; ranks are numbered host by host."""

    hosts: int = 1
    devices: int = 1  # of each host

    def __post_init__(self) -> None:
        """Refuse what holds no rank."""
        if self.hosts < 1 or self.devices < 1:
            raise SpecError(f"{self.hosts} hosts of {self.devices} devices: want at least one of each")
        if self.world > MOST_RANKS:
            raise SpecError(f"{self.hosts} hosts of {self.devices} devices: want at most {MOST_RANKS:,} devices in all")

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.hosts * self.devices

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.devices

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.devices, (host + 1) * self.devices)

    def link(self, a: int, b: int) -> Link:
        """What two ranks are connected by."""
        return "host" if self.host_of(a) == self.host_of(b) else "network"


class Codecs(Value, frozen=True):
    """How vectors travel over one kind of link: looked-up ones forward, their gradients backward."""

    forward: RowType = RowType.FP32
    backward: RowType = RowType.FP32

    def __post_init__(self) -> None:
        """Types may be given by their names."""
        _name_types(self, ("forward", "backward"))


def _name_types(wire: "Codecs | Wire", fields: Sequence[str]) -> None:
    for field in fields:
        value = getattr(wire, field)
        try:
            msgspec.structs.force_setattr(wire, field, RowType(value))
        except ValueError:
            want = ", ".join(repr(str(choice)) for choice in RowType)
            raise SpecError(f"{type(wire).__name__}: {field}={value!r}: want one of {want}") from None


class Wire(Value, frozen=True):
    """How numbers travel between ranks."""

    host: Codecs = Codecs()
    network: Codecs = Codecs()
    dense: RowType = RowType.FP32  # gradients of dense parameters
    error_feedback: bool = False  # what rounding took from a dense gradient is added to the next one

    def __post_init__(self) -> None:
        """Types may be given by their names."""
        _name_types(self, ("dense",))

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        types = (self.host.forward, self.host.backward, self.network.forward, self.network.backward, self.dense)
        return all(kind is RowType.FP32 for kind in types)


TAKEN = ("training", "_tiles")  # what modules that hold tables assign to; a parameter would be in the way


def check_names(tables: Sequence[Table]) -> None:
    """There are tables, and their names are unique across a model."""
    if not tables:
        raise SpecError("no tables: want at least one Table(name=..., rows=..., dim=...)")
    _check_unique("table", (t.name for t in tables))


def check_tables(tables: Sequence[Table]) -> None:
    """Names of tables and of features are unique across a model."""
    check_names(tables)
    taken = [table.name for table in tables if table.name in TAKEN]
    if taken:
        raise SpecError(f"table name {taken[0]!r}: modules have an attribute of that name: want another")
    _check_unique("feature", (f for t in tables for f in t.feature_names))


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{what} {name!r} is named twice: want every {what} once in a model")
        seen.add(name)
