"""Transforms of ids: hash, truncate, modulus, position and n-grams.

Missing ids: a null row stays null, an empty list stays empty, a null inside a list is dropped. Text is an id like any
other: it is hashed to 64 bits first, by rowwise's own hash.
"""

import numpy as np
import pyarrow as pa

from rowwise.ingest.bags import flatten_lists, flatten_values, hash_ids, int64, to_offsets
from rowwise.ingest.bags import lists as as_lists
from rowwise.ingest.kinds import FITS, ID_LISTS, IDS, LISTS, ROWS, element_of
from rowwise.ingest.mix import remainder
from rowwise.ingest.native import SIGRID, PickedIds, RowMapping
from rowwise.ingest.transform.arrays import IdLists, hash_pair, lists, nulls, to_id_lists, to_rows
from rowwise.ingest.transform.transform import Arrays, Kinds, OneColumn, RowPosition, ToIds, check_rows

MAX_JOINED = 1024  # ids of an n-gram


class SigridHash(ToIds, frozen=True, kw_only=True, tag="sigrid_hash", tag_field="kind"):
    """Each id hashed to a row of a table, exactly as by torcharrow's `sigrid_hash`, with a salt."""

    rows: int
    salt: int = 0
    want = IDS

    def __post_init__(self) -> None:
        """Refuse an impossible number of rows, and a salt of more than 64 bits."""
        check_rows(self, self.rows)
        if not -(1 << 63) <= self.salt < 1 << 63:
            raise self.spec_error(f"salt={self.salt}: expected a number of 64 bits, -2**63 to 2**63 - 1")

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """One kernel call for all rows."""
        return (pick_ids(arrays[0], self._mapping(), None),)

    def of_first(self, array: pa.Array, count: int) -> pa.Array:
        """The result after FirstX, in one pass that hashes only the first ids."""
        return pick_ids(array, self._mapping(), count)

    def _mapping(self) -> RowMapping:
        return RowMapping(SIGRID, self.rows, self.salt)


def pick_ids(array: pa.Array, mapping: RowMapping, count: int | None) -> pa.Array:
    """The first ids of each row, mapped by the kernels; reads Arrow's memory without a copy."""
    source = as_lists(array)
    picked = PickedIds(source, first=count)
    rows_N = np.empty(picked.total, np.int64)
    single = source.offsets is None
    offsets_R1 = None if single and source.row_valid is None else np.empty(picked.rows + 1, np.int64)
    picked.write(mapping, rows_N, offsets_R1)
    values = pa.array(rows_N)
    return IdLists(values=values, offsets_R1=offsets_R1, null_R=nulls(array), single=single).with_values(values)


class FirstX(OneColumn, frozen=True, kw_only=True, tag="first_x", tag_field="kind"):
    """The first `count` elements of each list; shorter lists stay as they are.

    Nulls in lists of ids are dropped first; in lists of other numbers a null counts as an element.
    """

    count: int
    want = LISTS

    def __post_init__(self) -> None:
        if not 1 <= self.count < 1 << 31:
            raise self.spec_error(f"count={self.count}: expected at least 1, and less than 2**31")

    def types(self, kinds: Kinds) -> Kinds:
        return (pa.large_list(element_of(kinds[0])),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        return (first(arrays[0], self.count),)


def first(array: pa.Array, count: int) -> pa.Array:
    """The first elements of each list."""
    kind = element_of(array.type)
    if kind == pa.int64():
        return pick_ids(array, RowMapping(), count)
    values, offsets_R1 = (flatten_lists if FITS[IDS](kind) else flatten_values)(array)
    assert offsets_R1 is not None
    lengths_R = np.diff(offsets_R1)
    used_N = np.arange(len(values)) - np.repeat(offsets_R1[:-1], lengths_R) < count
    return lists(values.filter(pa.array(used_N)), to_offsets(np.minimum(lengths_R, count)), nulls(array))


class PositiveModulus(ToIds, frozen=True, kw_only=True, tag="positive_modulus", tag_field="kind"):
    """The remainder of each whole number by `rows`, never negative: -1 by 10 is 9."""

    rows: int
    want = ROWS

    def __post_init__(self) -> None:
        check_rows(self, self.rows)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Divide all at once."""
        ids = to_id_lists(arrays[0])
        if ids.values.type == pa.uint64():
            rows_N = remainder(ids.values.to_numpy(zero_copy_only=False), self.rows)
        else:
            rows_N = int64(ids.values) % np.int64(self.rows)
        return (ids.with_values(rows_N),)


class Enumerate(ToIds, frozen=True, kw_only=True, tag="enumerate", tag_field="kind"):
    """The position of each id in its list: 0, 1, 2 and so on, as ids of a table of positions."""

    want = ID_LISTS

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Count from where each list begins."""
        ids = to_id_lists(arrays[0])
        offsets_R1 = ids.starts()
        return (ids.with_values(np.arange(len(ids.values)) - np.repeat(offsets_R1[:-1], np.diff(offsets_R1))),)


class NGram(ToIds, frozen=True, kw_only=True, tag="ngram", tag_field="kind"):
    """One id for each `n` consecutive ids of a list: a hash that depends on their order.

    A list shorter than `n` becomes empty. Nulls are dropped first, so their neighbours become adjacent.
    """

    n: int = 2
    rows: int | None = None  # hashes modulo this; None keeps 64 bits, to be hashed to rows later
    want = ID_LISTS

    def __post_init__(self) -> None:
        if not 2 <= self.n <= MAX_JOINED:
            raise self.spec_error(f"n={self.n}: expected at least 2, and at most {MAX_JOINED}")
        check_rows(self, self.rows)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Extend all n-grams of all lists by one id per round."""
        ids = to_id_lists(arrays[0])
        hash_N, offsets_R1 = hash_ids(ids.values), ids.starts()
        counts_R = np.maximum(np.diff(offsets_R1) - self.n + 1, 0)
        grams_R1 = to_offsets(counts_R)
        at_G = np.arange(grams_R1[-1]) + np.repeat(offsets_R1[:-1] - grams_R1[:-1], counts_R)
        joined_G = np.zeros(len(at_G), np.uint64)
        for step in range(self.n):
            joined_G = hash_pair(joined_G, hash_N[at_G + step])
        return (lists(pa.array(to_rows(joined_G, self.rows)), grams_R1, ids.null_R),)
