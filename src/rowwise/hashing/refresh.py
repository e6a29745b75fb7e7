"""Another id map for rows that were trained by one: which old rows each new row is the mean of.

Who can look ids up faster than `rows_of` says how.

[Note: Moved rows] Part by part, as parts have rows of a meaning and a width of their own. What an id was in a part is
the sum of its rows there, or nothing (zeros). A new row is the mean of what its ids were, weighted. If all of them had
just one row of the part, the same one, the new row is that one to the bit, as stored; so ids that share a row before
and after lose nothing, nor do some of them that get a row of their own; others meet in the middle, and training goes
on from there. State of optimizers is a mean as well, of the rows that ids had; of an id with several, it is theirs.
Rows without ids, and the state of rows whose ids had no row of the part, are zeros. Known limits: maps that give an id
several rows of one part, or multiply rows, cannot be moved to, as a mean does not say which row has to be what.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.hashing.idmap import IdMap, MapShape
from rowwise.hashing.rows import rows_of

IDS, NUMBERS = 1 << 20, 1 << 22  # at a time: ids that are looked up, numbers that are averaged
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
LookUp = Callable[[IdMap, Ids], NDArray[np.int64]]  # the rows [N, columns] of ids
Span = tuple[int, int]  # from, to (exclusive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The source of the new rows of one part. See [Note: Moved rows]."""

    order_M: NDArray[np.integer]  # ids that have a row of the part, row by row, ascending
    ends_R1: Ids  # where the ids of each row begin, and the last end
    same_R: Ids  # the old row that a new one is to the bit; -1: none
    old: Callable[[Ids], NDArray[np.int64]]  # the old rows [N, columns] of ids in the part; -1: none

    @property
    def rows(self) -> int:
        return len(self.same_R)

    @property
    def empty(self) -> int:
        """New rows that no id has."""
        return int((np.diff(self.ends_R1) == 0).sum())

    @property
    def kept(self) -> int:
        """New rows that are old ones to the bit."""
        return int((self.same_R >= 0).sum())


def same_rows(old: IdMap, new: IdMap) -> bool:
    """Whether ids have the same rows in both, whatever the maps of folds are."""
    return old.shape == new.shape and np.array_equal(old.words, new.words)


def check_movable(old: MapShape, new: MapShape, dim: int) -> None:
    """Refuse maps between which rows cannot be moved; `dim`: the table's."""
    if old.ids != new.ids:
        raise SpecError(f"the old map is of {old.ids} ids and the new one of {new.ids}: want as many")
    for which, shape in (("old", old), ("new", new)):
        if shape.combine != "sum":
            raise SpecError(f"the {which} map multiplies rows, whose mean says nothing: want maps that add them up")
    widths = [[dim if part.dim is None else min(part.dim, dim) for part in shape.parts] for shape in (old, new)]
    if widths[0] != widths[1]:
        had, has = (f"{len(some)} of {', '.join(map(str, some))} columns" for some in widths)
        want = "want as many, as wide: rows of another width mean something else, so train anew"
        raise SpecError(f"the old map has parts {had}, the new one {has}: {want}")


def find_moves(old: IdMap, new: IdMap, look_up: LookUp = rows_of) -> tuple[Move, ...]:
    """For each part where its new rows come from; maps as `check_movable` lets them pass."""
    return tuple(_move(old, new, index, look_up) for index in range(len(new.shape.parts)))


