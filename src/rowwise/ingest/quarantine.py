"""The quarantine: a folder with copies of unusable rows and the reasons, while training uses all other rows.

Each split with bad rows has one file, named after the split. So quarantining is idempotent: preparing a split again (in
another epoch, by another worker, for an evaluation) rewrites the same file, and no row is counted twice. Not supported:
a limit of bad rows; removing the hidden partial files of killed processes.
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

from rowwise.base.errors import DataError
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.ingest.encode import MAX_REASONS, RefusalReason, RefusedRows
from rowwise.ingest.reader import Split
from rowwise.ingest.unpacked import read_parquet
from rowwise.tables.spec import Value

ROWS, SPLIT = ".parquet", ".json"
PLACE, REASON = "_place", "_reason"  # columns
MAX_STEM = 80  # characters of the source's name in a file name; most file systems allow 255 bytes


class UnreadSplit(Value, frozen=True):
    """A split that could not be read at all."""

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
    """Write the bad rows as they were read, with columns `_place` and `_reason`; an empty `folder` writes nothing."""
    rows_N = np.flatnonzero(bad.mask_R)
    rows = rows_N.tolist()
    copy = table.take(pa.array(rows_N))
    copy = copy.append_column(PLACE, pa.array([split.locate_row(row) for row in rows]))
    copy = copy.append_column(REASON, pa.array(_reasons(rows, bad.reasons)))
    _write(folder, split, ROWS, lambda path: pq.write_table(copy, path))


def quarantine_split(split: Split, error: str, folder: str) -> None:
    """Record a split that cannot be read; an empty `folder` writes nothing."""
    rows = split.stop - split.start if split.rows is None else split.rows
    note = UnreadSplit(source=split.source, start=split.start, stop=split.stop, rows=rows, error=error)
    _write(folder, split, SPLIT, lambda path: path.write_bytes(msgspec.json.encode(note)))


def count_quarantined(folder: Path) -> QuarantinedRows:
    rows = sum(len(read_quarantined(path)) for path in folder.glob(f"*{ROWS}"))
    return QuarantinedRows(rows, tuple(_read_note(path) for path in sorted(folder.glob(f"*{SPLIT}"))))


def read_quarantined(path: Path) -> pa.Table:
    """The places and reasons of the rows in a file."""
    try:
        return read_parquet(path, (PLACE, REASON))
    except pa.ArrowException as error:
        raise DataError(f"{path} is damaged: {str(error)[:200]}", hint="remove the file") from None


def _read_note(path: Path) -> UnreadSplit:
    try:
        return decode_json(read_bytes(path, links=False), UnreadSplit)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path} is damaged: {error}", hint="remove the file") from None


def _reasons(rows: Sequence[int], described: Sequence[RefusalReason]) -> list[str]:
    """A text for each row. A row without a description is bad in a column with MAX_REASONS described rows."""
    reasons: dict[int, list[str]] = {}
    for refusal in described:
        reasons.setdefault(refusal.row, []).append(f"column {refusal.column!r}: {refusal.reason}")
    counts = Counter(refusal.column for refusal in described)
    full = " or ".join(repr(name) for name, count in counts.items() if count >= MAX_REASONS)
    return ["; ".join(reasons.get(row, [f"column {full}: as in rows before it"])) for row in rows]


def _write(folder: str, split: Split, ending: str, write: Callable[[Path], object]) -> None:
    """Write a file atomically, under a name derived from the split."""
    if not folder:
        return
    digest = hashlib.sha256(f"{split.source} {split.start} {split.stop}".encode()).hexdigest()[:16]
    path = Path(folder) / f"{Path(split.source).stem[:MAX_STEM]}-{split.start}-{digest}{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several threads, processes and hosts may write the same file at once: each renames its own copy to it.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
