"""Rows that cannot be used, put aside: copied to files of their own, with the reason, while all others are used.

A file for each split that has any, called by what the split is, so that preparing a split again (another epoch,
another worker, an evaluation of other rows of it) writes the same file again and counts nothing twice. Known limits: a
limit, and clearing away what a killed process had half written, which lies there hidden and is not counted.
"""

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.ingest.encode import MAX_REASONS, RefusalReason, RefusedRows
from rowwise.ingest.reader import Split
from rowwise.spec import Value

ROWS, SPLIT = ".parquet", ".json"
MOST_LETTERS = 80  # of a name: what a file system takes is some three times as much


class UnreadSplit(Value, frozen=True):
    """A split that could not be used at all."""

    source: str
    start: int
    stop: int
    rows: int | None
    error: str


class QuarantinedRows(NamedTuple):
    """The counts and files of a folder of quarantined rows."""

    rows: int
    unread: tuple[UnreadSplit, ...]


def quarantine_rows(table: pa.Table, split: Split, bad: RefusedRows, folder: str) -> None:
    """Bad rows as they were read, with where each was and what is wrong with it; folder "": nowhere."""
    rows_N = np.flatnonzero(bad.mask_R)
    told = _reasons(rows_N.tolist(), bad.reasons)
    found = table.take(pa.array(rows_N))
    found = found.append_column("_place", pa.array([split.place(row) for row in rows_N.tolist()]))
    found = found.append_column("_reason", pa.array(told))
    _write(folder, split, ROWS, lambda path: pq.write_table(found, path))


def quarantine_split(split: Split, error: str, folder: str) -> None:
    """Note a split that cannot be read."""
    rows = split.stop - split.start if split.rows is None else split.rows
    note = UnreadSplit(source=split.source, start=split.start, stop=split.stop, rows=rows, error=error)
    _write(folder, split, SPLIT, lambda path: path.write_bytes(msgspec.json.encode(note)))


def count_quarantined(folder: Path) -> QuarantinedRows:
    rows = sum(pq.read_metadata(path).num_rows for path in folder.glob(f"*{ROWS}"))
    notes = [msgspec.json.decode(path.read_bytes(), type=UnreadSplit) for path in sorted(folder.glob(f"*{SPLIT}"))]
    return QuarantinedRows(rows, tuple(notes))


def _reasons(rows: Sequence[int], wrong: Sequence[RefusalReason]) -> list[str]:
    """Of each row; only the first few of a column were looked at closely, so the others are bad as these are."""
    reasons: dict[int, list[str]] = {}
    for one in wrong:
        reasons.setdefault(one.row, []).append(f"column {one.column!r}: {one.reason}")
    count = Counter(one.column for one in wrong)
    more = " or ".join(repr(name) for name, rows_told in count.items() if rows_told >= MAX_REASONS)
    return ["; ".join(reasons.get(row, [f"column {more}: as in rows before it"])) for row in rows]


def _write(folder: str, split: Split, ending: str, write: Callable[[Path], object]) -> None:
    """Whole or not at all, under a name that follows from the split."""
    if not folder:
        return
    digest = hashlib.sha256(f"{split.source} {split.start} {split.stop}".encode()).hexdigest()[:16]
    path = Path(folder) / f"{Path(split.source).stem[:MOST_LETTERS]}-{split.start}-{digest}{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Threads, processes and hosts may all be at the same split, and each puts the same file in place.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