def moved_rows(
    move: Move,
    rows: Span,
    read: Callable[[Ids], Floats],
    weights: Callable[[Ids], NDArray[np.floating]],
    *,
    state: bool,
) -> Floats:
    """Some of the new rows [R, D] of a part, or of their state; zeros where `same_R` says which old ones they are.

    Args:
        move: of the part.
        rows: from which row to which.
        read: gives old rows as float32 [K, D], by their numbers.
        weights: of ids.
        state: whether it is state, of which an id without a row has none, and one with several their mean.
    """
    first, last = rows
    width = read(np.zeros(0, np.int64)).shape[1]
    sums_RD, totals_R = np.zeros((last - first, width)), np.zeros(last - first)
    step = max(1, NUMBERS // max(1, width))
    for begin in range(move.ends_R1[first], move.ends_R1[last], step):
        place_N = np.arange(begin, min(begin + step, move.ends_R1[last]))
        row_N = np.searchsorted(move.ends_R1, place_N, "right") - 1
        differs_N = move.same_R[row_N] < 0
        if not differs_N.any():
            continue
        row_N, ids = row_N[differs_N], move.order_M[place_N[differs_N]].astype(np.int64)
        were_ND, has_N = _old_vectors(move.old(ids), read, width, state=state)
        weights_N = weights(ids).astype(np.float64) * (has_N if state else 1.0)
        starts_K = np.flatnonzero(np.diff(row_N, prepend=-1))
        row_K = row_N[starts_K] - first
        sums_RD[row_K] += np.add.reduceat(were_ND * weights_N[:, None], starts_K)
        totals_R[row_K] += np.add.reduceat(weights_N, starts_K)
    totals_R[totals_R == 0] = 1
    sums_RD /= totals_R[:, None]
    return sums_RD.astype(np.float32)


def _move(old: IdMap, new: IdMap, index: int, look_up: LookUp) -> Move:
    ids, rows = new.shape.ids, new.shape.parts[index].rows
    new_N = np.empty(ids, np.min_scalar_type(-rows))
    # The least and the greatest old row of each new one's ids; where they differ there is more than one.
    low_R, high_R = np.full(rows, np.iinfo(np.int64).max), np.full(rows, -1)
    for at in range(0, ids, IDS):
        some = np.arange(at, min(at + IDS, ids))
        its_NC = _rows_in_part(new.shape, index, look_up(new, some))
        several_N = (its_NC >= 0).sum(1) > 1
        if several_N.any():
            bad, want = int(some[several_N.argmax()]), "want a map where each id has one row of a part, such as hash"
            raise SpecError(f"the new map gives id {bad} several rows of part {index}, which are not known: {want}")
        old_NC = _rows_in_part(old.shape, index, look_up(old, some))
        only_N = np.where((old_NC >= 0).sum(1) == 1, old_NC.max(1), -1)
        its_N = its_NC.max(1)
        new_N[some] = its_N
        there_N = its_N >= 0
        np.minimum.at(low_R, its_N[there_N], only_N[there_N])
        np.maximum.at(high_R, its_N[there_N], only_N[there_N])
    order_M = np.argsort(new_N, kind="stable")[int((new_N < 0).sum()) :]
    counts_R = np.bincount(new_N[new_N >= 0], minlength=rows)
    return Move(
        order_M=order_M.astype(np.min_scalar_type(-ids)),
        ends_R1=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts_R)]),
        same_R=np.where(low_R == high_R, low_R, -1),
        old=lambda ids_N: _rows_in_part(old.shape, index, look_up(old, ids_N)),
    )


def _rows_in_part(shape: MapShape, index: int, rows_NC: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that are of a part, as they are numbered there; -1: none."""
    begin = sum(part.rows for part in shape.parts[:index])
    own_NC = rows_NC - begin
    return np.where((own_NC >= 0) & (own_NC < shape.parts[index].rows), own_NC, -1)


def _old_vectors(
    old_NC: NDArray[np.int64], read: Callable[[Ids], Floats], width: int, *, state: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The old vector of each id in the part, or its state, and whether it had a row there."""
    were_ND, count_N = np.zeros((len(old_NC), width)), (old_NC >= 0).sum(1)
    for column_N in old_NC.T:
        there_N = np.flatnonzero(column_N >= 0)
        were_ND[there_N] += read(column_N[there_N])
    if state:
        were_ND /= np.maximum(count_N, 1)[:, None]
    return were_ND, count_N > 0
