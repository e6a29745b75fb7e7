"""Batches of B rows over the splits of a reader, shuffled, and resumed exactly.

[Note: order of rows] An epoch is one fixed sequence of rows: the splits in an order that depends on (seed, epoch), and
the rows inside split s in an order that depends on (seed, epoch, s). Batches cut this sequence every B rows, whatever
the borders of splits. So a position is three numbers, and a resume needs nothing else: no random state, no buffered
rows. Rows are shuffled within their split only, so a split should hold many batches, or data sorted by time or by user
stays clustered in training; in return each split is read once, one at a time.

[Note: borrowed splits] A service lends the memory of a split from a small pool, and waits until slots are released. A
batch may span more splits than the pool has slots. So rows in lent memory wait for their batch only until the next
split ends; rows that wait longer are copied. Else the batch and the service would wait for each other.

Splits are prepared here, or by worker processes (`service/`) with the same result. Each of several ranks goes through
the whole sequence and takes its own rows of each batch (see [Note: parts of a batch] in `batch_shard.py`); positions
refer to the whole sequence and are the same on all ranks. Known limits: without a service, each rank reads all files.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self, final

import msgspec
from msgspec import structs

from rowwise.base.errors import DataError, SpecError, StateError
from rowwise.ingest.ahead import read_ahead, time_items
from rowwise.ingest.batch_shard import BatchShard, BatchSpan
from rowwise.ingest.block import EncodedRows, allocate
from rowwise.ingest.collate import SplitRows, collate
from rowwise.ingest.columns import Columns
from rowwise.ingest.prepare import LoadedSplit, Preparation, PreparationTask, ReadSplit
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.share import Share
from rowwise.ingest.transform import LoadedTransforms, digest, to_json
from rowwise.ingest.where import RowFilter
from rowwise.tables.batch import Batch
from rowwise.tables.spec import Table, Value


class Batching(Value, frozen=True):
    """The batch size, the order of rows, and which rows are used."""

    size: int  # of the global batch
    seed: int = 0
    shuffle: bool = True
    keep_last: bool = True  # keep the last rows of an epoch where they fill no batch
    ahead: int = 0  # batches to prefetch in a background thread; 0 for no thread
    share: Share = Share()  # of the rows of each split
    shard: BatchShard = BatchShard()  # this rank's part of each batch; it may be empty in a small batch
    where: RowFilter = RowFilter()  # row filter; by default all rows pass
    together: str | None = None  # shuffle groups of neighbouring rows with equal values in this column (a session id)
    # Folder for copies of unusable rows; "" drops them without a copy; None raises at the first
    quarantine: str | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.ahead < 0 or self.seed < 0:
            raise SpecError(
                f"batching: size={self.size}, ahead={self.ahead}, seed={self.seed}",
                "at least one row a batch, and nothing negative",
            )


class Position(Value, frozen=True):
    """The resume position: before row `row` of the split at index `split` in the epoch's order."""

    epoch: int = 0
    split: int = 0
    row: int = 0
    seed: int = 0
    shuffle: bool = True
    data: str = ""  # digest of the splits, and of the settings that select and order their rows


class _PositionedBatch(NamedTuple):
    batch: Batch
    after: Position


class OpenedSplit(Protocol):
    """A split, read or already encoded."""

    @property
    def rows(self) -> int:
        """Number of rows used."""
        ...

    def slices(self, spans: Sequence[BatchSpan]) -> list[SplitRows]:
        """The encoded rows of each span."""
        ...

    def keep(self, rows: SplitRows) -> SplitRows:
        """The same rows, copied if their memory is lent. See [Note: borrowed splits]."""
        ...


MANAGED_IDS = 1 << 62
MAX_CACHED_bytes = 1 << 26  # tables of splits, cached for later epochs
OpenSplits = Callable[[int, int], Iterator[OpenedSplit]]  # (epoch, index) -> the epoch's splits from this index on


