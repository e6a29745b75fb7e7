"""Which rows of each global batch a rank reads: consecutive ones, in whole blocks of samples.

[Note: parts of a batch] An epoch is one sequence of rows, cut into global batches whatever the number of ranks (see
[Note: order of rows] in `batcher.py`). The parts of a batch depend only on its number of rows and the number of ranks,
so a run can resume on another number of ranks without repeating or losing a row. Parts are whole blocks of 256 rows, as
even as blocks allow, so that contributions to a row of a table are added up as on one device ([Note: Merge order]). The
parts also consist of whole virtual shards, if these are assigned to the same number of ranks (`train/virtual.py`).
Known limits: a batch of fewer blocks than ranks leaves ranks without rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rowwise.base.errors import SpecError
from rowwise.tables.ops.reference.sums import BLOCK
from rowwise.tables.spec import Value


class BatchSpan(NamedTuple):
    """The rows of a split that one batch may need on this rank."""

    begin: int  # in the split
    end: int
    batch_row: int  # row of the global batch at which the span begins
    after: int  # row of the split after the batch, or after the last row
    full: bool  # the batch ends at `after`; else it continues in the next split


class BatchShard(Value, frozen=True):
    """The part of every global batch that one rank reads; by default the whole batch."""

    rank: int = 0
    world: int = 1
    unit: int = BLOCK  # rows; parts are multiples of it, except the last

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world or self.unit < 1:
            raise SpecError(
                f"BatchShard: rank={self.rank}, world={self.world}, unit={self.unit}",
                "a rank of 0 to world - 1, and at least one row a unit",
            )

    def part(self, rows: int) -> tuple[int, int]:
        """Begin and end of this rank's part of a batch of `rows` rows."""
        units = -(-rows // self.unit)
        begin, end = (min(rows, self.unit * (units * r // self.world)) for r in (self.rank, self.rank + 1))
        return begin, end

    def spans(self, split: range, filled: int, size: int, *, last: bool) -> Iterator[BatchSpan]:
        """The rows that this rank may need of a split: its part of each full batch, and all rows of an open batch.

        Args:
            split: the remaining rows of the split.
            filled: rows that the open batch has from earlier splits.
            size: rows of a full batch.
            last: no split follows, so the open batch is as large as it gets.
        """
        at = split.start
        while at < split.stop:
            after = min(at + size - filled, split.stop)
            rows = filled + after - at
            # Parts depend on the number of rows of the batch, which is open until the next split is read.
            low, high = self.part(rows) if rows == size or last else (0, rows)
            begin, end = (min(max(at + x - filled, at), after) for x in (low, high))
            yield BatchSpan(begin=begin, end=end, batch_row=filled + begin - at, after=after, full=rows == size)
            filled = rows % size
            at = after
