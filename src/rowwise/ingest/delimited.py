"""A `Reader` of CSV and TSV files: a split is a range of bytes, and holds the lines that begin in it.

So the splits follow from the sizes of the files alone; the begin of a line is searched when a split is read. With line
breaks in quoted values, the begin of a line is ambiguous: then files are scanned once, and splits begin at rows. Files
without random access (compressed, or in other encodings than UTF-8) are read from plain copies (`plain_copy`). The
dialect is detected in the first megabyte (`dialect`); `settle` checks it against all rows.

The schema is the union of all files' columns; a column that a file lacks is null there. Folders called `day=3` make a
column `day`.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple, final

import numpy as np
import pyarrow as pa
from msgspec import structs
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.base.storage.read_cache import CacheFolder
from rowwise.base.textfile import open_regular
from rowwise.ingest.dialect import (
    Dialect,
    Heading,
    csv_reader,
    find_encoding,
    find_heading,
    find_layout,
    first_open_line,
    parse_type,
    record_starts,
    records,
)
from rowwise.ingest.lines import UnevenLinesError, find_bad_value, find_types, parse_lines
from rowwise.ingest.plain_copy import open_unpacked, packing_of, plain_copy
from rowwise.ingest.reader import Split, check_columns, find_files
from rowwise.ingest.union import widest
from rowwise.ingest.warehouse import hive

KINDS = (".csv", ".tsv", ".txt")
PACKED = ("", ".gz", ".zst", ".bz2", ".xz", ".zip")
ENDINGS = tuple(f"{kind}{packed}" for kind in KINDS for packed in PACKED)
HEAD_BYTES = 1 << 20  # beginning of a file, from which the types of its columns are inferred
MAX_NAMED, MAX_NOTES = 5, 8
BOM = b"\xef\xbb\xbf"
WHERE_TO_SET = "for rowwise data inspect, or data.text.{} in a recipe"


class MisfitError(DataError):
    """Rows do not fit the dialect detected at the beginning of the files; `CsvReader.settle` finds one that fits."""


class _TextFile(NamedTuple):
    """The encoding, columns and plain copy of a file."""

    plain: str | None  # the file, or its copy; None until the copy is needed
    encoding: str
    heading: Heading
    begin: int  # of the first row


@final
class CsvReader:
    """Reads the rows of text files.

    Args:
        path: a file, a folder or a pattern; or the files.
        dialect: the known settings; the others are detected in the first file.
    """

    def __init__(self, path: str | Path | tuple[str, ...], dialect: Dialect | None = None) -> None:
        """Detect the dialect and the types of the columns in the first megabyte of the first file."""
        self._files = path if isinstance(path, tuple) else find_text_files(path)
        self._given = dialect or Dialect()
        self._opened, self._splits = dict[str, _TextFile](), None
        head = self._head(self._files[0])
        self.dialect = find_layout(head[0], self._given)
        first = self._open(self._files[0], head)
        self.dialect = structs.replace(self.dialect, encoding=first.encoding, header=first.heading.header)
        headings = {name: self._open(name).heading for name in self._files}
        names = list(dict.fromkeys(n for h in headings.values() for n in h.names if n not in h.left_out))
        self._constants = hive.FolderConstants(self._files, {})
        self._constants.hide(names)
        self._notes = _notes_of(headings)
        self.undecided = tuple[str, ...]()
        chosen = self._guess(names, headings)
        self._schema = pa.schema([*chosen.items(), *self._constants.schema])
        self.dialect = structs.replace(self.dialect, types={name: str(kind) for name, kind in chosen.items()})

    _splits: tuple[Split, ...] | None

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def notes(self) -> tuple[str, ...]:
        """Surprising facts about the files, a line for each."""
        return tuple(self._notes)

    @property
    def copied(self) -> int:
        """Number of files with a plain copy."""
        return sum(file.plain != name for name, file in self._opened.items())

    def splits(self) -> tuple[Split, ...]:
        """Ranges of bytes. A split may have no rows, if a line is longer than a range."""
        if self._splits is None:
            self._splits = tuple(split for name in self._files for split in self._ranges(name))
        return self._splits

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        """The lines that begin in a range of bytes."""
        check_columns(columns, self._schema, split.source)
        file = self._unpack(split.source)
        data, begin = self._lines(file, split)
        names = file.heading.names
        self._refuse_open_lines(data, split, file, begin)
        # At least one column has to be parsed to count the rows.
        inside = [name for name in columns if name in names] or list(names[:1])
        kinds = {name: self._schema.field(name).type if name in columns else pa.string() for name in inside}
        try:
            table = parse_lines(data, names, self.dialect, kinds, inside)
        except pa.ArrowException as error:
            raise self._misfit(data, file, split, begin, kinds, error) from error
        values = self._constants.values(split.source)
        return hive.complete(table, columns, self._schema, values).select(list(columns))

    def settle(self) -> "CsvReader":
        """A reader whose types, words for missing values and line breaks fit all rows of all files; reads them all."""
        kinds = {
            name: pa.null() if name in self.undecided else parse_type(k, name) for name, k in self.dialect.types.items()
        }
        dialect = self.dialect
        for split in self.splits():
            file = self._unpack(split.source)
            data, begin = self._lines(file, split)
            if self._has_open_line(data):
                return CsvReader(self._files, structs.replace(self._given, line_breaks=True)).settle()
            if self._given.encoding is None and not _is_utf8(data):
                return CsvReader(self._files, structs.replace(self._given, encoding="cp1252")).settle()
            names = file.heading.names
            inside = [name for name in names if name in kinds]
            try:
                parse_lines(data, names, dialect, kinds, inside)
            except UnevenLinesError as error:
                raise self._misfit(data, file, split, begin, {}, error) from error
            except pa.ArrowException:
                # The decimal sign is undetermined until a fraction occurs.
                is_open = self._given.decimal is None and not any(map(types.is_floating, kinds.values()))
                open_dialect = structs.replace(dialect, decimal=None) if is_open else dialect
                inferred, dialect = find_types(data, names, inside, open_dialect)
                open_names = [name for name in inside if name not in self._given.types]
                kinds |= {name: widest(kinds[name], inferred[name]) or pa.string() for name in open_names}
        return self._settled(kinds, dialect)

    def _settled(self, kinds: dict[str, pa.DataType], dialect: Dialect) -> "CsvReader":
        signs = tuple(name for name in dialect.signs or () if not types.is_string(kinds[name]))
        texts = {name: str(pa.string() if types.is_null(kind) else kind) for name, kind in kinds.items()}
        settled = CsvReader(self._files, structs.replace(dialect, signs=signs, types=texts))
        for name, kind in texts.items():
            before = "no value" if name in self.undecided else self.dialect.types[name]
            if kind != self.dialect.types[name]:
                settled._notes.append(f"column {name!r} has {before} at first, and {kind} later: read as {kind}")
        return settled

    def __getstate__(self) -> dict[str, object]:
        """Names and settings; another process opens the files and makes plain copies itself."""
        return self.__dict__ | {"_opened": {}}

    def _head(self, name: str) -> tuple[bytes, str, bool]:
        """The first whole lines of a file in UTF-8, its encoding, and whether it allows random access."""
        with open_unpacked(name) as file:
            raw = file.read(HEAD_BYTES)
            whole = not file.read(1)
        if not raw:
            raise DataError(f"{name}: the file is empty", "lines of columns")
        encoding = find_encoding(raw, whole=whole)
        marked = any(raw.startswith(mark) for mark in (BOM, b"\xff\xfe", b"\xfe\xff"))
        encoding = encoding if marked or self._given.encoding is None else self._given.encoding
        try:
            text = io.TextIOWrapper(io.BytesIO(raw), encoding, "strict" if whole else "ignore", newline="").read()
        except UnicodeError as error:
            raise DataError(
                f"{name}: is not {encoding}: {error}", hint=f"set --encoding {WHERE_TO_SET.format('encoding')}"
            ) from error
        only_returns = "\n" not in text and "\r" in text
        text = text.replace("\r", "\n") if only_returns else text
        is_plain = encoding in ("utf-8", "ascii") and not only_returns and not packing_of(name)
        data = text.encode()
        return data if whole else data[: data.rfind(b"\n") + 1], encoding, is_plain

    def _open(self, name: str, head: tuple[bytes, str, bool] | None = None) -> _TextFile:
        """A file's encoding and columns, from its first lines."""
        if name in self._opened:
            return self._opened[name]
        data, encoding, is_plain = head or self._head(name)
        skip = len(BOM) * data.startswith(BOM)
        text = data[skip:].decode(errors="replace")
        try:
            rows = records(text, self.dialect)
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
        if not rows:
            raise DataError(f"{name}: no rows", "at least one")
        heading = find_heading(rows, structs.replace(self._given, header=self.dialect.header))
        begin = skip
        if heading.header:
            reader = csv_reader(text, self.dialect)
            while not next(reader):
                pass
            begin += len("".join(text.splitlines(keepends=True)[: reader.line_num]).encode())
        if not heading.names or len(set(heading.names)) < len(heading.names):
            raise DataError(
                f"{name}: its first line is no header", hint=f"set --names a,b,c {WHERE_TO_SET.format('names')}"
            )
        self._opened[name] = _TextFile(name if is_plain else None, encoding, heading, begin)
        return self._opened[name]

    def _unpack(self, name: str) -> _TextFile:
        """A file with random access: itself, or its plain copy."""
        file = self._open(name)
        if file.plain is not None and (file.plain == name or Path(file.plain).exists()):
            return file
        place = CacheFolder(Path(self.dialect.unpack_to).expanduser(), self.dialect.unpacked_gb * 10**9)
        try:
            copy = plain_copy(name, file.encoding, place)
        except OSError as error:
            raise DataError(
                f"{name}: cannot be unpacked into {place.folder}: {error}",
                hint=f"choose another folder: --unpack-to {WHERE_TO_SET.format('unpack_to')}",
            ) from error
        self._opened[name] = file._replace(plain=str(copy))
        return self._opened[name]

    def _ranges(self, name: str) -> list[Split]:
        file, step = self._unpack(name), self.dialect.split_bytes
        assert file.plain is not None
        size = Path(file.plain).stat().st_size
        starts: Iterable[int] = range(step, size, step)
        if self.dialect.line_breaks:
            with open_regular(file.plain) as opened:
                try:
                    starts = [at for at in record_starts(opened, self.dialect, step) if at < size]
                except DataError as error:
                    raise DataError(f"{name}: {error}") from None
        bounds = [0, *starts, size]
        return [Split(source=name, start=a, stop=b) for a, b in pairwise(bounds)]

    def _lines(self, file: _TextFile, split: Split) -> tuple[bytes, int]:
        """The lines that begin in a split's range of bytes, and the offset of the first."""
        assert file.plain is not None
        with open_regular(file.plain) as opened:
            begin = max(file.begin, _line_start(opened, split.start))
            end = max(begin, _line_start(opened, split.stop))
            opened.seek(begin)
            return opened.read(end - begin), begin

    def _guess(self, names: Sequence[str], headings: dict[str, Heading]) -> dict[str, pa.DataType]:
        """The type of each column and the number format, by the first file with the column."""
        kinds = {name: parse_type(kind, name) for name, kind in self._given.types.items() if name in names}
        for source, heading in headings.items():
            new = [name for name in heading.names if name in names and name not in kinds]
            is_first = source == self._files[0]
            if not new and not (is_first and None in (self.dialect.decimal, self.dialect.missing, self.dialect.signs)):
                continue
            head = self._head_rows(source)
            if not head.strip():
                raise DataError(
                    f"{source}: no row below the header",
                    "at least one",
                    hint="--no-header takes the first line as a row",
                )
            try:
                inferred, self.dialect = find_types(head, heading.names, heading.names, self.dialect)
            except pa.ArrowException as error:
                file = self._opened[source]
                split = Split(source=source, start=0, stop=len(head))
                raise self._misfit(head, file, split, file.begin, {}, error) from error
            kinds |= {name: inferred[name] for name in new}
        # A column without a value in the head is read as text, which fits any later value.
        self.undecided = tuple(name for name, kind in kinds.items() if types.is_null(kind))
        return {name: pa.string() if types.is_null(kinds[name]) else kinds[name] for name in names}

    def _head_rows(self, name: str) -> bytes:
        file = self._opened[name]
        if file.plain is None:
            return self._head(name)[0][file.begin :]
        with open_regular(name) as opened:
            opened.seek(file.begin)
            head = opened.read(HEAD_BYTES)
            return head[: head.rfind(b"\n") + 1] if opened.read(1) else head

    def _has_open_line(self, data: bytes) -> bool:
        """Whether a quoted value unexpectedly continues in the next line."""
        is_quoted = self.dialect.quotes and not self.dialect.line_breaks and b'"' in data
        # If each line has an even number of quotes, none is open.
        return is_quoted and _has_odd_line(data) and first_open_line(io.BytesIO(data), self.dialect) > 0

    def _refuse_open_lines(self, data: bytes, split: Split, file: _TextFile, begin: int) -> None:
        if self._has_open_line(data):
            line = _line_number(file, begin) + first_open_line(io.BytesIO(data), self.dialect)
            hint = "set data.text.line_breaks: true in a recipe, as rowwise data inspect does, or quotes: false"
            raise MisfitError(f"{split.source}: line {line}: a quoted value continues in the next line", hint=hint)

    def _misfit(
        self, data: bytes, file: _TextFile, split: Split, begin: int, kinds: Mapping[str, pa.DataType], error: Exception
    ) -> MisfitError:
        """An error for lines that cannot be parsed: the first bad line, and the options that help."""
        above = _line_number(file, begin)
        if isinstance(error, UnevenLinesError):
            alternative = f"another --delimiter {WHERE_TO_SET.format('delimiter')}"
            expected = f"values with {self.dialect.delimiter!r} in quotes, or {alternative}"
            return MisfitError(f"{split.source}: line {above + error.line}: {error}", expected)
        if not _is_utf8(data):
            lines = data.splitlines(keepends=True)
            line = next(k for k, text in enumerate(lines) if not _is_utf8(text))
            hint = f"set --encoding cp1252 or another {WHERE_TO_SET.format('encoding')}"
            return MisfitError(f"{split.source}: line {above + line + 1} is not UTF-8", hint=hint)
        bad = find_bad_value(data, file.heading.names, self.dialect, dict(kinds), list(kinds))
        if bad is None:
            return MisfitError(f"{split.source}: after line {above}: {error}", "lines like the first ones")
        place = f"{split.source}: line {above + bad.line}, column {bad.column!r}"
        hint = f"set --column-type {bad.column}=string {WHERE_TO_SET.format('types')}"
        return MisfitError(f"{place}: {bad.text[:80]!r} is no {bad.kind}", hint=hint)


