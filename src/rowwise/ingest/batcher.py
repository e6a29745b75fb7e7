"""Batches of B rows over the splits of a reader, shuffled, and resumed exactly.

[Note: order of rows] An epoch is one fixed sequence of rows: the splits in an order that depends on (seed, epoch), and
the rows inside split s in an order that depends on (seed, epoch, s). Batches cut this sequence every B rows, whatever
the borders of splits. So where a run stands is three numbers, and going on from them needs nothing else: no random
state, no rows kept. Rows move within their split only, so splits should be many times the batch, or data in an order
of its own (by time, by user) shows through; that is the price of reading splits once, one at a time.

[Note: borrowed splits] A service lends a split, and has room for a few: it goes on when splits are given back. A batch
may be made of more splits than that. So a split is kept as it is until the next one is used; rows that wait longer for
their batch are copied.

Splits are read and encoded here, or by a service of processes (`service/`), and are the same. Of several ranks each
goes through the whole sequence and takes the rows of its own parts only (see [Note: parts of a batch] in
`batch_shard.py`); positions are those of the sequence, the same on all ranks. Known limits: without a service, files
are read once a rank.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self, final

import msgspec
from msgspec import structs

from rowwise.batch import Batch
from rowwise.errors import DataError, SpecError, StateError
from rowwise.ingest.ahead import read_ahead
from rowwise.ingest.batch_shard import BatchShard, BatchSpan
from rowwise.ingest.block import Encoded, private
from rowwise.ingest.collate import SplitRows, collate
from rowwise.ingest.columns import Columns
from rowwise.ingest.prepare import Preparation, PreparationTask, ReadSplit
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.share import Share
from rowwise.ingest.transform import LoadedTransforms, digest, to_json
from rowwise.ingest.where import RowFilter
from rowwise.spec import Table, Value


class Batching(Value, frozen=True):
    """The batch size, order and drop rule of the batches."""

    size: int  # of the batches of all ranks together
    seed: int = 0
    shuffle: bool = True
    keep_last: bool = True  # the rows that are left when they fill no batch
    ahead: int = 0  # batches that a background thread makes before they are asked for; 0: no thread
    share: Share = Share()  # of the rows of each split; the others are not there
    deal: BatchShard = BatchShard()  # of each batch among ranks; every rank gets a batch, which may have no rows
    where: RowFilter = RowFilter()  # rows that are wanted; none said: all
    together: str | None = None  # neighbours that have the same in this column stay neighbours when rows are shuffled
    # A folder for rows that cannot be used; "": they are only left out; None: the first one is an error
    aside: str | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.ahead < 0 or self.seed < 0:
            got = f"size={self.size}, ahead={self.ahead}, seed={self.seed}"
            raise SpecError(f"batching: {got}: want at least one row a batch, and nothing negative")


class Position(Value, frozen=True):
    """The position of a run: row `row` of the split that is at `split` in the epoch's order."""

    epoch: int = 0
    split: int = 0
    row: int = 0
    seed: int = 0
    shuffle: bool = True
    data: str = ""  # of which splits this speaks


class _MadeBatch(NamedTuple):
    batch: Batch
    after: Position


class SplitPosition(Protocol):
    """A split as it is in the sequence of rows."""

    @property
    def rows(self) -> int:
        """How many of its rows are used."""
        ...

    def pieces(self, spans: Sequence[BatchSpan]) -> list[SplitRows]:
        """The rows of the spans."""
        ...

    def own(self, piece: SplitRows) -> SplitRows:
        """The rows of such a part, for as long as it takes. See [Note: borrowed splits]."""
        ...


Parts = Callable[[int, int], Iterator[SplitPosition]]  # of an epoch, from a split of its order on


