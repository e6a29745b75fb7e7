"""The `Reader` protocol: a source of rows, cut into splits that can be read in any order and more than once.

A reader has a schema, lists its splits without reading rows, and reads one split. Shuffling, resuming and handing
splits to workers need no more: a split is a small value, and reading it has no side effects. Implementations:
`parquet`, `delimited`, `frames`, `generator`; tests/ingest/test_reader.py checks the same properties of all.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from rowwise.base.errors import DataError, did_you_mean
from rowwise.tables.spec import Value

GLOB = set("*?[")
MAX_GUESSES = 200  # names compared with a missing name, and characters per name


class Split(Value, frozen=True):
    """Rows that are read together: a range of a source, in units of the reader (bytes, rows, row groups)."""

    source: str  # a path or another name, for errors
    start: int
    stop: int
    first_row: int | None = None  # number of the first row in the source; None if unknown before reading
    rows: int | None = None  # None if unknown before reading
    number: int | None = None  # index in the original reader, if this reader selects splits of another

    def locate_row(self, row: int) -> str:
        """Source and row number of a row of this split, for messages."""
        if self.first_row is None:
            return f"{self.source}: row {row} after byte {self.start}"
        return f"{self.source}: row {self.first_row + row}"


class Reader(Protocol):
    """A source of rows in splits. Reading a split again gives the same rows in the same order."""

    @property
    def schema(self) -> pa.Schema: ...

    def splits(self) -> tuple[Split, ...]:
        """The splits in the order of the data, without reading rows."""
        ...

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        """These columns of a split, in this order; reads no other columns if the format allows."""
        ...


def check_columns(names: Sequence[str], schema: pa.Schema, source: str) -> None:
    """Refuse names that the schema lacks, suggesting a similar one, or has more than once."""
    times = Counter(schema.names)
    for name in names:
        if name not in times:
            # Comparing takes time quadratic in the length of a name.
            short = [known for known in schema.names[:MAX_GUESSES] if len(known) <= MAX_GUESSES]
            guess = did_you_mean(name, short, cutoff=0.5)
            ending = f"; {guess}" if guess else "."
            raise DataError(f"{source}: no column {name!r}{ending} There are {_join(schema.names) or 'none'}")
        if times[name] > 1:
            raise DataError(f"{source}: {times[name]} columns are called {name!r}", "each name once")


def split_names(texts: Sequence[str], schema: pa.Schema) -> list[str]:
    """Split comma-separated column names; a text that is itself a column name stays whole."""
    known = set(schema.names)
    return [name for text in texts for name in ([text] if text in known else text.split(","))]


def find_files(path: str | Path, endings: Sequence[str]) -> tuple[str, ...]:
    """The sorted files of a path: the file itself, a folder's files with these endings, or the matches of a pattern."""
    root = Path(path)
    if root.is_file():
        return (str(root),)
    if root.is_dir():
        # Names that begin with a dot or an underscore are other systems' files (_SUCCESS, .crc), not data.
        visible = (p for p in root.rglob("*") if not any(part[0] in "._" for part in p.relative_to(root).parts))
        files = sorted(str(p) for p in visible if p.is_file() and p.name.endswith(tuple(endings)))
        problem = f"no file in it ends with {' or '.join(endings)}: expected at least one"
    elif GLOB & set(str(path)):
        anchor = Path(root.anchor)
        files = sorted(str(p) for p in anchor.glob(str(root.relative_to(anchor))) if p.is_file())
        problem = "no file matches the pattern: expected at least one"
    else:
        raise DataError(f"{path}: no such file or folder", "a file, a folder or a pattern such as logs/*.parquet")
    if not files:
        raise DataError(f"{path}: {problem}")
    return tuple(files)


def _join(names: Sequence[str], limit: int = 40) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
