"""The role of each column of the data: label, number, ids of a table, weight, key or time.

Frozen values, read from recipes and saved in run folders; training and serving use the same ones. Checking them against
a schema needs neither data nor tensors.

Missing values mean the same everywhere: a missing number is `fill`; a missing id is no id (the bag is empty and pools
to zeros, as an empty list does); a missing id inside a list is left out; a row without a label is left out
(`labels.py`); a missing weight is an error.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import pyarrow as pa
from pyarrow import types

from rowwise.base.errors import DataError, SpecError
from rowwise.ingest.kinds import FITS, IDS, KEYS, NUMBERS, ROWS, TIMES, element_of, is_text
from rowwise.ingest.labels import Label, LabelValues, parse_label
from rowwise.ingest.reader import check_columns
from rowwise.tables.managed import Managed
from rowwise.tables.row_optimizers import RowOptimizer
from rowwise.tables.spec import Table, Value

MIN_STD, LARGEST = 1e-30, 3.4e38  # numbers stay finite in 32 bits


class Dense(Value, frozen=True):
    """A column of numbers."""

    column: str
    fill: float = 0.0  # replaces null and NaN, before the logarithm
    log1p: bool = False  # take log(1 + max(x, 0))
    mean: float = 0.0  # (x - mean) / std, after the logarithm
    std: float = 1.0

    def __post_init__(self) -> None:
        for name, number in (("fill", self.fill), ("mean", self.mean)):
            if not abs(number) <= LARGEST:
                raise SpecError(f"columns: {self.column!r}: {name}={number}", "a finite number of 32 bits")
        if not MIN_STD <= self.std <= LARGEST:
            raise SpecError(f"columns: {self.column!r}: std={self.std}", f"{MIN_STD} to {LARGEST}")


class Sparse(Value, frozen=True):
    """A column of ids, one or a list of them in each row, and the table that they look up."""

    column: str
    table: str = ""  # by default named like the column
    ids: Literal["direct", "hash"] = "hash"  # ids are row numbers, or whole numbers or text that are hashed to rows
    first: int | None = None  # truncate each list to this many ids; None keeps all
    feature: str = ""  # name of the feature in the batch; by default that of the column
    # File of known ids with a row each (see `rowwise data inspect`); all other ids share row 0
    vocabulary: str = ""
    # Settings of the table if `tables` lacks it. rows=None: from the vocabulary or the data; other fields: the defaults
    rows: int | None = None
    dim: int | None = None
    optimizer: RowOptimizer | None = None
    managed: Managed | None = None  # maps an unbounded number of ids to `rows` rows

    @property
    def table_name(self) -> str:
        return self.table or self.column

    @property
    def feature_name(self) -> str:
        return self.feature or self.column


class Columns(Value, frozen=True):
    """The role of each column: labels, ids, numbers, weight, key and time."""

    # Columns of 0 and 1, or conditions on columns, such as "rating >= 4"; empty for prediction
    labels: tuple[str, ...]
    sparse: tuple[Sparse, ...]
    dense: tuple[Dense, ...] = ()
    weight: str | None = None  # weight of the sample in the loss
    key: str | None = None  # identifies the row: a whole number, or text, which is hashed
    time: str | None = None  # whole numbers as they are; times as microseconds since 1970
    # Values of labels, as train.objective needs them: 0 and 1, finite numbers, or finite numbers of at least 0
    label_values: LabelValues = "clicks"
    shared: tuple[str, ...] = ()  # features equal in neighbouring rows, as in a session: stored and looked up once

    def __post_init__(self) -> None:
        if not self.sparse:
            raise SpecError("columns: no sparse feature", "at least one Sparse(column=...)")
        names = [s.feature_name for s in self.sparse]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"columns: two sparse columns make feature {twice[0]!r}", "a different feature= for each")
        unknown = [name for name in self.shared if name not in names]
        if unknown:
            raise SpecError(f"columns.shared: no feature {', '.join(unknown)}", f"some of {', '.join(names)}")
        for sparse in self.sparse:
            _check_sparse(sparse)
        if len(set(self.tasks)) < len(self.labels):
            raise SpecError(f"columns.labels: {', '.join(self.labels)}", "each label once")

    @property
    def parsed_labels(self) -> tuple[Label, ...]:
        return tuple(map(parse_label, self.labels))

    @property
    def tasks(self) -> tuple[str, ...]:
        """A name for each label: its column, or the whole condition if several labels use the same column."""
        names = [label.name for label in self.parsed_labels]
        return tuple(t if names.count(n) > 1 else n for n, t in zip(names, self.labels, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read, each once."""
        labels = (name for label in self.parsed_labels for name in label.columns)
        return tuple(dict.fromkeys((*labels, *(name for name, _ in self._requirements()))))

    def check(self, schema: pa.Schema, source: str) -> None:
        """Refuse columns that are missing, or have a type that their role does not allow."""
        check_columns(self.names, schema, source)
        for label in self.parsed_labels:
            label.check(schema, source)
        for name, want in self._requirements():
            kind = schema.field(name).type
            if not FITS[want](kind):
                raise DataError(f"{source}: column {name!r} holds {kind}", want, hint=_hint_for(kind))

    def check_tables(self, tables: Sequence[Table]) -> None:
        """Refuse a feature without a table, or whose table does not list it."""
        by_name = {table.name: table for table in tables}
        for sparse in self.sparse:
            name, feature = sparse.table_name, sparse.feature_name
            if name not in by_name:
                known = ", ".join(by_name) or "none"
                raise SpecError(f"column {sparse.column!r}: no table {name!r}; the tables are {known}")
            if feature not in by_name[name].feature_names:
                known = ", ".join(by_name[name].feature_names)
                raise SpecError(
                    f"table {name!r} has features {known}, not {feature!r}", f"{feature!r} in Table(features=)"
                )

    def uncounted(self, tables: Sequence[Table]) -> tuple[str, ...]:
        """Columns whose number of table rows can only be counted from the data."""
        names = {table.name for table in tables} | {s.table_name for s in self.sparse if s.rows or s.vocabulary}
        return tuple(s.column for s in self.sparse if s.table_name not in names)

    def _requirements(self) -> Iterator[tuple[str, str]]:
        """Each column except labels, with its required type, a key of FITS."""
        yield from ((dense.column, NUMBERS) for dense in self.dense)
        yield from ((s.column, ROWS if s.ids == "direct" else IDS) for s in self.sparse)
        yield from ((name, want) for name, want in self._row_columns() if name is not None)

    def _row_columns(self) -> tuple[tuple[str | None, str], ...]:
        return ((self.weight, NUMBERS), (self.key, KEYS), (self.time, TIMES))


