"""The dialect of text files: encoding, delimiter, header, quotes and numbers, detected in their first bytes.

Pure functions of bytes and texts. `delimited` reads files by a dialect, and a recipe stores it as `data.text`.
"""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import BinaryIO, Literal, NamedTuple

import msgspec
import pyarrow as pa
from msgspec import structs

from rowwise.base.errors import DataError, SpecError
from rowwise.tables.spec import Value

DELIMITERS = "\t;|\x01, "  # by preference if several divide the lines equally well
MAX_LINE_bytes = 8 << 20  # the longest line that Arrow accepts
LOOK_AT = 200  # lines in which delimiter and header are detected
LOOK_AT_chars, MAX_ROWS = 1 << 18, 1 << 16  # extent in which spaces around values are detected
# Lower-case words for a missing value, in columns where all else is a number or a time.
MISSING = (
    *("na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "null", "none", "nil", "-", "--", "?", ".", "\\n", "missing"),
    *("n.a.", "n.a", "nd", "unknown"),
)
BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
BOMS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NO_CP1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
ESCAPED = re.compile(rb'[^,;\t|\n\\"]\\"[^,;\t|\r\n"]')  # a quote after a backslash in the middle of a value
# Cells that are hardly names of columns: numbers, dates, times, amounts.
DATA = re.compile(r"[-+$€£¥]?\s*\.?\d[\d\s.,:/'T+-]*(?:[eE][-+]?\d+)?\s*[%€$£¥Z]?")
UNNAMED = re.compile(r"(?:Unnamed: \d+)?")  # an index as pandas writes it, and the name that pandas gives it on reading
BLANKS = " \t"  # characters to trim around values
SPACES = " \u00a0\u202f"
CURRENCY = r"(?:[$€£¥₹₽₩₺]|R\$|(?:USD|EUR|GBP|JPY|CHF|CNY|INR|BRL)(?=\s)|(?<=\s)(?:USD|EUR|GBP|JPY|CHF|CNY|INR|BRL))"
GROUPS = {".": f",'\u2019{SPACES}", ",": f".'\u2019{SPACES}"}  # thousands separators, by decimal sign


class Dialect(Value, frozen=True):
    """The dialect of text files; fields that are None are detected in the first megabyte."""

    delimiter: str | None = None  # between values, one character
    header: bool | None = None  # the first line of each file has names
    names: tuple[str, ...] = ()  # column names; empty for those of the header, or c0, c1, ...
    quotes: bool = True  # values may be in double quotes
    escape: bool | None = None  # backslashes escape quotes, as Spark writes them
    line_breaks: bool | None = None  # quoted values have line breaks: files are read once more, to find their rows
    trim: bool | None = None  # strip spaces around values
    encoding: str | None = None  # Python's name of it, such as cp1252; a byte order mark overrides it
    decimal: Literal[".", ","] | None = None  # decimal sign
    thousands: str | None = None  # thousands separators in `signs`
    signs: tuple[str, ...] | None = None  # columns of numbers such as "1.234,50 €" and "3 %"
    missing: tuple[str, ...] | None = None  # words for a missing value; in columns of text only the empty one counts
    types: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # column types such as int64, double, string or timestamp[s]; others are detected
    split_bytes: int = 32 << 20  # size of a split
    unpack_to: str = "~/.cache/rowwise"  # folder for plain copies of compressed files and of other encodings
    unpacked_gb: int = 100  # size limit of these copies; the least recently used are evicted

    def __post_init__(self) -> None:
        if self.split_bytes < 1 or self.unpacked_gb < 1:
            raise SpecError(f"split_bytes={self.split_bytes}, unpacked_gb={self.unpacked_gb}", "at least 1")
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '\r\n"'):
            raise SpecError(f"delimiter {self.delimiter!r}", "one character, such as ';' or a tab")
        if self.encoding is not None and not _is_encoding(self.encoding):
            raise SpecError(f"encoding {self.encoding!r}", "one that Python knows, such as utf-8, cp1252 or utf-16")
        if self.thousands is not None and (invalid := set(self.thousands) - set("".join(GROUPS.values()))):
            raise SpecError(f"thousands {self.thousands!r}: {min(invalid)!r} is none of . , ' \u2019 and spaces")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise SpecError(f"names: {twice[0]!r} appears twice", "each name once")
        for name, kind in self.types.items():
            parse_type(kind, name)


