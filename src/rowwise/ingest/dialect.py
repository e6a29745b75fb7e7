"""How text files are written: encoding, delimiter, header, quotes and numbers, found in the bytes that begin them.

Pure: bytes and texts in, facts out. `delimited` reads files by these facts, and a recipe keeps them as `data.text`.
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

DELIMITERS = "\t;|\x01, "  # where two divide the lines equally well, the earlier one does
MAX_LINE_bytes = 8 << 20  # the longest line that Arrow accepts
LOOK_AT = 200  # lines that delimiter and header are found in
LOOK_AT_chars, MAX_ROWS = 1 << 18, 1 << 16  # that spaces around values are found in
# Lower-case words for a missing value, in columns where all else is a number or a time.
MISSING = (
    *("na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "null", "none", "nil", "-", "--", "?", ".", "\\n", "missing"),
    *("n.a.", "n.a", "nd", "unknown"),
)
BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
BOMS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NO_CP1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
ESCAPED = re.compile(rb'[^,;\t|\n\\"]\\"[^,;\t|\r\n"]')  # a quote after a backslash in the middle of a value
# What a name of a column hardly is: numbers, dates, times, amounts.
DATA = re.compile(r"[-+$€£¥]?\s*\.?\d[\d\s.,:/'T+-]*(?:[eE][-+]?\d+)?\s*[%€$£¥Z]?")
UNNAMED = re.compile(r"(?:Unnamed: \d+)?")  # as pandas writes its index, and what it reads then
BLANKS = " \t"  # that are no part of a value, at its ends
SPACES = " \u00a0\u202f"
CURRENCY = r"(?:[$€£¥₹₽₩₺]|R\$|(?:USD|EUR|GBP|JPY|CHF|CNY|INR|BRL)(?=\s)|(?<=\s)(?:USD|EUR|GBP|JPY|CHF|CNY|INR|BRL))"
GROUPS = {".": f",'\u2019{SPACES}", ",": f".'\u2019{SPACES}"}  # what separates thousands, by the decimal sign


class Dialect(Value, frozen=True):
    """How text files are written; what is null is found in the first megabyte."""

    delimiter: str | None = None  # between values, one character
    header: bool | None = None  # whether the first line of each file has names
    names: tuple[str, ...] = ()  # of the columns; empty: those of the header, or c0, c1, ...
    quotes: bool = True  # values may be in double quotes
    escape: bool | None = None  # a backslash before a quote makes it part of a value, as Spark writes it
    line_breaks: bool | None = None  # values in quotes have some: files are then read once more, to find their rows
    trim: bool | None = None  # leave out spaces around values
    encoding: str | None = None  # as Python calls it, such as cp1252; a byte order mark overrules it
    decimal: Literal[".", ","] | None = None  # sign before the fraction of a number
    thousands: str | None = None  # the signs between thousands in `signs`
    signs: tuple[str, ...] | None = None  # columns of numbers such as "1.234,50 €" and "3 %"
    missing: tuple[str, ...] | None = None  # words for a missing value; in columns of text only an empty one is missing
    types: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # of columns, such as int64, double, string or timestamp[s]; others are found
    split_bytes: int = 32 << 20  # how much is read at once
    unpack_to: str = "~/.cache/rowwise"  # folder of plain copies of files that are compressed or in other encodings
    unpacked_gb: int = 100  # what these copies take together; the least recently used are removed

    def __post_init__(self) -> None:
        if self.split_bytes < 1 or self.unpacked_gb < 1:
            raise SpecError(f"split_bytes={self.split_bytes}, unpacked_gb={self.unpacked_gb}", "at least 1")
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '\r\n"'):
            raise SpecError(f"delimiter {self.delimiter!r}", "one character, such as ';' or a tab")
        if self.encoding is not None and not _is_encoding(self.encoding):
            raise SpecError(f"encoding {self.encoding!r}", "one that Python knows, such as utf-8, cp1252 or utf-16")
        if self.thousands is not None and (others := set(self.thousands) - set("".join(GROUPS.values()))):
            raise SpecError(f"thousands {self.thousands!r}: {min(others)!r} is none of . , ' \u2019 and spaces")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise SpecError(f"names: {twice[0]!r} stands there twice", "each name once")
        for name, kind in self.types.items():
            parse_type(kind, name)


def style_of(dialect: Dialect) -> Dialect:
    """How text is written, without settings of a machine, such as a folder that a stranger may have named."""
    machine = ("split_bytes", "unpack_to", "unpacked_gb")
    return structs.replace(dialect, **{name: getattr(Dialect(), name) for name in machine})


class Heading(NamedTuple):
    """The columns of a file."""

    header: bool  # the first line has names
    names: tuple[str, ...]  # of all fields of a line
    left_out: tuple[str, ...]  # of these: an index without a name, or nothing after the last delimiter
    notes: tuple[str, ...]


class Style(NamedTuple):
    """How columns write numbers."""

    decimal: Literal[".", ","]
    thousands: str
    signs: tuple[str, ...]
    words: dict[str, tuple[str, ...]]  # words for missing values of columns that may be numbers otherwise
    large: tuple[str, ...]  # columns of whole numbers that 64 bits do not hold


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
    """The encoding of bytes that begin a file."""
    marked = next((name for mark, name in BOMS.items() if head.startswith(mark)), None)
    if marked is not None:
        return marked
    # Text of UTF-16 without a mark has a zero in every second byte, as long as it is mostly Latin.
    halves = [head[k::2].count(0) / max(len(head) // 2, 1) for k in (0, 1)]
    if max(halves) > 0.4 and min(halves) < 0.1:
        return "utf-16-le" if halves[1] > halves[0] else "utf-16-be"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        return "latin-1" if NO_CP1252.search(head) else "cp1252"
    return "utf-8"


def find_layout(head: bytes, given: Dialect) -> Dialect:
    """Delimiter, escapes, line breaks in quotes and spaces, from whole lines of UTF-8."""
    text = head[: 4 * LOOK_AT_chars].decode(errors="replace")[:LOOK_AT_chars]
    escape = given.quotes and bool(ESCAPED.search(head)) if given.escape is None else given.escape
    found = structs.replace(
        given, escape=escape, delimiter=given.delimiter or _find_delimiter(text, given.quotes, escape)
    )
    breaks = given.quotes and first_open_line(io.BytesIO(head), found) > 0
    rows = records(text, found, MAX_ROWS)
    whole = rows[: len(rows) - (len(text) == LOOK_AT_chars)]  # the last one may be cut
    trim = found.delimiter != " " and any(cell != cell.strip(BLANKS) for row in whole for cell in row)
    return structs.replace(
        found,
        line_breaks=breaks if given.line_breaks is None else given.line_breaks,
        trim=trim if given.trim is None else given.trim,
    )


def records(text: str, dialect: Dialect, most: int = LOOK_AT) -> list[list[str]]:
    """The first rows of a text, without empty lines."""
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
    """The one that divides most lines into equally many values."""
    best, most = ",", 0.0
    first = text.lstrip("\r\n").partition("\n")[0]
    for mark in DELIMITERS:
        if mark not in first:
            continue
        widths = [len(row) for row in records(text, Dialect(delimiter=mark, quotes=quotes, escape=escape))]
        ((width, lines),) = Counter(widths).most_common(1)
        alike = lines / len(widths)
        if mark == " ":  # may as well be in text; of R, the first line has no name for the names of the rows
            alike = float(width > 2 and set(widths[1:]) <= {width} and widths[0] in (width, width - 1))
        if width > 1 and alike > most:
            best, most = mark, alike
    return best


def find_heading(rows: Sequence[Sequence[str]], given: Dialect) -> Heading:
    """The columns, from the first rows of a file; the first row may have their names."""
    header = not given.names if given.header is None and given.names else given.header
    header = _has_header(rows) if header is None else header
    body = rows[1:] if header else rows
    first = [cell.strip() for cell in rows[0]] if header else []
    width = Counter(len(row) for row in body).most_common(1)[0][0] if body else len(first)
    notes: list[str] = []
    columns = [[row[k] if k < len(row) else "" for row in body] for k in range(max(width, len(first)))]
    if given.names:
        first = list(given.names)
    elif not header:
        first = [f"c{k}" for k in range(width)]
    elif len(first) == width - 1 and any(columns[-1]):
        first = ["", *first]  # the first column has the names of the rows, as R writes them
    first += [""] * (width - len(first))
    names, left_out = list[str](), list[str]()
    for k, name in enumerate(first):
        plain = f"c{k}" if UNNAMED.fullmatch(name) else name
        taken = {*names, *first[k + 1 :]} if UNNAMED.fullmatch(name) else set(names)
        unique = next(one for one in chain([plain], (f"{plain}_{n}" for n in count(2))) if one not in taken)
        names.append(unique)
        if UNNAMED.fullmatch(name):
            if not any(columns[k]):
                left_out.append(unique)
            elif k == 0 and _is_index(columns[k]):
                left_out.append(unique)
                notes.append("the first column has no name and a number of its own in each row: left out as an index")
            else:
                notes.append(f"column {k + 1} has no name: it is called {unique}")
        elif unique != name:
            notes.append(f"a second column is called {name!r}: it is {unique!r} here")
    return Heading(header, tuple(names), tuple(left_out), tuple(notes))


def _is_index(cells: Sequence[str]) -> bool:
    return all(cell.isascii() and cell.isdigit() for cell in cells) and len(set(cells)) == len(cells)


def _has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row has names: where later rows have numbers, it has words."""
    first, body = rows[0], rows[1:]
    if not body:
        return not any(map(_is_data, first))
    named, alike, repeated = 0, 0, 0
    for k, cell in enumerate(first):
        cells = [row[k].strip() for row in body if k < len(row)]
        known = [one for one in cells if one and one.lower() not in MISSING]
        if known and all(map(_is_data, known)):
            alike += _is_data(cell)
            named += not _is_data(cell) and bool(cell.strip()) and cell.strip().lower() not in MISSING
        else:
            repeated += cell.strip() in cells
    if alike or named:
        return named > 0
    return repeated < len(first)


