"""Roles of the data's columns: labels, dense numbers, ids of tables, weight, key and time.

Frozen values, read from recipes and saved in run folders. Apart from `encode`, which does what they say, because
they hold for training and serving alike, and need neither data nor tensors to be checked against a schema.

What is missing has one meaning everywhere: a missing number is `fill`, a missing id is no id (the bag is empty, as an
empty list's is, and pools to zeros), a missing id inside a list is left out, a missing label or weight is an error.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import pyarrow as pa
from pyarrow import types

from rowwise.errors import DataError, SpecError
from rowwise.ingest.reader import check_columns
from rowwise.row_optimizers import RowOptimizer
from rowwise.spec import Table, Value


class Dense(Value, frozen=True):
    """A column of numbers."""

    column: str
    fill: float = 0.0  # stands for null and NaN, before any logarithm
    log1p: bool = False  # log(1 + x), where x below 0 counts as 0

    def __post_init__(self) -> None:
        """Refuse what would stand for missing numbers as another that is none."""
        if not math.isfinite(self.fill):
            raise SpecError(f"columns: {self.column!r}: fill={self.fill}: want a finite number")


class Sparse(Value, frozen=True):
    """A column of ids, one or a list in each row, and the table whose rows they name."""

    column: str
    table: str = ""  # none named: called like the column
    ids: Literal["direct", "hash"] = "hash"  # row numbers already, or any whole numbers or text, hashed to the rows
    first: int | None = None  # of a list, how many ids are used; None: all
    feature: str = ""  # the name in the batch; none: the column's
    # File of known ids, each with the row of its own (see `rowwise data inspect`); all others share row 0
    vocabulary: str = ""
    # Of the table, where `tables` has none of its name. None: rows by the vocabulary or the data, the rest by default
    rows: int | None = None
    dim: int | None = None
    optimizer: RowOptimizer | None = None

    @property
    def table_name(self) -> str:
        return self.table or self.column

    @property
    def feature_name(self) -> str:
        """The feature of the batch."""
        return self.feature or self.column


class Columns(Value, frozen=True):
    """The role of each column: labels, ids, numbers, weight, key and time."""

    labels: tuple[str, ...]  # each holds 0 and 1; none: the rows are to be predicted for
    sparse: tuple[Sparse, ...]
    dense: tuple[Dense, ...] = ()
    weight: str | None = None  # how much a row counts
    key: str | None = None  # names the row: a whole number, or text, which is hashed
    time: str | None = None  # whole numbers as they are; times in microseconds since 1970
    shared: tuple[str, ...] = ()  # features that neighbouring rows have alike, such as a session's: held once for all

    def __post_init__(self) -> None:
        if not self.sparse:
            raise SpecError("columns: want at least one sparse feature")
        names = [s.feature_name for s in self.sparse]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"columns: feature {twice[0]!r} is made twice: give one of them another feature=")
        unknown = [name for name in self.shared if name not in names]
        if unknown:
            raise SpecError(f"columns.shared names {', '.join(unknown)}; the features are {', '.join(names)}")
        for sparse in self.sparse:
            if sparse.first is not None and not 1 <= sparse.first < 1 << 31:
                want = "want at least 1 and less than 2**31, or None for all"
                raise SpecError(f"columns: {sparse.column!r}: first={sparse.first}: {want}")
            if sparse.ids not in ("direct", "hash"):
                raise SpecError(f"columns: {sparse.column!r}: ids={sparse.ids!r}: want 'direct' or 'hash'")
            for name, count in (("rows", sparse.rows), ("dim", sparse.dim)):
                if count is not None and count < 1:
                    raise SpecError(f"columns: {sparse.column!r}: {name}={count}: want at least 1")
            if sparse.vocabulary and (sparse.ids == "direct" or sparse.rows is not None):
                given = "ids='direct'" if sparse.ids == "direct" else f"rows={sparse.rows}"
                raise SpecError(
                    f"columns: {sparse.column!r}: {given} with a vocabulary, which has the rows: leave it out"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read, each once."""
        return tuple(dict.fromkeys(name for name, _ in self._requirements()))

    def check(self, schema: pa.Schema, source: str) -> None:
        """Refuse columns that are not there or hold something else."""
        check_columns(self.names, schema, source)
        for name, want in self._requirements():
            kind = schema.field(name).type
            if not FITS[want](kind):
                raise DataError(f"{source}: column {name!r} holds {kind}: want {want}{_hint_for(kind)}")

    def check_tables(self, tables: Sequence[Table]) -> None:
        """Refuse a feature whose table is not there or does not look it up."""
        by_name = {table.name: table for table in tables}
        for sparse in self.sparse:
            name, feature = sparse.table_name, sparse.feature_name
            if name not in by_name:
                there = ", ".join(by_name) or "none"
                raise SpecError(f"column {sparse.column!r} wants a table {name!r}; there are: {there}")
            if feature not in by_name[name].feature_names:
                known = ", ".join(by_name[name].feature_names)
                raise SpecError(f"table {name!r} looks up {known}, and not {feature!r}: name it in Table(features=)")

    def uncounted(self, tables: Sequence[Table]) -> tuple[str, ...]:
        """Columns whose number of rows neither a table nor their own keys say: the data have to be looked at."""
        names = {table.name for table in tables} | {s.table_name for s in self.sparse if s.rows or s.vocabulary}
        return tuple(s.column for s in self.sparse if s.table_name not in names)

    def _requirements(self) -> Iterator[tuple[str, str]]:
        """Each column with its required type, a key of FITS."""
        yield from ((name, NUMBERS) for name in self.labels)
        yield from ((dense.column, NUMBERS) for dense in self.dense)
        yield from ((s.column, ROWS if s.ids == "direct" else IDS) for s in self.sparse)
        yield from ((name, want) for name, want in self._about_rows() if name is not None)

    def _about_rows(self) -> tuple[tuple[str | None, str], ...]:
        return ((self.weight, NUMBERS), (self.key, KEYS), (self.time, TIMES))


NUMBERS = "numbers"
ROWS = "whole numbers, or lists of them"
IDS = "whole numbers or text, or lists of them"
KEYS = "whole numbers or text"
TIMES = "times or whole numbers"


def is_text(kind: pa.DataType) -> bool:
    """Strings and bytes in any of Arrow's layouts."""
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def is_list(kind: pa.DataType) -> bool:
    """Lists in any of Arrow's layouts."""
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)
    return any(test(kind) for test in tests)


def _is_number(kind: pa.DataType) -> bool:
    return _is_whole(kind) or any(test(kind) for test in (types.is_boolean, types.is_floating, types.is_decimal))


def _is_whole(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind))


def _is_key(kind: pa.DataType) -> bool:
    inner = kind.value_type if types.is_dictionary(kind) else kind
    return _is_whole(inner) or is_text(inner)


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_list(kind) else kind


FITS: dict[str, Callable[[pa.DataType], bool]] = {  # what a column has to hold, as errors say it: whether a type does
    NUMBERS: _is_number,
    ROWS: lambda kind: _is_whole(_element(kind)),
    IDS: lambda kind: _is_key(_element(kind)),
    KEYS: _is_key,
    TIMES: lambda kind: _is_whole(kind) or types.is_timestamp(kind) or types.is_date(kind),
}


def _hint_for(kind: pa.DataType) -> str:
    if is_text(_element(kind)):
        return " (text is read with ids='hash'; a number written otherwise, such as 'NA', makes a CSV column text)"
    if types.is_floating(_element(kind)):
        return " (pandas makes floats of whole numbers beside missing ones: store them as Int64)"
    return ""
