"""Decodes the rows of requests, from JSON or Arrow, to columns of the raw schema of a version.

An absent column is an error, as missing values are sent as null; unused columns are ignored. Conversions are lossless.
Whole numbers may be text of digits and a minus sign, because many JSON libraries round large numbers. Names are checked
before any value is decoded.
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
from rowwise.ingest.raw_columns import NumberBlock, RawColumns
from rowwise.ingest.reader import check_columns
from rowwise.ingest.unpacked import read_arrow_stream, without_views
from rowwise.serve.json_body import WHERE, BodyLimits, ColumnName, SMALL_bytes, check_count, decode_body, kinds_of
from rowwise.serve.sides import SideTable

MAX_BYTES = 64 << 20
MAX_SHOWN = 80  # characters of a value in a message
MAX_UNUSED_COLUMNS = 256  # of a request
LIST_VALUES_PER_BATCH = 1 << 15  # budget of list values in a batch of up to 256 rows
LIST_VALUES_PER_ROW = 128  # in a row that costs as much as one without lists
NAME_characters = 256  # maximum, unless a column of the schema has more
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")  # stricter than int(), which accepts other digits, spaces and underscores
ARROW_ERRORS = (pa.ArrowException, OverflowError, TypeError, ValueError)  # raised by Arrow for values of another type


class RequestRows(NamedTuple):
    """The columns that a prediction reads, and counts of ignored columns and unknown keys."""

    arrays: RawColumns
    rows: int
    ignored: int  # number of unused columns
    unknown: int = 0  # unknown keys of side tables
    list_values: np.ndarray | None = None  # per row; None if no row has more than LIST_VALUES_PER_ROW

    def costs(self, rows_at_once: int) -> np.ndarray | None:
        """Prefix sums of row costs for a batch size, or None if each row costs 1."""
        if self.list_values is None:
            return None
        costs = np.maximum(1.0, self.list_values / max(LIST_VALUES_PER_ROW, LIST_VALUES_PER_BATCH // rows_at_once))
        return np.concatenate([[0.0], np.cumsum(costs)])


class JsonBody(msgspec.Struct, forbid_unknown_fields=True):
    """JSON body of a request: rows, or candidates with a shared context."""

    rows: dict[ColumnName, list[Any]] | None = None
    context: dict[ColumnName, Any] | None = None
    candidates: dict[ColumnName, list[Any]] | None = None


class PlainBody(msgspec.Struct, forbid_unknown_fields=True):
    """A `JsonBody` that is decoded without a hook for each key."""

    rows: dict[str, list[Any]] | None = None
    context: dict[str, Any] | None = None
    candidates: dict[str, list[Any]] | None = None


@final
class RequestReader:
    """Decodes requests for one raw schema.

    Args:
        schema: the columns that a prediction reads.
        max_rows: per request.
        sides: tables with columns that requests may omit.
        max_bytes: of a decompressed body.
        limits: of a body.
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
        self._used, self._order = tuple(self._fields.names), tuple(schema.names)
        in_sides = {name for side in sides for name in side.columns}
        self._required = [name for name in schema.names if name not in in_sides]  # which a request must send
        self._lists = [field.name for field in schema if is_list(field.type)]
        self._max_characters = max([NAME_characters, *map(len, self._used)])
        self.max_columns = 2 * len(self._used) + MAX_UNUSED_COLUMNS  # a list may be two tensors
        self.limits = (limits or BodyLimits())._replace(columns=self.max_columns)

    def reads(self, name: str) -> bool:
        return name in self._used

    def read_json(self, body: bytes | bytearray) -> RequestRows:
        decoded: JsonBody | PlainBody | None = _decode_plain(body) if len(body) <= SMALL_bytes else None
        if decoded is None:
            decoded = decode_body(body, JsonBody, self.limits, "JSON with rows, or with context and candidates")
        if decoded.rows is not None and decoded.context is None and decoded.candidates is None:
            return self.read_lists(decoded.rows)
        if decoded.rows is None and decoded.candidates is not None:
            return self.read_candidates(decoded.context or {}, decoded.candidates)
        raise DataError(WHERE, '{"rows": {...}}, or {"context": {...}, "candidates": {...}}')

    def read_arrow(self, body: bytes | bytearray) -> RequestRows:
        """Read an Arrow IPC stream."""
        try:
            table = read_arrow_stream(body, self._max_bytes, self.check_names)
        except pa.ArrowException as error:
            raise DataError(f"{WHERE}: invalid Arrow IPC stream: {error}") from None
        return self._read_table(table)

    def read_columns(self, columns: Mapping[str, pa.Array]) -> RequestRows:
        """Convert Arrow columns of any types."""
        self.check_names(columns)
        used = {name: columns[name] for name in self._used if name in columns}
        self._check_lengths({name: len(array) for name, array in used.items()})
        return self._read_table(pa.table(used), len(columns) - len(used))

    def _read_table(self, table: pa.Table, ignored: int = 0) -> RequestRows:
        rows = self._check_rows(table.num_rows)
        present = set(table.column_names)
        arrays = {
            field.name: _cast(table[field.name], field, self._max_bytes)
            for field in self._fields
            if field.name in present
        }
        return self._complete(_SentColumns([], arrays), rows, ignored + table.num_columns)

    def read_lists(self, columns: Mapping[str, Sequence[Any]]) -> RequestRows:
        """Convert columns of Python values."""
        self.check_names(columns)
        rows = self._check_lengths({name: len(columns[name]) for name in self._used if name in columns})
        return self._complete(self._convert(columns), rows, len(columns))

    def read_candidates(self, context: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]) -> RequestRows:
        """Convert Python values: one per column of the context, and a list per column of the candidates."""
        self.check_names([*context, *candidates])
        lengths = {name: len(candidates[name]) for name in self._used if name in candidates}
        if not lengths:
            raise DataError(f"{WHERE}: no column in candidates is read", f"some of {', '.join(self._used)}")
        rows = self._check_lengths(lengths, "candidates")
        context_columns = {name: [value] for name, value in context.items()}
        blocks, arrays = self._convert(candidates)
        shared = self._convert(context_columns)
        self._check_context(rows, shared.size_bytes())
        repeated = shared.repeat(rows)
        both = _SentColumns([*blocks, *repeated.blocks], arrays | repeated.arrays)
        return self._complete(both, rows, len(context) + len(candidates))

    def _convert(self, columns: Mapping[str, Sequence[Any]]) -> "_SentColumns":
        """Convert the used columns, of one length."""
        converted = _SentColumns([], {})
        for group in self._groups:
            names = tuple(name for name in group.fields if name in columns)
            if not names:
                continue
            values = [columns[name] for name in names]
            values_CR = group.numbers(values)
            if values_CR is not None:
                converted.blocks.append(NumberBlock(group.kind, names, values_CR))
                continue
            joined, length = group.join(values), len(values[0])
            for k, name in enumerate(names):
                converted.arrays[name] = (
                    to_array(columns[name], group.fields[name], is_whole=group.is_whole)
                    if joined is None
                    else joined.slice(k * length, length)
                )
        return converted

    def _check_context(self, candidates: int, size_bytes: int) -> None:
        """Raise for a context that is too large once it is repeated for all candidates."""
        repeated_bytes = candidates * size_bytes
        if repeated_bytes > self._max_bytes:
            raise DataError(
                f"{WHERE}: the context of {candidates} candidates takes {repeated_bytes:,} bytes",
                f"at most {self._max_bytes:,}",
                hint="send fewer candidates, or shorter lists",
            )

    def _complete(self, converted: "_SentColumns", rows: int, sent: int) -> RequestRows:
        """Add columns of side tables, in the order of the schema; `sent`: number of columns in the request."""
        blocks, arrays = converted
        columns = RawColumns(self._order, rows, blocks, arrays)
        ignored, unknown = sent - len(arrays) - sum(len(block.names) for block in blocks), 0
        for side in self._sides:
            missing = [name for name in side.columns if not columns.has(name)]
            if missing:
                joined = side.join(columns[side.key], missing)
                arrays |= joined.arrays
                unknown += joined.unknown
        return RequestRows(columns, rows, ignored, unknown, self._list_values(arrays, rows))

    def _list_values(self, arrays: Mapping[str, pa.Array], rows: int) -> np.ndarray | None:
        """List values per row; raises for a list that would block other requests."""
        lists = {name: arrays[name] for name in self._lists}
        if sum(len(array.values) for array in lists.values()) <= LIST_VALUES_PER_ROW:
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
        return total if total.max() > LIST_VALUES_PER_ROW else None

    def check_names(self, columns: Collection[str]) -> None:
        """Raise for too many, too long, duplicate or missing names."""
        check_count("columns", len(columns), self.max_columns)
        if max(map(len, columns), default=0) > self._max_characters:
            name = next(name for name in columns if len(name) > self._max_characters)
            raise DataError(
                f"{WHERE}: column {name[:MAX_SHOWN]!r}... has a name of {len(name):,} characters",
                f"at most {self._max_characters}",
            )
        if not isinstance(columns, Mapping) and len(set(columns)) < len(columns):
            ((duplicate, _),) = Counter(columns).most_common(1)
            raise DataError(f"{WHERE}: column {duplicate!r} is given twice", "each column once")
        if not all(map(columns.__contains__, self._required)):
            check_columns(self._required, pa.schema(dict.fromkeys(columns, pa.null())), WHERE)
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


