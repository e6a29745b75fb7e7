"""Batches of B rows over the splits of a reader, shuffled, and resumed exactly.

[Note: order of rows] An epoch is one fixed sequence of rows: the splits in an order that depends on (seed, epoch), and
the rows inside split s in an order that depends on (seed, epoch, s). Batches cut this sequence every B rows, whatever
the borders of splits. So where a run stands is three numbers, and going on from them needs nothing else: no random
state, no rows kept. Rows move within their split only, so splits should be many times the batch, or data in an order
of its own (by time, by user) shows through; that is the price of reading splits once, one at a time.

Of several ranks each reads the whole sequence, and encodes the rows of its own parts only (see [Note: parts of a batch]
in `deal.py`); positions are those of the sequence, the same on all ranks. Gives up: files are read once a rank.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import msgspec
import numpy as np
import pyarrow as pa

from rowwise.batch import Batch
from rowwise.errors import DataError, SpecError, StateError
from rowwise.ingest.ahead import ahead
from rowwise.ingest.bags import Ints
from rowwise.ingest.collate import Piece, collate
from rowwise.ingest.columns import Columns
from rowwise.ingest.deal import Deal, Span
from rowwise.ingest.encode import Encoded, encode
from rowwise.ingest.mix import permutation
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.share import Share
from rowwise.spec import Table, Value


class Batching(Value, frozen=True):
    """How rows become batches."""

    size: int  # of the batches of all ranks together
    seed: int = 0
    shuffle: bool = True
    keep_last: bool = True  # the rows that are left when they fill no batch
    ahead: int = 0  # batches that a background thread makes before they are asked for; 0: no thread
    share: Share = Share()  # of the rows of each split; the others are not there
    deal: Deal = Deal()  # of each batch among ranks; every rank gets a batch, which may have no rows

    def __post_init__(self) -> None:
        """Refuse what makes no batch."""
        if self.size < 1 or self.ahead < 0 or self.seed < 0:
            got = f"size={self.size}, ahead={self.ahead}, seed={self.seed}"
            raise SpecError(f"batching: {got}: want at least one row a batch, and nothing negative")


class Position(Value, frozen=True):
    """Where a run stands: before row `row` of the split that is at `split` in the epoch's order."""

    epoch: int = 0
    split: int = 0
    row: int = 0
    seed: int = 0
    shuffle: bool = True
    data: str = ""  # of which splits this speaks


class _Made(NamedTuple):
    batch: Batch
    after: Position


