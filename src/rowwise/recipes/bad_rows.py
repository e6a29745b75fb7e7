"""A summary of a run's quarantined rows for its result: their number, and the reasons of the first ones.

Rows of unreadable splits count where their number is known.
"""

from pathlib import Path

from pyarrow import parquet as pq

from rowwise.ingest.quarantine import ROWS, count_quarantined
from rowwise.spec import Value

NAMED = 5  # reasons


class BadRows(Value, frozen=True):
    """Number of quarantined rows, and why."""

    rows: int = 0
    reasons: tuple[str, ...] = ()  # of the first NAMED rows, each with its place in the data


def find_bad_rows(folder: Path) -> BadRows:
    """Summary of the folder `bad_rows` of a run, which exists only if rows were quarantined."""
    found = count_quarantined(folder)
    reasons = [f"{one.source}: {one.error}" for one in found.unread[:NAMED]]
    for path in sorted(folder.glob(f"*{ROWS}")):
        if len(reasons) >= NAMED:
            break
        table = pq.read_table(path, columns=["_place", "_reason"]).slice(0, NAMED - len(reasons))
        reasons += [f"{row['_place']}: {row['_reason']}" for row in table.to_pylist()]
    return BadRows(rows=found.rows + sum(one.rows or 0 for one in found.unread), reasons=tuple(reasons))
