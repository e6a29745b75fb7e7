"""Snapshots of Delta tables, read from their log by delta-rs.

Bounds of times in a Delta log are cut to milliseconds. Bounds of text and of floats are not used: the footers of the
files have them, too.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest.lake.snapshot import TableSnapshot, as_path, first_line, flatten
from rowwise.ingest.where import ColumnBounds, RowFilter

READ = ("columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck")  # features
MAPPING = "delta.columnMapping.mode"
PURGE = "REORG TABLE ... APPLY (PURGE) makes a version without deletion vectors"
CUT_US = 999  # of a time's upper bound


def latest(path: str) -> int:
    """The newest version of a table."""
    return int(_open(path, None).version())


def open_snapshot(path: str, version: int | None, where: RowFilter) -> TableSnapshot:
    """Resolve a version of a table to its files; None: the newest."""
    table = _open(path, version)
    name = f"delta:{path}@{table.version()}"
    _check_features(table, name)
    schema = pa.schema(table.schema().to_arrow())
    actions = pa.table(table.get_add_actions(flatten=True)).sort_by(
        [("modification_time", "ascending"), ("path", "ascending")]
    )
    if not actions.num_rows:
        raise DataError(f"{name}: the table has no files at this version", "rows", hint="another version as @NUMBER")
    root = as_path(unquote(table.table_uri)).rstrip("/")
    files = tuple(_location(root, path) for path in actions["path"].to_pylist())
    parts = {field.name: actions[f"partition.{field.name}"] for field in schema if _has(actions, "partition", field)}
    cells = {key: _plain(column).to_pylist() for key, column in parts.items()}
    constants = {source: {key: column[at] for key, column in cells.items()} for at, source in enumerate(files)}
    flat = flatten(schema)
    bounds: dict[str, dict[str, ColumnBounds]] = {source: {} for source in files}
    for field in (flat.field(key) for key in where.columns if key in flat.names):
        for source, bound in zip(files, _bounds(actions, field), strict=True):
            bounds[source][field.name] = bound
    return TableSnapshot(name=name, files=files, schema=flat, constants=constants, known_bounds=bounds)


def _open(path: str, version: int | None) -> Any:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError:
        raise DataError(f"delta:{path} needs delta-rs", hint="pip install 'rowwise[lake]'") from None
    # An endpoint that begins with http:// is reached without encryption; all others by https.
    options = {"AWS_ALLOW_HTTP": "true"} if path.startswith("s3") else None
    try:
        table = DeltaTable(path, storage_options=options)
    except TableNotFoundError:
        raise DataError(f"delta:{path}: no Delta table", "a folder or URL with a _delta_log") from None
    except (DeltaError, OSError, ValueError) as error:
        raise DataError(f"delta:{path}: delta-rs cannot open the table: {first_line(error)}") from None
    try:
        if version is not None:
            table.load_as_version(version)
    except (DeltaError, OSError, ValueError, OverflowError) as error:
        newest = table.version()
        reason = "" if version > newest else f"; delta-rs says: {first_line(error)}"
        raise DataError(f"delta:{path}: no version {version}{reason}", f"one that is kept, up to {newest}") from None
    return table


def _check_features(table: Any, name: str) -> None:
    """Refuse features that change what the rows of a file are."""
    features = table.protocol().reader_features or []
    unknown = sorted(set(features) - set(READ))
    if unknown:
        raise DataError(f"{name}: the table has the feature {unknown[0]}", f"only {', '.join(READ)}")
    mode = table.metadata().configuration.get(MAPPING, "none")
    if mode != "none":
        raise DataError(f"{name}: column mapping by {mode}", f"{MAPPING} = none", hint="copy the table without it")
    if "deletionVectors" in features:
        from deltalake.exceptions import DeltaError

        try:
            first = next(iter(pa.RecordBatchReader.from_stream(table.deletion_vectors())), None)
        except DeltaError as error:
            raise DataError(f"{name}: a deletion vector cannot be read: {first_line(error)}", hint=PURGE) from None
        if first is not None and first.num_rows:
            raise DataError(
                f"{name}: rows of {first['filepath'][0]} are deleted by a deletion vector",
                "files without deleted rows",
                hint=PURGE,
            )


def _location(root: str, path: str) -> str:
    place = as_path(unquote(path))
    return place if "://" in place or place.startswith("/") else f"{root}/{place}"


def _has(actions: pa.Table, kind: str, field: pa.Field) -> bool:
    return f"{kind}.{field.name}" in actions.column_names


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if types.is_dictionary(column.type) else column


def _bounds(actions: pa.Table, field: pa.Field) -> Iterator[ColumnBounds]:
    """Bounds of a column in each file."""
    rows = actions["num_records"].to_pylist()
    if _has(actions, "partition", field):
        column = _plain(actions[f"partition.{field.name}"])
        for value, missing in zip(_ticks(column), column.is_null().to_pylist(), strict=True):
            yield ColumnBounds(least=value, most=value, nulls=int(missing), rows=1)
        return
    nulls = (
        actions[f"null_count.{field.name}"].to_pylist() if _has(actions, "null_count", field) else [None] * len(rows)
    )
    ends: list[list[Any]] = [[None] * len(rows)] * 2
    if _has(actions, "min", field) and _has(actions, "max", field) and actions[f"min.{field.name}"].type == field.type:
        is_time = types.is_timestamp(field.type)
        if types.is_integer(field.type) or types.is_date32(field.type) or (is_time and field.type.unit == "us"):
            ends = [_ticks(actions[f"{end}.{field.name}"]) for end in ("min", "max")]
            if is_time:
                ends[1] = [None if value is None else value + CUT_US for value in ends[1]]
    for least, most, missing, count in zip(*ends, nulls, rows, strict=True):
        yield ColumnBounds(least=least, most=most, nulls=missing, rows=count)


def _ticks(column: pa.ChunkedArray) -> list[Any]:
    """The values, times as ticks of their unit."""
    if types.is_timestamp(column.type):
        return column.cast(pa.int64()).to_pylist()
    return (column.cast(pa.int32()) if types.is_date32(column.type) else column).to_pylist()
