"""Reads the rows of requests, from JSON or Arrow, as columns of the version's raw schema.

A column that is absent is an error, as null is how a missing value is sent; other columns are ignored. Values are
converted only where nothing is lost. Whole numbers may be text, because many JSON libraries round large ones: digits,
and a minus sign before them. Names are checked before any value is looked at.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, final

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest.kinds import is_list, is_text
from rowwise.ingest.reader import check_columns
from rowwise.ingest.unpacked import read_arrow_stream
from rowwise.serve.json_body import WHERE, BodyLimits, ColumnName, check_count, decode_body, kinds_of
from rowwise.serve.sides import SideTable

MAX_BYTES = 64 << 20
MAX_SHOWN = 80  # characters of a value in a message
SPARE_COLUMNS = 256  # that a request may have though they are not read
LISTS_AT_ONCE = 1 << 15  # values in lists of a batch, unless it has more than 256 rows
LIST_VALUES = 128  # in a row that counts as one
NAME_characters = 256  # of a column that is not read
WHOLE = re.compile(r"-?[0-9]{1,20}")  # int() takes digits of all scripts, spaces and underscores, too
REFUSED = (pa.ArrowException, OverflowError, TypeError, ValueError)  # what Arrow raises for values of another type


class RequestRows(NamedTuple):
    """The columns that a prediction reads, and how many were sent in vain."""

    arrays: dict[str, pa.Array]
    rows: int
    ignored: int
    unknown: int = 0  # keys of side tables
    list_values: np.ndarray | None = None  # of each row, where one has more than LIST_VALUES

    def costs(self, rows_at_once: int) -> np.ndarray | None:
        """How many rows those before each row count as, where so many are computed together; None: once each."""
        if self.list_values is None:
            return None
        costs = np.maximum(1.0, self.list_values / max(LIST_VALUES, LISTS_AT_ONCE // rows_at_once))
        return np.concatenate([[0.0], np.cumsum(costs)])

    def slice(self, begin: int, end: int) -> dict[str, pa.Array]:
        return {name: array.slice(begin, end - begin) for name, array in self.arrays.items()}


class JsonBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request in JSON: rows; or a context, whose values all candidates share."""

    rows: dict[ColumnName, list[Any]] | None = None
    context: dict[ColumnName, Any] | None = None
    candidates: dict[ColumnName, list[Any]] | None = None


