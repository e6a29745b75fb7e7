"""Selects the tables to compress, and computes their budget.

Small tables stay uncompressed: nearly all bytes are in a few large tables, and each costs about a dozen trainings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rowwise.base.errors import SpecError
from rowwise.base.records import KeptTable
from rowwise.tables.ids.methods import table_bytes
from rowwise.tables.ids.open import open_map
from rowwise.tables.spec import Table, Value

MIN_IDS, MIN_FRACTION = 1000, 0.01  # smaller tables are not compressed; fraction of all bytes


class CompressionGoal(Value, frozen=True, kw_only=True):
    """A ratio or a budget in bytes, and the methods to try."""

    ratio: float | None = None
    budget_bytes: int | None = None
    methods: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSelection:
    """Tables to compress (`chosen`), tables to keep uncompressed, and the total budget."""

    chosen: tuple[Table, ...]
    kept: tuple[KeptTable, ...]
    full_bytes: int
    budget_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.chosen)

    @property
    def kept_bytes(self) -> int:
        return sum(table.size_bytes for table in self.kept)

    def table(self, name: str) -> Table:
        return next(table for table in self.chosen if table.name == name)

    @property
    def ratio(self) -> float:
        """The ratio by which the chosen tables must shrink."""
        return (self.full_bytes - self.kept_bytes) / (self.budget_bytes - self.kept_bytes)


def select_tables(tables: Sequence[Table], goal: CompressionGoal) -> TableSelection:
    """Raises if no table can be compressed, and for budgets that are impossible or need no compression."""
    bytes_T = [table_bytes(table, open_map(table)) for table in tables]
    total = sum(bytes_T)
    chosen: list[Table] = []
    kept: list[KeptTable] = []
    for table, size_bytes in zip(tables, bytes_T, strict=True):
        reason = _reason_to_keep(table, size_bytes / total)
        if reason is None:
            chosen.append(table)
        else:
            kept.append(KeptTable(name=table.name, ids=table.rows, size_bytes=size_bytes, why=reason))
    if not chosen:
        raise SpecError(
            "no table to compress",
            f"a table with at least {MIN_IDS:,} ids and {MIN_FRACTION:.0%} of the bytes of all tables, without an "
            "id_map",
        )
    budget = int(total / goal.ratio) if goal.ratio is not None else goal.budget_bytes
    assert budget is not None
    selection = TableSelection(chosen=tuple(chosen), kept=tuple(kept), full_bytes=total, budget_bytes=budget)
    if budget >= total:
        raise SpecError(f"a budget of {budget:,} bytes: all tables take {total:,} uncompressed", "a smaller budget")
    if budget <= selection.kept_bytes:
        raise SpecError(
            f"a budget of {budget:,} bytes: uncompressed tables take {selection.kept_bytes:,} of {total:,} "
            f"({', '.join(table.name for table in kept)})",
            "a larger budget, or a smaller --ratio",
        )
    return selection


def _reason_to_keep(table: Table, fraction: float) -> str | None:
    if table.id_map is not None:
        return "has an id_map already"
    if table.managed is not None:
        return "is managed"
    if table.rows < MIN_IDS:
        return f"has fewer than {MIN_IDS:,} ids"
    return f"is less than {MIN_FRACTION:.0%} of all bytes" if fraction < MIN_FRACTION else None
