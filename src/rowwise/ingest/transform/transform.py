"""The interface of transforms: columns read, columns made, their types, and the computation.

What a kind does not say again holds for it: a transform reads one column and makes one, in its place or under another
name.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import pyarrow as pa
from pyarrow import types

from rowwise.errors import SpecError
from rowwise.ingest.columns import FITS, IDS, KEYS, NUMBERS, ROWS, TIMES, is_list, is_text
from rowwise.ingest.reader import Split
from rowwise.ingest.transform.arrays import element_kind
from rowwise.spec import Value

Kinds = tuple[pa.DataType, ...]
Arrays = tuple[pa.Array, ...]

LISTS = "lists"
ID_LISTS = "lists of whole numbers or text"
NUMBER_LISTS = "lists of numbers"
NUMBERS_OR_LISTS = "numbers, or lists of them"
VALUES = "numbers or text, or lists of them"
NUMBER_OR_KEY = "numbers or text"
ANYTHING = "anything"
MEETS: dict[str, Callable[[pa.DataType], bool]] = {  # what a column has to hold, as errors say it: whether a type does
    **{want: FITS[want] for want in (IDS, KEYS, NUMBERS, ROWS, TIMES)},
    LISTS: is_list,
    ID_LISTS: lambda kind: is_list(kind) and FITS[IDS](kind),
    NUMBER_LISTS: lambda kind: is_list(kind) and FITS[NUMBERS](element_kind(kind)),
    NUMBERS_OR_LISTS: lambda kind: FITS[NUMBERS](element_kind(kind)),
    VALUES: lambda kind: FITS[NUMBERS](element_kind(kind)) or FITS[IDS](kind),
    NUMBER_OR_KEY: lambda kind: FITS[NUMBERS](kind) or FITS[KEYS](kind),
    ANYTHING: lambda kind: True,
}


class RowPosition(Value, frozen=True, kw_only=True):
    """The split and index of rows: errors name rows by it, and sampling draws by it."""

    split: Split = Split(source="rows", start=0, stop=0, first_row=0)
    index: int = 0  # the split's number among all splits


Run = Callable[[Arrays, RowPosition], Arrays]


class Transform(Value, frozen=True, kw_only=True):
    """A pure function from columns to columns, row by row: a row's output depends on that row alone."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns it needs."""
        raise NotImplementedError

    @property
    def makes(self) -> tuple[str, ...]:
        """The columns it makes, or puts others in the place of."""
        raise NotImplementedError

    @property
    def wants(self) -> tuple[str, ...]:
        """The required type of each column it reads, a key of MEETS."""
        raise NotImplementedError

    def complaint(self, kinds: Kinds) -> str:
        """The fault of types that meet `wants`; empty if there is none."""
        return ""

    def types(self, kinds: Kinds) -> Kinds:
        """The types of the columns it makes of columns of these types."""
        raise NotImplementedError

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """The columns it makes."""
        raise NotImplementedError

    def loaded(self) -> "Transform":
        return self

    def ready(self) -> Run:
        """`run`, with what is the same for all rows done once."""
        return self.run

    def refuse(self, problem: str) -> SpecError:
        """An error that says which kind of transform is wrong."""
        return SpecError(f"transform {self.kind}: {problem}")


class OneColumn(Transform, frozen=True, kw_only=True):
    """A transform of one column into one."""

    column: str
    to: str = ""  # what the result is called; none: it takes the column's place

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.to or self.column,)


def check_rows(transform: Transform, rows: int | None) -> None:
    """Ids are hashed to a number of rows that a table can have."""
    if rows is not None and not 1 <= rows < 1 << 63:
        raise transform.refuse(f"rows={rows}: want at least 1, and less than 2**63")


def check_finite(transform: Transform, **numbers: float | None) -> None:
    """Refuse what JSON cannot hold and no formula means."""
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise transform.refuse(f"{name}={number}: want a finite number")


def check_borders(transform: Transform, borders: tuple[float, ...]) -> None:
    """Borders rise, or buckets between them could never be met."""
    for number in borders:
        check_finite(transform, borders=number)
    for low, high in pairwise(borders):
        if not low < high:
            raise transform.refuse(f"borders: {high} comes after {low}: want each larger than the one before")


def is_words(kind: pa.DataType) -> bool:
    """Text, in a dictionary or not, single or in lists."""
    inner = element_kind(kind)
    return is_text(inner.value_type if types.is_dictionary(inner) else inner)