@final
class Batcher:
    """Iterates over the batches of one epoch per `for`; the first `for` after a resume gives the rest of its epoch.

    Args:
        reader: reads the rows.
        columns: the role of each column.
        tables: the tables that the ids look up.
        batching: the batch size and the order of rows.
        position: where to resume, from `state()`; by default the start of the first epoch.
        transforms: applied to the rows before encoding.
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
            raise DataError(f"{type(reader).__name__}: no rows to read", "files with rows")
        columns.check_tables(tables)
        preparation = Preparation(
            columns=columns,
            table_rows=table_rows_for_ids(columns, tables),
            share=batching.share,
            seed=batching.seed,
            shuffle=batching.shuffle,
            transforms=to_json(transforms) if transforms else b"",
            where=batching.where,
            together=batching.together,
            quarantine=batching.quarantine,
        )
        preparation.check(reader.schema, splits[0].source)
        self.task = PreparationTask(reader=reader, splits=splits, preparation=preparation)
        self._open_splits: OpenSplits = self._read_splits
        self.on_read: Callable[[float, float], object] = lambda *_: None  # (begin_s, end_s) of making each batch
        self.change: Callable[[Batch], Batch] = lambda batch: batch  # applied in the thread that makes the batch
        self._cached: dict[int, LoadedSplit] = {}  # by index of the split
        self._cached_bytes = 0
        start = Position(seed=batching.seed, shuffle=batching.shuffle, data=_digest(splits, preparation))
        if position is not None:
            raising = _digest(splits, structs.replace(preparation, quarantine=None))
            if position.data == raising:  # the run raised at a bad row and resumes with quarantine: same rows so far
                position = structs.replace(position, data=start.data)
            _check_position(position, start, len(splits))
        self._position = position or start

    @property
    def splits(self) -> int:
        return len(self.task.splits)

    def use_splits(self, open_splits: OpenSplits) -> Self:
        """Take prepared splits from a service instead of reading them here."""
        self._open_splits = open_splits
        return self

    def state(self) -> Position:
        """The position after the last batch yielded; prefetched batches do not count."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        """The batches up to the end of the epoch; then the position is the start of the next epoch."""
        batches = time_items(self._batches(self._position))
        if self._batching.ahead:
            batches = read_ahead(batches, self._batching.ahead)
        for (batch, after), begin_s, end_s in batches:
            self._position = after
            self.on_read(begin_s, end_s)
            yield batch
        self._position = structs.replace(self._position, epoch=self._position.epoch + 1, split=0, row=0)

    def _batches(self, start: Position) -> Iterator[_PositionedBatch]:
        size, count = self._batching.size, self.splits
        waiting: list[SplitRows] = []  # this rank's rows of the open batch
        filled = 0  # rows of the open global batch
        owned = 0  # entries of `waiting` that are in memory of this process
        for index, split in enumerate(self._open_splits(start.epoch, start.split), start.split):
            first_row, before = start.row if index == start.split else 0, len(waiting)
            left = range(min(first_row, split.rows), split.rows)
            spans = list(self._batching.shard.spans(left, filled, size, last=index == count - 1))
            here = structs.replace(start, split=index)
            slices = split.slices(spans) if spans else []
            for span in spans:
                waiting.append(slices.pop(0))  # pop: a lent split is released when its last slice has no reference
                if span.full:
                    yield _PositionedBatch(self._collate(waiting, size), structs.replace(here, row=span.after))
                    waiting.clear()
                    before = owned = 0
            if before:  # the open batch spans more than one split: see [Note: borrowed splits]
                waiting[owned:] = [split.keep(rows) for rows in waiting[owned:]]
                owned = len(waiting)
            filled = (filled + len(left)) % size
            del split  # before the next one is awaited, so that a lent split is released first
        if filled and self._batching.keep_last:
            end = structs.replace(start, split=count, row=0)
            yield _PositionedBatch(self._collate(waiting, filled), end)

    def _collate(self, slices: Sequence[SplitRows], rows: int) -> Batch:
        """This rank's part of a global batch of `rows` rows."""
        begin, end = self._batching.shard.part(rows)
        return self.change(collate([rows_of_split.clip(begin, end) for rows_of_split in slices], self._columns))

    def _read_splits(self, epoch: int, at: int) -> Iterator[OpenedSplit]:
        """The splits of an epoch, read lazily. See [Note: order of rows]."""
        for index in self.task.order(epoch)[at:]:
            yield _LocalSplit(self._open(index, epoch))

    def _open(self, index: int, epoch: int) -> ReadSplit:
        """A split in the order of an epoch; its table is cached for later epochs while the cache has room."""
        if self._batching.quarantine is not None:  # each read has to quarantine its bad rows anew
            return self.task.open(index, epoch)
        loaded = self._cached.get(index)
        if loaded is None:
            loaded = self.task.load(index)
            if self._cached_bytes + loaded.table.nbytes <= MAX_CACHED_bytes:
                self._cached[index] = loaded
                self._cached_bytes += loaded.table.nbytes
        return self.task.order_rows(loaded, index, epoch)


