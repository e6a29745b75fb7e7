"""A `Reader` of CSV and TSV files: a split is a range of bytes, and holds the lines that begin in it.

So the splits follow from the sizes of the files alone; where a line begins is found when a split is read. Not
supported: line breaks inside quotes, because a line could then begin anywhere (a split with one is refused); compressed
files, because they cannot be read from the middle.
"""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import pyarrow as pa
from pyarrow import csv

from rowwise.errors import DataError
from rowwise.ingest.reader import Split, check_columns, find_files
from rowwise.spec import Value

ENDINGS = (".csv", ".tsv", ".txt")
DELIMITERS = ",\t;|"
HEAD_BYTES = 1 << 20  # of the first file, from which the types of the columns are guessed
BLOCK_BYTES = 8 << 20  # the longest line that Arrow accepts
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")


class Dialect(Value, frozen=True):
    """Delimiter, quotes and header of a text file."""

    delimiter: str = ","
    names: tuple[str, ...] = ()  # of the columns; empty: the first line of each file is a header
    quotes: bool = True  # values may be in double quotes
    nulls: tuple[str, ...] = ("",)  # texts of missing values; without "NA", which may be an id (Namibia)
    split_bytes: int = 32 << 20


@final
class CsvReader:
    """Reads the rows of text files.

    Args:
        path: a file, a folder or a pattern.
        dialect: None: the delimiter in the header of the first file, a comma if it has several.
        types: types of columns by name, where the first megabyte does not show them: for instance a column of
            floats that begins with whole numbers.
    """

    def __init__(self, path: str | Path, dialect: Dialect | None = None, types: dict[str, str] | None = None) -> None:
        """Guess the types of the columns from the first megabyte of the first file."""
        self._files = find_files(path, ENDINGS)
        for name in self._files:
            _check_file(name)
        self._dialect = dialect or Dialect(delimiter=_find_delimiter(self._files[0]))
        if self._dialect.split_bytes < 1:
            raise DataError(f"split_bytes={self._dialect.split_bytes}: want at least 1")
        self._names = self._dialect.names or _header(self._files[0], self._dialect)
        self._schema = self._guess(types or {})

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def splits(self) -> tuple[Split, ...]:
        """Ranges of bytes. A split may have no rows, if a line is longer than a range."""
        return tuple(split for name in self._files for split in self._ranges(name))

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        """The lines that begin in a range of bytes."""
        check_columns(columns, self._schema, split.source)
        with open(split.source, "rb") as file:
            begin = self._after_header(file, split.source) if split.start == 0 else _line_start(file, split.start)
            end = max(begin, _line_start(file, split.stop))
            file.seek(begin)
            data = file.read(end - begin)
        if self._dialect.quotes:
            _refuse_broken_quotes(data, split)
        try:
            return self._parse(data, self._schema, columns)
        except pa.ArrowException as error:
            want = "want values of the guessed types, or the type of the column in types={'name': 'float'}"
            raise DataError(f"{split.source}: bytes {begin} to {end}: {error}: {want}") from error

    def _ranges(self, name: str) -> list[Split]:
        size, step = Path(name).stat().st_size, self._dialect.split_bytes
        return [Split(source=name, start=at, stop=min(at + step, size)) for at in range(0, size, step)]

    def _after_header(self, file: io.BufferedReader, name: str) -> int:
        if self._dialect.names:
            return 0
        names = _header(name, self._dialect)
        if names != self._names:
            want = f"want the header of {self._files[0]}: {', '.join(self._names)}"
            raise DataError(f"{name}: its header is {', '.join(names)}; {want}")
        file.seek(0)
        file.readline()
        return file.tell()

    def _guess(self, types: dict[str, str]) -> pa.Schema:
        name = self._files[0]
        with open(name, "rb") as file:
            begin = self._after_header(file, name)
            file.seek(begin)
            head = file.read(HEAD_BYTES)
        if not head.strip():
            raise DataError(f"{name}: no row below the header: want at least one")
        if len(head) == HEAD_BYTES:
            head = head[: head.rfind(b"\n") + 1]
        try:
            guessed = self._parse(head, None, self._names).schema
            check_columns(list(types), guessed, name)
            # A column without a value in the head is read as text, which holds any later value.
            chosen = {f.name: pa.string() if pa.types.is_null(f.type) else f.type for f in guessed}
            chosen |= {column: pa.type_for_alias(alias) for column, alias in types.items()}
        except (pa.ArrowException, ValueError) as error:
            want = f"want lines of {', '.join(self._names)}, or Dialect(delimiter=...)"
            raise DataError(f"{name}: cannot be read as text of {len(self._names)} columns: {error}: {want}") from error
        return pa.schema(chosen)

    def _parse(self, data: bytes, schema: pa.Schema | None, columns: Sequence[str]) -> pa.Table:
        if schema is not None and not data:
            return schema.empty_table().select(list(columns))
        return csv.read_csv(
            pa.BufferReader(data),
            csv.ReadOptions(column_names=list(self._names), block_size=BLOCK_BYTES),
            csv.ParseOptions(delimiter=self._dialect.delimiter, quote_char='"' if self._dialect.quotes else False),
            csv.ConvertOptions(
                column_types=schema,
                include_columns=list(columns),
                strings_can_be_null=True,
                null_values=list(self._dialect.nulls),
            ),
        )


def _check_file(name: str) -> None:
    if name.endswith(COMPRESSED):
        raise DataError(f"{name}: a compressed text file cannot be read in parts: want it decompressed")
    if Path(name).stat().st_size == 0:
        raise DataError(f"{name}: the file is empty: want lines of columns")


def _find_delimiter(name: str) -> str:
    if name.endswith(".tsv"):
        return "\t"
    with open(name, "rb") as file:
        line = file.readline()
    return next((mark for mark in DELIMITERS if mark.encode() in line), ",")


def _header(name: str, dialect: Dialect) -> tuple[str, ...]:
    with open(name, "rb") as file:
        line = file.readline().removeprefix(b"\xef\xbb\xbf")  # UTF-8 byte order mark
    options = csv.ParseOptions(delimiter=dialect.delimiter, quote_char='"' if dialect.quotes else False)
    try:
        names = csv.read_csv(pa.BufferReader(line), parse_options=options).column_names
        twice = [column for column, count in Counter(names).items() if count > 1]
        if twice:
            raise DataError(f"{name}: its header names column {twice[0]!r} twice: want each name once")
        return tuple(names)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        want = "want names of columns there, or Dialect(names=(...)) for a file without a header"
        raise DataError(f"{name}: its first line is not a header: {error}: {want}") from error


def _line_start(file: io.BufferedReader, at: int) -> int:
    """The first byte at or after `at` at which a line begins."""
    if at == 0:
        return 0
    file.seek(at - 1)
    file.readline()
    return file.tell()


def _refuse_broken_quotes(data: bytes, split: Split) -> None:
    """Refuse a line break inside quotes: the number of quotes before it is odd."""
    if b'"' not in data:
        return
    bytes_N = np.frombuffer(data, np.uint8)
    open_N = np.cumsum(bytes_N == ord('"')) & 1
    broken = np.flatnonzero(open_N[bytes_N == ord("\n")])
    if broken.size:
        want = "want line breaks outside quotes only, or quotes=False if a quote is a plain character"
        raise DataError(f"{split.locate_row(int(broken[0]))}: a quoted value continues on the next line: {want}")
