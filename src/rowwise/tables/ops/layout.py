"""Tables, features and optimizers as the kernels read them: rows of small CPU tensors.

A row of `features_FC` is a `FeatureDescriptor`, a row of `tables_TC` a `TableDescriptor`: structs of `_cpp/tables.h`
with the same order of fields. They are made once per model; a batch with another order of features gets a copy with
other sources (`TableGroup.for_sources`).
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from rowwise.tables.ops.hyper import hyper_tensor
from rowwise.tables.row_optimizers import OPTIMIZERS
from rowwise.tables.spec import ROW_TYPES, Pooling, RowType, Table, row_bytes, state_width
from rowwise.tables.store.policy import WAYS
from rowwise.tables.store.sizes import cache_slots, overflow_slots

LINE = 64  # bytes of a cache line: every table starts on one


class Mode(enum.IntEnum):
    """Pooling by its number in the kernels."""

    SUM = 0
    MEAN = 1
    WEIGHTED = 2


class Choice(enum.IntEnum):
    """Which edges into a node are sampled, by its number in the kernels; see [Note: Sampled edges]."""

    FIRST = 0
    SPREAD = 1
    STRIDE = 2


STRIDE_PRIME = 577


# A sequence looks up bags of one id each, so its gradient is that of a sum: neither scaled nor weighted.
MODES = {Pooling.SUM: Mode.SUM, Pooling.MEAN: Mode.MEAN, Pooling.WEIGHTED: Mode.WEIGHTED, Pooling.SEQUENCE: Mode.SUM}
# The kernels know a row type and an optimizer by its index here; `native.check_library` compares the names.
TYPES = tuple(ROW_TYPES)
RULES: dict[type, int] = {kind: number for number, kind in enumerate(OPTIMIZERS.values())}


class RowFormat(NamedTuple):
    """The layout of a stored row; see [Note: Row formats] in `_cpp/tables.h`."""

    type: RowType
    dim: int
    scale_group: int  # columns that share a scale; 0: all of them

    @property
    def bytes(self) -> int:
        return row_bytes(self.type, self.dim, self.scale_group)


class FeatureDescriptor(NamedTuple):
    """A feature as the kernels see it."""

    source: int  # index of the feature in the batch
    table: int  # index of its table in the group
    base: int  # first byte of the table in the arena
    rows: int
    dim: int
    column: int  # first column in the pooled output
    mode: int
    type: int
    scale_group: int  # columns that share a scale; 0: all of them

    @property
    def format(self) -> RowFormat:
        return RowFormat(TYPES[self.type], self.dim, self.scale_group)

    @classmethod
    def read(cls, features_FC: Tensor) -> list["FeatureDescriptor"]:
        return [cls(*row) for row in features_FC.tolist()]


class TableDescriptor(NamedTuple):
    """A table as the kernels see it; its features are neighbours in `features_FC`."""

    base: int  # first byte in the arena
    rows: int
    dim: int
    state_base: int  # first float in the optimizer state
    state_width: int  # floats of optimizer state per row
    rule: int  # the optimizer
    first_feature: int
    num_features: int
    type: int
    scale_group: int  # columns that share a scale; 0: all of them
    first_row: int  # of a tile in its full table: random bits for rounding are a function of the position there
    first_column: int
    slot_rows: int = -1  # of a table on disk: index of its first slot in `Arena.slot_rows`; -1: slots are rows

    @property
    def format(self) -> RowFormat:
        return RowFormat(TYPES[self.type], self.dim, self.scale_group)

    @classmethod
    def read(cls, tables_TC: Tensor) -> list["TableDescriptor"]:
        return [cls(*row) for row in tables_TC.tolist()]


# Columns of features_FC.
SOURCE, BASE, ROWS, DIM = (FeatureDescriptor._fields.index(name) for name in ("source", "base", "rows", "dim"))


class ArenaOffset(NamedTuple):
    """The offset of a table in the arena."""

    base: int  # first byte of its rows
    state_base: int  # first float of its optimizer state


class TablePiece(NamedTuple):
    """Some rows and columns of `full_table`, as a table of their own."""

    table: Table
    full_table: Table
    first_row: int = 0
    first_column: int = 0
    cache_rows: int | None = None  # size of the cache here, if the rows are elsewhere; None: all rows are here
    batch_rows: int = 0  # least number of overflow slots beside the cache
    spare_rows: int = 0  # behind the table's rows, for later versions; see `newer.py`
    pinned_rows: Tensor | None = None  # of a cached piece, ascending: see [Note: Pinned rows]

    @property
    def slots(self) -> int:
        """Rows in the arena: all rows and spare ones, or those of the cache with its overflow slots."""
        if self.cache_rows is None:
            return self.table.rows + self.spare_rows
        slots = cache_slots(self.cache_rows)
        return slots + max(overflow_slots(slots), self.batch_rows)

    @property
    def overflow(self) -> int:
        """Slots of a cached piece that are neither in sets nor of pinned rows."""
        slots, pinned = cache_slots(self.cache_rows or 0), 0 if self.pinned_rows is None else len(self.pinned_rows)
        return self.slots - (slots - pinned) // WAYS * WAYS - pinned

    @classmethod
    def cut(cls, full: Table, rows: tuple[int, int], cols: tuple[int, int], features: tuple[str, ...]) -> "TablePiece":
        """Rows and columns [first, last) of a table, looked up by features of these names."""
        table = msgspec.structs.replace(
            full, rows=rows[1] - rows[0], dim=cols[1] - cols[0], features=features, managed=None
        )
        return cls(table, full, rows[0], cols[0])

    def cached(self, cache_rows: int, samples: int) -> "TablePiece":
        """The piece with a cache here, with one overflow slot or more per feature and sample."""
        batch_rows = min(self.table.rows, samples * len(self.table.feature_names))
        return self._replace(cache_rows=cache_rows, batch_rows=batch_rows)

    def pooled_by(self, pooling: Pooling) -> "TablePiece":
        """A copy with this pooling in place of its table's."""
        return self._replace(table=msgspec.structs.replace(self.table, pooling=pooling))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGroup:
    """Tables that one kernel call looks up: all pooled tables of an arena, or all its sequence tables."""

    tables: tuple[Table, ...]
    feature_names: tuple[str, ...]
    columns: int  # columns of the pooled output
    members_T: Tensor  # index in the arena of each table
    features_FC: Tensor
    tables_TC: Tensor
    hyper_TH: Tensor  # at the first step
    hyper_depends_on_step: bool

    @property
    def columns_F(self) -> list[slice]:
        """Columns of each feature in the pooled output."""
        return [slice(row.column, row.column + row.dim) for row in FeatureDescriptor.read(self.features_FC)]

    @property
    def column_slices(self) -> dict[str, slice]:
        """Columns of each feature in the pooled output by name, for groups in which no two tables share a feature."""
        return dict(zip(self.feature_names, self.columns_F, strict=True))

    def table_of(self, feature: int) -> Table:
        """The table of the i-th feature."""
        return self.tables[FeatureDescriptor.read(self.features_FC)[feature].table]

    def for_sources(self, available: Sequence[str]) -> Tensor:
        """`features_FC` for a batch that holds `available` in this order; raises KeyError for a missing one."""
        # A batch is never reordered for the tables: the kernels look up each feature where it is.
        at = {name: i for i, name in enumerate(available)}
        features_FC = self.features_FC.clone()
        features_FC[:, SOURCE] = torch.tensor([at[name] for name in self.feature_names], dtype=torch.int64)
        return features_FC