def _decode_plain(body: bytes | bytearray) -> PlainBody | None:
    """A body with as many colons as keys that were decoded, so that none is given twice; None for all others."""
    try:
        decoded = msgspec.json.decode(body, type=PlainBody)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    parts = [part for part in (decoded.rows, decoded.context, decoded.candidates) if part is not None]
    return decoded if body.count(b":") == len(parts) + sum(map(len, parts)) else None


class _SentColumns(NamedTuple):
    """The columns of a request, or of its context."""

    blocks: list[NumberBlock]
    arrays: dict[str, pa.Array]

    def size_bytes(self) -> int:
        return sum(block.values_CR.nbytes for block in self.blocks) + sum(a.nbytes for a in self.arrays.values())

    def repeat(self, times: int) -> "_SentColumns":
        """The columns of a context, with its value for each candidate."""
        same = pa.array(np.zeros(times, np.int64))
        blocks = [block._replace(values_CR=block.values_CR.repeat(times, 1)) for block in self.blocks]
        return _SentColumns(blocks, {name: array.take(same) for name, array in self.arrays.items()})


class _FieldGroup(NamedTuple):
    """Fields of one type, converted together, as each conversion has an overhead of microseconds."""

    kind: pa.DataType
    fields: dict[str, pa.Field]
    is_whole: bool  # whether the type is of integers
    dtype: np.dtype[Any] | None = None  # of numbers in blocks; None: each column is an Arrow array

    def numbers(self, columns: Sequence[Sequence[Any]]) -> np.ndarray | None:
        """The columns as a matrix [columns, rows]; None unless all values are numbers of the type, without nulls."""
        if self.dtype is None:
            return None
        values = list(chain.from_iterable(columns))
        if kinds_of(values) != {int if self.is_whole else float}:
            return None
        if not self.is_whole:
            with np.errstate(over="ignore"):  # infinite in 32 bits, which is refused later
                return np.array(values, self.dtype).reshape(len(columns), -1)
        try:
            wide = np.array(values, np.int64).reshape(len(columns), -1)
        except OverflowError:
            return None
        narrow = wide.astype(self.dtype, copy=False)
        return narrow if narrow is wide or (narrow == wide).all() else None

    def join(self, columns: Sequence[Sequence[Any]]) -> pa.Array | None:
        """The converted values of all columns, or None to convert each alone, which reports the bad value."""
        if len(columns) == 1:
            return None
        values = list(chain.from_iterable(columns))
        if bool in kinds_of(values):
            return None  # Arrow converts true to 1
        try:
            if not self.is_whole:
                return pa.array(values, self.kind)
            array = pa.array(values)
            if array.type == self.kind:
                return array
            return array.cast(self.kind) if types.is_integer(array.type) else None
        except ARROW_ERRORS:
            return None


