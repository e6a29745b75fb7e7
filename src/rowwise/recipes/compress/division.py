"""Which tables are compressed and which stay as they are, and what the budget leaves for them.

Pure. Small tables are left alone: nearly all bytes are in a few large ones, and each more table is a dozen trainings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rowwise.errors import SpecError
from rowwise.hashing.methods import table_bytes
from rowwise.hashing.open import open_map
from rowwise.recipes.compress.advice import KeptTable
from rowwise.spec import Table, Value

LEAST_IDS, LEAST_SHARE = 1000, 0.01  # of a table that is worth it


class CompressionGoal(Value, frozen=True, kw_only=True):
    """The target ratio or bytes, and the methods to try."""

    ratio: float | None = None
    budget_bytes: int | None = None
    methods: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDivision:
    """The tables of a recipe, and their budget."""

    chosen: tuple[Table, ...]
    left: tuple[KeptTable, ...]
    full_bytes: int
    budget_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.chosen)

    @property
    def left_bytes(self) -> int:
        return sum(one.size_bytes for one in self.left)

    def table(self, name: str) -> Table:
        return next(table for table in self.chosen if table.name == name)

    @property
    def ratio(self) -> float:
        """By how much those have to shrink that are compressed."""
        return (self.full_bytes - self.left_bytes) / (self.budget_bytes - self.left_bytes)


def divide(tables: Sequence[Table], goal: CompressionGoal) -> TableDivision:
    """Choose the tables, and refuse a budget that cannot be kept or says nothing."""
    bytes_T = [table_bytes(table, open_map(table)) for table in tables]
    total = sum(bytes_T)
    chosen: list[Table] = []
    left: list[KeptTable] = []
    for table, size_bytes in zip(tables, bytes_T, strict=True):
        why = _why_left(table, size_bytes / total)
        if why is None:
            chosen.append(table)
        else:
            left.append(KeptTable(name=table.name, ids=table.rows, size_bytes=size_bytes, why=why))
    if not chosen:
        want = f"want one with at least {LEAST_IDS:,} ids and {LEAST_SHARE:.0%} of the bytes of all tables"
        raise SpecError(f"there is no table to compress: {want}, and without an id_map")
    budget = int(total / goal.ratio) if goal.ratio is not None else goal.budget_bytes
    assert budget is not None
    made = TableDivision(chosen=tuple(chosen), left=tuple(left), full_bytes=total, budget_bytes=budget)
    if budget >= total:
        raise SpecError(f"a budget of {budget:,} bytes: all tables take {total:,} as they are: want less")
    if budget <= made.left_bytes:
        got = f"a budget of {budget:,} bytes: tables that are not compressed take {made.left_bytes:,} of {total:,}"
        raise SpecError(f"{got} ({', '.join(one.name for one in left)}): want more, or a smaller --ratio")
    return made


def _why_left(table: Table, share: float) -> str | None:
    if table.id_map is not None:
        return "has an id_map already"
    if table.rows < LEAST_IDS:
        return f"has fewer than {LEAST_IDS:,} ids"
    return f"is less than {LEAST_SHARE:.0%} of all bytes" if share < LEAST_SHARE else None
