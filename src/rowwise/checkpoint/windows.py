"""Going through a tensor of a checkpoint a bit at a time, so that tables of any size need little memory."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from rowwise.checkpoint.manifest import Span, TensorEntry

WINDOW_bytes = 128 << 20  # several pieces, or a piece of each of several column tiles
Tell = Callable[[int, int], None]  # how much is done, of how much


def windows(entry: TensorEntry, *others: TensorEntry) -> Iterator[Span]:
    """Runs of rows that together are all rows; `others` are gone through with it."""
    cuts = sorted({cut for e in (entry, *others) for piece in e.pieces for cut in piece.rows})
    return cut_rows(entry.rows, 4 * max(1, entry.columns), cuts)


def cut_rows(rows: int, row_bytes: int, cuts: Sequence[int]) -> Iterator[Span]:
    """Runs of at most `WINDOW_bytes`, each up to the last of the cuts within its reach, if there is one."""
    at, most = 0, max(1, WINDOW_bytes // row_bytes)
    while at < rows:
        reach = min(rows, at + most)
        k = bisect_right(cuts, reach)
        end = cuts[k - 1] if k and cuts[k - 1] > at and reach < rows else reach
        yield at, end
        at = end
