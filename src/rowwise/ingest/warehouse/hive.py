"""Hive partitions: folder names with the value of a column, such as `day=3/country=AT/part-00000.parquet`.

A column's type is inferred from all its folders: int64 if every value is an integer, else text.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, final
from urllib.parse import quote, unquote

import pyarrow as pa

from rowwise.base.textfile import parse_whole
from rowwise.ingest.where import ColumnBounds

NULL = "__HIVE_DEFAULT_PARTITION__"
UNQUOTED = " !$&'()*+,;@[]"  # characters that `quote` would escape although file names allow them

Cell = int | str | None


@final
class FolderConstants:
    """The columns in the names of the folders of all files; `known`: types that are not inferred."""

    def __init__(self, files: Sequence[str], known: Mapping[str, str]) -> None:
        self.schema = pa.schema(infer_fields([parse_folders(source) for source in files], known))

    def hide(self, names: Collection[str]) -> None:
        """Leave out columns that are also inside files."""
        self.schema = pa.schema([field for field in self.schema if field.name not in names])

    def values(self, source: str) -> dict[str, Cell]:
        texts = parse_folders(source) if len(self.schema) else {}
        return {field.name: parse_value(texts[field.name], field.type) for field in self.schema}

    def bounds(self, source: str) -> dict[str, ColumnBounds]:
        cells = self.values(source).items()
        return {n: ColumnBounds(least=v, most=v, nulls=int(v is None), rows=1) for n, v in cells}


def folder_name(names: Sequence[str], values: Sequence[Cell]) -> str:
    """The relative path of the folder of rows with these values."""
    return "/".join(f"{n}={NULL if v is None else quote(str(v), UNQUOTED)}" for n, v in zip(names, values, strict=True))


def parse_folders(source: str) -> dict[str, str | None]:
    """Column names and values in the folders of a path, the outermost first."""
    values: dict[str, str | None] = {}
    for part in source.split("/")[:-1]:
        name, sign, value = part.partition("=")
        if sign and name:
            values[name] = None if value == NULL else unquote(value)
    return values


def infer_fields(texts: Sequence[dict[str, str | None]], known: Mapping[str, str]) -> list[pa.Field]:
    """The columns that are in the folders of all files; `known`: types that are not inferred."""
    if not texts:
        return []
    names = [name for name in texts[0] if all(name in folders for folders in texts)]
    kinds = {name: _kind([folders[name] for folders in texts]) for name in names}
    return [pa.field(name, pa.string() if known.get(name) == "string" else kind) for name, kind in kinds.items()]


def complete(table: pa.Table, columns: Sequence[str], schema: pa.Schema, values: Mapping[str, Any]) -> pa.Table:
    """Add the columns that a file lacks: those with a value in all of its rows, and others as nulls."""
    for name in columns:
        if name not in table.column_names:
            value = pa.scalar(values.get(name), schema.field(name).type)
            table = table.append_column(name, pa.repeat(value, table.num_rows))
    return table


def parse_value(text: str | None, kind: pa.DataType) -> Cell:
    """A folder's text converted to the column's type."""
    return text if text is None or kind == pa.string() else int(text)


def _kind(values: Sequence[str | None]) -> pa.DataType:
    whole = all(v is None or parse_whole(v, signed=True) is not None for v in values)
    return pa.int64() if whole and any(v is not None for v in values) else pa.string()
