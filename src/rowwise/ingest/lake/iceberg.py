"""Snapshots of Iceberg tables, read from their metadata by pyiceberg.

A table is named by CATALOG/NAMESPACE.TABLE of pyiceberg's configuration, or by a path: its folder, or a metadata file.
In a folder the newest metadata file counts. Files are in the order of their names.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.base.storage.limits import endpoint_of_environment
from rowwise.ingest.lake.snapshot import REWRITE, TableSnapshot, as_path, first_line, flatten
from rowwise.ingest.where import Comparison, RowFilter, to_native

METADATA = re.compile(r"v?(\d+)(-[^/]*)?\.metadata\.json")
IN_CATALOG = "CATALOG/NAMESPACE.TABLE with a catalog of pyiceberg's configuration"
COMPACT = "rewrite the table's files without deleted rows (compaction)"


def is_path(table: str) -> bool:
    """Whether a table is named by a path or URL, not by a catalog."""
    return "://" in table or table.startswith((".", "/")) or table.count("/") != 1 or Path(table).exists()


def latest(table: str) -> int:
    """The id of the current snapshot of a table."""
    current = _open(table).current_snapshot()
    if current is None:
        raise DataError(f"iceberg:{table}: the table has no snapshot yet", "a table with rows")
    return int(current.snapshot_id)


def open_snapshot(table: str, version: int | None, where: RowFilter) -> TableSnapshot:
    """Resolve a snapshot of a table to the files that may have rows of the filter; None: the current snapshot."""
    number = latest(table) if version is None else version
    opened, name = _open(table), f"iceberg:{table}@{number}"
    if opened.snapshot_by_id(number) is None:
        kept = ", ".join(str(snapshot.snapshot_id) for snapshot in opened.snapshots()[-3:])
        raise DataError(
            f"{name}: no such snapshot, or it has expired",
            f"one that is kept, such as {kept}" if kept else "a table with rows",
        )
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.schema import index_by_name

    columns = opened.scan(snapshot_id=number).projection()
    flat, ids = flatten(schema_to_pyarrow(columns)), index_by_name(columns)
    where.check(flat, name)
    for field in columns.fields:
        if field.initial_default is not None:
            raise DataError(f"{name}: column {field.name!r} has a default in old files", "no default", hint=REWRITE)
    now = index_by_name(opened.schema())  # pyiceberg plans by the table's present columns
    known = [term for term in where.all_of if term.column in flat.names and now.get(term.column) == ids[term.column]]
    chosen = AlwaysTrue()
    for term in known:
        chosen &= _expression(term, flat.field(term.column).type)
    with _one_line_errors(table):
        tasks = list(opened.scan(row_filter=chosen, snapshot_id=number).plan_files())
    constants = dict[str, dict[str, Any]]()
    for task in sorted(tasks, key=lambda task: str(task.file.file_path)):
        _check_file(task, name)
        constants[as_path(task.file.file_path)] = dict(_identities(opened, task.file, columns))
    return TableSnapshot(
        name=name,
        files=tuple(constants),
        schema=flat,
        constants=constants,
        ids=ids,
        old_names={
            now: old
            for schema in opened.schemas().values()
            for old, number in index_by_name(schema).items()
            if (now := columns.find_column_name(number)) not in (None, old)
        },
    )


def _open(table: str) -> Any:
    """The table as pyiceberg has it."""
    try:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.table import StaticTable
    except ImportError:
        raise DataError(f"iceberg:{table} needs pyiceberg", hint="pip install 'rowwise[lake]'") from None
    catalog, _, name = table.partition("/")
    with _one_line_errors(table):
        if not is_path(table):
            return load_catalog(catalog).load_table(name)
        endpoint = endpoint_of_environment() if table.startswith("s3") else ""
        return StaticTable.from_metadata(_newest_metadata(table), {"s3.endpoint": endpoint} if endpoint else {})


@contextmanager
def _one_line_errors(table: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # each catalog raises the errors of its own client
        raise DataError(
            f"iceberg:{table}: pyiceberg cannot read the table: {first_line(error)}",
            f"{IN_CATALOG}, or the path of a table",
        ) from None


def _newest_metadata(table: str) -> str:
    if "://" in table or table.endswith(".json"):
        return table
    folder = Path(table) / "metadata"
    if not folder.is_dir():
        raise DataError(
            f"iceberg:{table}: no such folder, or no metadata in it", "the folder of a table, or " + IN_CATALOG
        )
    files = [(int(match[1]), str(path)) for path in folder.iterdir() if (match := METADATA.fullmatch(path.name))]
    if not files:
        raise DataError(f"iceberg:{table}: no *.metadata.json in {folder}", "the folder of an Iceberg table")
    return max(files)[1]


def _check_file(task: Any, name: str) -> None:
    """Refuse what is not a plain Parquet file."""
    file = task.file
    if task.delete_files:
        count = len(task.delete_files)
        problem = f"{name}: rows of {file.file_path} are deleted by {count} delete file{'s' * (count > 1)}"
        raise DataError(problem, "files without deleted rows", hint=COMPACT)
    if file.file_format.name != "PARQUET":
        raise DataError(f"{name}: {file.file_path} is {file.file_format.name}", "Parquet files")
    if file.key_metadata is not None:
        raise DataError(f"{name}: {file.file_path} is encrypted", "files without encryption")


def _identities(table: Any, file: Any, columns: Any) -> Iterator[tuple[str, Any]]:
    """The columns by whose values a file's rows were partitioned, which the file may lack."""
    from pyiceberg.transforms import IdentityTransform

    for at, field in enumerate(table.specs()[file.spec_id].fields):
        name = columns.find_column_name(field.source_id)
        if name is not None and isinstance(field.transform, IdentityTransform):
            yield name, file.partition[at]


def _expression(term: Comparison, kind: pa.DataType) -> Any:
    """A comparison as pyiceberg has it; always true where its values may compare in another way."""
    from pyiceberg import expressions

    exact = types.is_integer(kind) or types.is_date32(kind) or types.is_string(kind) or types.is_large_string(kind)
    if type(term) is not Comparison or not (exact or (types.is_timestamp(kind) and kind.unit == "us")):
        return expressions.AlwaysTrue()
    if term.op == "is null" or term.op == "not null":
        return (expressions.IsNull if term.op == "is null" else expressions.NotNull)(term.column)
    values = [to_native(value, kind) for value in term.values]
    valid = expressions.NotNull(term.column)  # a comparison with null holds for no row
    if term.op == "in":
        return valid & expressions.In(term.column, values)
    compare = {
        "==": expressions.EqualTo,
        "!=": expressions.NotEqualTo,
        "<": expressions.LessThan,
        "<=": expressions.LessThanOrEqual,
        ">": expressions.GreaterThan,
        ">=": expressions.GreaterThanOrEqual,
    }
    return valid & compare[term.op](term.column, values[0])
