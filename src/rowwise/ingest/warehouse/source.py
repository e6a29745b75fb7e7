"""The flattened rows of a conversion's source, in small pieces, from any row on.

Pieces are aligned to the first row of a split, so that a resumed conversion cuts at the same rows. Map columns are
split into one column per key, so that a job reads only the keys that it uses. A missing key is null; of a duplicate key
in a row, the last value counts. Not supported: maps of maps.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, final, runtime_checkable

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.base.errors import DataError
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.block import Ints
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.warehouse.layout import FlattenedColumns, Key, WarehouseLayout, choose_columns, flat_name, rows_in

PIECE_BYTES = 16 << 20
MAX_ROWS = 16_384
SAMPLE_ROWS = 64
MAX_KEYS = 20_000


Progress = Callable[[int, int], object]  # called with the number of splits done, and of all


@runtime_checkable
class FileReader(Protocol):
    """A reader that can read a split in pieces, and detect whether a file has changed."""

    def pieces(self, split: Split, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """The rows of a split, at most `rows` at a time."""
        ...

    def stamp(self, source: str) -> tuple[int, int]:
        """Size in bytes and modification time of a file."""
        ...


class UnitRows(NamedTuple):
    """Consecutive rows of a unit (see `WarehouseFile`), from row `row` on."""

    table: pa.Table
    unit: int
    row: int


def rows_from(tables: Iterable[pa.Table], unit: int, row: int) -> Iterator[UnitRows]:
    """The rows of a unit from row `row` on."""
    done = 0
    for table in tables:
        done += table.num_rows
        if done > row:
            rest = table.slice(max(table.num_rows - (done - row), 0))
            yield UnitRows(rest, unit, done - rest.num_rows)


@final
class ConversionSource:
    """The rows that a conversion reads, in order."""

    def __init__(self, reader: Reader, layout: WarehouseLayout) -> None:
        self.reader, self.layout = reader, layout
        self.splits = reader.splits()
        if not self.splits:
            raise DataError(f"{type(reader).__name__}: no rows to convert", "files with rows")
        self.name = self.splits[0].source
        self._chosen = choose_columns(layout, reader.schema, self.name)

    def digest(self) -> str:
        """A digest of the splits, files and schema, to detect changes of the source."""
        files = dict.fromkeys(split.source for split in self.splits)
        stamps = [self._stamp(name) for name in files]
        schema = self.reader.schema.remove_metadata().to_string()
        return hashlib.sha256(msgspec.json.encode((self.splits, stamps, schema))).hexdigest()[:32]

    def keys(self, progress: Progress) -> dict[str, tuple[Key, ...]]:
        """The keys of each map column: those of the layout, or all keys of the data."""
        plain, maps = self._chosen
        unlisted = [name for name, keys in maps.items() if keys is None]
        counts = {name: count_keys(pa.chunked_array([], self.reader.schema.field(name).type)) for name in unlisted}
        for at, split in enumerate(self.splits if unlisted else ()):
            progress(at, len(self.splits))
            for table in self._tables(split, unlisted, MAX_ROWS):
                for name in unlisted:
                    counts[name].update(count_keys(table[name]))
                    if len(counts[name]) > MAX_KEYS:
                        raise DataError(
                            f"{split.source}: column {name!r} has more than {MAX_KEYS} keys",
                            hint=f"select keys: --keys {name}=1,2,3",
                        )
        chosen = {name: tuple(sorted(counts[name])) if keys is None else tuple(keys) for name, keys in maps.items()}
        clash = [n for c, keys in chosen.items() for n in (flat_name(c, k) for k in keys) if n in plain]
        if clash:
            raise DataError(f"{self.name}: {clash[0]!r} is a column and also a key of a map", "each name once")
        return chosen

    def flat(self, keys: dict[str, tuple[Key, ...]]) -> FlattenedColumns:
        return FlattenedColumns(plain=tuple(self._chosen[0]), maps=keys)

    def pieces(self, flat: FlattenedColumns, split: int = 0, row: int = 0) -> Iterator[UnitRows]:
        """All rows from row `row` of split `split` on; after each split, an empty piece at the start of the next."""
        rows = self._piece_rows(flat)
        for index in range(split, len(self.splits)):
            tables = self._tables(self.splits[index], flat.read, rows)
            for piece in rows_from(tables, index, row if index == split else 0):
                yield piece._replace(table=flatten(piece.table, flat))
            yield UnitRows(self.empty(flat), index + 1, 0)

    def empty(self, flat: FlattenedColumns) -> pa.Table:
        """A table of the flattened columns without rows."""
        schema = pa.schema([self.reader.schema.field(name) for name in flat.read])
        return flatten(schema.empty_table(), flat)

    def _piece_rows(self, flat: FlattenedColumns) -> int:
        first = next(self._tables(self.splits[0], flat.read, SAMPLE_ROWS), None)
        if first is None:
            return MAX_ROWS
        return rows_in(
            min(PIECE_BYTES, self.layout.working_bytes // 4), flatten(first.slice(0, SAMPLE_ROWS), flat), MAX_ROWS
        )

    def _tables(self, split: Split, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        if isinstance(self.reader, FileReader):
            yield from self.reader.pieces(split, columns, rows)
            return
        table = self.reader.read(split, columns)
        for at in range(0, table.num_rows, rows):
            yield table.slice(at, rows)

    def _stamp(self, name: str) -> tuple[int, int]:
        if isinstance(self.reader, FileReader):
            return self.reader.stamp(name)
        path = Path(name)
        if not path.is_file():
            return 0, 0
        status = path.stat()
        return status.st_size, status.st_mtime_ns


def flatten(table: pa.Table, flat: FlattenedColumns) -> pa.Table:
    """The plain columns, then a column for each key of each map."""
    flattened = table.select(list(flat.plain))
    for name, keys in flat.maps.items():
        for key, column in zip(keys, split_by_key(combine_chunks(table[name]), keys), strict=True):
            flattened = flattened.append_column(flat_name(name, key), column)
    return flattened


def split_by_key(array: pa.MapArray, keys: Sequence[Key]) -> list[pa.Array]:
    """A column for each key."""
    begin, end, row_N = _entries(array)
    keys_N = array.keys.slice(begin, end - begin)
    items = array.items.slice(begin, end - begin)
    wanted = pa.array(keys, array.type.key_type)
    code_N = (
        pc.call_function("index_in", [keys_N], pc.SetLookupOptions(wanted)).fill_null(-1).to_numpy(zero_copy_only=False)
    )
    code_N = np.where(row_N < 0, -1, code_N)
    order_N = np.argsort(code_N, kind="stable")
    cuts = np.searchsorted(code_N[order_N], np.arange(len(keys) + 1))
    return [_column(items, row_N, order_N[cuts[i] : cuts[i + 1]], len(array)) for i in range(len(keys))]


def count_keys(array: pa.ChunkedArray) -> Counter[Key]:
    """The number of entries of each key."""
    counts: Counter[Key] = Counter()
    for chunk in array.chunks:
        begin, end, row_N = _entries(chunk)
        keys_N = chunk.keys.slice(begin, end - begin).filter(pa.array(row_N >= 0))
        for pair in pc.call_function("value_counts", [keys_N]).to_pylist():
            counts[pair["values"]] += pair["counts"]
    return counts


def _column(items: pa.Array, row_N: Ints, entry_K: Ints, rows: int) -> pa.Array:
    at_R = np.zeros(rows, np.int64)
    missing_R = np.ones(rows, np.bool_)
    at_R[row_N[entry_K]] = entry_K  # numpy keeps the last assignment of a duplicate key
    missing_R[row_N[entry_K]] = False
    return items.take(pa.array(at_R, mask=missing_R))


def _entries(array: pa.MapArray) -> tuple[int, int, Ints]:
    """Begin and end of a slice's entries, and the row of each entry, or -1 under a null map."""
    if len(array) == 0:
        return 0, 0, np.empty(0, np.int64)
    offset_R1 = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    row_R = np.where(array.is_null().to_numpy(zero_copy_only=False), -1, np.arange(len(array)))
    return int(offset_R1[0]), int(offset_R1[-1]), np.repeat(row_R, np.diff(offset_R1))