@final
class RequestReader:
    """Reads requests for one raw schema.

    Args:
        schema: of the columns that a prediction reads.
        max_rows: of a request.
        sides: tables that have columns which a request leaves out.
        max_bytes: of a compressed body, once it is not.
        limits: what a body may have.
    """

    def __init__(
        self,
        schema: pa.Schema,
        max_rows: int,
        sides: Sequence[SideTable] = (),
        max_bytes: int = MAX_BYTES,
        limits: BodyLimits | None = None,
    ) -> None:
        self.schema, self._max_rows, self._sides, self._max_bytes = schema, max_rows, sides, max_bytes
        keys = [pa.field(side.key, side.kind) for side in sides if side.key not in schema.names]
        self._fields = pa.schema([*schema, *keys])
        self._groups = _group_fields(self._fields)
        self._read, self._order = tuple(self._fields.names), tuple(schema.names)
        in_sides = {name for side in sides for name in side.columns}
        self._names = [name for name in schema.names if name not in in_sides]  # which a request must have
        self._lists = [field.name for field in schema if is_list(field.type)]
        self._max_characters = max([NAME_characters, *map(len, self._read)])
        self.max_columns = 2 * len(self._read) + SPARE_COLUMNS  # a list may be two tensors
        self.limits = (limits or BodyLimits())._replace(columns=self.max_columns)

    def reads(self, name: str) -> bool:
        return name in self._read

    def read_json(self, body: bytes | bytearray) -> RequestRows:
        found = decode_body(body, JsonBody, self.limits, "JSON with rows, or with context and candidates")
        if found.rows is not None and found.context is None and found.candidates is None:
            return self.read_lists(found.rows)
        if found.rows is None and found.candidates is not None:
            return self.read_candidates(found.context or {}, found.candidates)
        raise DataError(WHERE, '{"rows": {...}}, or {"context": {...}, "candidates": {...}}')

    def read_arrow(self, body: bytes | bytearray) -> RequestRows:
        """Read an Arrow IPC stream."""
        try:
            table = read_arrow_stream(body, self._max_bytes, self.check_names)
        except pa.ArrowException as error:
            raise DataError(f"{WHERE}: not an Arrow IPC stream that is read: {error}") from None
        return self._read_table(table)

    def read_columns(self, columns: Mapping[str, pa.Array]) -> RequestRows:
        """Read columns of any types."""
        self.check_names(columns)
        used = {name: columns[name] for name in self._read if name in columns}
        self._check_lengths({name: len(array) for name, array in used.items()})
        return self._read_table(pa.table(used), len(columns) - len(used))

    def _read_table(self, table: pa.Table, ignored: int = 0) -> RequestRows:
        rows = self._check_rows(table.num_rows)
        there = set(table.column_names)
        arrays = {
            field.name: _cast(table[field.name], field, self._max_bytes)
            for field in self._fields
            if field.name in there
        }
        return self._complete(arrays, rows, ignored + table.num_columns)

    def read_lists(self, columns: Mapping[str, Sequence[Any]]) -> RequestRows:
        """Read columns of Python values."""
        self.check_names(columns)
        rows = self._check_lengths({name: len(columns[name]) for name in self._read if name in columns})
        return self._complete(self._convert(columns), rows, len(columns))

    def read_candidates(self, context: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]) -> RequestRows:
        """Read columns of Python values: one of each column that all candidates share, and those of the candidates."""
        self.check_names([*context, *candidates])
        lengths = {name: len(candidates[name]) for name in self._read if name in candidates}
        if not lengths:
            raise DataError(f"{WHERE}: no column in candidates is read", f"some of {', '.join(self._read)}")
        rows = self._check_lengths(lengths, "candidates")
        once = {name: [value] for name, value in context.items()}
        arrays = self._convert(candidates) | self._convert(once, rows)
        return self._complete(arrays, rows, len(context) + len(candidates))

    def _convert(self, columns: Mapping[str, Sequence[Any]], times: int | None = None) -> dict[str, pa.Array]:
        """Those columns that are read, of one length; `times`: they are a context, with a row for each candidate."""
        found: list[_ConvertedGroup] = []
        for group in self._groups:
            names = [name for name in group.fields if name in columns]
            if not names:
                continue
            length = len(columns[names[0]])
            joined = group.join([columns[name] for name in names])
            parts = (
                [to_array(columns[name], group.fields[name], whole=group.whole) for name in names]
                if joined is None
                else [joined.slice(k * length, length) for k in range(len(names))]
            )
            found.append(_ConvertedGroup(names, parts, joined))
        if times is not None:
            self._check_context(times, sum(part.nbytes for one in found for part in one.parts))
        arrays: dict[str, pa.Array] = {}
        for one in found:
            arrays |= zip(one.names, one.parts if times is None else one.repeat(times), strict=True)
        return arrays

    def _check_context(self, candidates: int, size_bytes: int) -> None:
        """Refuse a context that is too large when each candidate has it."""
        repeated_bytes = candidates * size_bytes
        if repeated_bytes > self._max_bytes:
            raise DataError(
                f"{WHERE}: the context of {candidates} candidates takes {repeated_bytes:,} bytes",
                f"at most {self._max_bytes:,}",
                hint="send fewer candidates, or shorter lists",
            )

    def _complete(self, arrays: dict[str, pa.Array], rows: int, given: int) -> RequestRows:
        """With columns of side tables, in the order of the schema; `given`: columns of the request."""
        ignored, unknown = given - len(arrays), 0
        for side in self._sides:
            missing = [name for name in side.columns if name not in arrays]
            if missing:
                joined = side.join(arrays[side.key], missing)
                arrays |= joined.arrays
                unknown += joined.unknown
        return RequestRows(
            {name: arrays[name] for name in self._order}, rows, ignored, unknown, self._list_values(arrays, rows)
        )

    def _list_values(self, arrays: Mapping[str, pa.Array], rows: int) -> np.ndarray | None:
        """The values in the lists of each row; raises for a list that would hold up other requests."""
        lists = {name: arrays[name] for name in self._lists}
        if sum(len(array.values) for array in lists.values()) <= LIST_VALUES:
            return None
        total = np.zeros(rows, np.int64)
        for name, array in lists.items():
            lengths = pc.call_function("list_value_length", [array]).fill_null(0).to_numpy(zero_copy_only=False)
            if lengths.max() > self.limits.list_values:
                raise DataError(
                    f"{WHERE}: column {name!r} has a list of {lengths.max():,} values",
                    f"at most {self.limits.list_values:,}",
                )
            total += lengths
        return total if total.max() > LIST_VALUES else None

    def check_names(self, columns: Collection[str]) -> None:
        """Refuse too many names, long names, doubled names and missing names."""
        check_count("columns", len(columns), self.max_columns)
        for name in columns:
            if len(name) > self._max_characters:
                raise DataError(
                    f"{WHERE}: column {name[:MAX_SHOWN]!r}... has a name of {len(name):,} characters",
                    f"at most {self._max_characters}",
                )
        if not isinstance(columns, Mapping) and len(set(columns)) < len(columns):
            ((twice, _),) = Counter(columns).most_common(1)
            raise DataError(f"{WHERE}: column {twice!r} is given twice", "each column once")
        if not all(name in columns for name in self._names):
            check_columns(self._names, pa.schema(dict.fromkeys(columns, pa.null())), WHERE)
        for side in self._sides:
            missing = [name for name in side.columns if name not in columns]
            if missing and side.key not in columns:
                raise DataError(f"{WHERE}: no column {side.key!r}, by which {missing[0]!r} is looked up", "one of them")

    def _check_lengths(self, lengths: Mapping[str, int], what: str = "rows") -> int:
        rows = max(lengths.values())
        for name, length in lengths.items():
            if length != rows:
                raise DataError(
                    f"{WHERE}: column {name!r} has {length} {what}, others have {rows}", "the same number in each"
                )
        return self._check_rows(rows)

    def _check_rows(self, rows: int) -> int:
        if not 1 <= rows <= self._max_rows:
            raise DataError(f"{WHERE}: {rows} rows", f"1 to {self._max_rows} in a request")
        return rows


