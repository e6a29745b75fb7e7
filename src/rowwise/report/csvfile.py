"""A CSV file that may be missing, empty, cut in its last line or damaged in the middle: the rows that are whole.

A last line without its end is left out even where it looks whole, as a cut 0.7812 looks like 0.78.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowwise import textfile


@dataclass(frozen=True, slots=True)
class Row:
    """Cells by the name of their column."""

    columns: Mapping[str, int]
    cells: Sequence[str]

    def text(self, column: str) -> str:
        """The cell as it is; empty if there is no such column."""
        return self.cells[self.columns[column]] if column in self.columns else ""

    def number(self, column: str) -> float:
        """The cell's number; NaN if it has none."""
        try:
            return float(self.text(column))
        except ValueError:
            return math.nan


@dataclass(frozen=True, slots=True)
class Records:
    """The lines of a CSV file that could be read, and a message about the others."""

    rows: tuple[Row, ...]
    columns: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_bytes(path: Path) -> tuple[bytes, str | None]:
    """A file's content, or why there is none."""
    try:
        return textfile.read_bytes(path), None
    except FileNotFoundError:
        return b"", f"{path.name} is missing"
    except OSError as error:
        return b"", f"{path.name} could not be read: {error.strerror or error}"


def read_csv(path: Path, needed: Sequence[str]) -> Records:
    """The whole rows of a file; none if a needed column is not there."""
    content, problem = read_bytes(path)
    if problem:
        return Records((), (), (problem,))
    text = content.decode("utf-8", errors="replace").removeprefix("\ufeff")
    lines, problems = _lines(text, path.name)
    if not lines:
        return Records((), (), (*problems, f"{path.name} is empty"))
    header = lines.pop(0)
    columns = {name: k for k, name in enumerate(header)}
    lacking = [name for name in needed if name not in columns]
    if lacking:
        problems.append(f"{path.name} lacks the column {', '.join(lacking)}, so it was not used")
        return Records((), tuple(header), tuple(problems))
    whole = [line for line in lines if len(line) == len(header)]
    odd = len(lines) - len(whole)
    if odd:
        problems.append(f"{path.name}: {odd} line{'s' * (odd > 1)} without {len(header)} cells left out")
    if not whole:
        problems.append(f"{path.name} has no rows")
    return Records(tuple(Row(columns, line) for line in whole), tuple(header), tuple(problems))


def _lines(text: str, name: str) -> tuple[list[list[str]], list[str]]:
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