def _is_data(cell: str) -> bool:
    return DATA.fullmatch(cell.strip()) is not None


def find_style(columns: dict[str, list[str]], given: Dialect) -> Style:
    """How numbers are written in columns that are not plain numbers; their different values, without empty ones."""
    known = {
        name: [cell.strip() for cell in cells if cell.strip().lower() not in MISSING] for name, cells in columns.items()
    }
    fits = {
        sign: {name for name, cells in known.items() if cells and all(map(_number(sign).fullmatch, cells))}
        for sign in (".", ",")
    }
    points, commas = len(fits["."] - fits[","]), len(fits[","] - fits["."])
    decimal = given.decimal or ("," if commas > points else ".")
    signs, used, large, words = list[str](), set[str](), list[str](), dict[str, tuple[str, ...]]()
    for name in columns:
        odd = tuple(sorted({cell for cell in columns[name] if cell.strip().lower() in MISSING}))
        if odd and known[name]:
            words[name] = odd
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
    thousands = "".join(sorted(used | set(given.thousands or "")))
    return Style(decimal, thousands, tuple(signs), words, tuple(large))


def _number(decimal: str) -> re.Pattern[str]:
    """Numbers with signs between thousands, currencies and percents."""
    mark, group = re.escape(decimal), f"[{re.escape(GROUPS[decimal])}]"
    whole = rf"(?:[1-9]\d{{0,2}}(?:{group}\d{{3}})+|\d+)"
    number = rf"(?:{whole}(?:{mark}\d*)?|{mark}\d+)(?:[eE][-+]?\d+)?"
    return re.compile(rf"[-+]?(?:{CURRENCY}\s?)?[-+]?{number}\s?(?:%|{CURRENCY})?")


