"""What exists: tables, how they are pooled, filled and updated.

Frozen values with a strict JSON round trip and no torch, so that a plan can be made, read and compared
without loading any tensor library. Where a table lives is `plan`'s business, its memory is `ops.arena`'s.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from rowwise.errors import SpecError


class Pooling(enum.StrEnum):
    """How the rows of one bag become one vector."""

    SUM = "sum"
    MEAN = "mean"
    WEIGHTED = "weighted"  # sum of rows times the per-id weights of the batch
    SEQUENCE = "sequence"  # not at all: one vector for each id


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the frozen values: unknown keys are refused when read from a file."""


class Sgd(Value, frozen=True, tag="sgd", tag_field="kind"):
    """w -= lr * g."""

    lr: float = 0.01
    weight_decay: float = 0.0


class Adagrad(Value, frozen=True, tag="adagrad", tag_field="kind"):
    """s += g * g, w -= lr * g / (sqrt(s) + eps): one float of state for each weight."""

    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial: float = 0.0


class RowWiseAdagrad(Value, frozen=True, tag="rowwise_adagrad", tag_field="kind"):
    """s += mean(g * g), w -= lr * g / (sqrt(s) + eps): one float of state for each row."""

    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial: float = 0.0


RowOptimizer = Sgd | Adagrad | RowWiseAdagrad


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

    def __post_init__(self) -> None:
        """Refuse what no kernel could hold."""
        _check_types(self)
        if not self.name or set("./\\\0") & set(self.name):
            want = "want one without dots and slashes, as parameters and files are called by it"
            raise SpecError(f"table name {self.name!r}: {want}")
        if self.rows < 1 or self.dim < 1:
            raise SpecError(f"table {self.name!r} is {self.rows} x {self.dim}: want at least one row and one column")
        # The update packs (row, contribution) into 64 bits and needs 24 of them for the contribution.
        if self.rows >= 1 << 40:
            raise SpecError(f"table {self.name!r} has {self.rows} rows: want fewer than 2**40; hash the ids")
        if len(set(self.features)) != len(self.features):
            raise SpecError(f"table {self.name!r} names a feature twice: {', '.join(self.features)}")
        _check_numbers(self)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The features in lookup order."""
        return self.features or (self.name,)


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
    try:
        msgspec.structs.force_setattr(table, "pooling", Pooling(table.pooling))
    except ValueError:
        want = ", ".join(repr(str(p)) for p in Pooling)
        raise SpecError(f"table {name!r}: pooling={table.pooling!r}: want one of {want}") from None


def _check_numbers(table: Table) -> None:
    # Only a constant's value may be negative; None is a bound that the table's size will give.
    numbers = msgspec.structs.asdict(table.optimizer) | msgspec.structs.asdict(table.init)
    for field, value in numbers.items():
        if value is None:
            continue
        if not -3e38 < value < 3e38 or (value < 0 and field != "value"):
            raise SpecError(f"table {table.name!r}: {field}={value}: want a finite number that is not negative")
        # The kernels compute in 32 bits, where what is smaller than this rounds to nothing.
        if field == "eps" and value < 2.0**-126:
            want = "want more than 0 in 32 bits, or a gradient of 0 is divided by 0"
            raise SpecError(f"table {table.name!r}: eps={value}: {want}")


def check_tables(tables: Sequence[Table]) -> None:
    """Names of tables and of features are unique across a model."""
    if not tables:
        raise SpecError("no tables: want at least one Table(name=..., rows=..., dim=...)")
    _check_unique("table", (t.name for t in tables))
    _check_unique("feature", (f for t in tables for f in t.feature_names))


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{what} {name!r} is named twice: want every {what} once in a model")
        seen.add(name)
