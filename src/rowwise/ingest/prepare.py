"""Reads a split, applies transforms and filters, and encodes its rows in the order of an epoch. Needs no torch.

A `Split` becomes a `LoadedSplit` (the same in every epoch), then a `ReadSplit` (with the order of its rows in an
epoch), then `EncodedRows`.

[Note: which rows] A split's table is never filtered, because errors name rows by their numbers. What selects rows (a
share, a filter, a missing label, sampling, quarantine) only leaves them out of the order in which rows are used. So a
position counts used rows, and preparing the split again gives the same ones.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, final

import numpy as np
import pyarrow as pa
from msgspec import structs
from numpy.typing import NDArray
from pyarrow import compute as pc

from rowwise.base.errors import DataError
from rowwise.ingest import transform
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.block import Allocator, EncodedRows, Ints, allocate
from rowwise.ingest.columns import Columns
from rowwise.ingest.encode import RefusedRows, bad_rows, encode
from rowwise.ingest.kinds import is_list
from rowwise.ingest.labels import unlabelled
from rowwise.ingest.mix import permutation
from rowwise.ingest.quarantine import quarantine_rows, quarantine_split
from rowwise.ingest.reader import Reader, Split, check_columns
from rowwise.ingest.share import Share
from rowwise.ingest.where import RowFilter
from rowwise.tables.spec import Value

ALL_ROWS = Share()


class Preparation(Value, frozen=True):
    """The columns, transforms and order of rows that workers apply."""

    columns: Columns
    table_rows: dict[str, int]  # rows of each table whose ids are hashed to rows or must lie in range
    share: Share = ALL_ROWS
    seed: int = 0
    shuffle: bool = True
    transforms: bytes = b""  # from `transform.to_json`; empty for no transforms
    where: RowFilter = RowFilter()
    together: str | None = None  # see `Batching`
    quarantine: str | None = None  # see `Batching`

    @property
    def loaded(self) -> transform.LoadedTransforms:
        return _load_cached(self.transforms)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read."""
        more = (*self.where.columns, *(name for name in (self.together, self.share.group) if name is not None))
        return tuple(dict.fromkeys((*transform.sources(self.loaded, self.columns.names), *more)))

    def check(self, schema: pa.Schema, source: str) -> None:
        """Refuse columns that are missing or have a type that their role does not allow."""
        self.where.check(schema, source)
        if self.together is not None:
            check_columns((self.together,), schema, source)
            if not _can_compare(kind := schema.field(self.together).type):
                raise DataError(
                    f"{source}: together: column {self.together!r} holds {kind}",
                    "a column of single values, such as whole numbers or text",
                )
        if self.share.group is not None:
            check_columns((self.share.group,), schema, source)
            if is_list(kind := schema.field(self.share.group).type):
                raise DataError(f"{source}: group: column {self.share.group!r} holds {kind}", "single values")
        self.columns.check(transform.schema_after(schema, self.loaded, source), source)


class PreparationSeconds(Value, frozen=True):
    """Seconds of one split by stage."""

    read_s: float = 0.0  # includes decompressing and decoding
    transform_s: float = 0.0
    encode_s: float = 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSplit:
    """The transformed table of a split, and the order in which its rows are used."""

    table: pa.Table
    split: Split
    order_R: Ints | None  # row numbers of the table; None for all rows in table order
    preparation: Preparation
    spent: PreparationSeconds

    @property
    def rows(self) -> int:
        return self.table.num_rows if self.order_R is None else len(self.order_R)

    def encode(self, ranges: Sequence[tuple[int, int]] | None = None, allocator: Allocator = allocate) -> EncodedRows:
        """Encode the rows at these ranges of the order, concatenated; by default all rows."""
        order_R = self.order_R
        if ranges is not None and sum(end - begin for begin, end in ranges) < self.rows:
            order_R = np.arange(self.table.num_rows) if order_R is None else order_R
            order_R = np.concatenate([order_R[begin:end] for begin, end in ranges])
        return encode(self.table, self.preparation.columns, self.preparation.table_rows, self.split, order_R, allocator)


