"""Managed tables in recipes: any 64-bit ids, a fixed number of rows, and a policy that decides which ids have one.

Frozen values without tensors. A table's rows are in buckets of equal size; the high bits of an id's hash select
its bucket. The number of buckets is the largest power of two, at most 4,096, that leaves each of them 64 rows. The
number of rows is rounded up to a multiple of it. Row 0 of a bucket is shared by its ids without a row of their own. The
id -1 never gets one.
"""

from typing import Literal

from rowwise.base.errors import SpecError
from rowwise.base.value import MAX_STEPS, Value

MAX_BUCKETS = 4096
MIN_BUCKET_ROWS = 64
MAX_ROWS = 1 << 32  # the index has 32 bits for a row
INDEX_bytes = 16  # hash index per row: two to four slots of four bytes
NO_ID = -1
ID = "id"  # the name of the state that lookups need; the others are for training


class Managed(Value, frozen=True):
    """Which ids get a row, and which lose theirs when a bucket is full."""

    admit: int = 1  # occurrences after which an id is admitted
    probability: float = 1.0  # of an admission, in each step with the id
    evict: Literal["lru", "lfu"] = "lru"  # the least recently or the least frequently used id
    # Updates of its table after which an unused id loses its row; None: never
    ttl_steps: int | None = None
    seed: int = 0  # of the admissions by probability

    def __post_init__(self) -> None:
        if type(self.admit) is not int or not 1 <= self.admit < 1 << 31:
            raise SpecError(f"managed: admit={self.admit!r}", "a whole number of at least 1, and less than 2**31")
        if not isinstance(self.probability, int | float) or not 0 < self.probability <= 1:
            raise SpecError(f"managed: probability={self.probability!r}", "a number above 0, and at most 1")
        if self.evict not in ("lru", "lfu"):
            raise SpecError(f"managed: evict={self.evict!r}", "'lru' or 'lfu'")
        if self.ttl_steps is not None and (type(self.ttl_steps) is not int or not 1 <= self.ttl_steps <= MAX_STEPS):
            raise SpecError(f"managed: ttl_steps={self.ttl_steps!r}", "a whole number of at least 1, or None")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 32:
            raise SpecError(f"managed: seed={self.seed!r}", "at least 0, and less than 2**32")

    @property
    def initial_state(self) -> dict[str, int]:
        """The state of each row as 64-bit numbers, by name, with the value of a row without an id."""
        state = {ID: NO_ID, "used": -1, "count": 0}  # step of the last use; occurrences since the admission
        # The id that waits for admission, and its occurrences.
        return state | {"candidate": NO_ID, "seen": 0} if self.admit > 1 else state

    @property
    def row_bytes(self) -> int:
        """Upper bound on the bytes of a row's state and its share of the index."""
        return 8 * len(self.initial_state) + INDEX_bytes


def bucket_count(rows: int) -> int:
    """The largest power of two that leaves each bucket `MIN_BUCKET_ROWS` rows, at most `MAX_BUCKETS`."""
    return 1 << (max(1, min(MAX_BUCKETS, rows // MIN_BUCKET_ROWS)).bit_length() - 1)


def round_rows(rows: int) -> int:
    """Round up to a multiple of the number of buckets."""
    buckets = bucket_count(rows)
    return -(-rows // buckets) * buckets
