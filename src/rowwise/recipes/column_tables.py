"""Makes the tables of columns: a vocabulary becomes a `map_id` transform, and a column without a table gets one.

A resolved recipe lists every table and transform, so a resumed run has the same ones.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.transform import LoadedTransforms, MapId
from rowwise.recipes.recipe import TableChanges, Tables
from rowwise.tables.spec import Table

UNKNOWN_ROW = 0  # row of ids outside of a vocabulary
DEFAULT_DIM = 16
TABLE_KEYS = ("rows", "dim", "optimizer", "managed")  # keys of a column for its table


def replace_vocabularies(columns: Columns) -> tuple[Columns, tuple[MapId, ...]]:
    """Replace columns with a vocabulary by columns of row numbers; returns also the transforms that look rows up."""
    lookups: dict[tuple[str, str], MapId] = {}
    encoded: list[Sparse] = []
    for sparse in columns.sparse:
        if sparse.vocabulary:
            file = str(Path(sparse.vocabulary).absolute())
            # A new column, as others, such as columns.key, may read the ids; numbered from the second file on.
            number = sum(column == sparse.column for column, _ in lookups) or ""
            lookup = MapId(column=sparse.column, to=f"{sparse.column}.row{number}", file=file, unknown=UNKNOWN_ROW)
            lookup = lookups.setdefault((sparse.column, file), lookup)
            names = {"table": sparse.table_name, "feature": sparse.feature_name}
            sparse = structs.replace(sparse, column=lookup.to, ids="direct", vocabulary="", **names)
        encoded.append(sparse)
    return structs.replace(columns, sparse=tuple(encoded)), tuple(lookups.values())


def add_column_tables(
    columns: Columns, tables: Tables, suggested: Sequence[Table], loaded: LoadedTransforms
) -> tuple[Columns, Tables]:
    """Add a table for each column whose table is not listed, by the column's keys, vocabulary and dataset.

    Args:
        columns: columns of `replace_vocabularies`.
        tables: section of the recipe.
        suggested: tables of the dataset.
        loaded: transforms of the recipe and of `replace_vocabularies`.

    Returns:
        The columns without TABLE_KEYS, and all tables, to which `all` and `each` still apply.
    """
    by_table: dict[str, list[Sparse]] = {}
    for sparse in columns.sparse:
        by_table.setdefault(sparse.table_name, []).append(sparse)
    lookups = [step.transform for step in loaded.steps if isinstance(step.transform, MapId)]
    vocabulary_rows = {m.to: 1 + max(m.mapping.values()) for m in lookups if m.unknown == UNKNOWN_ROW}
    new_tables = [
        _make_table(name, users, vocabulary_rows, tables, {table.name: table for table in suggested})
        for name, users in by_table.items()
        if name not in (table.name for table in tables.list)
    ]
    with_keys = {sparse.table_name: sparse for sparse in columns.sparse if any(getattr(sparse, k) for k in TABLE_KEYS)}
    for table in tables.list:
        if table.name in with_keys:
            column = with_keys[table.name].column
            keys = ", ".join(key for key in TABLE_KEYS if getattr(with_keys[table.name], key))
            raise SpecError(
                f"columns: {column!r}: {keys}: tables.list describes table {table.name!r}", hint=f"set {keys} there"
            )
    plain = tuple(structs.replace(sparse, **dict.fromkeys(TABLE_KEYS)) for sparse in columns.sparse)
    return structs.replace(columns, sparse=plain), structs.replace(tables, list=(*tables.list, *new_tables))


def _make_table(
    name: str, users: list[Sparse], vocabulary_rows: Mapping[str, int], tables: Tables, suggested: Mapping[str, Table]
) -> Table:
    """The table of the columns `users`, which tables.list lacks."""
    settings: dict[str, Any] = {}
    for sparse in users:
        for key in TABLE_KEYS:
            value = getattr(sparse, key)
            if value is not None and settings.setdefault(key, value) != value:
                raise SpecError(
                    f"columns: {sparse.column!r}: {key}={value}, but another column of table {name!r} has "
                    f"{settings[key]}",
                    "one value for the table",
                )
    rows = [vocabulary_rows[sparse.column] for sparse in users if sparse.column in vocabulary_rows]
    if rows:
        settings["rows"] = max(rows)
    changes = TableChanges(**settings)
    if name in suggested:
        return changes.apply(suggested[name])
    if changes.rows is None:
        raise SpecError(
            f"column {users[0].column!r} has no table {name!r}, and no number of rows for one",
            f"columns.sparse: {{column: {users[0].column}, rows: N}}, or the table in tables.list",
        )
    features = tuple(sparse.feature_name for sparse in users)
    plain = Table(name=name, rows=changes.rows, dim=changes.dim or tables.all.dim or DEFAULT_DIM)
    return changes.apply(structs.replace(plain, features=() if features == (name,) else features))