class LoadedSplit(NamedTuple):
    """A split as it is in every epoch: read and transformed, with the rows that are kept."""

    table: pa.Table  # transformed
    groups: pa.ChunkedArray | None  # the column of `together`
    keep_R: NDArray[np.bool_] | None  # mask of the rows to use; None for all
    spent: PreparationSeconds
    rows: int  # rows that pass the filter
    unlabelled: int  # of these, rows left out for lack of a label


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationTask:
    """Everything that a worker needs to prepare splits."""

    reader: Reader
    splits: tuple[Split, ...]
    preparation: Preparation
    epochs: int = 1  # expected epochs of the run

    def order(self, epoch: int) -> list[int]:
        """The indices of the splits, in the order of an epoch."""
        if not self.preparation.shuffle:
            return list(range(len(self.splits)))
        return permutation(len(self.splits), self.preparation.seed, epoch).tolist()

    def open(self, index: int, epoch: int) -> ReadSplit:
        """Read the split of this index. A split that cannot be read has no rows, if there is a quarantine."""
        split, preparation = self.splits[index], self.preparation
        try:
            return self.order_rows(self.load(index), index, epoch)
        except DataError as error:
            if preparation.quarantine is None:
                raise
            quarantine_split(split, str(error), preparation.quarantine)
            schema = transform.schema_after(self.reader.schema, preparation.loaded, split.source)
            empty = pa.schema([schema.field(name) for name in preparation.columns.names]).empty_table()
            return ReadSplit(
                table=empty, split=split, order_R=None, preparation=preparation, spent=PreparationSeconds()
            )

    def load(self, index: int) -> LoadedSplit:
        """Read and transform the split of this index."""
        begin_s = perf_counter()
        split, preparation = self.splits[index], self.preparation
        table = self.reader.read(split, preparation.names)
        read_s = perf_counter() - begin_s
        transformed, keep_R = table, None
        if preparation.transforms:
            position = transform.RowPosition(split=split, index=index)
            transformed, keep_R = transform.apply(table, preparation.loaded, preparation.columns.names, position)
        wanted_R = preparation.where.mask(table) if preparation.where.all_of else None
        passed = table.num_rows if wanted_R is None else int(wanted_R.sum())
        unlabelled_R = unlabelled(transformed, preparation.columns.parsed_labels)
        if unlabelled_R is not None:
            wanted_R = _intersect(wanted_R, ~unlabelled_R)
        if wanted_R is not None:
            keep_R = _intersect(keep_R, wanted_R)
        unlabelled_rows = 0 if unlabelled_R is None or wanted_R is None else passed - int(wanted_R.sum())
        # All rows of the split are checked, also those of other shares: training should not start on data whose test
        # share would stop the run in the end.
        if preparation.quarantine is not None or preparation.share != ALL_ROWS:
            bad = _bad_among(wanted_R, transformed, preparation, split)
            if bad is not None:
                self._quarantine_or_raise(bad, table, split)
                keep_R = _intersect(keep_R, ~bad.mask_R)
        if preparation.share.group is not None:
            in_share_R = preparation.share.holds(table[preparation.share.group], _source_index(split, index))
            keep_R = _intersect(keep_R, in_share_R)
        groups = None if preparation.together is None else table[preparation.together]
        spent = PreparationSeconds(read_s=read_s, transform_s=perf_counter() - begin_s - read_s)
        return LoadedSplit(transformed, groups, keep_R, spent, passed, unlabelled_rows)

    def order_rows(self, loaded: LoadedSplit, index: int, epoch: int) -> ReadSplit:
        """The split with the order of its rows in an epoch."""
        split, preparation, keep_R, rows = self.splits[index], self.preparation, loaded.keep_R, loaded.table.num_rows
        order_R = self._order_of_rows(loaded, index, epoch)
        order_R = preparation.share.select(order_R, rows, _source_index(split, index))
        if keep_R is not None:
            order_R = np.flatnonzero(keep_R) if order_R is None else order_R[keep_R[order_R]]
        return ReadSplit(table=loaded.table, split=split, order_R=order_R, preparation=preparation, spent=loaded.spent)

    def _quarantine_or_raise(self, bad: RefusedRows, table: pa.Table, split: Split) -> None:
        if self.preparation.quarantine is not None:
            quarantine_rows(table, split, bad, self.preparation.quarantine)
            return
        raise bad.reasons[0].error(split)

    def _order_of_rows(self, loaded: LoadedSplit, index: int, epoch: int) -> Ints | None:
        preparation, rows = self.preparation, loaded.table.num_rows
        if not preparation.shuffle:
            return None
        if loaded.groups is None:
            return permutation(rows, preparation.seed, epoch, index)
        # Shuffle groups of equal neighbours: group g of the table moves to where its rows begin in the new order.
        starts_G1 = _group_starts(loaded.groups)
        order_G = permutation(len(starts_G1) - 1, preparation.seed, epoch, index)
        lengths_G = np.diff(starts_G1)[order_G]
        moved_G = np.cumsum(lengths_G) - lengths_G
        return np.arange(rows) + np.repeat(starts_G1[order_G] - moved_G, lengths_G)


def _source_index(split: Split, index: int) -> int:
    return index if split.number is None else split.number


@functools.cache
def _load_cached(data: bytes) -> transform.LoadedTransforms:
    return transform.from_json(data) if data else transform.load(())


def _bad_among(
    wanted_R: NDArray[np.bool_] | None, table: pa.Table, preparation: Preparation, split: Split
) -> RefusedRows | None:
    """The bad rows among those that the filter keeps, with row numbers of the split."""
    columns, table_rows = preparation.columns, preparation.table_rows
    if wanted_R is None or wanted_R.all():
        return bad_rows(table, columns, table_rows, split)
    bad = bad_rows(table.filter(pa.array(wanted_R)), columns, table_rows, split)
    if bad is None:
        return None
    rows_N = np.flatnonzero(wanted_R)
    mask_R = np.zeros_like(wanted_R)
    mask_R[rows_N[bad.mask_R]] = True
    return RefusedRows(mask_R, tuple(structs.replace(reason, row=int(rows_N[reason.row])) for reason in bad.reasons))


def _intersect(mask_R: NDArray[np.bool_] | None, other_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return other_R if mask_R is None else mask_R & other_R


def _group_starts(column: pa.ChunkedArray) -> Ints:
    """The first row of each group of equal neighbours, then the number of rows. A null is a group of its own."""
    array = combine_chunks(column)
    if len(array) < 2:
        return np.array([0] * bool(len(array)) + [len(array)], np.int64)
    differs = _not_equal(array[1:], array[:-1]).fill_null(True).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.flatnonzero(differs) + 1, [len(array)]])


def _not_equal(left: pa.Array, right: pa.Array) -> pa.Array:
    return pc.call_function("not_equal", [left, right])


def _can_compare(kind: pa.DataType) -> bool:
    empty = combine_chunks(pa.chunked_array([], kind))
    try:
        _not_equal(empty, empty)
    except pa.ArrowException:
        return False
    return True
