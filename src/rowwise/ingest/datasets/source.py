"""Files of a dataset as published: plain, compressed by gzip, or inside ZIP archives."""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, final

import pyarrow as pa
from pyarrow import csv
from pyarrow import json as arrow_json

from rowwise.base.errors import DataError

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A download for the user: files, size, terms, and page."""

    files: tuple[str, ...]
    size: str
    terms: str
    page: str


@final
class SourceFolder:
    """The files below a folder.

    Args:
        folder: searched recursively.
        name: of the dataset, for errors.
        download: the expected files.
    """

    def __init__(self, folder: Path, name: str, download: Download) -> None:
        self._folder, self._name, self._download = folder, name, download

    def find(self, pattern: str) -> str:
        """The path of the only file that matches the pattern: FILE, FILE.gz, or ARCHIVE.zip!MEMBER."""
        matches = self._search(pattern)
        if not matches:
            wanted = ", ".join(self._download.files)
            raise DataError(
                f"{self._folder}: no {pattern}",
                hint=f"download {wanted} ({self._download.size}; {self._download.terms}) from "
                f"{self._download.page} into {self._folder}, unpack .tar archives, and start again: "
                f"rowwise data get {self._name}, or with --source FOLDER where the files are elsewhere",
            )
        if len(matches) > 1:
            raise DataError(f"{self._folder}: {len(matches)} files fit {pattern}: {', '.join(matches[:5])}", "one file")
        return matches[0]

    def has(self, pattern: str) -> bool:
        return bool(self._search(pattern))

    def csv(
        self,
        pattern: str,
        types: Mapping[str, pa.DataType],
        *,
        header: bool = True,
        delimiter: str = ",",
        only: Sequence[str] = (),
    ) -> Iterator[pa.Table]:
        """Blocks of rows of a text file.

        Args:
            pattern: file name pattern.
            types: columns to read; without a header, all columns of the file.
            header: the first line has column names.
            delimiter: separates values.
            only: columns of `types` to read; by default all.
        """
        with self._open(pattern, f"the columns {', '.join(types)}") as file:
            reader = csv.open_csv(
                file,
                csv.ReadOptions(column_names=None if header else list(types), block_size=BLOCK_BYTES),
                csv.ParseOptions(delimiter=delimiter, quote_char='"' if header else False),
                csv.ConvertOptions(
                    column_types=dict(types),
                    include_columns=list(only or types),
                    strings_can_be_null=True,
                    null_values=[""],
                ),
            )
            for batch in reader:
                yield pa.Table.from_batches([batch])

    def json_lines(self, pattern: str, types: Mapping[str, pa.DataType]) -> Iterator[pa.Table]:
        """Blocks of rows of a file with one JSON object a line, with the keys of `types` only."""
        options = arrow_json.ParseOptions(explicit_schema=pa.schema(dict(types)), unexpected_field_behavior="ignore")
        with self._open(pattern, f"one JSON object a line, with {', '.join(types)}") as file:
            for lines in _whole_lines(file):
                block = arrow_json.ReadOptions(block_size=len(lines) + 1)
                yield arrow_json.read_json(pa.BufferReader(lines), block, options)

    def lines(self, pattern: str, encoding: str = "utf8") -> Iterator[list[str]]:
        """Blocks of lines of a text file."""
        with self._open(pattern, "lines of text") as file:
            for lines in _whole_lines(file):
                yield lines.decode(encoding).split("\n")[:-1]

    def _search(self, pattern: str) -> list[str]:
        if not self._folder.is_dir():
            return []
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        matches = [str(p) for p in files if fnmatch(p.name, pattern) or fnmatch(p.name, f"{pattern}.gz")]
        for path in files if not matches else ():
            if path.suffix == ".zip" and zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    members = (name for name in archive.namelist() if fnmatch(name.rpartition("/")[2], pattern))
                    matches += [f"{path}!{name}" for name in members]
        return matches

    @contextmanager
    def _open(self, pattern: str, expected: str) -> Iterator[Any]:
        """Open the file that matches the pattern; errors name it."""
        path = self.find(pattern)
        archive, mark, member = path.partition("!")
        try:
            packed = "gzip" if path.endswith(".gz") else None
            with zipfile.ZipFile(archive).open(member) if mark else pa.input_stream(path, compression=packed) as file:
                yield file
        except (pa.ArrowException, KeyError, UnicodeDecodeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: {error}", expected) from error


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    rest = b""
    while block := file.read(BLOCK_BYTES):
        lines, newline, rest_of_block = block.rpartition(b"\n")
        if newline:
            yield rest + lines + newline
            rest = rest_of_block
        else:
            rest += block
    if rest:
        yield rest + b"\n"