def style_of(dialect: Dialect) -> Dialect:
    """The dialect without machine settings, such as a folder, which another user may have chosen."""
    machine = ("split_bytes", "unpack_to", "unpacked_gb")
    return structs.replace(dialect, **{name: getattr(Dialect(), name) for name in machine})


class Heading(NamedTuple):
    """The columns of a file."""

    header: bool  # the first line has names
    names: tuple[str, ...]  # all fields of a line
    left_out: tuple[str, ...]  # unnamed indexes, and the empty field after a trailing delimiter
    notes: tuple[str, ...]


class Style(NamedTuple):
    """The format of numbers in columns."""

    decimal: Literal[".", ","]
    thousands: str
    signs: tuple[str, ...]
    words: dict[str, tuple[str, ...]]  # words for missing values, by column with other values
    large: tuple[str, ...]  # columns of plain integers, maybe beyond 64 bits


def _is_encoding(name: str) -> bool:
    try:
        codecs.lookup(name)
        return isinstance("".encode(name), bytes)
    except (LookupError, ValueError):
        return False


def parse_type(text: str, column: str) -> pa.DataType:
    """A type by its name, such as int64, double, string, date32[day] or timestamp[s]."""
    zoned = re.fullmatch(r"timestamp\[(s|ms|us|ns), tz=([\w/+:-]+)\]", text)
    try:
        if zoned:
            return pa.timestamp(zoned[1], zoned[2])
        return pa.type_for_alias({"int": "int64", "text": "string"}.get(text, text))
    except ValueError:
        raise SpecError(f"type {text!r} of column {column!r}", "int, float, string, bool or timestamp[s]") from None


