"""From a split to its encoded rows, in the order of an epoch: all that is done to rows before they become batches.

Nothing here needs torch.

[Note: which rows] A split's rows are never cut away, as errors name them by their numbers. What selects rows (a share,
a filter, sampling, bad rows that are put aside) only leaves them out of the order in which rows are used. So where a
run stands counts rows that are used, and follows from the same values again.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import final

import numpy as np
import pyarrow as pa
from msgspec import structs
from numpy.typing import NDArray
from pyarrow import compute as pc

from rowwise.errors import DataError
from rowwise.ingest import transform
from rowwise.ingest.bags import Ints, combine_chunks
from rowwise.ingest.block import Encoded, Memory, private
from rowwise.ingest.columns import Columns
from rowwise.ingest.encode import RefusedRows, bad_rows, encode
from rowwise.ingest.mix import permutation
from rowwise.ingest.quarantine import quarantine_rows, quarantine_split
from rowwise.ingest.reader import Reader, Split, check_columns
from rowwise.ingest.share import Share
from rowwise.ingest.where import RowFilter
from rowwise.spec import Value

ALL = Share()


class Preparation(Value, frozen=True):
    """The columns, transforms and order of rows that workers apply."""

    columns: Columns
    rows_of: dict[str, int]  # of tables, where ids are hashed to them or refused outside them
    share: Share = Share()
    seed: int = 0
    shuffle: bool = True
    transforms: bytes = b""  # as `transform.to_json` has them; none: columns are used as they are
    where: RowFilter = RowFilter()  # rows that are wanted
    together: str | None = None  # neighbours that have the same in this column stay neighbours when rows are shuffled
    # A folder for rows that cannot be used; "": they are only left out; None: the first one ends the run
    aside: str | None = None

    @property
    def loaded(self) -> transform.LoadedTransforms:
        return _load_cached(self.transforms)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read."""
        more = (*self.where.columns, *(() if self.together is None else (self.together,)))
        return tuple(dict.fromkeys((*transform.sources(self.loaded, self.columns.names), *more)))

    def check(self, schema: pa.Schema, source: str) -> None:
        """Refuse columns that are not there or hold something else."""
        self.where.check(schema, source)
        if self.together is not None:
            check_columns((self.together,), schema, source)
            if not _can_differ(kind := schema.field(self.together).type):
                want = "want a column of single values, such as whole numbers or text"
                raise DataError(f"{source}: together: column {self.together!r} holds {kind}: {want}")
        self.columns.check(transform.schema_after(schema, self.loaded, source), source)


