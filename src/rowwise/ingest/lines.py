"""Parses lines of text by their `Dialect`, with Arrow; infers the types of columns, too.

Arrow requires one value per column in each line. Shorter lines, and lines with empty values behind the last column, are
rewritten first, which takes about ten times as long; only text with such lines pays for it.
"""

import csv as lines_csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import structs
from pyarrow import compute as pc
from pyarrow import csv, types

from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.dialect import BLANKS, CURRENCY, Dialect, MAX_LINE_bytes, csv_reader, find_style

MAX_DISTINCT = 4096  # values of a column that its number format is inferred from
WHOLE = r"^[-+]?\d{1,18}$"


class UnevenLinesError(pa.ArrowInvalid):
    """A line has more values than there are columns."""

    def __init__(self, line: int, got: int, want: int) -> None:
        super().__init__(f"{got} values in a line of {want} columns")
        self.line = line  # from 1


class BadValue(NamedTuple):
    """A value that does not fit its column's type."""

    line: int  # from 1
    column: str
    text: str
    kind: pa.DataType


def parse_lines(
    data: bytes, names: Sequence[str], dialect: Dialect, kinds: dict[str, pa.DataType] | None, columns: Sequence[str]
) -> pa.Table:
    """Parse some columns of lines.

    Args:
        data: whole lines without a header.
        names: columns of a line, in order.
        dialect: complete, without None.
        kinds: the types of the columns; None lets Arrow infer them.
        columns: the names to parse.
    """
    if not data or (data.isspace() and not data.strip(b"\r\n")):
        return pa.schema([(name, (kinds or {}).get(name, pa.null())) for name in columns]).empty_table()
    try:
        return _parse(data, names, dialect, kinds, columns)
    except pa.ArrowInvalid as error:
        if "columns, got" not in str(error):
            raise
    return _parse(_even_lines(data, len(names), dialect), names, dialect, kinds, columns)


def _parse(
    data: bytes, names: Sequence[str], dialect: Dialect, kinds: dict[str, pa.DataType] | None, columns: Sequence[str]
) -> pa.Table:
    text = pa.string()
    signs = [n for n in columns if kinds is not None and n in (dialect.signs or ()) and not types.is_string(kinds[n])]
    words = list(dialect.missing or ("",))
    only_empty = words == [""] or kinds is None
    words += [f"{before}{word}{after}" for word in words for before in ("", *BLANKS) for after in ("", *BLANKS)] * bool(
        dialect.trim
    )
    table = csv.read_csv(
        pa.BufferReader(_arrow_copy(data)),
        csv.ReadOptions(column_names=list(names), block_size=MAX_LINE_bytes),
        csv.ParseOptions(
            delimiter=dialect.delimiter or ",",
            quote_char='"' if dialect.quotes else False,
            escape_char="\\" if dialect.escape else False,
            newlines_in_values=bool(dialect.line_breaks),
        ),
        csv.ConvertOptions(
            column_types=None if kinds is None else {name: text if name in signs else kinds[name] for name in columns},
            include_columns=list(columns),
            strings_can_be_null=only_empty,
            null_values=words,
            decimal_point=dialect.decimal or ".",
        ),
    )
    if not dialect.trim and not signs and only_empty:
        return table
    for at, name in enumerate(table.column_names):
        column = table[name]
        if types.is_string(column.type):
            if dialect.trim:
                column = pc.call_function("ascii_trim", [column], pc.TrimOptions(BLANKS))
            if not only_empty or dialect.trim:
                column = _null_where(pc.call_function("equal", [column, ""]), column)
        if name in signs and kinds is not None:
            column = plain_numbers(column, dialect).cast(kinds[name])
        table = table.set_column(at, name, column)
    return table


def _arrow_copy(data: bytes) -> pa.Buffer:
    """A copy of the bytes in memory owned by Arrow.

    An Arrow thread may be the last to release its input. To release memory owned by Python it needs the GIL, and a
    process that exits meanwhile aborts: "terminate called without an active exception".
    """
    copy = pa.allocate_buffer(len(data))
    np.frombuffer(copy, np.uint8)[:] = np.frombuffer(data, np.uint8)
    return copy


def plain_numbers(column: pa.ChunkedArray, dialect: Dialect) -> pa.ChunkedArray:
    """Texts of numbers without thousands separators, currencies and percent signs; null for words."""
    trimmed = pc.call_function("utf8_trim_whitespace", [column])
    is_word = pc.call_function("is_in", [trimmed], pc.SetLookupOptions(pa.array(dialect.missing or ("",), pa.string())))
    bare = CURRENCY.replace(r"(?=\s)", r"\s").replace(r"(?<=\s)", r"\s")  # RE2 does not look around
    plain = _replace(
        "replace_substring_regex", trimmed, f"{bare}|%|[{re.escape(dialect.thousands or '')}\\s\u00a0\u202f]", ""
    )
    plain = plain if dialect.decimal != "," else _replace("replace_substring", plain, ",", ".")
    return _null_where(is_word, plain)


def _replace(how: str, texts: pa.ChunkedArray, pattern: str, new: str) -> pa.ChunkedArray:
    return pc.call_function(how, [texts], pc.ReplaceSubstringOptions(pattern, new))


