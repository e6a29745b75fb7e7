"""The Reader seam: where rows come from, cut into splits that can be read in any order and read again.

A reader says what columns there are, cuts its rows into splits without reading them, and reads one split. That is
all that shuffling, resuming and handing splits to several workers need: a split is a small value, and reading it is
pure. Implementations: `parquet`, `delimited`, `frames`, `generator`; tests/ingest/test_reader.py holds all to the
same promises.
"""

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from rowwise.errors import DataError
from rowwise.spec import Value

GLOB = set("*?[")


class Split(Value, frozen=True):
    """Rows that are read together: a range of a source, in the unit of the reader that made it."""

    source: str  # a path, or what else the user knows the rows by
    start: int
    stop: int
    first_row: int | None = None  # how many rows of the source come before; None where that takes reading them
    rows: int | None = None  # how many there are; None where that takes reading them

    def place(self, row: int) -> str:
        """The position of a row of this split in words, for messages."""
        if self.first_row is None:
            return f"{self.source}: row {row} after byte {self.start}"
        return f"{self.source}: row {self.first_row + row}"


class Reader(Protocol):
    """Rows in splits. Reading the same split gives the same rows in the same order, whatever was read before."""

    @property
    def schema(self) -> pa.Schema: ...

    def splits(self) -> tuple[Split, ...]:
        """The splits, in the order of the data, known without reading it."""
        ...

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        """These columns of a split, in this order; others are not read where the format allows that."""
        ...


def check_columns(names: Sequence[str], schema: pa.Schema, source: str) -> None:
    """Refuse a column that is not there, with the name that was meant."""
    times = Counter(schema.names)
    for name in names:
        if name not in times:
            near = difflib.get_close_matches(name, schema.names, n=1, cutoff=0.5)
            guess = f"; did you mean {near[0]!r}?" if near else "."
            raise DataError(f"{source}: no column {name!r}{guess} There are {_list_names(schema.names)}")
        if times[name] > 1:
            raise DataError(f"{source}: column {name!r} is there {times[name]} times: want each name once")


def find_files(path: str | Path, endings: Sequence[str]) -> tuple[str, ...]:
    """A file as it is, the files of a folder that end so (at any depth), or those that a pattern matches; sorted."""
    place = Path(path)
    if place.is_file():
        return (str(place),)
    if place.is_dir():
        # Names that begin with a dot or an underscore are notes that other systems leave among the data.
        inside = (p for p in place.rglob("*") if not any(part[0] in "._" for part in p.relative_to(place).parts))
        found = sorted(str(p) for p in inside if p.is_file() and p.name.endswith(tuple(endings)))
        want = f"no file in it ends with {' or '.join(endings)}"
    elif GLOB & set(str(path)):
        anchor = Path(place.anchor)
        found = sorted(str(p) for p in anchor.glob(str(place.relative_to(anchor))) if p.is_file())
        want = "no file matches the pattern"
    else:
        raise DataError(f"{path}: no such file or folder")
    if not found:
        raise DataError(f"{path}: {want}")
    return tuple(found)


def _list_names(names: Sequence[str], most: int = 40) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
