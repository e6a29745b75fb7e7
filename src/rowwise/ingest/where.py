"""Row filters: comparisons of columns with values, joined by "and".

`RowFilter.may_hold` (row-group pruning) has false positives, but never drops a group with a matching row. A comparison
with null holds for no row, as in SQL. Known limits: no "or", and no expressions: write such a column into the data.
"""

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import DataError, SpecError
from rowwise.ingest.bags import combine_chunks, numpy_type
from rowwise.ingest.kinds import FITS, KEYS, decoded_kind, is_time
from rowwise.ingest.reader import check_columns
from rowwise.ingest.transform.read import ToTime
from rowwise.ingest.transform.transform import RowPosition
from rowwise.tables.spec import Value

Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in", "is null", "not null"]
Plain = bool | int | float | str
NULLS = ("is null", "not null")
HOW = "'column op value' with one of " + ", ".join(get_args(Operator))

_NAME = r"(?:`(?P<quoted>[^`]+)`|(?P<name>[^\s=!<>`]+))"
_NULLS = r"(?P<nulls>is\s+not\s+null\b|not\s+null\b|is\s+null\b)"
_OP = r"(?P<op>==|!=|<=|>=|=|<|>|in\b)"
_ONE = r"\"[^\"]*\"|'[^']*'|[^\s,\[\]\"'=<>]+"
_TERM = re.compile(rf"\s*{_NAME}\s*(?:{_NULLS}|{_OP}\s*(?P<value>\[[^\]]*\]|{_ONE}))\s*", re.IGNORECASE)
_SIGNS: dict[str, Operator] = {"=": "==", "==": "==", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_AND = re.compile(r"and\s", re.IGNORECASE)


class ColumnBounds(Value, frozen=True):
    """Bounds and null count of a column in some rows; None if unknown. Times are in ticks of the column's own unit."""

    least: Any = None
    most: Any = None
    nulls: int | None = None
    rows: int | None = None


class Comparison(Value, frozen=True):
    """A comparison of one column with a value or a list of values."""

    column: str
    op: Operator
    value: Plain | tuple[Plain, ...] | None = None

    def __post_init__(self) -> None:
        listed = isinstance(self.value, tuple)
        if (self.value is None) != (self.op in NULLS) or listed != (self.op == "in"):
            raise SpecError(f"where: {self.column} {self.op} {self.value!r}", "a list for 'in', a value for others")

    @property
    def values(self) -> tuple[Plain, ...]:
        if self.value is None:
            return ()
        return self.value if isinstance(self.value, tuple) else (self.value,)

    def may_hold(self, bounds: ColumnBounds, kind: pa.DataType) -> bool:
        """False only if no row with these bounds can match."""
        if self.op == "is null":
            return bounds.nulls != 0
        if bounds.rows is not None and bounds.nulls == bounds.rows:
            return False
        if self.op == "not null" or bounds.least is None or bounds.most is None:
            return True
        return any(self._may_equal(bounds.least, bounds.most, to_native(value, kind), kind) for value in self.values)

    def _may_equal(self, least: Any, most: Any, value: Any, kind: pa.DataType) -> bool:
        match self.op:
            case "<":
                return bool(least < value)
            case "<=":
                return bool(least <= value)
            case ">":
                return bool(most > value)
            case ">=":
                return bool(most >= value)
            case "!=":
                # Statistics exclude NaN, and NaN differs from every value.
                return types.is_floating(kind) or not least == most == value
            case "==" | "in":
                return bool(least <= value <= most)
            case "is null" | "not null":
                raise AssertionError("nulls are counted, not compared")

    def comparable(self, kind: pa.DataType) -> pa.DataType:
        """The type in which values are compared."""
        return kind

    def mask(self, array: pa.ChunkedArray) -> NDArray[np.bool_]:
        if self.op in NULLS:
            answers = array.is_null() if self.op == "is null" else array.is_valid()
            return np.asarray(answers.to_numpy(), np.bool_)
        kind = array.type
        plain = _comparable(array)
        mask = np.zeros(len(array), np.bool_)
        for value in self.values:
            mask |= _compare(plain, self.op, to_native(value, kind))
        return mask


class TextTimeComparison(Comparison, frozen=True):
    """A comparison of times that are stored as text."""

    formats: tuple[str, ...] = ()  # see `to_time`

    def may_hold(self, bounds: ColumnBounds, kind: pa.DataType) -> bool:
        """Always true: the order of texts is not that of times."""
        return True

    def mask(self, array: pa.ChunkedArray) -> NDArray[np.bool_]:
        return super().mask(pa.chunked_array([self._times(combine_chunks(array))]))

    def comparable(self, kind: pa.DataType) -> pa.DataType:
        if not FITS[KEYS](kind) or types.is_integer(kind):
            raise DataError(f"column {self.column!r} holds {kind}", "text for formats of times")
        return pa.timestamp("us")

    def _times(self, array: pa.Array) -> pa.Array:
        return ToTime(column=self.column, formats=self.formats).run((array,), RowPosition())[0]


class RowFilter(Value, frozen=True):
    """A conjunction of comparisons; an empty one holds for every row."""

    all_of: tuple[Comparison, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(term.column for term in self.all_of))

    def check(self, schema: pa.Schema, source: str, key: str = "where") -> None:
        """Refuse unknown columns, and values that a column cannot hold; `key`: recipe key, for errors."""
        check_columns(self.columns, schema, source)
        for term in self.all_of:
            kind = term.comparable(schema.field(term.column).type)
            for value in term.values:
                try:
                    _compare(_comparable(pa.chunked_array([], kind)), "==", to_native(value, kind))
                except (ArithmeticError, TypeError, ValueError, pa.ArrowException):
                    raise DataError(
                        f"{source}: {key}: column {term.column!r} holds {kind}, but is compared with {value!r}",
                        _wanted_values(kind),
                    ) from None
            if types.is_boolean(decoded_kind(kind)) and term.op in ("<", "<=", ">", ">="):
                raise DataError(f"{source}: {key}: column {term.column!r} holds {kind}", "==, != or in")

    def may_hold(self, bounds: Mapping[str, ColumnBounds], schema: pa.Schema) -> bool:
        """False only if no row with these bounds can match."""
        bounded = (term for term in self.all_of if term.column in bounds)
        return all(term.may_hold(bounds[term.column], schema.field(term.column).type) for term in bounded)

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        mask = np.ones(table.num_rows, np.bool_)
        for term in self.all_of:
            mask &= term.mask(table[term.column])
        return mask


def parse(texts: str | Iterable[str], key: str = "where") -> RowFilter:
    """Parse texts such as `day >= 3`, `country in [AT, 'B R']`, `price is not null`, also joined by `and`.

    Backquotes quote column names with spaces; quotes mark text that looks like a number.
    `key`: recipe key, for errors.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    return RowFilter(all_of=tuple(term for text in texts for term in _terms(text, key)))


def _terms(text: str, key: str) -> Iterator[Comparison]:
    at = 0
    while True:
        match = _TERM.match(text, at)
        if match is None:
            raise SpecError(f"{key}: {text!r}", HOW)
        yield _term(match, text, key)
        at = match.end()
        if at == len(text):
            return
        conjunction = _AND.match(text, at)
        if conjunction is None:
            raise SpecError(f"{key}: {text!r}: cannot read {text[at:]!r}", f"{HOW}, joined by 'and'")
        at = conjunction.end()


def _term(match: re.Match[str], text: str, key: str) -> Comparison:
    name = match["quoted"] or match["name"]
    if match["nulls"] is not None:
        return Comparison(column=name, op="not null" if "not" in match["nulls"].lower() else "is null")
    op, value = match["op"].lower(), match["value"]
    if value.startswith("[") != (op == "in"):
        raise SpecError(f"{key}: {text!r}", HOW, hint="'in' takes a list in brackets")
    if op == "in":
        return Comparison(column=name, op="in", value=tuple(_literal(item) for item in re.findall(_ONE, value[1:-1])))
    return Comparison(column=name, op=_SIGNS[op], value=_literal(value))


def _literal(text: str) -> Plain:
    if text[0] in "\"'":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float) if text.isascii() and "_" not in text else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _wanted_values(kind: pa.DataType) -> str:
    plain = decoded_kind(kind)
    tests = (
        (types.is_boolean, "true or false"),
        (types.is_integer, "a whole number"),
        (types.is_floating, "a number"),
        (types.is_decimal, "a number"),
        (_is_text, "text, in quotes where it looks like a number"),
        (_is_bytes, "text, in quotes where it looks like a number"),
        (is_time, "a time such as '2024-05-31' or '2024-05-31T12:00:00'"),
    )
    return next((want for test, want in tests if test(plain)), "'is null' or 'not null' only")


def to_native(value: Plain, kind: pa.DataType) -> Any:
    """Convert a value for comparison with a column of this type; raises if that is impossible."""
    plain = decoded_kind(kind)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if types.is_boolean(plain) and isinstance(value, bool):
        return value
    if types.is_integer(plain) and is_number and value == int(value):
        return int(value)
    if types.is_floating(plain) and is_number:
        return float(value)
    if types.is_decimal(plain) and is_number:
        return Decimal(str(value))
    if isinstance(value, str) and (_is_text(plain) or _is_bytes(plain)):
        return value if _is_text(plain) else value.encode()
    if isinstance(value, str) and is_time(plain):
        return _ticks(value, plain)
    raise TypeError(f"{value!r} is no {kind}")


def _ticks(text: str, kind: pa.DataType) -> int:
    """A time in ticks of a column's own unit."""
    when = datetime.datetime.fromisoformat(text)
    if types.is_date32(kind):
        return (when.date() - datetime.date(1970, 1, 1)).days
    zoned = when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
    micros = (zoned - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1)
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
    ticks, rest = divmod(micros * per_second, 10**6)
    if rest:
        raise ValueError(f"{text} is finer than {kind}")
    return ticks


def _comparable(array: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = decoded_kind(array.type)
    if types.is_dictionary(array.type):
        array = array.cast(kind)
    if types.is_timestamp(kind):
        return array.cast(pa.int64())
    if types.is_date32(kind):
        return array.cast(pa.int32())
    if types.is_string_view(kind):
        return array.cast(pa.large_string())
    if types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    return array.cast(pa.float64()) if types.is_floating(kind) else array


def _compare(array: pa.ChunkedArray, op: str, value: Any) -> NDArray[np.bool_]:
    kind = array.type
    if types.is_integer(kind):
        # A number outside the type's range compares alike with all of its values.
        info = np.iinfo(numpy_type(kind))
        if not info.min <= value <= info.max:
            above = value > info.max
            always = op == "!=" or (op in ("<", "<=") and above) or (op in (">", ">=") and not above)
            return np.asarray(array.is_valid().to_numpy(), np.bool_) & always
    how = {"==": "equal", "in": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater"}
    scalar = pa.scalar(value) if types.is_decimal(kind) else pa.scalar(value, kind)
    answers = pc.call_function(how.get(op, "greater_equal"), [array, scalar])
    return np.asarray(pc.fill_null(answers, False).to_numpy(), np.bool_)