def _null_where(mask: pa.ChunkedArray, column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.call_function("if_else", [mask, pa.scalar(None, column.type), column])


def find_types(
    data: bytes, names: Sequence[str], columns: Sequence[str], dialect: Dialect
) -> tuple[dict[str, pa.DataType], Dialect]:
    """The types of columns in some lines, and the dialect completed by their number format.

    A column without any value has the type null.
    """
    plain = structs.replace(dialect, decimal=".", signs=(), missing=("",))
    texts = parse_lines(data, names, plain, dict.fromkeys(names, pa.string()), columns)
    guessed = parse_lines(data, names, plain, None, columns).schema
    doubtful = [f.name for f in guessed if types.is_string(f.type) or types.is_floating(f.type)]
    values = {name: texts[name].unique().drop_null().slice(0, MAX_DISTINCT).to_pylist() for name in doubtful}
    style = find_style(values, dialect)
    words = tuple(sorted({word for of_column in style.words.values() for word in of_column}))
    known = dialect.missing or ("",)
    tried = structs.replace(plain, decimal=style.decimal, missing=(*known, *words), thousands=style.thousands)
    kinds = {field.name: field.type for field in parse_lines(data, names, tried, None, columns).schema}
    signs = list(dialect.signs or ())
    for name in style.signs:
        numbers = plain_numbers(texts[name], tried)
        are_whole = pc.call_function("match_substring_regex", [numbers], pc.MatchSubstringOptions(WHOLE))
        whole = pc.call_function("all", [are_whole]).as_py()
        kinds[name] = pa.int64() if whole else pa.float64()
        try:
            numbers.cast(kinds[name])
            signs.append(name)
        except pa.ArrowInvalid:  # a value beyond the MAX_DISTINCT that were checked
            kinds[name] = pa.string()
    # Integers beyond 64 bits are ids: doubles would merge distinct ones.
    kinds |= {name: pa.string() for name in style.large if types.is_floating(kinds[name])}
    kinds |= {n: pa.string() for n, kind in kinds.items() if types.is_integer(kind) and _have_leading_zeros(texts[n])}
    used = sorted({w for n, ws in style.words.items() if not types.is_string(kinds[n]) for w in ws} - set(known))
    thousands = "".join(sorted({*(dialect.thousands or ""), *style.thousands}))
    return kinds, structs.replace(
        dialect,
        decimal=style.decimal,
        thousands=thousands,
        signs=tuple(dict.fromkeys(signs)),
        missing=(*known, *used),
    )


def _have_leading_zeros(texts: pa.ChunkedArray) -> bool:
    """Whether integers are codes, such as the postal code 01234."""
    padded = pc.call_function("match_substring_regex", [texts], pc.MatchSubstringOptions(r"^\s*0\d+$"))
    return bool(pc.call_function("any", [padded]).as_py())


def find_bad_value(
    data: bytes, names: Sequence[str], dialect: Dialect, kinds: dict[str, pa.DataType], columns: Sequence[str]
) -> BadValue | None:
    """The first value that does not fit its column's type, or None."""
    for name in columns:
        kind = kinds[name]
        texts = combine_chunks(
            parse_lines(data, names, structs.replace(dialect, signs=()), {name: pa.string()}, [name])[name]
        )
        plain = combine_chunks(plain_numbers(pa.chunked_array([texts]), structs.replace(dialect, thousands="")))
        if types.is_string(kind) or _fits(plain, kind):
            continue
        low, high = 0, len(plain)  # binary search: the first bad value is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            if _fits(plain.slice(low, middle - low), kind):
                low = middle
            else:
                high = middle
        return BadValue(_line_of(data, low, dialect), name, texts[low].as_py(), kind)
    return None


def _fits(array: pa.Array, kind: pa.DataType) -> bool:
    try:
        array.cast(kind)
    except pa.ArrowException:
        return False
    return True


def _line_of(data: bytes, row: int, dialect: Dialect) -> int:
    """The line in which a row begins, from 1."""
    reader, begin = csv_reader(data.decode(errors="replace"), dialect), 1
    for record in reader:
        if record and row == 0:
            break
        row -= bool(record)
        begin = reader.line_num + 1
    return begin


def _even_lines(data: bytes, width: int, dialect: Dialect) -> bytes:
    """Pad or cut each line to `width` values; refuses a line with a value beyond them."""
    out = io.StringIO(newline="")
    writer = lines_csv.writer(
        out,
        delimiter=dialect.delimiter or ",",
        lineterminator="\n",
        quoting=lines_csv.QUOTE_MINIMAL if dialect.quotes else lines_csv.QUOTE_NONE,
        quotechar='"' if dialect.quotes else None,
        escapechar="\\" if dialect.escape else None,
    )
    reader = csv_reader(data.decode(errors="surrogateescape"), dialect)
    for row in reader:
        if any(row[width:]):
            raise UnevenLinesError(reader.line_num, len(row), width)
        if row:
            writer.writerow((row + [""] * width)[:width])
    return out.getvalue().encode(errors="surrogateescape")