def _group_fields(schema: pa.Schema) -> tuple[_FieldGroup, ...]:
    """Groups of scalar number fields by type; each other field has its own group."""
    numbers: dict[pa.DataType, dict[str, pa.Field]] = {}
    groups: list[_FieldGroup] = []
    for field in schema:
        if types.is_integer(field.type) or types.is_floating(field.type):
            numbers.setdefault(field.type, {})[field.name] = field
        else:
            groups.append(_FieldGroup(field.type, {field.name: field}, types.is_integer(_element(field.type))))
    for kind, fields in numbers.items():
        dtype = None if types.is_uint64(kind) or types.is_float16(kind) else np.dtype(kind.to_pandas_dtype())
        groups.append(_FieldGroup(kind, fields, types.is_integer(kind), dtype))
    return tuple(groups)


def to_array(values: Sequence[Any], field: pa.Field, *, is_whole: bool) -> pa.Array:
    """Convert Python values to a column; raises for the first invalid one. `is_whole`: the type is of integers."""
    is_number = is_whole or _is_number(_element(field.type))
    try:
        if is_number and _has_bool(values):
            raise ValueError(values)
        if not is_whole:
            return pa.array(values, field.type)
        array = pa.array(values)  # with inferred type first, as Arrow would truncate 2.5 to 2
        if array.type == field.type:
            return array
        _check_numbers(array, field)
        return array.cast(field.type)
    except ARROW_ERRORS:
        pass
    converted = []
    for row, value in enumerate(values):
        try:
            if is_number and _has_bool([value]):
                raise ValueError(value)
            parsed = _parse_whole(value) if is_whole else value
            pa.array([parsed], field.type)
        except ARROW_ERRORS:
            raise DataError(
                f"{WHERE}: row {row}, column {field.name!r}: {repr(value)[:MAX_SHOWN]}",
                f"{_describe(field.type)}, or null",
            ) from None
        converted.append(parsed)
    return pa.array(converted, field.type)


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_list(kind) else kind


