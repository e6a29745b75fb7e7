"""Columns that requests leave out, because a version has them by key: those of items, by the number of the item."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet as pq
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.ingest.unpacked import read_parquet
from rowwise.serve.contents import reading_export

SIDES = "sides"  # the folder in a version: <key>.parquet


class JoinedColumns(NamedTuple):
    """Columns by the keys of a request, and how many keys were unknown: their values are null."""

    arrays: dict[str, pa.Array]
    unknown: int


@final
class SideTable:
    """Columns by a key.

    Args:
        key: the name of the key's column.
        table: the key's column, and others.
    """

    def __init__(self, key: str, table: pa.Table) -> None:
        """Refuse keys that are missing, null, or there twice."""
        if key not in table.column_names:
            raise DataError(f"no column {key!r}", "a column of keys with the file's name")
        keys = table[key].combine_chunks()
        if keys.null_count:
            raise DataError(f"column {key!r} has {keys.null_count} null keys", "a key in each row")
        if not (types.is_integer(keys.type) or types.is_string(keys.type) or types.is_large_string(keys.type)):
            raise DataError(f"column {key!r} holds {keys.type}", "keys of whole numbers or text")
        self.key, self.kind = key, keys.type
        self._columns = {name: table[name].combine_chunks() for name in table.column_names if name != key}
        self._order_K: np.ndarray | None = None
        self._rows: dict[str, int] = {}
        if types.is_integer(keys.type):
            values_K = keys.to_numpy()
            self._order_K = np.argsort(values_K, kind="stable")
            self._sorted_K = values_K[self._order_K]
            twice = np.flatnonzero(self._sorted_K[1:] == self._sorted_K[:-1])
            if len(twice):
                raise DataError(f"column {key!r}: key {self._sorted_K[twice[0]]} is there twice", "each key once")
            return
        for row, value in enumerate(keys.to_pylist()):
            if self._rows.setdefault(value, row) != row:
                raise DataError(f"column {key!r}: key {value[:80]!r} is there twice", "each key once")

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def join(self, keys: pa.Array, names: Sequence[str]) -> JoinedColumns:
        """Columns of these names, in the order of the keys."""
        rows_B, known_B = self._find(keys)
        unknown = len(keys) - keys.null_count - int(known_B.sum())
        indices = pa.array(rows_B, mask=~known_B)
        return JoinedColumns({name: self._columns[name].take(indices) for name in names}, unknown)

    def _find(self, keys: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """The row of each key, and whether there is one."""
        valid_B = ~np.asarray(pc.call_function("is_null", [keys]))
        if self._order_K is None:
            found = [self._rows.get(value, -1) for value in keys.to_pylist()]
            rows_B = np.array(found, np.int64)
            return rows_B, valid_B & (rows_B >= 0)
        if not len(self._order_K):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        wanted_B = keys.fill_null(0).to_numpy()
        places_B = np.minimum(np.searchsorted(self._sorted_K, wanted_B), len(self._order_K) - 1)
        return self._order_K[places_B], valid_B & (self._sorted_K[places_B] == wanted_B)


def read_sides(version: Path) -> tuple[SideTable, ...]:
    """The side tables of a version."""
    sides = []
    for file in sorted((version / SIDES).glob("*.parquet")):
        with reading_export(file, DataError):
            sides.append(SideTable(file.stem, read_parquet(file)))
    return tuple(sides)


class NamedSide(NamedTuple):
    """A side table that is to be written."""

    key: str
    table: pa.Table

    def write(self, version: Path) -> None:
        (version / SIDES).mkdir(exist_ok=True)
        pq.write_table(self.table, version / SIDES / f"{self.key}.parquet")


def load_side(text: str, schema: pa.Schema) -> NamedSide:
    """FILE:KEY with the columns that a prediction reads, of the types in which it reads them."""
    file, _, key = text.rpartition(":")
    if not file or not key or "/" in key:
        raise DataError(f"--side {text}", "a Parquet file and the column of its keys, such as items.parquet:item")
    table = read_users_parquet(f"--side {text}", file)
    if key not in table.column_names:
        raise DataError(f"--side {text}: no column {key!r}; there are {', '.join(table.column_names)}")
    read = [name for name in table.column_names if name in schema.names and name != key]
    if not read:
        raise DataError(f"--side {text}: the model reads none of its columns; it reads {', '.join(schema.names)}")
    fields = [schema.field(name) for name in read]
    kind = schema.field(key).type if key in schema.names else table.schema.field(key).type
    return NamedSide(key, cast_keyed(f"--side {text}", table, key, pa.schema([pa.field(key, kind), *fields])))


def read_users_parquet(what: str, file: str) -> pa.Table:
    """A table of a user's file; `what` begins the message of an error."""
    try:
        return pq.read_table(file)
    except FileNotFoundError:
        raise DataError(f"{what}: no such file", "the path of a Parquet file") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{what}: {str(error)[:200]}", "a Parquet file") from None


def cast_keyed(what: str, table: pa.Table, key: str, schema: pa.Schema) -> pa.Table:
    """The columns of a schema, in its types; raises for a key that is missing or occurs twice."""
    try:
        table = table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{what}: {str(error)[:200]}", "the types of the training data") from None
    try:
        SideTable(key, table)
    except DataError as error:
        raise DataError(f"{what}: {error}") from None
    return table
