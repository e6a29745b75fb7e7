"""Base classes of transforms: input and output columns, their types, and the computation.

Most transforms are `OneColumn`: they read one column and replace it, or write the result to another column.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

import pyarrow as pa

from rowwise.base.errors import SpecError
from rowwise.ingest.kinds import decoded_kind, element_of, is_text
from rowwise.ingest.reader import Split
from rowwise.ingest.transform.arrays import list_like
from rowwise.tables.spec import Value

Kinds = tuple[pa.DataType, ...]
Arrays = tuple[pa.Array, ...]


class RowPosition(Value, frozen=True, kw_only=True):
    """The split of the rows: errors name rows by it, and sampling hashes its index."""

    split: Split = Split(source="rows", start=0, stop=0, first_row=0)
    index: int = 0  # of the split among all splits


Run = Callable[[Arrays, RowPosition], Arrays]


class Transform(Value, frozen=True, kw_only=True):
    """Computes columns from columns, row by row: a row of the result depends on that row of the input only."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the input columns."""
        raise NotImplementedError

    @property
    def makes(self) -> tuple[str, ...]:
        """Names of the output columns; an existing column of that name is replaced."""
        raise NotImplementedError

    @property
    def wants(self) -> tuple[str, ...]:
        """The requirement of each input column, a key of FITS."""
        raise NotImplementedError

    def type_problem(self, kinds: Kinds) -> str:
        """Why input types that meet `wants` are still refused; empty if they are accepted."""
        return ""

    def types(self, kinds: Kinds) -> Kinds:
        """The types of the output columns for these input types."""
        raise NotImplementedError

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Compute the output columns."""
        raise NotImplementedError

    def read_files(self) -> "Transform":
        """The same transform with the contents of its files inlined."""
        return self

    def prepare(self) -> Run:
        """`run`, with the work that does not depend on rows done in advance."""
        return self.run

    def spec_error(self, problem: str) -> SpecError:
        """An error that names the kind of transform, to be raised."""
        return SpecError(f"transform {self.kind}: {problem}")


class OneColumn(Transform, frozen=True, kw_only=True):
    """A transform of one column to one column."""

    column: str
    to: str = ""  # name of the result; empty to replace the column
    want: ClassVar[str]  # a key of FITS

    @property
    def wants(self) -> tuple[str, ...]:
        return (self.want,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.to or self.column,)


class ToIds(OneColumn, frozen=True, kw_only=True):
    """A transform into integers, single or in lists like the column."""

    def types(self, kinds: Kinds) -> Kinds:
        return (list_like(kinds[0], pa.int64()),)


def check_rows(transform: Transform, rows: int | None) -> None:
    """Refuse an impossible number of table rows."""
    if rows is not None and not 1 <= rows < 1 << 63:
        raise transform.spec_error(f"rows={rows}: expected at least 1, and less than 2**63")


def check_finite(transform: Transform, **numbers: float | None) -> None:
    """Refuse NaN and infinity."""
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise transform.spec_error(f"{name}={number}: expected a finite number")


def check_borders(transform: Transform, borders: tuple[float, ...]) -> None:
    """Refuse borders that are not strictly ascending."""
    for number in borders:
        check_finite(transform, borders=number)
    for low, high in pairwise(borders):
        if not low < high:
            raise transform.spec_error(f"borders: {high} comes after {low}: expected each larger than the one before")


def is_words(kind: pa.DataType) -> bool:
    """Whether a column holds text, single or in lists, dictionary-encoded or not."""
    return is_text(decoded_kind(element_of(kind)))