def find_text_files(path: str | Path) -> tuple[str, ...]:
    """The files of a path; in a folder, .txt files only if there are no others."""
    files = find_files(path, ENDINGS)
    tables = tuple(name for name in files if ".txt" not in Path(name).suffixes)
    return (tables or files) if Path(path).is_dir() else files


def _notes_of(headings: Mapping[str, Heading]) -> list[str]:
    """Notes on differences between the columns of the files."""
    first, *others = headings.items()
    notes = list(first[1].notes)
    for name, heading in others:
        missing = [column for column in first[1].names if column not in heading.names]
        more = [column for column in heading.names if column not in first[1].names]
        for what, columns in (("lacks", missing), ("alone has", more)):
            if columns and len(notes) < MAX_NOTES:
                named = ", ".join(columns[:MAX_NAMED])
                notes.append(f"{name} {what} {named}, by the header of {first[0]}: no value where a file lacks it")
    return notes


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _has_odd_line(data: bytes) -> bool:
    """Whether a line has an odd number of quotes before its end, counting from the first byte."""
    bytes_N = np.frombuffer(data, np.uint8)
    open_N = np.cumsum(bytes_N == ord('"')) & 1
    return bool(open_N[bytes_N == ord("\n")].any())


def _line_number(file: _TextFile, at: int) -> int:
    """The number of lines that end before an offset of a file."""
    if file.plain is None:
        return int(file.heading.header)
    with open_regular(file.plain) as opened:
        sizes = range(0, at, HEAD_BYTES)
        return sum(opened.read(min(HEAD_BYTES, at - done)).count(b"\n") for done in sizes)


def _line_start(file: BinaryIO, at: int) -> int:
    """The first offset from `at` on at which a line begins."""
    if at == 0:
        return 0
    file.seek(at - 1)
    while (piece := file.readline(HEAD_BYTES)) and not piece.endswith(b"\n"):
        pass  # a long line, in pieces
    return file.tell()