def find_encoding(head: bytes, *, whole: bool) -> str:
    """The encoding of a file by its first bytes; `whole`: they are the whole file."""
    marked = next((name for mark, name in BOMS.items() if head.startswith(mark)), None)
    if marked is not None:
        return marked
    # UTF-16 without a byte order mark: in mostly Latin text, every second byte is zero.
    halves = [head[k::2].count(0) / max(len(head) // 2, 1) for k in (0, 1)]
    if max(halves) > 0.4 and min(halves) < 0.1:
        return "utf-16-le" if halves[1] > halves[0] else "utf-16-be"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        return "latin-1" if NO_CP1252.search(head) else "cp1252"
    return "utf-8"


def find_layout(head: bytes, known: Dialect) -> Dialect:
    """Complete a dialect by delimiter, escapes, quoted line breaks and spaces, detected in whole lines of UTF-8."""
    text = head[: 4 * LOOK_AT_chars].decode(errors="replace")[:LOOK_AT_chars]
    escape = known.quotes and bool(ESCAPED.search(head)) if known.escape is None else known.escape
    dialect = structs.replace(
        known, escape=escape, delimiter=known.delimiter or _find_delimiter(text, known.quotes, escape)
    )
    breaks = known.quotes and first_open_line(io.BytesIO(head), dialect) > 0
    rows = records(text, dialect, MAX_ROWS)
    complete = rows[: len(rows) - (len(text) == LOOK_AT_chars)]  # the last one may be cut
    trim = dialect.delimiter != " " and any(cell != cell.strip(BLANKS) for row in complete for cell in row)
    return structs.replace(
        dialect,
        line_breaks=breaks if known.line_breaks is None else known.line_breaks,
        trim=trim if known.trim is None else known.trim,
    )


def records(text: str, dialect: Dialect, most: int = LOOK_AT) -> list[list[str]]:
    """The first `most` rows of a text, without empty lines."""
    return [row for _, row in zip(range(most), read_records(text, dialect), strict=False)]


def read_records(text: str, dialect: Dialect) -> Iterator[list[str]]:
    lines = csv_reader(text, dialect)
    try:
        yield from (row for row in lines if row)
    except csv.Error as error:
        raise DataError(
            f"line {lines.line_num}: {error}", hint="set --no-quotes if quotes are plain characters"
        ) from None


def csv_reader(text: str, dialect: Dialect):  # noqa: ANN201 - its type has no name
    return csv.reader(
        io.StringIO(text, newline=""),
        delimiter=dialect.delimiter or ",",
        quoting=csv.QUOTE_MINIMAL if dialect.quotes else csv.QUOTE_NONE,
        escapechar="\\" if dialect.escape else None,
    )


def _find_delimiter(text: str, quotes: bool, escape: bool) -> str:
    """The delimiter that divides the largest share of lines into an equal number of values."""
    best, best_share = ",", 0.0
    first = text.lstrip("\r\n").partition("\n")[0]
    for mark in DELIMITERS:
        if mark not in first:
            continue
        widths = [len(row) for row in records(text, Dialect(delimiter=mark, quotes=quotes, escape=escape))]
        ((width, lines),) = Counter(widths).most_common(1)
        alike = lines / len(widths)
        if mark == " ":  # also occurs in text; in files of R the header has no name for the row names
            alike = float(width > 2 and set(widths[1:]) <= {width} and widths[0] in (width, width - 1))
        if width > 1 and alike > best_share:
            best, best_share = mark, alike
    return best


def find_heading(rows: Sequence[Sequence[str]], dialect: Dialect) -> Heading:
    """The columns of a file by its first rows, with or without a header."""
    header = not dialect.names if dialect.header is None and dialect.names else dialect.header
    header = _has_header(rows) if header is None else header
    body = rows[1:] if header else rows
    first = [cell.strip() for cell in rows[0]] if header else []
    width = Counter(len(row) for row in body).most_common(1)[0][0] if body else len(first)
    notes: list[str] = []
    columns = [[row[k] if k < len(row) else "" for row in body] for k in range(max(width, len(first)))]
    if dialect.names:
        first = list(dialect.names)
    elif not header:
        first = [f"c{k}" for k in range(width)]
    elif len(first) == width - 1 and any(columns[-1]):
        first = ["", *first]  # R writes row names without a header cell
    first += [""] * (width - len(first))
    names, left_out = list[str](), list[str]()
    for k, name in enumerate(first):
        plain = f"c{k}" if UNNAMED.fullmatch(name) else name
        taken = {*names, *first[k + 1 :]} if UNNAMED.fullmatch(name) else set(names)
        unique = next(free for free in chain([plain], (f"{plain}_{n}" for n in count(2))) if free not in taken)
        names.append(unique)
        if UNNAMED.fullmatch(name):
            if not any(columns[k]):
                left_out.append(unique)
            elif k == 0 and _is_index(columns[k]):
                left_out.append(unique)
                notes.append("the first column has no name and a number of its own in each row: left out as an index")
            else:
                notes.append(f"column {k + 1} has no name: it is named {unique}")
        elif unique != name:
            notes.append(f"a second column is named {name!r}: it is renamed to {unique!r}")
    return Heading(header, tuple(names), tuple(left_out), tuple(notes))


def _is_index(cells: Sequence[str]) -> bool:
    return all(cell.isascii() and cell.isdigit() for cell in cells) and len(set(cells)) == len(cells)


def _has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row is a header: words in columns of numbers, or cells that do not recur."""
    first, body = rows[0], rows[1:]
    if not body:
        return not any(map(_is_data, first))
    named, alike, repeated = 0, 0, 0
    for k, cell in enumerate(first):
        cells = [row[k].strip() for row in body if k < len(row)]
        present = [value for value in cells if value and value.lower() not in MISSING]
        if present and all(map(_is_data, present)):
            alike += _is_data(cell)
            named += not _is_data(cell) and bool(cell.strip()) and cell.strip().lower() not in MISSING
        else:
            repeated += cell.strip() in cells
    if alike or named:
        return named > 0
    return repeated < len(first)


def _is_data(cell: str) -> bool:
    return DATA.fullmatch(cell.strip()) is not None


def find_style(columns: dict[str, list[str]], dialect: Dialect) -> Style:
    """The format of numbers in columns that do not parse as plain numbers, by their distinct, non-empty values."""
    known = {
        name: [cell.strip() for cell in cells if cell.strip().lower() not in MISSING] for name, cells in columns.items()
    }
    fits = {
        sign: {name for name, cells in known.items() if cells and all(map(_number(sign).fullmatch, cells))}
        for sign in (".", ",")
    }
    points, commas = len(fits["."] - fits[","]), len(fits[","] - fits["."])
    decimal = dialect.decimal or ("," if commas > points else ".")
    signs, used, large, words = list[str](), set[str](), list[str](), dict[str, tuple[str, ...]]()
    for name in columns:
        missing = tuple(sorted({cell for cell in columns[name] if cell.strip().lower() in MISSING}))
        if missing and known[name]:
            words[name] = missing
        if name not in fits[decimal]:
            continue
        between = {mark for cell in known[name] for mark in cell if mark in GROUPS[decimal]}
        if between or any(re.search(r"[^-+\d.,eE]", cell) for cell in known[name]):
            signs.append(name)
            used |= {
                mark for mark in between if any(re.search(rf"\d{re.escape(mark)}\d", cell) for cell in known[name])
            }
        elif all(cell.lstrip("-+").isdigit() for cell in known[name]):
            large.append(name)
    thousands = "".join(sorted(used | set(dialect.thousands or "")))
    return Style(decimal, thousands, tuple(signs), words, tuple(large))


def _number(decimal: str) -> re.Pattern[str]:
    """A pattern of numbers with thousands separators, currencies and percent signs."""
    mark, group = re.escape(decimal), f"[{re.escape(GROUPS[decimal])}]"
    whole = rf"(?:[1-9]\d{{0,2}}(?:{group}\d{{3}})+|\d+)"
    number = rf"(?:{whole}(?:{mark}\d*)?|{mark}\d+)(?:[eE][-+]?\d+)?"
    return re.compile(rf"[-+]?(?:{CURRENCY}\s?)?[-+]?{number}\s?(?:%|{CURRENCY})?")


def first_open_line(file: BinaryIO, dialect: Dialect) -> int:
    """The first line (from 1) after which a quoted value continues; 0 if there is none."""
    return next((k for k, (_, is_open) in enumerate(_lines(file, dialect), 1) if is_open), 0)


def record_starts(file: BinaryIO, dialect: Dialect, step: int) -> Iterator[int]:
    """Offsets at which rows begin, at least `step` bytes apart; reads all lines."""
    at = last = row = 0
    is_open = False
    for number, (line, is_open) in enumerate(_lines(file, dialect), 1):
        at += len(line)
        row = row if is_open else number
        if not is_open and at - last >= step and line.endswith(b"\n"):
            yield at
            last = at
    if is_open:
        raise DataError(
            f"line {row + 1}: a quote is opened and never closed",
            hint="if it is a plain character, set --no-quotes for rowwise data inspect, "
            "or data.text.quotes: false in a recipe",
        )


def _lines(file: BinaryIO, dialect: Dialect) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether a quoted value continues after it."""
    mark = re.escape((dialect.delimiter or ",").encode())
    begin = re.compile(rb"(?:^|(?<=" + mark + rb'))"')
    end = re.compile(rb'(?:[^"\\]++|\\.|"")*+"' if dialect.escape else rb'(?:[^"]++|"")*+"', re.DOTALL)
    is_open = False
    while line := file.readline(MAX_LINE_bytes):
        if b'"' in line:
            at = 0
            while match := end.match(line, at) if is_open else begin.search(line, at):
                is_open, at = not is_open, match.end()
        yield line, is_open


def describe(dialect: Dialect) -> str:
    """A dialect in words, with the options that override it."""
    names = {"\t": "a tab", " ": "a space"}
    fields = dialect.names or ("c0", "c1", "...")
    parts = [
        f"{names.get(dialect.delimiter or '', repr(dialect.delimiter))} between values",
        "a header" if dialect.header else f"no header (columns are {', '.join(fields[:3])})",
        f"{dialect.encoding}",
    ]
    parts += ["decimal comma"] * (dialect.decimal == ",")
    parts += [f"numbers with signs in {', '.join(dialect.signs or ())}"] * bool(dialect.signs)
    words = [word for word in dialect.missing or () if word]
    parts += [f"missing (numbers only): {', '.join(map(repr, words))}"] * bool(words)
    parts += ["line breaks in quotes"] * bool(dialect.line_breaks)
    parts += ["spaces around values left out"] * bool(dialect.trim)
    parts += ["quotes after backslashes"] * bool(dialect.escape)
    options = "--delimiter, --header, --names, --encoding, --decimal, --missing, --column-type"
    return f"text: {'; '.join(parts)} (other: {options})"
