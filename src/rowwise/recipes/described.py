"""Tables and row numbers of columns: a vocabulary becomes a `map_id` transform, and a column without a table gets one.

A resolved recipe names every table and transform, so a resumed run decides nothing anew.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from rowwise.errors import SpecError
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.transform import LoadedTransforms, MapId
from rowwise.recipes.recipe import TableChanges, Tables
from rowwise.spec import Table

UNKNOWN_ROW = 0  # of ids that a vocabulary lacks
DEFAULT_DIM = 16
TABLE_KEYS = ("rows", "dim", "optimizer")  # of a column, for its table


def look_up_ids(columns: Columns) -> tuple[Columns, tuple[MapId, ...]]:
    """The columns with row numbers in place of ids that have a vocabulary, and the transforms that look them up."""
    lookups: dict[tuple[str, str], MapId] = {}
    sparse: list[Sparse] = []
    for one in columns.sparse:
        if one.vocabulary:
            file = str(Path(one.vocabulary).absolute())
            number = sum(column == one.column for column, _ in lookups) or ""  # of its vocabularies
            made = f"{one.column}.row{number}"  # a column of its own: others may read the ids, such as columns.key
            lookup = lookups.setdefault(
                (one.column, file), MapId(column=one.column, to=made, file=file, unknown=UNKNOWN_ROW)
            )
            names = {"table": one.table_name, "feature": one.feature_name}
            one = structs.replace(one, column=lookup.to, ids="direct", vocabulary="", **names)
        sparse.append(one)
    return structs.replace(columns, sparse=tuple(sparse)), tuple(lookups.values())


def describe_tables(
    columns: Columns, tables: Tables, suggested: Sequence[Table], loaded: LoadedTransforms
) -> tuple[Columns, Tables]:
    """A table for each column: listed, or made by the column's keys, its vocabulary and the dataset's suggestion.

    Args:
        columns: those of `look_up_ids`.
        tables: section of the recipe.
        suggested: tables of the dataset.
        loaded: transforms of the recipe and of `look_up_ids`.

    Returns:
        The columns without keys that describe tables, and the tables, to which `all` and `each` still apply.
    """
    by_table: dict[str, list[Sparse]] = {}
    for one in columns.sparse:
        by_table.setdefault(one.table_name, []).append(one)
    lookups = [step.transform for step in loaded.steps if isinstance(step.transform, MapId)]
    known = {lookup.to: 1 + max(lookup.mapping.values()) for lookup in lookups if lookup.unknown == UNKNOWN_ROW}
    made = [
        _table(name, users, known, tables, {table.name: table for table in suggested})
        for name, users in by_table.items()
        if name not in (table.name for table in tables.list)
    ]
    described = {one.table_name: one for one in columns.sparse if any(getattr(one, key) for key in TABLE_KEYS)}
    for table in tables.list:
        if table.name in described:
            column = described[table.name].column
            keys = ", ".join(key for key in TABLE_KEYS if getattr(described[table.name], key))
            raise SpecError(f"columns: {column!r}: {keys}: tables.list describes table {table.name!r}: want it there")
    plain = tuple(structs.replace(one, **dict.fromkeys(TABLE_KEYS)) for one in columns.sparse)
    return structs.replace(columns, sparse=plain), structs.replace(tables, list=(*tables.list, *made))


def _table(
    name: str, users: list[Sparse], known: Mapping[str, int], tables: Tables, suggested: Mapping[str, Table]
) -> Table:
    """The table of some columns that no list describes."""
    given: dict[str, Any] = {}
    for one in users:
        for key in TABLE_KEYS:
            value = getattr(one, key)
            if value is not None and given.setdefault(key, value) != value:
                raise SpecError(
                    f"columns: {one.column!r}: {key}={value}, and another column of table {name!r} has {given[key]}: "
                    "want it once"
                )
    rows = [known[one.column] for one in users if one.column in known]
    if rows:
        given["rows"] = max(rows)
    change = TableChanges(**given)
    if name in suggested:
        return change.apply(suggested[name])
    if change.rows is None:
        want = f"want columns.sparse: {{column: {users[0].column}, rows: N}}, or the table in tables.list"
        raise SpecError(f"column {users[0].column!r} has no table {name!r}, and no rows for one: {want}")
    features = tuple(one.feature_name for one in users)
    plain = Table(name=name, rows=change.rows, dim=change.dim or tables.all.dim or DEFAULT_DIM)
    return change.apply(structs.replace(plain, features=() if features == (name,) else features))
