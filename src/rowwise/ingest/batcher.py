"""Batches of B rows over the splits of a reader, shuffled, and resumed exactly.

[Note: order of rows] An epoch is one fixed sequence of rows: the splits in an order that depends on (seed, epoch), and
the rows inside split s in an order that depends on (seed, epoch, s). Batches cut this sequence every B rows, whatever
the borders of splits. So where a run stands is three numbers, and going on from them needs nothing else: no random
state, no rows kept. Rows move within their split only, so splits should be many times the batch, or data in an order
of its own (by time, by user) shows through; that is the price of reading splits once, one at a time.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import msgspec
import numpy as np

from rowwise.batch import Batch
from rowwise.errors import DataError, SpecError, StateError
from rowwise.ingest.ahead import ahead
from rowwise.ingest.collate import Piece, collate
from rowwise.ingest.columns import Columns
from rowwise.ingest.encode import Encoded, encode
from rowwise.ingest.mix import permutation
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.share import Share
from rowwise.spec import Table, Value


class Batching(Value, frozen=True):
    """How rows become batches."""

    size: int
    seed: int = 0
    shuffle: bool = True
    keep_last: bool = True  # the rows that are left when they fill no batch
    ahead: int = 0  # batches that a background thread makes before they are asked for; 0: no thread
    share: Share = Share()  # of the rows of each split; the others are not there

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
        waiting: list[Piece] = []
        missing = self._batching.size
        for encoded, stands in self._encoded(start):
            begin = stands.row
            # What is left of a split fills the open batch, then batches of its own.
            while encoded.rows - begin >= missing:
                waiting.append(Piece(encoded, begin, begin + missing))
                begin += missing
                yield _Made(collate(waiting, self._columns), msgspec.structs.replace(stands, row=begin))
                waiting.clear()
                missing = self._batching.size
            if begin < encoded.rows:
                waiting.append(Piece(encoded, begin, encoded.rows))
                missing -= encoded.rows - begin
        if waiting and self._batching.keep_last:
            yield _Made(collate(waiting, self._columns), msgspec.structs.replace(start, split=len(self._splits), row=0))

    def _encoded(self, start: Position) -> Iterator[tuple[Encoded, Position]]:
        """The splits from a position on, in their order, each with where it stands. See [Note: order of rows]."""
        count, how = len(self._splits), self._batching
        order_S = permutation(count, how.seed, start.epoch) if how.shuffle else np.arange(count)
        for at in range(start.split, count):
            index = int(order_S[at])
            split = self._splits[index]
            table = self._reader.read(split, self._columns.names)
            order_R = permutation(table.num_rows, how.seed, start.epoch, index) if how.shuffle else None
            order_R = how.share.among(order_R, table.num_rows, index)
            encoded = encode(table, self._columns, self._rows_of, split, order_R)
            yield encoded, msgspec.structs.replace(start, split=at, row=start.row if at == start.split else 0)


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