@final
@dataclass(frozen=True, slots=True)
class _LocalSplit:
    """A split read in this process. Only this rank's rows are encoded: hashing takes most of the time."""

    opened: ReadSplit

    @property
    def rows(self) -> int:
        return self.opened.rows

    def slices(self, spans: Sequence[BatchSpan]) -> list[SplitRows]:
        encoded = self.opened.encode([(span.begin, span.end) for span in spans])
        slices: list[SplitRows] = []
        at = 0
        for begin, end, batch_row, *_ in spans:
            slices.append(SplitRows(encoded, at, at + end - begin, batch_row))
            at += end - begin
        return slices

    def keep(self, rows: SplitRows) -> SplitRows:
        return rows  # already in memory of this process


@final
@dataclass(frozen=True, slots=True)
class EncodedSplit:
    """A split that a service has encoded, with all of its rows."""

    encoded: EncodedRows

    @property
    def rows(self) -> int:
        return self.encoded.rows

    def slices(self, spans: Sequence[BatchSpan]) -> list[SplitRows]:
        return [SplitRows(self.encoded, begin, end, batch_row) for begin, end, batch_row, *_ in spans]

    def keep(self, rows: SplitRows) -> SplitRows:
        lent = rows.encoded
        block = allocate(len(lent.block))
        block[:] = lent.block
        return rows._replace(encoded=EncodedRows.from_block(block, lent.layout))


def table_rows_for_ids(columns: Columns, tables: Sequence[Table]) -> dict[str, int]:
    """Rows of the tables whose ids are hashed to their rows, or must lie in range; others take any id.

    Ids of managed tables are hashed to 62 bits.
    """
    hashed = {s.table_name for s in columns.sparse if s.ids == "hash"}
    rows = {t.name: t.rows for t in tables if t.managed is None and (t.name in hashed or t.unknown == "raise")}
    return rows | {t.name: MANAGED_IDS for t in tables if t.managed is not None and t.name in hashed}


def _digest(splits: Sequence[Split], preparation: Preparation) -> str:
    """A digest of the sequence of rows. It holds file names but no folders, so moved data is recognised."""
    fields = ("start", "stop", "first_row")
    named = [{"source": Path(split.source).name} | {name: getattr(split, name) for name in fields} for split in splits]
    # The keys of shares and of `selection` are part of the digests in saved runs.
    share = {name: value for name, value in structs.asdict(preparation.share).items() if value is not None}
    digested: list[object] = [share, named]
    selection = {
        "where": preparation.where,
        "together": preparation.together,
        "aside": preparation.quarantine is not None,
    }
    if preparation.transforms:
        selection["transforms"] = digest(preparation.loaded)
    if any((preparation.where.all_of, preparation.together, preparation.quarantine, preparation.transforms)):
        digested.append(selection)
    return hashlib.sha256(msgspec.json.encode(digested)).hexdigest()[:16]


def _check_position(position: Position, start: Position, splits: int) -> None:
    """Refuse a position in another sequence of rows: its three numbers would name other rows here."""
    for name in ("seed", "shuffle", "data"):
        got, want = getattr(position, name), getattr(start, name)
        if got != want:
            what = f"{name}={got!r}, but this run has {name}={want!r}"
            if name == "data":
                what = "other files, splits, filters or transforms (or another together or on_bad_rows) than this run"
            raise StateError(
                f"the position has {what}", "the settings that the run began with", hint="or start a new run"
            )
    if not 0 <= position.split <= splits or position.row < 0 or position.epoch < 0:
        raise StateError(position, f"a split of 0 to {splits}, and nothing negative")