@final
class Batcher:
    """Each `for` over it gives the batches of one epoch, or those that are left of the one it stands in.

    Args:
        reader: where rows come from.
        columns: what the columns are.
        tables: whose rows the ids name.
        batching: how many rows, and in which order.
        position: where to go on, as `state()` gave it.
    """

    def __init__(
        self,
        reader: Reader,
        columns: Columns,
        tables: Sequence[Table],
        batching: Batching,
        position: Position | None = None,
    ) -> None:
        """Check all names and types before a row is read."""
        self._reader, self._columns, self._batching = reader, columns, batching
        self._splits = reader.splits()
        if not self._splits:
            raise DataError(f"{type(reader).__name__}: there are no rows to read")
        columns.check(reader.schema, self._splits[0].source)
        columns.check_tables(tables)
        self._rows_of = rows_to_hold(columns, tables)
        start = Position(seed=batching.seed, shuffle=batching.shuffle, data=_digest(self._splits, batching.share))
        if position is not None:
            _check_position(position, start, len(self._splits))
        self._position = position or start

    @property
    def splits(self) -> int:
        """How many splits an epoch has."""
        return len(self._splits)

    def state(self) -> Position:
        """Where the batches given so far end; what the thread has made beyond them does not count."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        """The batches up to the end of the epoch, then the position is at the start of the next."""
        made = self._batches(self._position)
        if self._batching.ahead:
            made = ahead(made, self._batching.ahead)
        for batch, after in made:
            self._position = after
            yield batch
        self._position = msgspec.structs.replace(self._position, epoch=self._position.epoch + 1, split=0, row=0)

    def _batches(self, start: Position) -> Iterator[_Made]:
        size = self._batching.size
        waiting: list[Piece] = []  # of the open batch
        filled = 0
        for read in self._read(start):
            if not read.left:
                continue
            spans = list(self._batching.deal.spans(read.left, filled, size, last=read.last))
            encoded = self._encode(read, spans)
            at = 0
            for begin, end, place, after, full in spans:
                waiting.append(Piece(encoded, at, at + end - begin, place))
                at += end - begin
                if full:
                    yield _Made(self._collate(waiting, size), msgspec.structs.replace(read.stands, row=after))
                    waiting.clear()
            filled = (filled + len(read.left)) % size
        if filled and self._batching.keep_last:
            end = msgspec.structs.replace(start, split=len(self._splits), row=0)
            yield _Made(self._collate(waiting, filled), end)

    def _encode(self, read: "_Read", spans: Sequence[Span]) -> Encoded:
        """The rows of the spans; a few are picked first, as most of the time goes into hashing."""
        rows_R = read.only(spans)
        if rows_R is not None and 2 * len(rows_R) <= read.table.num_rows:
            # What is wrong is said of the whole split, by the number that a row has there.
            with suppress(DataError, pa.ArrowException):
                return encode(read.table.take(pa.array(rows_R)), self._columns, self._rows_of, read.split)
        return encode(read.table, self._columns, self._rows_of, read.split, rows_R)

    def _collate(self, pieces: Sequence[Piece], rows: int) -> Batch:
        """This rank's part of a batch of so many rows."""
        begin, end = self._batching.deal.part(rows)
        return collate([piece.within(begin, end) for piece in pieces], self._columns)

    def _read(self, start: Position) -> Iterator["_Read"]:
        """The splits from a position on, in their order. See [Note: order of rows]."""
        count, how = len(self._splits), self._batching
        order_S = permutation(count, how.seed, start.epoch) if how.shuffle else np.arange(count)
        for at in range(start.split, count):
            index = int(order_S[at])
            split = self._splits[index]
            table = self._reader.read(split, self._columns.names)
            order_R = permutation(table.num_rows, how.seed, start.epoch, index) if how.shuffle else None
            order_R = how.share.among(order_R, table.num_rows, index)
            rows, row = table.num_rows if order_R is None else len(order_R), start.row if at == start.split else 0
            yield _Read(
                table=table,
                split=split,
                order_R=order_R,
                left=range(min(row, rows), rows),
                stands=msgspec.structs.replace(start, split=at),
                last=at == count - 1,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A split as it is in the sequence of rows."""

    table: pa.Table
    split: Split
    order_R: Ints | None  # None: as they are
    left: range  # of that order, what was not used before
    stands: Position  # of it
    last: bool  # in the epoch

    def only(self, spans: Sequence[Span]) -> Ints | None:
        """The rows of the spans, in order; None: all, as they are."""
        if self.left.start == 0 and sum(span.end - span.begin for span in spans) == len(self.left):
            return self.order_R
        order_R = np.arange(self.table.num_rows) if self.order_R is None else self.order_R
        return np.concatenate([order_R[span.begin : span.end] for span in spans])


def rows_to_hold(columns: Columns, tables: Sequence[Table]) -> dict[str, int]:
    """Rows of each table whose ids are to be hashed or checked; one that maps unknown ids itself may be given any."""
    hashed = {s.table_name for s in columns.sparse if s.ids == "hash"}
    return {t.name: t.rows for t in tables if t.name in hashed or t.unknown == "raise"}


def _digest(splits: Sequence[Split], share: Share) -> str:
    """Knows the rows again, also where their folder has moved."""
    here = share, [msgspec.structs.replace(split, source=Path(split.source).name) for split in splits]
    return hashlib.sha256(msgspec.json.encode(here)).hexdigest()[:16]


def _check_position(position: Position, start: Position, splits: int) -> None:
    """A position means rows only together with what it was taken of."""
    for name in ("seed", "shuffle", "data"):
        got, want = getattr(position, name), getattr(start, name)
        if got != want:
            what = "other files or splits" if name == "data" else f"{name}={got!r}"
            raise StateError(f"the position is of {what}, and this run has {name}={want!r}: no row would be the same")
    if not 0 <= position.split <= splits or position.row < 0 or position.epoch < 0:
        raise StateError(f"{position}: want a split of 0 to {splits}, and nothing negative")