def _check_sparse(sparse: Sparse) -> None:
    if sparse.first is not None and not 1 <= sparse.first < 1 << 31:
        raise SpecError(
            f"columns: {sparse.column!r}: first={sparse.first}", "at least 1 and less than 2**31, or None for all"
        )
    if sparse.ids not in ("direct", "hash"):
        raise SpecError(f"columns: {sparse.column!r}: ids={sparse.ids!r}", "'direct' or 'hash'")
    for name, count in (("rows", sparse.rows), ("dim", sparse.dim)):
        if count is not None and count < 1:
            raise SpecError(f"columns: {sparse.column!r}: {name}={count}", "at least 1")
    if sparse.vocabulary and sparse.managed is not None:
        raise SpecError(
            f"columns: {sparse.column!r}: managed, with a vocabulary",
            "only one of the two, as the vocabulary lists the ids",
        )
    if sparse.vocabulary and (sparse.ids == "direct" or sparse.rows is not None):
        setting = "ids='direct'" if sparse.ids == "direct" else f"rows={sparse.rows}"
        raise SpecError(
            f"columns: {sparse.column!r}: {setting} with a vocabulary, which determines the rows", f"no {setting}"
        )


def _hint_for(kind: pa.DataType) -> str:
    if is_text(element_of(kind)):
        return "set ids='hash' for text; one value such as 'NA' makes a whole CSV column text"
    if types.is_floating(element_of(kind)):
        return "store whole numbers with missing values as Int64, as pandas turns them into floats"
    return ""
