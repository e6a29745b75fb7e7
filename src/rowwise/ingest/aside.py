"""Rows that cannot be used, put aside: copied to files of their own, with the reason, while all others are used.

A file for each split that has any, called by what the split is, so that preparing a split again (another epoch, another
worker) writes the same file again and counts nothing twice. Its own file because it is the only thing that preparing
rows ever writes. Gives up: a limit; how many rows were put aside is told when a run ends.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.ingest.encode import Bad
from rowwise.ingest.reader import Split
from rowwise.spec import Value

ROWS, SPLIT = ".parquet", ".json"


class Unread(Value, frozen=True):
    """A split that could not be used at all."""

    source: str
    start: int
    stop: int
    rows: int | None
    error: str


class PutAside(NamedTuple):
    """What is in a folder of bad rows."""

    rows: int
    unread: tuple[Unread, ...]


def put_aside(table: pa.Table, split: Split, bad: Bad, folder: str) -> None:
    """Bad rows as they were read, with where each was and what is wrong with it."""
    rows_N = np.flatnonzero(bad.mask_R)
    reasons: dict[int, list[str]] = {}
    for wrong in bad.wrong:
        reasons.setdefault(wrong.row, []).append(f"column {wrong.column!r}: {wrong.reason}")
    told = ["; ".join(reasons.get(row, ["as rows before it"])) for row in rows_N.tolist()]
    found = table.take(pa.array(rows_N))
    found = found.append_column("_place", pa.array([split.place(row) for row in rows_N.tolist()]))
    found = found.append_column("_reason", pa.array(told))
    _write(folder, split, ROWS, lambda path: pq.write_table(found, path))


def put_split_aside(split: Split, error: str, folder: str) -> None:
    """Note a split that cannot be read."""
    rows = split.stop - split.start if split.rows is None else split.rows
    note = Unread(source=split.source, start=split.start, stop=split.stop, rows=rows, error=error)
    _write(folder, split, SPLIT, lambda path: path.write_bytes(msgspec.json.encode(note)))


def count_aside(folder: Path) -> PutAside:
    """What was put aside so far."""
    rows = sum(pq.read_metadata(path).num_rows for path in folder.glob(f"*{ROWS}"))
    notes = [msgspec.json.decode(path.read_bytes(), type=Unread) for path in sorted(folder.glob(f"*{SPLIT}"))]
    return PutAside(rows, tuple(notes))


def _write(folder: str, split: Split, ending: str, write: Callable[[Path], object]) -> None:
    """Whole or not at all, under a name that follows from the split."""
    digest = hashlib.sha256(f"{split.source} {split.start} {split.stop}".encode()).hexdigest()[:8]
    path = Path(folder) / f"{Path(split.source).stem}-{split.start}-{digest}{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    write(part)
    part.replace(path)
