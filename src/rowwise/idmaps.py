"""How the ids of a table share fewer rows, as a recipe says it: a rule, or a file that was learned from data.

Frozen values without tensors, apart from `spec` because tables hold them. What they mean for an id is `hashing`'s
business, which makes an `IdMap` of each. Ids that are ordered are scrambled first by every one of them.
"""

from typing import Literal

from rowwise.errors import SpecError
from rowwise.value import Value


class HashIds(Value, frozen=True, tag="hash", tag_field="kind"):
    """Each id has one row, chosen by a hash: ids that have nothing in common share it."""

    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.rows, self.seed, 1)


class DoubleHashIds(Value, frozen=True, tag="double_hash", tag_field="kind"):
    """Each id is the sum of `hashes` rows, chosen by as many hashes; few ids share all of them."""

    rows: int
    seed: int = 0
    hashes: int = 2

    def __post_init__(self) -> None:
        _check(self.rows, self.seed, 1)
        if not 1 < self.hashes <= 8:
            raise SpecError(f"id_map: hashes={self.hashes}: want 2 to 8; kind: hash has one")


class QuotientRemainderIds(Value, frozen=True, tag="quotient_remainder", tag_field="kind"):
    """Each id has a row for its quotient and one for its remainder, so that no two ids share both.

    Source: Shi et al. 2020. About as few rows as the budget allows are taken so that all pairs fit. `seed`: of the
    order that ids are put in first.
    """

    rows: int
    seed: int = 0
    combine: Literal["sum", "product"] = "sum"

    def __post_init__(self) -> None:
        _check(self.rows, self.seed, 2)


class StoredIds(Value, frozen=True, tag="stored", tag_field="kind"):
    """An id map in a file, made by `rowwise compress` or `rowwise.hashing` from data: by frequency, or learned."""

    file: str
    digest: str = ""  # of its content; none: whatever it holds
    table: str = ""  # that it was made for; none: the one that has it. A wide part has the maps of other tables


AnyIdMap = HashIds | DoubleHashIds | QuotientRemainderIds | StoredIds


def _check(rows: int, seed: int, least: int) -> None:
    if type(rows) is not int or rows < least:
        raise SpecError(f"id_map: rows={rows!r}: want a whole number of at least {least}")
    if rows >= 1 << 40:
        raise SpecError(f"id_map: rows={rows}: want fewer than 2**40")
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise SpecError(f"id_map: seed={seed!r}: want at least 0, and less than 2**32")
