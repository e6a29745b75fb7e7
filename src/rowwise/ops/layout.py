"""How tables, features and optimizers are written down for the kernels: rows of small CPU tensors.

One row of `features` is one `FeatureRow`, one row of `tables` one `TableRow`; `_cpp/tables.h` has the same
fields in the same order. Made once a model; a batch whose features come in another order gets a copy with
other sources (`TableGroup.for_sources`).
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from rowwise.ops.hyper import hyper_tensor
from rowwise.row_optimizers import OPTIMIZERS
from rowwise.spec import ROW_TYPES, Pooling, RowType, Table, row_bytes, state_width

LINE = 64  # bytes: every table starts on a cache line


class Mode(enum.IntEnum):
    """The pooling of a feature, as kernels number it."""

    SUM = 0
    MEAN = 1
    WEIGHTED = 2


# A sequence is a lookup of bags of one id each, so its gradient is neither scaled nor weighted: a sum.
MODES = {Pooling.SUM: Mode.SUM, Pooling.MEAN: Mode.MEAN, Pooling.WEIGHTED: Mode.WEIGHTED, Pooling.SEQUENCE: Mode.SUM}
# The kernels know a row type and an optimizer by its place; `native.check_library` compares the names.
TYPES = tuple(ROW_TYPES)
RULES: dict[type, int] = {kind: number for number, kind in enumerate(OPTIMIZERS.values())}


class RowFormat(NamedTuple):
    """The storage of a row; see [Note: Row formats] in `_cpp/tables.h`."""

    type: RowType
    dim: int
    group: int  # columns that share a scale; 0: all of them

    @property
    def bytes(self) -> int:
        return row_bytes(self.type, self.dim, self.group)


class FeatureRow(NamedTuple):
    """A feature as the kernels see it; `source` is its place in the batch."""

    source: int
    table: int
    base: int
    rows: int
    dim: int
    column: int
    mode: int
    type: int
    group: int

    @property
    def format(self) -> RowFormat:
        """How its rows are stored."""
        return RowFormat(TYPES[self.type], self.dim, self.group)

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
    type: int
    group: int
    first_row: int  # where a tile begins in the whole table: random bits go by places there
    first_column: int

    @property
    def format(self) -> RowFormat:
        """How its rows are stored."""
        return RowFormat(TYPES[self.type], self.dim, self.group)

    @classmethod
    def read(cls, tables: Tensor) -> list["TableRow"]:
        """All rows of the tensor."""
        return [cls(*row) for row in tables.tolist()]


class ArenaOffset(NamedTuple):
    """The offset of a table's rows, in bytes, and of their optimizer state, in floats."""

    base: int
    state_base: int


class TablePiece(NamedTuple):
    """A rectangle of a table, as a table of its own; `whole` is the table that it is cut from."""

    table: Table
    whole: Table
    first_row: int = 0
    first_column: int = 0

    @classmethod
    def cut(cls, whole: Table, rows: tuple[int, int], cols: tuple[int, int], features: tuple[str, ...]) -> "TablePiece":
        """A rectangle of a table, looked up by features of these names."""
        dim = cols[1] - cols[0]
        table = msgspec.structs.replace(whole, rows=rows[1] - rows[0], dim=dim, features=features)
        return cls(table, whole, rows[0], cols[0])

    def pooled_by(self, pooling: Pooling) -> "TablePiece":
        """The same, pooled in another way than its table."""
        return self._replace(table=msgspec.structs.replace(self.table, pooling=pooling))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGroup:
    """Tables that one kernel call serves: all pooled ones, or all sequence ones."""

    tables: tuple[Table, ...]
    feature_names: tuple[str, ...]
    columns: int  # of the pooled output
    members_T: Tensor  # which of the arena's tables these are
    features_FC: Tensor
    tables_TC: Tensor
    hyper_TC: Tensor  # at the first step
    hyper_moves: bool

    @property
    def columns_F(self) -> list[slice]:
        """Where each feature stands in the pooled output."""
        return [slice(row.column, row.column + row.dim) for row in FeatureRow.read(self.features_FC)]

    @property
    def column_slices(self) -> dict[str, slice]:
        """The same by name, where no two tables share a feature."""
        return dict(zip(self.feature_names, self.columns_F, strict=True))

    def table_of(self, feature: int) -> Table:
        """The table of the i-th feature."""
        return self.tables[FeatureRow.read(self.features_FC)[feature].table]

    def for_sources(self, available: Sequence[str]) -> Tensor:
        """`features_FC` for a batch that holds `available` in this order; raises KeyError for a missing one."""
        # A batch is never reordered to suit the tables: telling the kernels where to look is free.
        at = {name: i for i, name in enumerate(available)}
        features = self.features_FC.clone()
        features[:, 0] = torch.tensor([at[name] for name in self.feature_names], dtype=torch.int64)
        return features


def place_tables(tables: Iterable[Table]) -> tuple[list[ArenaOffset], ArenaOffset]:
    """Where each table goes, and the size of everything."""
    places: list[ArenaOffset] = []
    base = state_base = 0
    for table in tables:
        places.append(ArenaOffset(base, state_base))
        # Tables, not rows, are padded: a row of 7 floats takes 28 bytes.
        base += _aligned(table.rows * table.row_bytes, LINE)
        state_base += _aligned(table.rows * state_width(table), LINE // 4)
    return places, ArenaOffset(base, state_base)


def make_group(
    pieces: Sequence[TablePiece], places: Sequence[ArenaOffset], chosen: Sequence[int] | None = None
) -> TableGroup:
    """Write the chosen tables down, or all of them; their features are numbered in table order."""
    chosen = range(len(pieces)) if chosen is None else chosen
    tables = [piece.table for piece in pieces]
    optimizers = [tables[i].optimizer for i in chosen]
    feature_rows: list[FeatureRow] = []
    table_rows: list[TableRow] = []
    column = 0
    for index, (piece, place) in enumerate((pieces[i], places[i]) for i in chosen):
        table = piece.table
        rows, dim, stored = table.rows, table.dim, (TYPES.index(table.row_type), table.column_group or 0)
        # The state of a row is one run of floats, whatever the optimizer keeps in it.
        state = place.state_base, state_width(table), RULES[type(table.optimizer)]
        first, count = len(feature_rows), len(table.feature_names)
        table_rows.append(
            TableRow(place.base, rows, dim, *state, first, count, *stored, piece.first_row, piece.first_column)
        )
        # Features are numbered table by table, so the update finds those of a table side by side.
        for _ in table.feature_names:
            source, mode = len(feature_rows), MODES[table.pooling]
            feature_rows.append(FeatureRow(source, index, place.base, rows, dim, column, mode, *stored))
            column += dim
    return TableGroup(
        tables=tuple(tables[i] for i in chosen),
        feature_names=tuple(name for i in chosen for name in tables[i].feature_names),
        columns=column,
        members_T=torch.tensor(chosen, dtype=torch.int64),
        features_FC=torch.tensor(feature_rows, dtype=torch.int64).view(-1, 9),
        tables_TC=torch.tensor(table_rows, dtype=torch.int64).view(-1, 12),
        hyper_TC=hyper_tensor(optimizers, [1] * len(optimizers)),
        hyper_moves=any(o.hyper_depends_on_step for o in optimizers),
    )


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit
