"""Files of a warehouse: rows cut into row groups, and each file written whole.

So row groups are cut by the sizes of values, and written from one piece.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, final

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet as pq

from rowwise.ingest.columns import is_list
from rowwise.ingest.warehouse.hive import Cell, folder
from rowwise.ingest.warehouse.journal import FOLDER, WarehouseFile
from rowwise.ingest.warehouse.layout import VERSION, WarehouseLayout, rows_in

SAMPLE_ROWS = 4096


class UnitRows(NamedTuple):
    """Rows of a unit, and which of them is the first."""

    table: pa.Table
    unit: int
    row: int


@final
class RowQueue:
    """A queue of rows that knows where each came from."""

    def __init__(self, feed: Iterator[UnitRows], end: int) -> None:
        """Read units from `feed` up to `end`, the unit after the last."""
        self._feed, self._end = feed, end
        self._held: deque[UnitRows] = deque()
        self._rows = 0

    def fill(self, rows: int) -> int:
        """Hold so many rows if there are; gives how many."""
        while self._rows < rows:
            fed = next(self._feed, None)
            if fed is None:
                break
            if fed.table.num_rows:
                self._held.append(fed)
                self._rows += fed.table.num_rows
        return self._rows

    def look(self, rows: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The first rows, which stay."""
        tables: list[pa.Table] = []
        left = rows
        for fed in self._held:
            if left <= 0:
                break
            table = fed.table if columns is None else fed.table.select(list(columns))
            tables.append(table.slice(0, left))
            left -= table.num_rows
        return pa.concat_tables(tables)

    def take(self, rows: int) -> pa.Table:
        """The first rows, in one piece."""
        table = self.look(rows)
        self._rows -= rows
        while rows:
            fed = self._held.popleft()
            got = fed.table.num_rows
            if got > rows:
                self._held.appendleft(UnitRows(fed.table.slice(rows), fed.unit, fed.row + rows))
            rows -= min(got, rows)
        return table.unify_dictionaries().combine_chunks()

    @property
    def stands(self) -> tuple[int, int]:
        """Unit and row of the first row held."""
        return (self._held[0].unit, self._held[0].row) if self._held else (self._end, 0)


@final
class WarehouseWriter:
    """Writes the files of a warehouse."""

    def __init__(
        self, dest: Path, how: WarehouseLayout, columns: Sequence[str], popularity: Mapping[str, float]
    ) -> None:
        self._dest, self._how, self._columns = dest, how, list(columns)
        used = {name: popularity[name] for name in columns if name in popularity}
        self._about: dict[str, object] = {
            "version": VERSION,
            "columns": self._columns,
            "popularity": used,
            "cluster_by": how.cluster_by,
            "sort_by": how.sort_by,
            "partition_types": dict[str, str](),
            "made_by": f"rowwise {version('rowwise')} data convert",
        }

    def name_types(self, kinds: Mapping[str, str]) -> None:
        self._about["partition_types"] = dict(kinds)

    def write(self, rows: RowQueue, cells: Sequence[Cell], number: int) -> WarehouseFile:
        """The next file of a folder; there is at least one row."""
        place = Path(folder(self._how.partition_by, cells)) / f"part-{number:05d}.parquet"
        group_rows = rows_in(
            self._how.decoded_bytes,
            rows.look(min(rows.fill(SAMPLE_ROWS), SAMPLE_ROWS), self._columns),
            self._how.group_rows,
        )
        temporary = self._dest / FOLDER / "part.tmp"
        written = groups = 0
        with temporary.open("wb") as file:
            first = self._next(rows, group_rows)
            with self._open_writer(file, first.schema) as out:
                table: pa.Table | None = first
                while table is not None:
                    out.write_table(table, row_group_size=table.num_rows)
                    written, groups = written + table.num_rows, groups + 1
                    more = groups < self._how.part_groups and rows.fill(1) > 0
                    table = self._next(rows, group_rows) if more else None
                out.add_key_value_metadata({"rowwise": msgspec.json.encode({**self._about, "rows": written}).decode()})
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        (self._dest / place).parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, self._dest / place)
        pa.default_memory_pool().release_unused()
        unit, row = rows.stands
        return WarehouseFile(path=str(place), rows=written, bytes=size, groups=groups, unit=unit, row=row)

    def _open_writer(self, file: object, schema: pa.Schema) -> pq.ParquetWriter:
        # Numbers of a dictionary hide from the packer that neighbours have the same lists.
        plain = [field.name for field in schema if self._how.cluster_by is None or not is_list(field.type)]
        return pq.ParquetWriter(
            file,
            schema,
            compression=self._how.compression,
            use_dictionary=plain if len(plain) < len(schema) else True,
            write_page_checksum=True,
            write_statistics=True,
        )

    def _next(self, rows: RowQueue, most: int) -> pa.Table:
        """A row group; where rows are clustered it ends with a session, if one ends inside."""
        there = rows.fill(most + 1)
        count = min(most, there)
        if self._how.cluster_by is not None and there > most:
            count = _last_border(rows.look(most + 1, [self._how.cluster_by])[self._how.cluster_by]) or most
        return rows.take(count).select(self._columns).replace_schema_metadata(None)


def _last_border(session: pa.ChunkedArray) -> int:
    """The last row that begins a session; 0: none but the first does."""
    if pa.types.is_dictionary(session.type):
        session = session.cast(session.type.value_type)
    whole = pa.concat_arrays(session.chunks)
    changed = pc.fill_null(
        pc.call_function("not_equal", [whole[1:], whole[:-1]]), True
    )  # a row without a session is one of its own
    borders_N = np.flatnonzero(changed.to_numpy(zero_copy_only=False))
    return int(borders_N[-1]) + 1 if borders_N.size else 0
