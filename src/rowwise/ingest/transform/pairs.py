"""Transforms of several columns of ids: cross products, intersections and scores.

The lists of all rows are compared at once, as pairs (row, dictionary code of the id). Comparisons are exact: distinct
texts have distinct codes, unlike hashes.
"""

from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest.bags import flatten_values, hash_ids, int64, to_offsets
from rowwise.ingest.block import Ints
from rowwise.ingest.kinds import ID_LISTS, IDS, NUMBER_LISTS, decoded_kind, element_of, is_list
from rowwise.ingest.transform.arrays import (
    IdLists,
    Mask,
    either_null,
    hash_pair,
    lists,
    nulls,
    plain_kind,
    row_of_each,
    to_id_lists,
    to_numbers,
    to_rows,
)
from rowwise.ingest.transform.transform import (
    Arrays,
    Kinds,
    RowPosition,
    Transform,
    check_rows,
    is_words,
)


class TwoColumns(Transform, frozen=True, kw_only=True):
    """A transform of two columns into one."""

    columns: tuple[str, str]
    to: str
    want: ClassVar[str]  # of both, a key of FITS

    @property
    def wants(self) -> tuple[str, ...]:
        return (self.want, self.want)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.to,)


class Cartesian(TwoColumns, frozen=True, kw_only=True, tag="cartesian", tag_field="kind"):
    """The cross product of two columns of ids: an order-dependent hash of each pair of ids.

    The pairs of a row are in the order of the first column's ids, then of the second's. Of two columns with one id in a
    row comes one with one id. A row that is null in either is null, a list that is empty in either makes an empty one,
    and nulls inside lists are left out. Cut long lists with first_x before: a row gets as many pairs as the product.
    """

    rows: int | None = None  # hashes modulo this; None keeps 64 bits, to be hashed to rows later
    want = IDS

    def __post_init__(self) -> None:
        check_rows(self, self.rows)

    def types(self, kinds: Kinds) -> Kinds:
        return (pa.large_list(pa.int64()) if any(map(is_list, kinds)) else pa.int64(),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Enumerate the pairs of all rows: pair p of a row is (p // seconds, p % seconds)."""
        a, b = to_id_lists(arrays[0]), to_id_lists(arrays[1])
        hash_A, hash_B, zero = hash_ids(a.values), hash_ids(b.values), np.zeros(1, np.uint64)
        starts_R1, begins_R1 = a.starts(), b.starts()
        seconds_R = np.diff(begins_R1)
        pairs_R = np.diff(starts_R1) * seconds_R
        offsets_R1 = to_offsets(pairs_R)
        nth_P = np.arange(offsets_R1[-1]) - np.repeat(offsets_R1[:-1], pairs_R)
        first_P, second_P = np.divmod(nth_P, np.repeat(seconds_R, pairs_R))
        first_P += np.repeat(starts_R1[:-1], pairs_R)
        second_P += np.repeat(begins_R1[:-1], pairs_R)
        joined_P = to_rows(hash_pair(hash_pair(zero, hash_A)[first_P], hash_B[second_P]), self.rows)
        null_R, single = either_null(a.null_R, b.null_R), a.single and b.single
        pairs = IdLists(values=a.values, offsets_R1=offsets_R1, null_R=null_R, single=single)
        return (pairs.with_values(joined_P),)


class IdListTransform(TwoColumns, frozen=True, kw_only=True, tag="id_list", tag_field="kind"):
    """The intersection of two lists: distinct ids, in the order of the first list.

    A row that is null in either column is null; without a common id the list is empty; nulls inside lists are dropped.
    """

    want = ID_LISTS

    def type_problem(self, kinds: Kinds) -> str:
        """Refuse to compare numbers with words."""
        return _unlike(*kinds)

    def types(self, kinds: Kinds) -> Kinds:
        """The type of the ids."""
        return (pa.large_list(_comparable(kinds[0])),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Compare the lists of all rows by their (row, id) keys."""
        a, b = to_id_lists(arrays[0]), to_id_lists(arrays[1])
        key_A, key_B, values = _keys(a, b)
        kept = _are_in(key_A, key_B) & _first_of_each(key_A)
        return (lists(values.filter(pa.array(kept)), to_offsets(kept)[a.starts()], either_null(a.null_R, b.null_R)),)


def _unlike(a: pa.DataType, b: pa.DataType) -> str:
    if is_words(a) == is_words(b):
        return ""
    return "ids are compared with ids of another kind: expected whole numbers in both, or text in both"


def _comparable(kind: pa.DataType) -> pa.DataType:
    inner = decoded_kind(element_of(kind))
    return pa.int64() if types.is_integer(inner) else plain_kind(inner)


def _keys(a: IdLists, b: IdLists) -> tuple[Ints, Ints, pa.Array]:
    """A key for each (row, id), consistent between both columns; and the ids of the first column."""
    values = [_plain(ids.values) for ids in (a, b)]
    same = [v if v.type == values[0].type else v.cast(values[0].type) for v in values]
    codes = pa.concat_arrays(same).dictionary_encode()
    code_N, count = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(codes.dictionary)
    row_N = np.concatenate([row_of_each(a.starts()), row_of_each(b.starts())])
    key_N = row_N * count + code_N
    return key_N[: len(a.values)], key_N[len(a.values) :], values[0]


def _are_in(key_A: Ints, key_B: Ints) -> Mask:
    """Membership of each key in another array, by Arrow's hash table, as numpy would sort."""
    members = pc.call_function("is_in", [pa.array(key_A)], pc.SetLookupOptions(value_set=pa.array(key_B)))
    return members.to_numpy(zero_copy_only=False)


def _first_of_each(key_N: Ints) -> Mask:
    """Mask of first occurrences: dictionary codes are assigned in the order of first occurrences."""
    code_N = pa.array(key_N).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    first_N = np.ones(len(code_N), np.bool_)
    first_N[1:] = code_N[1:] > np.maximum.accumulate(code_N)[:-1]
    return first_N


def _plain(values: pa.Array) -> pa.Array:
    kind = _comparable(values.type)
    return pa.array(int64(values)) if kind == pa.int64() else values.cast(kind)


By = Literal["sum", "mean", "max", "min"]


class ComputeScore(Transform, frozen=True, kw_only=True, tag="compute_score", tag_field="kind"):
    """Reduces a list of scores, parallel to a list of ids, to their sum, mean, minimum or maximum.

    With `among`, only the scores count whose id is in that column's list. An id that is null, and a score that is null
    or NaN, are left out; infinities count. The sum of no scores is 0, other numbers of none are null; a row is null
    that is so in any of the columns is null. Lists of a row that are not equally long are an error.
    """

    ids: str
    scores: str
    to: str
    by: By = "sum"
    among: str | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown reduction of scores."""
        if self.by not in ("sum", "mean", "max", "min"):
            raise self.spec_error(f"by={self.by!r}: expected 'sum', 'mean', 'max' or 'min'")

    @property
    def reads(self) -> tuple[str, ...]:
        """Ids, scores, and the ids that count."""
        return (self.ids, self.scores) + (() if self.among is None else (self.among,))

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.to,)

    @property
    def wants(self) -> tuple[str, ...]:
        return (ID_LISTS, NUMBER_LISTS, ID_LISTS)[: len(self.reads)]

    def type_problem(self, kinds: Kinds) -> str:
        """Refuse to compare numbers with words."""
        return "" if self.among is None else _unlike(kinds[0], kinds[2])

    def types(self, kinds: Kinds) -> Kinds:
        return (pa.float64(),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        values, offsets_R1 = flatten_values(arrays[0])
        numbers = to_numbers(arrays[1])
        assert offsets_R1 is not None
        assert numbers.offsets_R1 is not None
        null_R = either_null(nulls(arrays[0]), numbers.null_R)
        self._refuse_lengths(offsets_R1, numbers.offsets_R1, null_R, where)
        here_R = np.ones(len(arrays[0]), np.bool_) if null_R is None else ~null_R
        # If one list is null the other may still have elements: drop elements without a counterpart.
        id_at = np.flatnonzero(np.repeat(here_R, np.diff(offsets_R1)))
        score_at = np.flatnonzero(np.repeat(here_R, np.diff(numbers.offsets_R1)))
        missing = either_null(nulls(values), None)
        counts_N = np.ones(len(id_at), np.bool_) if missing is None else ~missing[id_at]
        if numbers.missing_N is not None:
            counts_N &= ~numbers.missing_N[score_at]
        row_N = row_of_each(offsets_R1)[id_at]
        if self.among is not None:
            null_R = either_null(null_R, nulls(arrays[2]))
            counts_N &= _ids_in_row(values, id_at, row_N, to_id_lists(arrays[2]), counts_N)
        x_N = numbers.x_N[score_at][counts_N].astype(np.float64)
        return (self._combine_scores(x_N, row_N[counts_N], len(arrays[0]), null_R),)

    def _combine_scores(self, x_N: NDArray[np.float64], row_N: Ints, rows: int, null_R: Mask | None) -> pa.Array:
        count_R = np.bincount(row_N, minlength=rows)
        if self.by in ("sum", "mean"):
            score_R = np.bincount(row_N, x_N, rows)
        else:
            score_R, scored_R = np.zeros(rows), count_R > 0
            if len(x_N):
                reduce = np.maximum if self.by == "max" else np.minimum
                score_R[scored_R] = reduce.reduceat(x_N, (np.cumsum(count_R) - count_R)[scored_R])
        if self.by == "mean":
            score_R = score_R / np.maximum(count_R, 1)
        none_R = None if self.by == "sum" or count_R.all() else count_R == 0
        return pa.array(score_R, mask=either_null(null_R, none_R))

    def _refuse_lengths(self, a_R1: Ints, b_R1: Ints, null_R: Mask | None, where: RowPosition) -> None:
        ids_R, scores_R = np.diff(a_R1), np.diff(b_R1)
        unlike_R = ids_R != scores_R
        if null_R is not None:
            unlike_R &= ~null_R
        if unlike_R.any():
            row = int(np.argmax(unlike_R))
            raise DataError(
                f"{where.split.locate_row(row)}: {ids_R[row]} ids in {self.ids!r} and {scores_R[row]} scores in "
                f"{self.scores!r}",
                "a score for each id",
            )


def _ids_in_row(values: pa.Array, id_at: Ints, row_N: Ints, among: IdLists, counts_N: Mask) -> Mask:
    """Mask of the ids of a row that are also in another column of that row."""
    index_K = np.flatnonzero(counts_N)
    offsets_R1 = np.searchsorted(row_N[index_K], np.arange(len(among.starts())))
    ids = IdLists(values=values.take(pa.array(id_at[index_K])), offsets_R1=offsets_R1, null_R=None, single=False)
    key_A, key_B, _ = _keys(ids, among)
    member_N = np.zeros(len(counts_N), np.bool_)
    member_N[index_K[_are_in(key_A, key_B)]] = True
    return member_N
