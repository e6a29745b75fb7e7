"""The union of the schemas of several Parquet files, with types that hold the values of all files. Pure."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest.kinds import decoded_kind

UNITS = ("s", "ms", "us", "ns")
TEXTS = (types.is_string, types.is_large_string, types.is_string_view)
MAX_NOTES = 20


class FlatColumn(NamedTuple):
    """A column, or a field of a struct column."""

    root: str  # the column of the file
    path: tuple[str, ...]  # field names inside structs; empty for the column itself
    kind: pa.DataType

    def take_from(self, table: pa.Table) -> pa.ChunkedArray:
        column = table[self.root]
        for name in self.path:
            at = column.type.get_field_index(name)
            column = pc.call_function("struct_field", [column], pc.StructFieldOptions([at]))
        return column


class Union(NamedTuple):
    """The union of the columns of several files."""

    types: dict[str, pa.DataType]
    sources: dict[str, str]  # a file with this type, for messages
    notes: tuple[str, ...]
    lacking: dict[str, frozenset[str]]  # files without the column, by column


def flat_columns(schema: pa.Schema) -> dict[str, FlatColumn]:
    """The columns of a file by name, in order; fields of structs are named a.b, unless a column has that name."""
    columns: dict[str, FlatColumn] = {}
    for field in schema:
        for path, kind in _fields(field.type):
            name = ".".join((field.name, *path))
            if not path or name not in schema.names:
                columns[name] = FlatColumn(field.name, path, kind)
    return columns


def _fields(kind: pa.DataType) -> list[tuple[tuple[str, ...], pa.DataType]]:
    if not types.is_struct(kind) or not kind.num_fields or len({f.name for f in kind}) < kind.num_fields:
        return [((), kind)]
    return [((field.name, *path), inner) for field in kind for path, inner in _fields(field.type)]


def unite(schemas: Mapping[str, pa.Schema]) -> Union:
    """The union of the columns of files; of incompatible types the first file's type is kept."""
    union = Union({}, {}, (), {})
    notes, lacking = list[str](), dict[str, list[str]]()
    seen, last, flat = list[str](), pa.schema([]), dict[str, FlatColumn]()
    for source, schema in schemas.items():
        if not schema.equals(last):
            last, flat = schema, flat_columns(schema)
            new = [name for name in flat if name not in union.types]
            lacking |= {name: list(seen) for name in new if seen}
            notes += [f"{flat[name].root!r} is a struct: {name!r} is a field of it" for name in new if flat[name].path]
            notes += _add(union, flat, source)
        for name in union.types.keys() - flat.keys():
            lacking.setdefault(name, []).append(source)
        seen.append(source)
    for name in (name for name in union.types if name in lacking):
        files = f"{len(lacking[name])} of {len(schemas)} files, such as {lacking[name][0]}"
        notes.append(f"column {name!r} is not in {files}: it has no value there")
    more = len(notes) - MAX_NOTES
    kept = notes if more <= 0 else [*notes[:MAX_NOTES], f"and {more} more such differences between the files"]
    return union._replace(notes=tuple(kept), lacking={name: frozenset(files) for name, files in lacking.items()})


def _add(union: Union, flat: Mapping[str, FlatColumn], source: str) -> Iterator[str]:
    """Add the columns of a file; yields notes on changed types."""
    for name, column in flat.items():
        known = union.types.setdefault(name, column.kind)
        first = union.sources.setdefault(name, source)
        wider = widest(known, column.kind)
        if wider is not None and wider != known:
            if not types.is_null(known):
                yield f"column {name!r} holds {known} in {first} and {column.kind} in {source}: read as {wider}"
            union.types[name], union.sources[name] = wider, source


def widest(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """A type that holds the values of both, or None."""
    if can_cast(b, a) and not _loses(b, a):
        return a
    if can_cast(a, b) and not _loses(a, b):
        return b
    if types.is_integer(a) and types.is_integer(b):
        return pa.int64()
    if _is_number(a) and _is_number(b):
        return pa.float64()
    if types.is_dictionary(a) or types.is_dictionary(b):
        return widest(decoded_kind(a), decoded_kind(b))
    return None


def _loses(got: pa.DataType, want: pa.DataType) -> bool:
    """Whether a cast between compatible types may lose values or precision."""
    if types.is_dictionary(want):
        return got != want
    if _is_list(got) and _is_list(want):
        return _loses(got.value_type, want.value_type)
    if types.is_timestamp(got) and types.is_timestamp(want):
        return UNITS.index(got.unit) > UNITS.index(want.unit)
    if types.is_date(want):
        return not types.is_null(got)
    if types.is_integer(got) and types.is_integer(want):
        signed = types.is_signed_integer(want)
        return got.bit_width + (signed and not types.is_signed_integer(got)) > want.bit_width or (
            types.is_signed_integer(got) and not signed
        )
    if types.is_floating(want):
        return (types.is_integer(got) and got.bit_width * 2 > want.bit_width and want.bit_width < 64) or (
            types.is_floating(got) and got.bit_width > want.bit_width
        )
    return types.is_large_string(got) and types.is_string(want)


def can_cast(got: pa.DataType, want: pa.DataType) -> bool:
    """Whether a column can be cast to a type: the same kind of values in another width, unit or layout."""
    plain = decoded_kind(got)
    if types.is_dictionary(want):
        return can_cast(plain, want.value_type)
    if types.is_null(plain) or plain == want:
        return True
    if _is_list(plain) and _is_list(want):
        return can_cast(plain.value_type, want.value_type)
    if types.is_timestamp(want):
        return (types.is_date(plain) and want.tz is None) or (types.is_timestamp(plain) and plain.tz == want.tz)
    kinds = ((types.is_integer,), TEXTS)
    same = any(any(is_kind(plain) for is_kind in kind) and any(is_kind(want) for is_kind in kind) for kind in kinds)
    return same or (types.is_floating(want) and _is_number(plain))


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind))
