"""Windows of rows, for processing a tensor of any size in little memory."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import final

from rowwise.checkpoint.manifest import Span, TensorEntry

WINDOW_bytes = 128 << 20  # several chunks, or a chunk of each of several column tiles
Tell = Callable[[int, int], None]  # called with (done, total)


@final
class ProgressCounter:
    """Counts completed work, and reports (done, total) to a callback."""

    def __init__(self, tell: Tell | None, total: int, done: int = 0) -> None:
        self._report, self._total, self._done = tell, total, done

    def add(self, amount: int) -> None:
        self._done += amount
        if self._report is not None:
            self._report(self._done, self._total)


def windows(entry: TensorEntry, *others: TensorEntry) -> Iterator[Span]:
    """Consecutive spans of rows that cover the tensor, cut at ends of its chunks and of those of `others`."""
    cuts = sorted({cut for e in (entry, *others) for chunk in e.chunks for cut in chunk.rows})
    return cut_rows(entry.rows, 4 * max(1, entry.columns), cuts)


def cut_rows(rows: int, row_bytes: int, cuts: Sequence[int]) -> Iterator[Span]:
    """Consecutive spans of at most `WINDOW_bytes`, each up to the last cut within that size, if any."""
    at, max_rows = 0, max(1, WINDOW_bytes // row_bytes)
    while at < rows:
        limit = min(rows, at + max_rows)
        k = bisect_right(cuts, limit)
        end = cuts[k - 1] if k and cuts[k - 1] > at and limit < rows else limit
        yield at, end
        at = end
