"""Reads the complete rows of a CSV file that may be missing, empty, truncated or damaged.

A run can be killed at any byte. A last line without a newline is dropped even if it parses, as a truncated 0.7812 reads
as 0.78.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rowwise.base import textfile

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CsvRow:
    """A row with cells by column name."""

    columns: Mapping[str, int]
    cells: Sequence[str]

    def text(self, column: str) -> str:
        """The cell's text; empty without such a column."""
        return self.cells[self.columns[column]] if column in self.columns else ""

    def number(self, column: str) -> float:
        """The cell's number; NaN if the cell has none."""
        try:
            return float(self.text(column))
        except ValueError:
            return math.nan

    def record(self, kind: type[T], **columns: str) -> T:
        """The cells as a dataclass of texts and numbers; `columns` maps fields to columns of another name."""
        values: dict[str, Any] = {}
        for name, type_ in kind.__annotations__.items():
            values[name] = (self.text if type_ is str else self.number)(columns.get(name, name))
        return kind(**values)


@dataclass(frozen=True, slots=True)
class CsvTable:
    """The readable rows, and descriptions of problems."""

    rows: tuple[CsvRow, ...]
    columns: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_bytes(path: Path) -> tuple[bytes, str | None]:
    """The content of a file, or the reason why it is missing."""
    try:
        return textfile.read_bytes(path), None
    except FileNotFoundError:
        return b"", f"{path.name} is missing"
    except OSError as error:
        return b"", f"{path.name} could not be read: {error.strerror or error}"


def read_csv(path: Path, needed: Sequence[str], *, optional: bool = False) -> CsvTable:
    """The complete rows of a file; none if a needed column is missing. A missing optional file is not a problem."""
    if optional and not path.exists():
        return CsvTable(())
    content, problem = read_bytes(path)
    if problem:
        return CsvTable((), (), (problem,))
    text = content.decode("utf-8", errors="replace").removeprefix("\ufeff")
    lines, problems = _parse_lines(text, path.name)
    if not lines:
        return CsvTable((), (), (*problems, f"{path.name} is empty"))
    header = lines.pop(0)
    columns = {name: k for k, name in enumerate(header)}
    missing = [name for name in needed if name not in columns]
    if missing:
        problems.append(f"{path.name} lacks the column {', '.join(missing)}, so it was not used")
        return CsvTable((), tuple(header), tuple(problems))
    complete = [line for line in lines if len(line) == len(header)]
    dropped = len(lines) - len(complete)
    if dropped:
        problems.append(f"{path.name}: {dropped} line{'s' * (dropped > 1)} without {len(header)} cells left out")
    if not complete:
        problems.append(f"{path.name} has no rows")
    return CsvTable(tuple(CsvRow(columns, line) for line in complete), tuple(header), tuple(problems))


def _parse_lines(text: str, name: str) -> tuple[list[list[str]], list[str]]:
    lines: list[list[str]] = []
    problems: list[str] = []
    try:
        lines.extend(line for line in csv.reader(io.StringIO(text, newline="")) if line)
    except csv.Error as error:
        problems.append(f"{name} was read up to a line that is no CSV ({error})")
    if text and not text.endswith("\n"):
        problems.append(f"{name}: the last line is cut and was left out")
        lines = lines[:-1]
    return lines, problems
