"""Id maps in recipes: how the ids of a table share fewer rows, by a rule or by a file that was learned from data.

Frozen values without tensors, from which `ids` makes `IdMap`s. All of them scramble ids first, as consecutive ids
are often related.
"""

from typing import Literal

from rowwise.base.errors import SpecError
from rowwise.base.value import Value


class HashIds(Value, frozen=True, tag="hash", tag_field="kind"):
    """Hash trick: each id has one row, chosen by a hash; unrelated ids share it."""

    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_rows_and_seed(self.rows, self.seed, 1)


class DoubleHashIds(Value, frozen=True, tag="double_hash", tag_field="kind"):
    """Each id is the sum of `hashes` rows, chosen by as many hashes; few pairs of ids share all of them."""

    rows: int
    seed: int = 0
    hashes: int = 2

    def __post_init__(self) -> None:
        _check_rows_and_seed(self.rows, self.seed, 1)
        if not 1 < self.hashes <= 8:
            raise SpecError(f"id_map: hashes={self.hashes}", "2 to 8", hint="kind: hash has one")


class QuotientRemainderIds(Value, frozen=True, tag="quotient_remainder", tag_field="kind"):
    """Each id has a row for its quotient and one for its remainder, so that no two ids share both.

    Source: Shi et al. 2020. The divisor is chosen so that at most `rows` rows are used. `seed`: of the permutation of
    ids before the division.
    """

    rows: int
    seed: int = 0
    combine: Literal["sum", "product"] = "sum"

    def __post_init__(self) -> None:
        _check_rows_and_seed(self.rows, self.seed, 2)


class StoredIds(Value, frozen=True, tag="stored", tag_field="kind"):
    """A map in a file, made from data by `rowwise compress` or `rowwise.tables.ids`: by frequency, or learned."""

    file: str
    digest: str = ""  # of the file's content; empty: not checked
    table: str = ""  # that the map is for; empty: this table. Wide models use maps of other tables


AnyIdMap = HashIds | DoubleHashIds | QuotientRemainderIds | StoredIds


def _check_rows_and_seed(rows: int, seed: int, min_rows: int) -> None:
    if type(rows) is not int or rows < min_rows:
        raise SpecError(f"id_map: rows={rows!r}", f"a whole number of at least {min_rows}")
    if rows >= 1 << 40:
        raise SpecError(f"id_map: rows={rows}", "fewer than 2**40")
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise SpecError(f"id_map: seed={seed!r}", "at least 0, and less than 2**32")
