"""Assigns the rows of a global batch to ranks: consecutive ranges of whole blocks of samples.

[Note: parts of a batch] An epoch is one sequence of rows, cut into global batches whatever the number of ranks (see
[Note: order of rows] in `batcher.py`). A batch is dealt by the number of its rows alone, so a run can go on with
another number of ranks, and neither repeats a row nor loses one. Parts are whole blocks of 256 rows, as evenly as
blocks allow, so that contributions to a row of a table add up as on one device ([Note: Merge order]); they are also
runs of whole virtual shards, if those are dealt to that many ranks (`train/virtual.py`). Known limits: batches of
fewer blocks than ranks leave ranks without rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rowwise.errors import SpecError
from rowwise.ops.reference.sums import BLOCK
from rowwise.spec import Value


class BatchSpan(NamedTuple):
    """The rows of a split that one batch may need on this rank."""

    begin: int  # in the split
    end: int
    place: int  # of its first row in the batch
    after: int  # where the batch, or the split, ends
    full: bool  # the batch is full there


class BatchShard(Value, frozen=True):
    """The parts of one rank of several; by itself the whole."""

    rank: int = 0
    world: int = 1
    unit: int = BLOCK  # rows that stay together

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world or self.unit < 1:
            got = f"rank={self.rank}, world={self.world}, unit={self.unit}"
            raise SpecError(f"deal: {got}: want a rank of 0 to world - 1, and at least one row a unit")

    def part(self, rows: int) -> tuple[int, int]:
        """The range of a batch that belongs to this rank."""
        units = -(-rows // self.unit)
        begin, end = (min(rows, self.unit * (units * r // self.world)) for r in (self.rank, self.rank + 1))
        return begin, end

    def spans(self, split: range, filled: int, size: int, *, last: bool) -> Iterator[BatchSpan]:
        """The ranges of a split that this rank may need: its part of each batch, and all of an open batch.

        Args:
            split: the rows that are left of it.
            filled: rows of the open batch that came before.
            size: rows of a full batch.
            last: no other split follows, so that the open batch gets no more rows.
        """
        at = split.start
        while at < split.stop:
            after = min(at + size - filled, split.stop)
            held = filled + after - at
            # Whose rows these are is known once it is known how many the batch has.
            low, high = self.part(held) if held == size or last else (0, held)
            begin, end = (min(max(at + x - filled, at), after) for x in (low, high))
            yield BatchSpan(begin=begin, end=end, place=filled + begin - at, after=after, full=held == size)
            filled = held % size
            at = after
