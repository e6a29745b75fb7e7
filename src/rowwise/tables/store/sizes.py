"""Bytes of a piece of a table on the disk tier: of its cache in memory, and of its log on the disk.

The runtime allocates by these numbers and the planner counts with them. A cached row takes its weights, its optimizer
state, and 16 bytes that describe it; every row of the piece takes 6 bytes of index and count, cached or not.
"""

import numpy as np
from numpy.typing import NDArray

from rowwise.tables.spec import Table, state_width
from rowwise.tables.store.policy import WAYS, sets_of

FLOAT_bytes = 4
HEADER_bytes = 16  # beside a row and its state, in memory and on the disk
INDEX_bytes = 6  # of a row of the piece: 4 for its place, 2 for its count
BLOCK_bytes = 4096
MIN_OVERFLOW = 1024
OVERFLOW_PART = 8  # one overflow slot for this many slots
LOG_COPIES = 2  # a log may hold as many replaced records as current ones
Floats = NDArray[np.float64]


def cache_slots(cache_rows: int) -> int:
    """Slots of the sets of a cache: at least one set."""
    return max(1, sets_of(cache_rows)) * WAYS


def overflow_slots(slots: int) -> int:
    return int(overflow_rows(np.array([float(slots)]))[0])


def overflow_rows(slots: Floats) -> Floats:
    """Overflow slots: for rows of one batch whose set is full."""
    return np.maximum(MIN_OVERFLOW, slots // OVERFLOW_PART)


def cache_bytes_of(record_bytes: Floats, rows: Floats, cache_rows: Floats) -> Floats:
    """Memory of a piece of `rows` rows, `cache_rows` of them cached; records include the header."""
    slots = np.maximum(np.ceil(cache_rows / WAYS), 1) * WAYS
    return (slots + overflow_rows(slots)) * record_bytes + rows * INDEX_bytes


def disk_bytes_of(record_bytes: Floats, rows: Floats) -> Floats:
    return LOG_COPIES * rows * stored_bytes(record_bytes)


def stored_bytes(record_bytes: Floats) -> Floats:
    """Bytes that a record takes on the disk: records do not cross blocks, unless they are larger than one."""
    blocks = np.ceil(record_bytes / BLOCK_bytes) * BLOCK_bytes
    return blocks / np.maximum(BLOCK_bytes // record_bytes, 1)


def record_bytes_of(table: Table) -> int:
    return table.row_bytes + FLOAT_bytes * state_width(table) + HEADER_bytes


def cache_bytes(piece: Table, cache_rows: int) -> int:
    """Memory of a piece, a table of its rows and columns, with `cache_rows` rows cached."""
    return int(cache_bytes_of(*np.array([record_bytes_of(piece), piece.rows, cache_rows], float)[:, None])[0])


def disk_bytes(piece: Table) -> int:
    return int(np.ceil(disk_bytes_of(*np.array([record_bytes_of(piece), piece.rows], float)[:, None])[0]))
