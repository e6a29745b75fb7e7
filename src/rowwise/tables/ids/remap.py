"""Computes the rows of a table for a new id map from the rows that were trained with an old one.

[Note: Moved rows] Parts are moved one by one, because rows of different parts have different meanings and widths. The
old vector of an id in a part is the sum of its old rows there; zeros if it has none. A new row is the weighted mean of
the old vectors of its ids. If all of its ids had the same single old row, that row is copied bit by bit: ids that share
a row before and after keep it exactly, and so do ids that leave a shared row for one of their own. Optimizer state is a
weighted mean over the ids that had old rows; the state of an id with several old rows is their mean. Rows without ids
and state without old rows are zeros. Known limit: the new map must not multiply rows, or give an id several rows of one
part, because a mean does not determine the single rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.tables.ids.idmap import IdMap, MapShape
from rowwise.tables.ids.rows import look_up_rows

MAX_IDS, MAX_FLOATS = 1 << 20, 1 << 22  # per chunk: ids looked up, floats averaged
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
LookUp = Callable[[IdMap, Ids], NDArray[np.int64]]  # returns the rows [N, columns] of ids
RowRange = tuple[int, int]  # begin, end (exclusive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The ids and the old rows that the new rows of one part come from. See [Note: Moved rows]."""

    ids_M: NDArray[np.integer]  # ids that have a row of the part, sorted by new row and id
    offsets: Ids  # [rows + 1]: where the ids of each new row begin in `ids_M`, and the end of the last
    same_R: Ids  # the old row that the new row copies; -1: none
    old_rows: Callable[[Ids], NDArray[np.int64]]  # returns the old rows [N, columns] of ids in the part; -1: none

    @property
    def rows(self) -> int:
        return len(self.same_R)

    @property
    def empty(self) -> int:
        """The number of new rows without ids."""
        return int((np.diff(self.offsets) == 0).sum())

    @property
    def kept(self) -> int:
        """The number of new rows that are copies of old ones."""
        return int((self.same_R >= 0).sum())


def same_rows(old: IdMap, new: IdMap) -> bool:
    """Whether all ids have the same rows in both maps; maps of folds are not compared."""
    return old.shape == new.shape and np.array_equal(old.words, new.words)


def check_movable(old: MapShape, new: MapShape, dim: int) -> None:
    """Raise for maps between which the rows of a table of this dim cannot be moved."""
    if old.ids != new.ids:
        raise SpecError(f"the old map has {old.ids} ids and the new one {new.ids}", "the same number")
    for which, shape in (("old", old), ("new", new)):
        if shape.combine != "sum":
            raise SpecError(f"the {which} map multiplies rows, which cannot be averaged", "maps that add rows up")
    widths = [[dim if part.dim is None else min(part.dim, dim) for part in shape.parts] for shape in (old, new)]
    if widths[0] != widths[1]:
        old_parts, new_parts = (f"{len(dims)} of {', '.join(map(str, dims))} columns" for dims in widths)
        raise SpecError(
            f"the old map has parts {old_parts}, the new one {new_parts}",
            "parts of the same widths",
            hint="or train anew",
        )


def find_moves(old: IdMap, new: IdMap, look_up: LookUp = look_up_rows) -> tuple[Move, ...]:
    """A move for each part; maps have passed `check_movable`. `look_up` may be faster than `look_up_rows`."""
    return tuple(_find_move(old, new, index, look_up) for index in range(len(new.shape.parts)))