def first_open_line(file: BinaryIO, dialect: Dialect) -> int:
    """The line after which a value in quotes goes on, from 1; 0: there is none."""
    return next((k for k, (_, is_open) in enumerate(_lines(file, dialect), 1) if is_open), 0)


def record_starts(file: BinaryIO, dialect: Dialect, step: int) -> Iterator[int]:
    """Where rows begin, at least `step` bytes from each other; reads all lines."""
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
    """Each line, and whether a value in quotes goes on after it."""
    mark = re.escape((dialect.delimiter or ",").encode())
    begin = re.compile(rb"(?:^|(?<=" + mark + rb'))"')
    end = re.compile(rb'(?:[^"\\]++|\\.|"")*+"' if dialect.escape else rb'(?:[^"]++|"")*+"', re.DOTALL)
    is_open = False
    while line := file.readline(MAX_LINE_bytes):
        if b'"' in line:
            at = 0
            while found := end.match(line, at) if is_open else begin.search(line, at):
                is_open, at = not is_open, found.end()
        yield line, is_open


def describe(found: Dialect) -> str:
    """How files are written, in words, with the options that overrule it."""
    names = {"\t": "a tab", " ": "a space"}
    fields = found.names or ("c0", "c1", "...")
    parts = [
        f"{names.get(found.delimiter or '', repr(found.delimiter))} between values",
        "a header" if found.header else f"no header (columns are {', '.join(fields[:3])})",
        f"{found.encoding}",
    ]
    parts += ["decimal comma"] * (found.decimal == ",")
    parts += [f"numbers with signs in {', '.join(found.signs or ())}"] * bool(found.signs)
    words = [word for word in found.missing or () if word]
    parts += [f"missing (numbers only): {', '.join(map(repr, words))}"] * bool(words)
    parts += ["line breaks in quotes"] * bool(found.line_breaks)
    parts += ["spaces around values left out"] * bool(found.trim)
    parts += ["quotes after backslashes"] * bool(found.escape)
    options = "--delimiter, --header, --names, --encoding, --decimal, --missing, --column-type"
    return f"text: {'; '.join(parts)} (other: {options})"
