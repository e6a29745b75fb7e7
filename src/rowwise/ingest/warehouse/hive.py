"""Folders that carry a value: `day=3/country=AT/part-00000.parquet`, as Hive, Spark and pyarrow write them.

The type is guessed from all names: whole numbers where every value is one, text else.
"""

from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

import pyarrow as pa

NULL = "__HIVE_DEFAULT_PARTITION__"
KEPT = " !$&'()*+,;@[]"  # what `quote` would change and file names may well hold

Cell = int | str | None


def folder(names: Sequence[str], values: Sequence[Cell]) -> str:
    """The folder of rows with these values."""
    return "/".join(f"{n}={NULL if v is None else quote(str(v), KEPT)}" for n, v in zip(names, values, strict=True))


def texts_of(source: str) -> dict[str, str | None]:
    """Names of a file's folders, outermost first."""
    found: dict[str, str | None] = {}
    for part in source.split("/")[:-1]:
        name, sign, value = part.partition("=")
        if sign and name:
            found[name] = None if value == NULL else unquote(value)
    return found


def fields(texts: Sequence[dict[str, str | None]], known: Mapping[str, str]) -> list[pa.Field]:
    """The columns that all files have in their folders; `known`: types that need no guess."""
    if not texts:
        return []
    names = [name for name in texts[0] if all(name in other for other in texts)]
    kinds = {name: _kind([other[name] for other in texts]) for name in names}
    return [pa.field(name, pa.string() if known.get(name) == "string" else kind) for name, kind in kinds.items()]


def cell(text: str | None, kind: pa.DataType) -> Cell:
    """A folder's value as the column holds it."""
    return text if text is None or kind == pa.string() else int(text)


def _kind(values: Sequence[str | None]) -> pa.DataType:
    whole = all(v is None or (len(v) < 19 and v.removeprefix("-").isdecimal()) for v in values)
    return pa.int64() if whole and any(v is not None for v in values) else pa.string()