def lay_out_tables(pieces: Iterable[TablePiece]) -> tuple[list[ArenaOffset], ArenaOffset]:
    """The offset of each table in an arena, and the arena's size."""
    offsets: list[ArenaOffset] = []
    base = state_base = 0
    for piece in pieces:
        offsets.append(ArenaOffset(base, state_base))
        # Tables are padded to cache lines, rows are not: a row of 7 floats takes 28 bytes.
        base += _round_up(piece.slots * piece.table.row_bytes, LINE)
        state_base += _round_up(piece.slots * state_width(piece.table), LINE // 4)
    return offsets, ArenaOffset(base, state_base)


def make_group(
    pieces: Sequence[TablePiece],
    offsets: Sequence[ArenaOffset],
    chosen: Sequence[int] | None = None,
    slot_rows: Mapping[int, int] | None = None,
) -> TableGroup:
    """The group of the chosen tables (None: all), their features numbered table by table.

    `slot_rows`: by index of a table on disk, see `TableDescriptor`.
    """
    chosen = range(len(pieces)) if chosen is None else chosen
    tables = [piece.table for piece in pieces]
    optimizers = [tables[i].optimizer for i in chosen]
    feature_descriptors: list[FeatureDescriptor] = []
    table_descriptors: list[TableDescriptor] = []
    column = 0
    for index, member in enumerate(chosen):
        piece, offset = pieces[member], offsets[member]
        table = piece.table
        rows, dim, stored = piece.slots, table.dim, (TYPES.index(table.row_type), table.column_group or 0)
        state = offset.state_base, state_width(table), RULES[type(table.optimizer)]
        first, count = len(feature_descriptors), len(table.feature_names)
        table_descriptors.append(
            TableDescriptor(offset.base, rows, dim, *state, first, count, *stored, piece.first_row, piece.first_column,
                            (slot_rows or {}).get(member, -1))
        )  # fmt: skip
        for _ in table.feature_names:
            source, mode = len(feature_descriptors), MODES[table.pooling]
            feature_descriptors.append(FeatureDescriptor(source, index, offset.base, rows, dim, column, mode, *stored))
            column += dim
    return TableGroup(
        tables=tuple(tables[i] for i in chosen),
        feature_names=tuple(name for i in chosen for name in tables[i].feature_names),
        columns=column,
        members_T=torch.tensor(chosen, dtype=torch.int64),
        features_FC=torch.tensor(feature_descriptors, dtype=torch.int64).view(-1, len(FeatureDescriptor._fields)),
        tables_TC=torch.tensor(table_descriptors, dtype=torch.int64).view(-1, len(TableDescriptor._fields)),
        hyper_TH=hyper_tensor(optimizers, [1] * len(optimizers)),
        hyper_depends_on_step=any(o.hyper_depends_on_step for o in optimizers),
    )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
