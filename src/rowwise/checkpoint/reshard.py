"""Intersects the chunks of a tensor with a rectangle to read; neither depends on a plan."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import structs

from rowwise.checkpoint.manifest import Span, TensorChunk, TensorEntry


class CopyRegion(NamedTuple):
    """The intersection of a chunk and a rectangle, relative to the chunk (from) and to the rectangle (to)."""

    chunk: TensorChunk
    rows_from: Span
    rows_to: Span
    cols_from: Span
    cols_to: Span


def copy_regions(entry: TensorEntry, rows: Span, cols: Span) -> Iterator[CopyRegion]:
    """The regions to copy, in this order (later chunks overwrite rows of earlier ones), to fill a rectangle."""
    for chunk in entry.chunks:
        chunk_cols = entry.chunk_cols(chunk)
        row, col = _intersect(chunk.rows, rows), _intersect(chunk_cols, cols)
        if row[0] < row[1] and col[0] < col[1]:
            if chunk.initial is not None:  # generate only the rows to read
                chunk, chunk_cols = structs.replace(chunk, rows=row, cols=col), col
            yield CopyRegion(
                chunk=chunk,
                rows_from=_shift(row, chunk.rows[0]),
                rows_to=_shift(row, rows[0]),
                cols_from=_shift(col, chunk_cols[0]),
                cols_to=_shift(col, cols[0]),
            )


def stored_spans(entry: TensorEntry, width: int, cols: Span) -> list[Span]:
    """The spans of stored elements that hold columns of a row of `width` columns.

    An int8 row stores scales, then codes (see [Note: Row formats] in `tables/ops/_cpp/tables.h`), so it has two spans;
    its columns are whole groups, as those of tiles are.
    """
    if not entry.scaled:
        return [cols]
    group = entry.column_group or width
    scales = 8 * -(-width // group)  # two floats for each group
    return [(8 * (cols[0] // group), 8 * -(-cols[1] // group)), (scales + cols[0], scales + cols[1])]


def _intersect(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])


def _shift(span: Span, first: int) -> Span:
    return span[0] - first, span[1] - first
