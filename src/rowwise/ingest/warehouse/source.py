"""The rows of a conversion's source, flattened, in small pieces from any row on.

Pieces are counted from the first row of a split, so that a resumed conversion cuts at the same rows.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, final, runtime_checkable

import msgspec
import pyarrow as pa

from rowwise.errors import DataError
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.warehouse.flatten import count_keys, flatten
from rowwise.ingest.warehouse.layout import FlattenedColumns, Key, WarehouseLayout, choose_columns, flat_name, rows_in

PIECE_BYTES = 16 << 20
MAX_ROWS = 16_384
SAMPLE_ROWS = 64
MAX_KEYS = 20_000


Progress = Callable[[int, int], object]  # called with the number of splits done, and of all


@runtime_checkable
class FileReader(Protocol):
    """A reader that can read a split in pieces, and tell whether a file has changed."""

    def pieces(self, split: Split, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """The rows of a split, at most `rows` at a time."""
        ...

    def stamp(self, source: str) -> tuple[int, int]:
        """Size in bytes and modification time of a file."""
        ...


class SourceRows(NamedTuple):
    """Rows of a source, and the position after them."""

    table: pa.Table
    split: int  # of the next row
    row: int  # of that split


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
        """A digest of the splits, files and schema: it changes when the source does."""
        files = dict.fromkeys(split.source for split in self.splits)
        stamps = [self._stamp(name) for name in files]
        schema = self.reader.schema.remove_metadata().to_string()
        return hashlib.sha256(msgspec.json.encode((self.splits, stamps, schema))).hexdigest()[:32]

    def keys(self, progress: Progress) -> dict[str, tuple[Key, ...]]:
        """The keys of each map column: those of the layout, or all keys of the data."""
        plain, maps = self._chosen
        open_ = [name for name, keys in maps.items() if keys is None]
        counts = {name: count_keys(pa.chunked_array([], self.reader.schema.field(name).type)) for name in open_}
        for at, split in enumerate(self.splits if open_ else ()):
            progress(at, len(self.splits))
            for table in self._tables(split, open_, MAX_ROWS):
                for name in open_:
                    counts[name].update(count_keys(table[name]))
                    if len(counts[name]) > MAX_KEYS:
                        raise DataError(
                            f"{split.source}: column {name!r} has more than {MAX_KEYS} keys",
                            hint=f"choose some: --keys {name}=1,2,3",
                        )
        chosen = {name: tuple(sorted(counts[name])) if keys is None else tuple(keys) for name, keys in maps.items()}
        clash = [n for c, keys in chosen.items() for n in (flat_name(c, k) for k in keys) if n in plain]
        if clash:
            raise DataError(f"{self.name}: {clash[0]!r} is a column and also a key of a map", "each name once")
        return chosen

    def flat(self, keys: dict[str, tuple[Key, ...]]) -> FlattenedColumns:
        return FlattenedColumns(plain=tuple(self._chosen[0]), maps=keys)

    def pieces(self, flat: FlattenedColumns, split: int = 0, row: int = 0) -> Iterator[SourceRows]:
        """All rows from row `row` of split `split` on; after each split, an empty piece at the start of the next."""
        rows = self._piece_rows(flat)
        for index in range(split, len(self.splits)):
            skip, done = row if index == split else 0, 0
            for table in self._tables(self.splits[index], flat.read, rows):
                done += table.num_rows
                if done > skip:
                    rest = table.slice(max(table.num_rows - (done - skip), 0))
                    yield SourceRows(flatten(rest, flat), index, done)
            yield SourceRows(self.empty(flat), index + 1, 0)

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
        found = path.stat()
        return found.st_size, found.st_mtime_ns
