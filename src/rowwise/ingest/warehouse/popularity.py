"""Records the columns that jobs read, so that the next conversion writes the most used columns side by side.

Best effort, as a failed record must not fail a job: nothing is recorded on read-only disks, in remote stores and
outside of warehouses.
"""

import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rowwise.base.textfile import decode_json, read_bytes
from rowwise.ingest.warehouse.journal import FOLDER
from rowwise.ingest.warehouse.storage import is_url
from rowwise.tables.spec import Value

DAY_S = 86_400
PLACE = Path(FOLDER) / "popularity"


class ColumnUse(Value, frozen=True):
    """The columns read by a job, and the time."""

    time: float  # seconds since 1970
    columns: tuple[str, ...]


def log_use(path: str | Path, columns: Sequence[str], now: float) -> Path | None:
    """Record that a job reads these columns; returns the file, or None if it could not be written."""
    root = _warehouse_of(path)
    if root is None:
        return None
    note = root / PLACE / f"{int(now)}-{uuid.uuid4().hex[:12]}.json"
    try:
        note.parent.mkdir(exist_ok=True)
        if note.parent.resolve() != root.resolve() / PLACE:  # a symbolic link would lead out of the warehouse
            return None
        temporary = note.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(ColumnUse(time=now, columns=tuple(columns))))
        temporary.replace(note)
    except OSError:
        return None
    return note


def popularity(warehouse: str | Path, now: float, days: float = 7) -> dict[str, float]:
    """The number of jobs of the last `days` that read each column; unread columns are omitted."""
    root = _warehouse_of(warehouse)
    counts: Counter[str] = Counter()
    for note in sorted((root / PLACE).glob("*.json")) if root is not None else ():
        try:
            use = decode_json(read_bytes(note), ColumnUse)
        except (OSError, msgspec.DecodeError):
            continue
        if abs(now - use.time) <= days * DAY_S:  # clock skew between hosts may put a use after `now`
            counts.update(dict.fromkeys(use.columns, 1))
    return {name: float(count) for name, count in counts.most_common()}


def _warehouse_of(path: str | Path) -> Path | None:
    """The warehouse of a path: the path itself, or one of its parents."""
    if is_url(path):
        return None
    try:
        return next((p for p in (Path(path), *Path(path).parents[:4]) if (p / FOLDER).is_dir()), None)
    except OSError:
        return None
