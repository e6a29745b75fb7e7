"""Summarises a run's quarantined rows for its result: their number, and the reasons of the first ones.

Rows of unreadable splits count if their number is known.
"""

from pathlib import Path

from rowwise.ingest.quarantine import ROWS, count_quarantined, read_quarantined
from rowwise.spec import Value

MOST_REASONS = 5


class BadRows(Value, frozen=True):
    """The number of quarantined rows, and reasons."""

    rows: int = 0
    reasons: tuple[str, ...] = ()  # for the first MOST_REASONS rows, each with the row's position in the data


def find_bad_rows(folder: Path) -> BadRows:
    """The summary of the folder `bad_rows` of a run, which exists only if rows were quarantined."""
    counts = count_quarantined(folder)
    reasons = [f"{split.source}: {split.error}" for split in counts.unread[:MOST_REASONS]]
    for path in sorted(folder.glob(f"*{ROWS}")):
        if len(reasons) >= MOST_REASONS:
            break
        table = read_quarantined(path).slice(0, MOST_REASONS - len(reasons))
        reasons += [f"{row['_place']}: {row['_reason']}" for row in table.to_pylist()]
    return BadRows(rows=counts.rows + sum(split.rows or 0 for split in counts.unread), reasons=tuple(reasons))
