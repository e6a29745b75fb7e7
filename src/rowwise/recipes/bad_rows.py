"""What a run could not use of its rows, in a few words for its result: how many, and why the first ones.

Rows of splits that could not be read at all count where their number is known.
"""

from pathlib import Path

from pyarrow import parquet as pq

from rowwise.ingest.quarantine import ROWS, count_quarantined
from rowwise.spec import Value

NAMED = 5  # reasons


class BadRows(Value, frozen=True):
    """Rows that were put aside."""

    rows: int = 0
    reasons: tuple[str, ...] = ()  # of the first ones, with their places


def find_bad_rows(folder: Path) -> BadRows:
    """Those in the folder `bad_rows` of a run, which is not there where all rows could be used."""
    found = count_quarantined(folder)
    reasons = [f"{one.source}: {one.error}" for one in found.unread[:NAMED]]
    for path in sorted(folder.glob(f"*{ROWS}")):
        if len(reasons) >= NAMED:
            break
        table = pq.read_table(path, columns=["_place", "_reason"]).slice(0, NAMED - len(reasons))
        reasons += [f"{row['_place']}: {row['_reason']}" for row in table.to_pylist()]
    return BadRows(rows=found.rows + sum(one.rows or 0 for one in found.unread), reasons=tuple(reasons))
