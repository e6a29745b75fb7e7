"""A snapshot of a table: its Parquet files, its columns, and what the table's metadata tells about each file.

A snapshot is pickled with the reader, so workers need neither the table's metadata nor the package that reads it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest.union import flat_columns
from rowwise.ingest.where import ColumnBounds

VERSION = re.compile(r"(?P<table>.+)@(?P<version>\d+)")
FIELD_ID = b"PARQUET:field_id"
LOCAL = re.compile(r"^file:(//)?(?=/)")
HADOOP = re.compile(r"^s3[an]://")  # names of S3 in tables written by Hadoop


class TableSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a version of a table.

    Args:
        name: the table with its version, such as delta:/lake/clicks@3.
        schema: the columns, fields of structs as `a.b`; the schema of a file may have more.
        constants: values of a file's columns that are not inside the file.
        known_bounds: bounds of a file's columns, as far as a filter needs them.
        ids: field id of each column; empty in formats that know columns by name.
        old_names: a former name of each renamed column.
    """

    name: str
    files: tuple[str, ...]
    schema: pa.Schema
    constants: Mapping[str, Mapping[str, Any]]
    known_bounds: Mapping[str, dict[str, ColumnBounds]] = {}
    ids: Mapping[str, int] = {}
    old_names: Mapping[str, str] = {}

    @property
    def root(self) -> str:
        """The store that holds all files; empty for local files."""
        stores = sorted({_store_of(source) for source in self.files})
        if len(stores) > 1:
            names = " and ".join(store or "local folders" for store in stores)
            raise DataError(f"{self.name}: its files are in {names}", "files in one store")
        return "".join(stores)

    @property
    def gone(self) -> str:
        return f"{self.name} was vacuumed or expired: start a new run on a newer version, or restore the file"

    def values(self, source: str) -> Mapping[str, Any]:
        return self.constants.get(source, {})

    def bounds(self, source: str) -> dict[str, ColumnBounds]:
        return self.known_bounds.get(source, {})

    def check_ids(self, schemas: Mapping[str, pa.Schema]) -> None:
        """Refuse files in which a column has another name or another field id than in the table."""
        names = {number: name for name, number in self.ids.items()}
        for source, schema in schemas.items() if self.ids else ():
            inside = dict(_field_ids(schema))
            for name, number in inside.items():
                renamed = names.get(number, name) != name
                if renamed or self.ids.get(name, number) != number:
                    now = f"column {names[number]!r} is called {name!r}" if renamed else f"column {name!r} is another"
                    raise DataError(f"{self.name}: {now} in {source}", "columns never renamed", hint=REWRITE)
            if not inside and self.old_names:
                name, old = next(iter(self.old_names.items()))
                raise DataError(
                    f"{self.name}: column {name!r} was called {old!r}, and {source} has no field ids",
                    "columns never renamed",
                    hint=REWRITE,
                )


REWRITE = "rewrite the table's files under their present names"


def split_version(text: str) -> tuple[str, int | None]:
    """The table and its version, as in lake/clicks@3; None without a version."""
    match = VERSION.fullmatch(text)
    return (text, None) if match is None else (match["table"], int(match["version"]))


def flatten(schema: pa.Schema) -> pa.Schema:
    """The columns as a `ParquetReader` names them."""
    return pa.schema([(name, column.kind) for name, column in flat_columns(schema).items()])


def as_path(location: str) -> str:
    """The path of a local file:// location; s3:// instead of s3a://."""
    return HADOOP.sub("s3://", LOCAL.sub("", location))


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _store_of(source: str) -> str:
    parts = urlsplit(source)
    return f"{parts.scheme}://{parts.netloc}" if "://" in source else ""


def _field_ids(fields: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The field ids of columns in a file, and of fields in structs."""
    for field in fields:
        number = (field.metadata or {}).get(FIELD_ID)
        if number is not None:
            yield f"{prefix}{field.name}", int(number)
        if types.is_struct(field.type):
            yield from _field_ids(field.type, f"{prefix}{field.name}.")
