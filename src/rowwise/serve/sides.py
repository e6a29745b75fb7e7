"""Side tables: columns that requests omit, as a version has them by key, such as item columns by item id."""

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

SIDES = "sides"  # folder of a version with files <key>.parquet


class JoinedColumns(NamedTuple):
    """Columns joined by key, and the number of unknown keys, whose values are null."""

    arrays: dict[str, pa.Array]
    unknown: int


@final
class SideTable:
    """Columns by a key.

    Args:
        key: name of the key column.
        table: the key column, and others.
    """

    def __init__(self, key: str, table: pa.Table) -> None:
        """Raise for keys that are missing, null or duplicate."""
        if key not in table.column_names:
            raise DataError(f"no column {key!r}", "a key column with the name of the file")
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
            duplicates = np.flatnonzero(self._sorted_K[1:] == self._sorted_K[:-1])
            if len(duplicates):
                raise DataError(f"column {key!r}: key {self._sorted_K[duplicates[0]]} occurs twice", "each key once")
            return
        for row, value in enumerate(keys.to_pylist()):
            if self._rows.setdefault(value, row) != row:
                raise DataError(f"column {key!r}: key {value[:80]!r} occurs twice", "each key once")

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def join(self, keys: pa.Array, names: Sequence[str]) -> JoinedColumns:
        """Look up columns, in the order of the keys."""
        rows_B, known_B = self._find(keys)
        unknown = len(keys) - keys.null_count - int(known_B.sum())
        indices = pa.array(rows_B, mask=~known_B)
        return JoinedColumns({name: self._columns[name].take(indices) for name in names}, unknown)

    def _find(self, keys: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """The row of each key, and whether the key is known."""
        valid_B = ~np.asarray(pc.call_function("is_null", [keys]))
        if self._order_K is None:
            rows = [self._rows.get(value, -1) for value in keys.to_pylist()]
            rows_B = np.array(rows, np.int64)
            return rows_B, valid_B & (rows_B >= 0)
        if not len(self._order_K):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        keys_B = keys.fill_null(0).to_numpy()
        positions_B = np.minimum(np.searchsorted(self._sorted_K, keys_B), len(self._order_K) - 1)
        return self._order_K[positions_B], valid_B & (self._sorted_K[positions_B] == keys_B)


def read_sides(version: Path) -> tuple[SideTable, ...]:
    """The side tables of a version."""
    sides = []
    for file in sorted((version / SIDES).glob("*.parquet")):
        with reading_export(file, DataError):
            sides.append(SideTable(file.stem, read_parquet(file)))
    return tuple(sides)


class NamedSide(NamedTuple):
    """A side table to write."""

    key: str
    table: pa.Table

    def write(self, version: Path) -> None:
        (version / SIDES).mkdir(exist_ok=True)
        pq.write_table(self.table, version / SIDES / f"{self.key}.parquet")


def load_side(text: str, schema: pa.Schema) -> NamedSide:
    """Load FILE:KEY, with the columns and types of the schema."""
    file, _, key = text.rpartition(":")
    if not file or not key or "/" in key:
        raise DataError(f"--side {text}", "a Parquet file and the column of its keys, such as items.parquet:item")
    table = read_users_parquet(f"--side {text}", file)
    if key not in table.column_names:
        raise DataError(f"--side {text}: no column {key!r}; there are {', '.join(table.column_names)}")
    used = [name for name in table.column_names if name in schema.names and name != key]
    if not used:
        raise DataError(f"--side {text}: the model reads none of its columns; it reads {', '.join(schema.names)}")
    fields = [schema.field(name) for name in used]
    kind = schema.field(key).type if key in schema.names else table.schema.field(key).type
    return NamedSide(key, cast_keyed(f"--side {text}", table, key, pa.schema([pa.field(key, kind), *fields])))


def read_users_parquet(what: str, file: str) -> pa.Table:
    """Read a Parquet file of the user; `what` is the prefix of error messages."""
    try:
        return pq.read_table(file)
    except FileNotFoundError:
        raise DataError(f"{what}: no such file", "the path of a Parquet file") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{what}: {str(error)[:200]}", "a Parquet file") from None


def cast_keyed(what: str, table: pa.Table, key: str, schema: pa.Schema) -> pa.Table:
    """Select and cast the columns of a schema; raises for a missing or duplicate key."""
    try:
        table = table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{what}: {str(error)[:200]}", "the types of the training data") from None
    try:
        SideTable(key, table)
    except DataError as error:
        raise DataError(f"{what}: {error}") from None
    return table
