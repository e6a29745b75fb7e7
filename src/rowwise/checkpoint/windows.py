"""Windows of rows, in which a tensor of any size is processed with little memory."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import final

from rowwise.checkpoint.manifest import Span, TensorEntry

WINDOW_bytes = 128 << 20  # several chunks, or a chunk of each of several column tiles
Tell = Callable[[int, int], None]  # called with the amount done, and the total


@final
class ProgressCounter:
    """Counts what is done of a total, and tells it."""

    def __init__(self, tell: Tell | None, total: int, done: int = 0) -> None:
        self._tell, self._total, self._done = tell, total, done

    def add(self, amount: int) -> None:
        self._done += amount
        if self._tell is not None:
            self._tell(self._done, self._total)


def windows(entry: TensorEntry, *others: TensorEntry) -> Iterator[Span]:
    """Consecutive spans of rows that cover the tensor, cut at ends of its chunks and of those of `others`."""
    cuts = sorted({cut for e in (entry, *others) for chunk in e.chunks for cut in chunk.rows})
    return cut_rows(entry.rows, 4 * max(1, entry.columns), cuts)


def cut_rows(rows: int, row_bytes: int, cuts: Sequence[int]) -> Iterator[Span]:
    """Consecutive spans of at most `WINDOW_bytes`, each up to the last cut within that size, if there is one."""
    at, most = 0, max(1, WINDOW_bytes // row_bytes)
    while at < rows:
        reach = min(rows, at + most)
        k = bisect_right(cuts, reach)
        end = cuts[k - 1] if k and cuts[k - 1] > at and reach < rows else reach
        yield at, end
        at = end