@final
class Batcher:
    """Each `for` over it gives the batches of one epoch, or those that are left of the one it stands in.

    Args:
        reader: where rows come from.
        columns: what the columns are.
        tables: whose rows the ids name.
        batching: how many rows, and in which order.
        position: where to go on, as `state()` gave it.
        transforms: what is made of the columns first.
    """

    def __init__(
        self,
        reader: Reader,
        columns: Columns,
        tables: Sequence[Table],
        batching: Batching,
        position: Position | None = None,
        transforms: LoadedTransforms | None = None,
    ) -> None:
        """Check all names and types before a row is read."""
        self._columns, self._batching = columns, batching
        splits = reader.splits()
        if not splits:
            raise DataError(f"{type(reader).__name__}: no rows to read")
        columns.check_tables(tables)
        how = Preparation(
            columns=columns,
            rows_of=rows_to_hold(columns, tables),
            share=batching.share,
            seed=batching.seed,
            shuffle=batching.shuffle,
            transforms=to_json(transforms) if transforms else b"",
            where=batching.where,
            together=batching.together,
            aside=batching.aside,
        )
        how.check(reader.schema, splits[0].source)
        self.task = PreparationTask(reader=reader, splits=splits, how=how)
        self._parts: Parts = self._here
        start = Position(seed=batching.seed, shuffle=batching.shuffle, data=_digest(splits, how))
        if position is not None:
            position = _position_with_quarantine(position, start, _digest(splits, structs.replace(how, aside=None)))
            _check_position(position, start, len(splits))
        self._position = position or start

    @property
    def splits(self) -> int:
        return len(self.task.splits)

    def served_by(self, parts: Parts) -> Self:
        self._parts = parts
        return self

    def state(self) -> Position:
        """The position after the batches given so far; batches made in advance do not count."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        """The batches up to the end of the epoch, then the position is at the start of the next."""
        made = self._batches(self._position)
        if self._batching.ahead:
            made = read_ahead(made, self._batching.ahead)
        for batch, after in made:
            self._position = after
            yield batch
        self._position = structs.replace(self._position, epoch=self._position.epoch + 1, split=0, row=0)

    def _batches(self, start: Position) -> Iterator[_MadeBatch]:
        size, count = self._batching.size, self.splits
        waiting: list[SplitRows] = []  # of the open batch
        filled = owned = 0
        for at, part in enumerate(self._parts(start.epoch, start.split), start.split):
            row, before = start.row if at == start.split else 0, len(waiting)
            left = range(min(row, part.rows), part.rows)
            spans = list(self._batching.deal.spans(left, filled, size, last=at == count - 1))
            stands = structs.replace(start, split=at)
            pieces = part.pieces(spans) if spans else []
            for span in spans:
                waiting.append(pieces.pop(0))  # and no other name for it: a split goes back with its last piece
                if span.full:
                    yield _MadeBatch(self._collate(waiting, size), structs.replace(stands, row=span.after))
                    waiting.clear()
                    before = owned = 0
            if before:  # see [Note: borrowed splits]
                waiting[owned:] = [part.own(piece) for piece in waiting[owned:]]
                owned = len(waiting)
            filled = (filled + len(left)) % size
            del part
        if filled and self._batching.keep_last:
            end = structs.replace(start, split=count, row=0)
            yield _MadeBatch(self._collate(waiting, filled), end)

    def _collate(self, pieces: Sequence[SplitRows], rows: int) -> Batch:
        """This rank's part of a batch of so many rows."""
        begin, end = self._batching.deal.part(rows)
        return collate([piece.within(begin, end) for piece in pieces], self._columns)

    def _here(self, epoch: int, at: int) -> Iterator[SplitPosition]:
        """The splits of an epoch, prepared as they are needed. See [Note: order of rows]."""
        for index in self.task.order(epoch)[at:]:
            yield _PartialSplit(self.task.open(index, epoch))


@final
@dataclass(frozen=True, slots=True)
class _PartialSplit:
    """A split of which only this rank's rows are encoded, as most of the time goes into hashing."""

    opened: ReadSplit

    @property
    def rows(self) -> int:
        """How many of its rows are used."""
        return self.opened.rows

    def pieces(self, spans: Sequence[BatchSpan]) -> list[SplitRows]:
        """The rows of the spans."""
        encoded = self.opened.encode([(span.begin, span.end) for span in spans])
        pieces: list[SplitRows] = []
        at = 0
        for begin, end, place, *_ in spans:
            pieces.append(SplitRows(encoded, at, at + end - begin, place))
            at += end - begin
        return pieces

    def own(self, piece: SplitRows) -> SplitRows:
        return piece


@final
@dataclass(frozen=True, slots=True)
class EncodedSplit:
    """A split that was encoded elsewhere, with all of its rows."""

    encoded: Encoded

    @property
    def rows(self) -> int:
        """How many of its rows are used."""
        return self.encoded.rows

    def pieces(self, spans: Sequence[BatchSpan]) -> list[SplitRows]:
        """The rows of the spans."""
        return [SplitRows(self.encoded, begin, end, place) for begin, end, place, *_ in spans]

    def own(self, piece: SplitRows) -> SplitRows:
        lent = piece.encoded
        block = private(len(lent.block))
        block[:] = lent.block
        return piece._replace(encoded=Encoded.of(block, lent.layout))


def rows_to_hold(columns: Columns, tables: Sequence[Table]) -> dict[str, int]:
    """Rows of each table whose ids are to be hashed or checked; one that maps unknown ids itself may be given any."""
    hashed = {s.table_name for s in columns.sparse if s.ids == "hash"}
    return {t.name: t.rows for t in tables if t.name in hashed or t.unknown == "raise"}


def _digest(splits: Sequence[Split], how: Preparation) -> str:
    """Knows the rows again, also where their folder has moved; what selects and orders them counts where it is used."""
    kept = ("start", "stop", "first_row")
    named = [{"source": Path(split.source).name} | {name: getattr(split, name) for name in kept} for split in splits]
    here: list[object] = [how.share, named]
    chosen = {"where": how.where, "together": how.together, "aside": how.aside is not None}
    if how.transforms:
        chosen["transforms"] = digest(how.loaded)
    if any((how.where.all_of, how.together, how.aside, how.transforms)):
        here.append(chosen)
    return hashlib.sha256(msgspec.json.encode(here)).hexdigest()[:16]


def _position_with_quarantine(position: Position, start: Position, data: str) -> Position:
    """The position of a run that ended at its first bad row, for a run that quarantines: only good rows count."""
    return structs.replace(position, data=start.data) if position.data == data else position


def _check_position(position: Position, start: Position, splits: int) -> None:
    """Raise unless the position was taken with the same data, columns and order."""
    for name in ("seed", "shuffle", "data"):
        got, want = getattr(position, name), getattr(start, name)
        if got != want:
            out = "go on with what the run began with, or start a new one"
            if name == "data":
                what = "other files, splits, filters or transforms (or another together or on_bad_rows) than this run's"
                raise StateError(f"the position is of {what}: no row would be the same; {out}")
            what = f"{name}={got!r}, and this run has {name}={want!r}"
            raise StateError(f"the position is of {what}: no row would be the same; {out}")
    if not 0 <= position.split <= splits or position.row < 0 or position.epoch < 0:
        raise StateError(f"{position}: want a split of 0 to {splits}, and nothing negative")