def average_rows(
    move: Move,
    rows: RowRange,
    read: Callable[[Ids], Floats],
    weights: Callable[[Ids], NDArray[np.floating]],
    *,
    state: bool,
) -> Floats:
    """A range of the new rows [R, D] of a part, or of their optimizer state; rows that are copies are left zero.

    Args:
        move: the part's ids and old rows.
        rows: the range of new rows.
        read: returns old rows by index, as float32 [K, D].
        weights: returns the weights of ids.
        state: average optimizer state instead of rows. See [Note: Moved rows].
    """
    first, last = rows
    width = read(np.zeros(0, np.int64)).shape[1]
    sums_RD, totals_R = np.zeros((last - first, width)), np.zeros(last - first)
    step = max(1, MAX_FLOATS // max(1, width))
    for begin in range(move.offsets[first], move.offsets[last], step):
        index_N = np.arange(begin, min(begin + step, move.offsets[last]))
        row_N = np.searchsorted(move.offsets, index_N, "right") - 1
        averaged_N = move.same_R[row_N] < 0
        if not averaged_N.any():
            continue
        row_N, ids = row_N[averaged_N], move.ids_M[index_N[averaged_N]].astype(np.int64)
        vectors_ND, has_row_N = _old_vectors(move.old_rows(ids), read, width, state=state)
        weights_N = weights(ids).astype(np.float64) * (has_row_N if state else 1.0)
        # A row's ids are adjacent, but may continue in the next step: sum runs of equal rows into the totals.
        runs_K = np.flatnonzero(np.diff(row_N, prepend=-1))
        row_K = row_N[runs_K] - first
        sums_RD[row_K] += np.add.reduceat(vectors_ND * weights_N[:, None], runs_K)
        totals_R[row_K] += np.add.reduceat(weights_N, runs_K)
    totals_R[totals_R == 0] = 1
    sums_RD /= totals_R[:, None]
    return sums_RD.astype(np.float32)


def _find_move(old: IdMap, new: IdMap, index: int, look_up: LookUp) -> Move:
    ids, rows = new.shape.ids, new.shape.parts[index].rows
    new_N = np.empty(ids, np.min_scalar_type(-rows))
    # The lowest and the highest old row of each new row's ids: equal where all ids have the same single old row.
    low_R, high_R = np.full(rows, np.iinfo(np.int64).max), np.full(rows, -1)
    for begin in range(0, ids, MAX_IDS):
        chunk_N = np.arange(begin, min(begin + MAX_IDS, ids))
        new_NC = _rows_in_part(new.shape, index, look_up(new, chunk_N))
        has_several_N = (new_NC >= 0).sum(1) > 1
        if has_several_N.any():
            bad = int(chunk_N[has_several_N.argmax()])
            raise SpecError(
                f"the new map gives id {bad} several rows of part {index}, which are not known",
                "a map where each id has one row of a part, such as hash",
            )
        old_NC = _rows_in_part(old.shape, index, look_up(old, chunk_N))
        single_N = np.where((old_NC >= 0).sum(1) == 1, old_NC.max(1), -1)
        row_N = new_NC.max(1)
        new_N[chunk_N] = row_N
        has_row_N = row_N >= 0
        np.minimum.at(low_R, row_N[has_row_N], single_N[has_row_N])
        np.maximum.at(high_R, row_N[has_row_N], single_N[has_row_N])
    ids_M = np.argsort(new_N, kind="stable")[int((new_N < 0).sum()) :]
    counts_R = np.bincount(new_N[new_N >= 0], minlength=rows)
    return Move(
        ids_M=ids_M.astype(np.min_scalar_type(-ids)),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts_R)]),
        same_R=np.where(low_R == high_R, low_R, -1),
        old_rows=lambda ids_N: _rows_in_part(old.shape, index, look_up(old, ids_N)),
    )


def _rows_in_part(shape: MapShape, index: int, rows_NC: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows as numbered in a part; -1 for rows of other parts."""
    begin = sum(part.rows for part in shape.parts[:index])
    local_NC = rows_NC - begin
    return np.where((local_NC >= 0) & (local_NC < shape.parts[index].rows), local_NC, -1)


def _old_vectors(
    old_NC: NDArray[np.int64], read: Callable[[Ids], Floats], width: int, *, state: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The old vector of each id in the part, or its state, and whether it had a row there."""
    vectors_ND, count_N = np.zeros((len(old_NC), width)), (old_NC >= 0).sum(1)
    for column_N in old_NC.T:
        ids_K = np.flatnonzero(column_N >= 0)
        vectors_ND[ids_K] += read(column_N[ids_K])
    if state:
        vectors_ND /= np.maximum(count_N, 1)[:, None]
    return vectors_ND, count_N > 0