class PreparationSeconds(Value, frozen=True):
    """Seconds of one split by stage."""

    read_s: float = 0.0  # decompressed and decoded, too
    transform_s: float = 0.0
    encode_s: float = 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSplit:
    """A split that was read, and the order of its rows."""

    table: pa.Table
    split: Split
    order_R: Ints | None  # None: all, as they are
    how: Preparation
    spent: PreparationSeconds

    @property
    def rows(self) -> int:
        return self.table.num_rows if self.order_R is None else len(self.order_R)

    def encode(self, ranges: Sequence[tuple[int, int]] | None = None, memory: Memory = private) -> Encoded:
        """The rows at these ranges of the order, one range after another; None: all."""
        order_R = self.order_R
        if ranges is not None and sum(end - begin for begin, end in ranges) < self.rows:
            order_R = np.arange(self.table.num_rows) if order_R is None else order_R
            order_R = np.concatenate([order_R[begin:end] for begin, end in ranges])
        return encode(self.table, self.how.columns, self.how.rows_of, self.split, order_R, memory)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationTask:
    """Everything that a worker needs to prepare splits."""

    reader: Reader
    splits: tuple[Split, ...]
    how: Preparation
    epochs: int = 1  # that will be asked for, as far as is known

    def order(self, epoch: int) -> list[int]:
        """The numbers of the splits, in the order of an epoch."""
        count = len(self.splits)
        return permutation(count, self.how.seed, epoch).tolist() if self.how.shuffle else list(range(count))

    def open(self, index: int, epoch: int) -> ReadSplit:
        """Read the split of a number."""
        split, how = self.splits[index], self.how
        try:
            return self._open(index, epoch)
        except DataError as error:
            if how.aside is None:
                raise
            quarantine_split(split, str(error), how.aside)
            return ReadSplit(table=self._nothing(split), split=split, order_R=None, how=how, spent=PreparationSeconds())

    def _nothing(self, split: Split) -> pa.Table:
        """No rows, of columns as they would be."""
        after = transform.schema_after(self.reader.schema, self.how.loaded, split.source)
        return pa.schema([after.field(name) for name in self.how.columns.names]).empty_table()

    def _open(self, index: int, epoch: int) -> ReadSplit:
        begin_s = perf_counter()
        split, how = self.splits[index], self.how
        table = self.reader.read(split, how.names)
        read_s = perf_counter() - begin_s
        made, keep_R = table, None
        if how.transforms:
            where = transform.RowPosition(split=split, index=index)
            made, keep_R = transform.apply(table, how.loaded, how.columns.names, where)
        wanted_R = how.where.mask(table) if how.where.all_of else None
        if wanted_R is not None:
            keep_R = _intersect(keep_R, wanted_R)
        # Also rows of other shares: a run that is to be tested on a bad row had better not begin.
        bad = _bad_among(wanted_R, made, how, split) if how.aside is not None or how.share != ALL else None
        if bad is not None:
            self._dismiss(bad, table, split)
            keep_R = _intersect(keep_R, ~bad.mask_R)
        order_R = self._order_of_rows(table, index, epoch)
        order_R = how.share.among(order_R, table.num_rows, index)
        if keep_R is not None:
            order_R = np.flatnonzero(keep_R) if order_R is None else order_R[keep_R[order_R]]
        spent = PreparationSeconds(read_s=read_s, transform_s=perf_counter() - begin_s - read_s)
        return ReadSplit(table=made, split=split, order_R=order_R, how=how, spent=spent)

    def _dismiss(self, bad: RefusedRows, table: pa.Table, split: Split) -> None:
        """Quarantine bad rows, or raise for the first."""
        if self.how.aside is not None:
            quarantine_rows(table, split, bad, self.how.aside)
            return
        first = bad.wrong[0]
        raise DataError(f"{split.place(first.row)}, column {first.column!r}: {first.reason}")

    def _order_of_rows(self, table: pa.Table, index: int, epoch: int) -> Ints | None:
        how = self.how
        if not how.shuffle:
            return None
        if how.together is None:
            return permutation(table.num_rows, how.seed, epoch, index)
        starts_G1 = _runs(table[how.together])
        order_G = permutation(len(starts_G1) - 1, how.seed, epoch, index)
        lengths_G = np.diff(starts_G1)[order_G]
        moved_G = np.cumsum(lengths_G) - lengths_G
        return np.arange(table.num_rows) + np.repeat(starts_G1[order_G] - moved_G, lengths_G)


@functools.cache
def _load_cached(data: bytes) -> transform.LoadedTransforms:
    return transform.from_json(data) if data else transform.load(())


def _bad_among(
    wanted_R: NDArray[np.bool_] | None, made: pa.Table, how: Preparation, split: Split
) -> RefusedRows | None:
    """Bad rows that pass the filter, the same for every share of a split."""
    if wanted_R is None or wanted_R.all():
        return bad_rows(made, how.columns, how.rows_of, split)
    bad = bad_rows(made.filter(pa.array(wanted_R)), how.columns, how.rows_of, split)
    if bad is None:
        return None
    rows_N = np.flatnonzero(wanted_R)
    mask_R = np.zeros_like(wanted_R)
    mask_R[rows_N[bad.mask_R]] = True
    return RefusedRows(mask_R, tuple(structs.replace(wrong, row=int(rows_N[wrong.row])) for wrong in bad.wrong))


def _intersect(one_R: NDArray[np.bool_] | None, other_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return other_R if one_R is None else one_R & other_R


def _runs(column: pa.ChunkedArray) -> Ints:
    """The starts of runs of equal neighbours, and the end. A row without a value is a run of its own."""
    array = combine_chunks(column)
    if len(array) < 2:
        return np.array([0] * bool(len(array)) + [len(array)], np.int64)
    differs = _differ(array[1:], array[:-1]).fill_null(True).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.flatnonzero(differs) + 1, [len(array)]])


def _differ(one: pa.Array, other: pa.Array) -> pa.Array:
    return pc.call_function("not_equal", [one, other])


def _can_differ(kind: pa.DataType) -> bool:
    nothing = combine_chunks(pa.chunked_array([], kind))
    try:
        _differ(nothing, nothing)
    except pa.ArrowException:
        return False
    return True