class _ConvertedGroup(NamedTuple):
    """The columns of a request that are of one group."""

    names: list[str]
    parts: list[pa.Array]  # of one length
    joined: pa.Array | None  # all parts, where they were converted together

    def repeat(self, times: int) -> list[pa.Array]:
        """The columns with each value `times` times."""
        whole = self.joined if self.joined is not None else pa.concat_arrays(self.parts)
        repeated, length = whole.take(pa.array(np.repeat(np.arange(len(whole)), times))), len(self.parts[0]) * times
        return [repeated.slice(k * length, length) for k in range(len(self.parts))]


class _FieldGroup(NamedTuple):
    """Fields of one type, whose values are converted together: a conversion takes microseconds for one value, too."""

    kind: pa.DataType
    fields: dict[str, pa.Field]
    whole: bool  # of whole numbers

    def join(self, columns: Sequence[Sequence[Any]]) -> pa.Array | None:
        """The values of all columns; None: each has to be converted alone, which names a bad value."""
        if len(columns) == 1:
            return None
        values = list(chain.from_iterable(columns))
        if bool in kinds_of(values):
            return None  # Arrow takes true for 1
        try:
            if not self.whole:
                return pa.array(values, self.kind)
            found = pa.array(values)
            if found.type == self.kind:
                return found
            return found.cast(self.kind) if types.is_integer(found.type) else None
        except REFUSED:
            return None


def _group_fields(schema: pa.Schema) -> tuple[_FieldGroup, ...]:
    """Single numbers by type; other fields each in a group of its own."""
    numbers: dict[pa.DataType, dict[str, pa.Field]] = {}
    groups: list[_FieldGroup] = []
    for field in schema:
        if types.is_integer(field.type) or types.is_floating(field.type):
            numbers.setdefault(field.type, {})[field.name] = field
        else:
            groups.append(_FieldGroup(field.type, {field.name: field}, types.is_integer(_element(field.type))))
    return (*groups, *(_FieldGroup(kind, fields, types.is_integer(kind)) for kind, fields in numbers.items()))