def _parse_whole(value: Any) -> Any:
    """Parse whole numbers from text, also in lists; returns other values unchanged."""
    if isinstance(value, list):
        return [_parse_whole(item) for item in value]
    if isinstance(value, str):
        if not WHOLE_NUMBER.fullmatch(value):
            raise ValueError(value)
        return int(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return value


def _is_number(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


def _has_bool(values: Sequence[Any]) -> bool:
    """Whether values, or lists in them, have booleans, which Arrow would convert to numbers."""
    kinds = kinds_of(values)
    return bool in kinds or (
        list in kinds and bool in kinds_of(chain.from_iterable(value for value in values if type(value) is list))
    )


def _cast(column: pa.ChunkedArray, field: pa.Field, max_bytes: int) -> pa.Array:
    """Cast a column to the type of its field. Text casts only to integers, in the syntax accepted in JSON."""
    try:
        if column.type == field.type:
            cast = column
        else:
            _check_expanded(column, field.type, max_bytes)
            if types.is_dictionary(column.type) or _is_number(_element(field.type)):
                column = without_views(column)
            _check_numbers(column.combine_chunks(), field)
            cast = column.cast(field.type)
    except (pa.ArrowException, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise DataError(f"{WHERE}: column {field.name!r} holds {column.type}", f"{field.type}: {reason}") from None
    return cast.chunk(0) if cast.num_chunks == 1 else cast.combine_chunks()


def _check_numbers(values: pa.Array, field: pa.Field) -> None:
    """Raise for values that Arrow would convert to numbers: booleans, and text such as 0x7."""
    element = _element(field.type)
    if not _is_number(element):
        return
    if is_list(values.type):
        values = values.flatten()
    if types.is_dictionary(values.type):
        values = values.dictionary
    if types.is_boolean(values.type):
        raise ValueError("true is no number")
    if is_text(values.type):
        is_whole = pc.call_function(
            "match_substring_regex", [values], pc.MatchSubstringOptions(rf"\A{WHOLE_NUMBER.pattern}\z")
        )
        if not types.is_integer(element) or pc.call_function("all", [is_whole]).as_py() is False:
            raise ValueError(f"text is no number: expected {_describe(element)}")


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
    """Raise if a cast takes too much memory: bits and nulls may become 64 bits each."""
    plain = _element(kind)
    if is_text(plain):
        return  # the reader of the stream has limited texts
    count = 0
    for values in column.chunks:
        while is_list(values.type):
            values = values.values
        count += len(values)
    size = count * (plain.bit_width + 7) // 8
    if size > max_bytes:
        raise ValueError(f"{size:,} bytes in that type: expected at most {max_bytes:,}")
