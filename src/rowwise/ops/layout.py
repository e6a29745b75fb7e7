"""How tables, features and optimizers are written down for the kernels: rows of small CPU tensors.

One row of `features` is one `FeatureRow`, one row of `tables` one `TableRow`; `_cpp/tables.h` has the same
fields in the same order. Made once a model; a batch whose features come in another order gets a copy with
other sources (`Group.for_sources`).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.spec import Adagrad, Pooling, RowWiseAdagrad, Sgd, Table

ALIGN = 16  # floats: every table starts on a cache line


class Mode(enum.IntEnum):
    """How a feature's rows are pooled."""

    SUM = 0
    MEAN = 1
    WEIGHTED = 2


class Rule(enum.IntEnum):
    """How a table's rows are updated."""

    SGD = 0
    ADAGRAD = 1
    ROWWISE_ADAGRAD = 2


# A sequence is a lookup of bags of one id each, so its gradient is neither scaled nor weighted: a sum.
MODES = {Pooling.SUM: Mode.SUM, Pooling.MEAN: Mode.MEAN, Pooling.WEIGHTED: Mode.WEIGHTED, Pooling.SEQUENCE: Mode.SUM}
RULES: dict[type, Rule] = {Sgd: Rule.SGD, Adagrad: Rule.ADAGRAD, RowWiseAdagrad: Rule.ROWWISE_ADAGRAD}


class FeatureRow(NamedTuple):
    """A feature as the kernels see it; `source` is its place in the batch."""

    source: int
    table: int
    base: int
    rows: int
    dim: int
    column: int
    mode: int

    @classmethod
    def read(cls, features: Tensor) -> list["FeatureRow"]:
        """All rows of the tensor."""
        return [cls(*row) for row in features.tolist()]


class TableRow(NamedTuple):
    """A table as the kernels see it; features of a table stand together."""

    base: int
    rows: int
    dim: int
    state_base: int
    state_width: int
    rule: int
    first_feature: int
    num_features: int

    @classmethod
    def read(cls, tables: Tensor) -> list["TableRow"]:
        """All rows of the tensor."""
        return [cls(*row) for row in tables.tolist()]


class Place(NamedTuple):
    """Where a table's rows and their optimizer state begin, in floats."""

    base: int
    state_base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tables that one kernel call serves: all pooled ones, or all sequence ones."""

    tables: tuple[Table, ...]
    feature_names: tuple[str, ...]
    columns: int  # of the pooled output
    features_F7: Tensor
    tables_T8: Tensor
    hyper_T4: Tensor

    @property
    def column_slices(self) -> dict[str, slice]:
        """Where each feature stands in the pooled output."""
        rows = FeatureRow.read(self.features_F7)
        return {name: slice(r.column, r.column + r.dim) for name, r in zip(self.feature_names, rows, strict=True)}

    def table_of(self, feature: int) -> Table:
        """The table of the i-th feature."""
        return self.tables[FeatureRow.read(self.features_F7)[feature].table]

    def for_sources(self, available: Sequence[str]) -> Tensor:
        """`features_F7` for a batch that holds `available` in this order; raises KeyError for a missing one."""
        # A batch is never reordered to suit the tables: telling the kernels where to look is free.
        at = {name: i for i, name in enumerate(available)}
        features = self.features_F7.clone()
        features[:, 0] = torch.tensor([at[name] for name in self.feature_names], dtype=torch.int64)
        return features


def state_slots(table: Table) -> dict[str, int]:
    """Names and widths of the optimizer state in each row."""
    match table.optimizer:
        case Sgd():
            return {}
        case Adagrad():
            return {"sum": table.dim}
        case RowWiseAdagrad():
            return {"sum": 1}


def place_tables(tables: Sequence[Table]) -> tuple[list[Place], Place]:
    """Where each table goes, and the size of everything."""
    places: list[Place] = []
    base = state_base = 0
    for table in tables:
        places.append(Place(base, state_base))
        # Tables, not rows, are padded: a row of 7 floats takes 28 bytes.
        base += _aligned(table.rows * table.dim)
        state_base += _aligned(table.rows * sum(state_slots(table).values()))
    return places, Place(base, state_base)


def make_group(tables: Sequence[Table], places: Sequence[Place]) -> Group:
    """Write the tables down; their features are numbered in table order."""
    feature_rows: list[FeatureRow] = []
    table_rows: list[TableRow] = []
    column = 0
    for index, (table, place) in enumerate(zip(tables, places, strict=True)):
        # The state of a row is one run of floats, whatever the optimizer keeps in it.
        width = sum(state_slots(table).values())
        rule = RULES[type(table.optimizer)]
        first, count = len(feature_rows), len(table.feature_names)
        table_rows.append(TableRow(place.base, table.rows, table.dim, place.state_base, width, rule, first, count))
        # Features are numbered table by table, so the update finds those of a table side by side.
        for _ in table.feature_names:
            source, mode = len(feature_rows), MODES[table.pooling]
            feature_rows.append(FeatureRow(source, index, place.base, table.rows, table.dim, column, mode))
            column += table.dim
    # Floats of 32 bits, as the kernels compute in them; the reference reads the same rounded numbers.
    hyper = [(t.optimizer.lr, getattr(t.optimizer, "eps", 0.0), t.optimizer.weight_decay, 0.0) for t in tables]
    return Group(
        tables=tuple(tables),
        feature_names=tuple(name for t in tables for name in t.feature_names),
        columns=column,
        features_F7=torch.tensor(feature_rows, dtype=torch.int64).view(-1, 7),
        tables_T8=torch.tensor(table_rows, dtype=torch.int64).view(-1, 8),
        hyper_T4=torch.tensor(hyper, dtype=torch.float32).view(-1, 4),
    )


def _aligned(floats: int) -> int:
    return -(-floats // ALIGN) * ALIGN
