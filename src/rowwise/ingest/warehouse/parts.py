"""Writes the files of a warehouse, atomically; cuts rows into row groups by the size of their values."""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import final

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet as pq

from rowwise.ingest.bags import combine_chunks, decoded
from rowwise.ingest.kinds import is_list
from rowwise.ingest.warehouse.hive import Cell, folder_name
from rowwise.ingest.warehouse.journal import FOLDER, StoredWarehouse, WarehouseFile
from rowwise.ingest.warehouse.layout import VERSION, WarehouseLayout, rows_in
from rowwise.ingest.warehouse.source import UnitRows

SAMPLE_ROWS = 4096


@final
class RowQueue:
    """A queue of rows that tracks the unit and row number of its head."""

    def __init__(self, source: Iterator[UnitRows], end: int) -> None:
        """Reads `source` on demand; `end`: the unit after the last."""
        self._source, self._end = source, end
        self._queued: deque[UnitRows] = deque()
        self._rows = 0

    def fill(self, rows: int) -> int:
        """Read until at least `rows` rows are queued, or the source ends; returns the number of queued rows."""
        while self._rows < rows:
            chunk = next(self._source, None)
            if chunk is None:
                break
            if chunk.table.num_rows:
                self._queued.append(chunk)
                self._rows += chunk.table.num_rows
        return self._rows

    def peek(self, rows: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The first rows, without removing them."""
        tables: list[pa.Table] = []
        left = rows
        for chunk in self._queued:
            if left <= 0:
                break
            table = chunk.table if columns is None else chunk.table.select(list(columns))
            tables.append(table.slice(0, left))
            left -= table.num_rows
        return pa.concat_tables(tables)

    def take(self, rows: int) -> pa.Table:
        """Remove the first rows and return them as one chunk, so that a row group has one dictionary."""
        table = self.peek(rows)
        self._rows -= rows
        while rows:
            chunk = self._queued.popleft()
            available = chunk.table.num_rows
            if available > rows:
                self._queued.appendleft(UnitRows(chunk.table.slice(rows), chunk.unit, chunk.row + rows))
            rows -= min(available, rows)
        return table.unify_dictionaries().combine_chunks()

    @property
    def position(self) -> tuple[int, int]:
        """Unit and row number of the head."""
        return (self._queued[0].unit, self._queued[0].row) if self._queued else (self._end, 0)


@final
class WarehouseWriter:
    """Writes the files of a warehouse."""

    def __init__(
        self,
        dest: Path,
        layout: WarehouseLayout,
        columns: Sequence[str],
        popularity: Mapping[str, float],
        partition_types: Mapping[str, str],
        store: StoredWarehouse | None = None,
    ) -> None:
        self._dest, self._layout, self._columns, self._store = dest, layout, list(columns), store
        used = {name: popularity[name] for name in columns if name in popularity}
        self._metadata: dict[str, object] = {
            "version": VERSION,
            "columns": self._columns,
            "popularity": used,
            "cluster_by": layout.cluster_by,
            "sort_by": layout.sort_by,
            "partition_types": dict(partition_types),
            "made_by": f"rowwise {version('rowwise')} data convert",
        }

    def write(self, rows: RowQueue, cells: Sequence[Cell], number: int) -> WarehouseFile:
        """Write the next file of a folder; the queue has at least one row."""
        place = Path(folder_name(self._layout.partition_by, cells)) / f"part-{number:05d}.parquet"
        group_rows = rows_in(
            self._layout.decoded_bytes,
            rows.peek(min(rows.fill(SAMPLE_ROWS), SAMPLE_ROWS), self._columns),
            self._layout.group_rows,
        )
        temporary = self._dest / FOLDER / "part.tmp"
        written = groups = 0
        with temporary.open("wb") as file:
            first = self._next_group(rows, group_rows)
            with self._open_writer(file, first.schema) as out:
                table: pa.Table | None = first
                while table is not None:
                    out.write_table(table, row_group_size=table.num_rows)
                    written, groups = written + table.num_rows, groups + 1
                    more = groups < self._layout.part_groups and rows.fill(1) > 0
                    table = self._next_group(rows, group_rows) if more else None
                metadata = msgspec.json.encode({**self._metadata, "rows": written}).decode()
                out.add_key_value_metadata({"rowwise": metadata})
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        if self._store is not None:
            self._store.send(temporary, place.as_posix())
        else:
            (self._dest / place).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, self._dest / place)
        pa.default_memory_pool().release_unused()
        unit, row = rows.position
        return WarehouseFile(path=str(place), rows=written, bytes=size, groups=groups, unit=unit, row=row)

    def _open_writer(self, file: object, schema: pa.Schema) -> pq.ParquetWriter:
        # Clustered rows repeat their lists: the codec compresses repeated values well, but not bit-packed indices.
        plain = [field.name for field in schema if self._layout.cluster_by is None or not is_list(field.type)]
        return pq.ParquetWriter(
            file,
            schema,
            compression=self._layout.compression,
            use_dictionary=plain if len(plain) < len(schema) else True,
            write_page_checksum=True,
            write_statistics=True,
        )

    def _next_group(self, rows: RowQueue, max_rows: int) -> pa.Table:
        """The rows of the next row group; if rows are clustered, it preferably ends between two sessions."""
        queued = rows.fill(max_rows + 1)
        count = min(max_rows, queued)
        if self._layout.cluster_by is not None and queued > max_rows:
            session = rows.peek(max_rows + 1, [self._layout.cluster_by])[self._layout.cluster_by]
            count = _last_session_start(session) or max_rows
        return rows.take(count).select(self._columns).replace_schema_metadata(None)


def _last_session_start(session: pa.ChunkedArray) -> int:
    """The last row at which a session begins; 0 if all rows are of one session."""
    values = decoded(combine_chunks(session))
    changed = pc.call_function("not_equal", [values[1:], values[:-1]])
    changed = pc.fill_null(changed, True)  # a null is a session of its own
    borders_N = np.flatnonzero(changed.to_numpy(zero_copy_only=False))
    return int(borders_N[-1]) + 1 if borders_N.size else 0
