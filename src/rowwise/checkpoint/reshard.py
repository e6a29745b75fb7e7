"""Computes the overlaps of old pieces and a new rectangle, for any two sharding plans."""

from collections.abc import Iterator
from typing import NamedTuple

from rowwise.checkpoint.manifest import Span, TensorChunk, TensorEntry


class CopyRegion(NamedTuple):
    """The intersection of a chunk and a rectangle, relative to each."""

    piece: TensorChunk
    rows_from: Span
    rows_to: Span
    cols_from: Span
    cols_to: Span


def overlaps(entry: TensorEntry, rows: Span, cols: Span) -> Iterator[CopyRegion]:
    """The copies that fill these rows and columns, in the order to make them."""
    for piece in entry.pieces:
        theirs = entry.cols_of(piece)
        row, col = _common(piece.rows, rows), _common(theirs, cols)
        if row[0] < row[1] and col[0] < col[1]:
            yield CopyRegion(
                piece, _from(row, piece.rows[0]), _from(row, rows[0]), _from(col, theirs[0]), _from(col, cols[0])
            )


def stored_spans(entry: TensorEntry, width: int, cols: Span) -> list[Span]:
    """The spans of a row, in stored elements, that hold these columns.

    Of int8 rows, see [Note: Row formats] in `ops/_cpp/tables.h`: first their scales, then their codes. There the
    columns begin and end with a group, as tiles do.
    """
    if not entry.scaled:
        return [cols]
    group = entry.column_group or width
    head = 8 * -(-width // group)
    return [(8 * (cols[0] // group), 8 * -(-cols[1] // group)), (head + cols[0], head + cols[1])]


def _common(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])


def _from(span: Span, first: int) -> Span:
    return span[0] - first, span[1] - first