def to_array(values: Sequence[Any], field: pa.Field, *, whole: bool) -> pa.Array:
    """Python values as a column; raises for the first that does not fit its type. `whole`: of whole numbers."""
    is_number = whole or _is_number(_element(field.type))
    try:
        if is_number and _has_truth(values):
            raise ValueError(values)
        if not whole:
            return pa.array(values, field.type)
        found = pa.array(values)  # in its own type first, as Arrow would cut 2.5 down to 2
        if found.type == field.type:
            return found
        _check_numbers(found, field)
        return found.cast(field.type)
    except REFUSED:
        pass
    converted = []
    for row, value in enumerate(values):
        try:
            if is_number and _has_truth([value]):
                raise ValueError(value)
            one = _parse_whole(value) if whole else value
            pa.array([one], field.type)
        except REFUSED:
            raise DataError(
                f"{WHERE}: row {row}, column {field.name!r}: {repr(value)[:MAX_SHOWN]}",
                f"{_describe(field.type)}, or null",
            ) from None
        converted.append(one)
    return pa.array(converted, field.type)


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_list(kind) else kind


def _parse_whole(value: Any) -> Any:
    """A whole number from text, also in a list; other values as they are."""
    if isinstance(value, list):
        return [_parse_whole(one) for one in value]
    if isinstance(value, str):
        if not WHOLE.fullmatch(value):
            raise ValueError(value)
        return int(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return value


def _is_number(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


def _has_truth(values: Sequence[Any]) -> bool:
    """Whether true or false is among values, or in lists that are: Arrow takes them for numbers."""
    kinds = kinds_of(values)
    return bool in kinds or (
        list in kinds and bool in kinds_of(chain.from_iterable(one for one in values if type(one) is list))
    )


def _cast(column: pa.ChunkedArray, field: pa.Field, max_bytes: int) -> pa.Array:
    """A column in the type of its field. Text is a whole number where it is one in JSON; no text is another number."""
    try:
        if column.type == field.type:
            cast = column
        else:
            _check_expanded(column, field.type, max_bytes)
            _check_numbers(column.combine_chunks(), field)
            cast = column.cast(field.type)
    except (pa.ArrowException, ValueError) as error:
        why = str(error).partition("\n")[0][:200]
        raise DataError(f"{WHERE}: column {field.name!r} holds {column.type}", f"{field.type}: {why}") from None
    return cast.chunk(0) if cast.num_chunks == 1 else cast.combine_chunks()


def _check_numbers(values: pa.Array, field: pa.Field) -> None:
    """Refuse what Arrow would make a number of: true, and text such as 0x7."""
    wanted = _element(field.type)
    if not _is_number(wanted):
        return
    if is_list(values.type):
        values = values.flatten()
    if types.is_dictionary(values.type):
        values = values.dictionary
    if types.is_boolean(values.type):
        raise ValueError("true is no number")
    if is_text(values.type):
        whole = pc.call_function("match_substring_regex", [values], pc.MatchSubstringOptions(rf"\A{WHOLE.pattern}\z"))
        if not types.is_integer(wanted) or pc.call_function("all", [whole]).as_py() is False:
            raise ValueError(f"text is no number: expected {_describe(wanted)}")


def _describe(kind: pa.DataType) -> str:
    element = _element(kind)
    if types.is_integer(element):
        what = f"a whole number of {element}"
    elif types.is_floating(element) or types.is_decimal(element):
        what = "a number"
    elif is_text(element):
        what = "text"
    else:
        what = str(element)
    return f"a list, each {what}" if is_list(kind) else what


def _check_expanded(column: pa.ChunkedArray, kind: pa.DataType, max_bytes: int) -> None:
    """Raise where numbers take more memory in another type: bits and nulls may become 64 bits each."""
    plain = _element(kind)
    if is_text(plain):
        return  # the reader of the stream has counted texts
    count = 0
    for values in column.chunks:
        while is_list(values.type):
            values = values.values
        count += len(values)
    size = count * (plain.bit_width + 7) // 8
    if size > max_bytes:
        raise ValueError(f"{size:,} bytes in that type: expected at most {max_bytes:,}")
