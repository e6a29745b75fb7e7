"""External sort of rows by folder and session: writes sorted runs to disk, then merges one range at a time.

[Note: runs] The source is read once, in runs that fill the memory budget. The rows of a run are stably sorted by folder
and bucket (the first bits of the session's hash), and written as one file with an index of the first row of each
bucket. Then each range of buckets is read from all runs and sorted in memory. So one file is open at a time, whatever
the number of folders and buckets. A run is committed by its index, which is renamed into place after the rows.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.ingest.bags import combine_chunks, decoded, hash_ids
from rowwise.ingest.kinds import decoded_kind
from rowwise.ingest.mix import Words, mix
from rowwise.ingest.warehouse.hive import Cell
from rowwise.ingest.warehouse.layout import BASE_MEMORY, WarehouseLayout, table_bytes
from rowwise.ingest.warehouse.source import UnitRows
from rowwise.tables.spec import Value

BUCKET_BITS = 12
HASH = "\x00hash"  # extra column with the session's hash
BATCH_BYTES = 96 << 10  # of a run's file; small, as a range needs few rows of each run and batches are read whole
LONE = 0x5851F42D4C957F2D  # salt for rows with a null session, each of which is its own session


class SpillRun(Value, frozen=True):
    """A sorted run on disk, and the position of the next one."""

    folders: tuple[tuple[Cell, ...], ...]
    segments: bytes  # int32 of shape (3, segments): index of the folder, bucket, first row
    rows: int
    bytes: float
    batch_rows: int
    split: int  # of the next row
    row: int  # of the next row, in its split
    first_row: int  # number of the next row in the source

    @property
    def segments_3S(self) -> NDArray[np.int32]:
        """Folder, bucket and first row of each segment, in the order of the rows."""
        return np.frombuffer(self.segments, np.int32).reshape(3, -1)


class SpillRange(Value, frozen=True):
    """A range of buckets of one folder, whose rows are read from all runs and sorted in memory."""

    folder: tuple[Cell, ...]
    first: int  # bucket
    last: int  # bucket, inclusive
    run: int | None = None  # without cluster_by: the only run to read, as rows keep the order of the source


@final
class Spill:
    """The sorted runs in a folder; resumes after the committed runs."""

    def __init__(self, folder: Path, layout: WarehouseLayout) -> None:
        self._folder, self._layout = folder, layout
        self.runs: list[SpillRun] = []
        self._indexes: list[dict[tuple[Cell, ...], int]] = []
        while (self._folder / f"{len(self.runs)}.json").exists():
            data = read_bytes(self._folder / f"{len(self.runs)}.json")
            try:
                self.runs.append(decode_json(data, SpillRun))
            except msgspec.DecodeError as error:
                place = self._folder / f"{len(self.runs)}.json"
                raise DataError(f"{place}: not an index of a sorted run: {error}", hint="delete the folder") from None

    @property
    def position(self) -> tuple[int, int]:
        """Split and row of the first row that is not in a run yet."""
        return (self.runs[-1].split, self.runs[-1].row) if self.runs else (0, 0)

    def fill(self, pieces: Iterator[UnitRows]) -> Iterator[int]:
        """Write the remaining rows as runs; yields the current split as progress."""
        tables: list[pa.Table] = []
        size = 0.0
        last: UnitRows | None = None
        for piece in pieces:
            tables.append(piece.table)
            size += table_bytes(piece.table)
            last = piece
            if size >= self._layout.working_bytes:
                self._write(tables, size, piece)
                tables.clear()
                size = 0.0
            yield piece.unit
        if last is not None and sum(t.num_rows for t in tables):
            self._write(tables, size, last)

    def ranges(self) -> list[SpillRange]:
        """The ranges of all rows, in output order."""
        if self._layout.cluster_by is None:
            cells = {(f, at) for at, run in enumerate(self.runs) for f in run.folders}
            ordered = sorted(cells, key=lambda pair: (_sortable(pair[0]), pair[1]))
            return [SpillRange(folder=folder, first=0, last=0, run=at) for folder, at in ordered]
        sizes: dict[tuple[Cell, ...], dict[int, float]] = {}
        for run in self.runs:
            for folder, bucket, begin, end in _segments(run):
                bucket_bytes = sizes.setdefault(folder, {})
                bucket_bytes[bucket] = bucket_bytes.get(bucket, 0.0) + (end - begin) * run.bytes / run.rows
        return [s for folder in sorted(sizes, key=_sortable) for s in self._cut(folder, sizes[folder])]

    def read(self, rows_range: SpillRange) -> Iterator[pa.Table]:
        """The rows of a range, sorted by session (and `sort_by`), without the columns of the folders."""
        if self._layout.cluster_by is None:
            assert rows_range.run is not None
            yield from self._rows(rows_range.run, rows_range)
            return
        table = pa.concat_tables([t for at in range(len(self.runs)) for t in self._rows(at, rows_range)])
        table = table.unify_dictionaries().combine_chunks()
        keys = {"hash": table[HASH], "session": _codes(table[self._layout.cluster_by])}
        if self._layout.sort_by is not None:
            keys["time"] = table[self._layout.sort_by]
        by = pc.SortOptions([(name, "ascending") for name in keys])
        order_R = pc.call_function("sort_indices", [pa.table(keys)], by)
        yield table.take(order_R).drop_columns([HASH])

    def _cut(self, folder: tuple[Cell, ...], bytes_of: dict[int, float]) -> Iterator[SpillRange]:
        first, size = None, 0.0
        before = 0
        for bucket in sorted(bytes_of):
            if bytes_of[bucket] > 2 * self._layout.working_bytes:
                raise DataError(
                    f"the rows of one {self._layout.cluster_by!r} (or of a few with like hashes) take "
                    f"{bytes_of[bucket] / 1e6:,.0f} MB, and are sorted in memory",
                    hint=f"set --memory {(4 * bytes_of[bucket] + BASE_MEMORY) / 1e9 + 0.1:.1f}GB",
                )
            if first is not None and size + bytes_of[bucket] > self._layout.working_bytes:
                yield SpillRange(folder=folder, first=first, last=before)
                first, size = None, 0.0
            first = bucket if first is None else first
            size, before = size + bytes_of[bucket], bucket
        if first is not None:
            yield SpillRange(folder=folder, first=first, last=before)

    def _rows(self, at: int, rows_range: SpillRange) -> Iterator[pa.Table]:
        """The rows of a run that belong to a range; they are consecutive."""
        run = self.runs[at]
        index = self._folder_of(at).get(rows_range.folder)
        if index is None:
            return
        # Segments are sorted by (folder, bucket): search the folder, then the buckets inside it.
        folder_S, bucket_S, begin_S = run.segments_3S
        low, high = np.searchsorted(folder_S, [index, index + 1])
        first, last = low + np.searchsorted(bucket_S[low:high], [rows_range.first, rows_range.last + 1])
        begin, end = (int(begin_S[at]) if at < len(begin_S) else run.rows for at in (first, last))
        if begin == end:
            return
        with pa.OSFile(str(self._folder / f"{at}.arrow")) as file:
            batches = pa.ipc.open_file(file)
            for index in range(begin // run.batch_rows, (end - 1) // run.batch_rows + 1):
                batch, first = batches.get_batch(index), index * run.batch_rows
                low, high = max(begin - first, 0), min(end - first, batch.num_rows)
                yield pa.Table.from_batches([batch.slice(low, high - low)])

    def _folder_of(self, at: int) -> dict[tuple[Cell, ...], int]:
        for run in self.runs[len(self._indexes) :]:
            self._indexes.append({folder: index for index, folder in enumerate(run.folders)})
        return self._indexes[at]

    def _write(self, tables: Sequence[pa.Table], size: float, after: UnitRows) -> None:
        layout, first_row = self._layout, self.runs[-1].first_row if self.runs else 0
        table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
        rows = table.num_rows
        folders, folder_R = _folders(table, layout.partition_by)
        bucket_R = np.zeros(rows, np.int64)
        if layout.cluster_by is not None:
            hash_R = session_hash(table[layout.cluster_by], first_row)
            bucket_R = (hash_R >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
            table = table.append_column(HASH, pa.array(hash_R))
        place_R = (folder_R << BUCKET_BITS) | bucket_R
        order_R = np.argsort(place_R, kind="stable")
        place_S, begin_S = np.unique(place_R[order_R], return_index=True)
        table = table.drop_columns(list(layout.partition_by))
        name, batch_rows = str(len(self.runs)), max(16, int(BATCH_BYTES * rows / max(size, 1.0)))
        self._folder.mkdir(parents=True, exist_ok=True)
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with (
            pa.OSFile(str(self._folder / f"{name}.tmp"), "wb") as file,
            pa.ipc.new_file(file, table.schema, options=options) as out,
        ):
            for at in range(0, rows, batch_rows):
                out.write_batch(to_batch(table.take(pa.array(order_R[at : at + batch_rows]))))
        run = SpillRun(
            folders=folders,
            segments=np.stack([place_S >> BUCKET_BITS, place_S & ((1 << BUCKET_BITS) - 1), begin_S])
            .astype(np.int32)
            .tobytes(),
            rows=rows,
            bytes=size,
            batch_rows=batch_rows,
            split=after.unit,
            row=after.row + after.table.num_rows,
            first_row=first_row + rows,
        )
        os.replace(self._folder / f"{name}.tmp", self._folder / f"{name}.arrow")
        (self._folder / f"{name}.tmp").write_bytes(msgspec.json.encode(run))
        os.replace(self._folder / f"{name}.tmp", self._folder / f"{name}.json")
        self.runs.append(run)
        pa.default_memory_pool().release_unused()


def to_batch(table: pa.Table) -> pa.RecordBatch:
    """A table as a single record batch."""
    return table.combine_chunks().to_batches()[0]


def session_hash(column: pa.ChunkedArray, first_row: int) -> Words:
    """A 64-bit hash of each row's session; a row with a null session is hashed by its number in the source."""
    ids = decoded(combine_chunks(column))
    missing_R = ids.is_null().to_numpy(zero_copy_only=False)
    row_R = np.arange(first_row, first_row + len(ids), dtype=np.uint64)
    return np.where(missing_R, mix(row_R ^ np.uint64(LONE)), hash_ids(ids))


def check_session(kind: pa.DataType, name: str, source: str) -> None:
    plain = decoded_kind(kind)
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if not (types.is_integer(plain) or any(test(plain) for test in texts)):
        raise DataError(f"{source}: column {name!r} holds {kind}", "whole numbers or text")


def _codes(column: pa.ChunkedArray) -> pa.Array:
    """A code for each session, as tie breaker of equal hashes; -1 for null sessions, whose hashes differ."""
    return decoded(combine_chunks(column)).dictionary_encode().indices.fill_null(-1)


def _folders(table: pa.Table, names: Sequence[str]) -> tuple[tuple[tuple[Cell, ...], ...], NDArray[np.int64]]:
    """The distinct folders of a table's rows, and the index of each row's folder."""
    if not names:
        return ((),), np.zeros(table.num_rows, np.int64)
    code_R, columns = np.zeros(table.num_rows, np.int64), list[pa.Array]()
    for name in names:
        column = table[name].cast(pa.string()) if not types.is_integer(table[name].type) else table[name]
        columns.append(combine_chunks(column))
        encoded = columns[-1].dictionary_encode("encode")
        code_R = code_R * max(len(encoded.dictionary), 1) + encoded.indices.to_numpy()
    _, first_F, folder_R = np.unique(code_R, return_index=True, return_inverse=True)
    cells = (column.take(pa.array(first_F)).to_pylist() for column in columns)
    return tuple(zip(*cells, strict=True)), folder_R.astype(np.int64)


def _segments(run: SpillRun) -> Iterator[tuple[tuple[Cell, ...], int, int, int]]:
    """The segments of a run: folder, bucket, first row, and the row after the last."""
    folder_S, bucket_S, begin_S = run.segments_3S.tolist()
    for folder, bucket, begin, end in zip(folder_S, bucket_S, begin_S, [*begin_S[1:], run.rows], strict=True):
        yield run.folders[folder], bucket, begin, end


def _sortable(folder: tuple[Cell, ...]) -> Any:
    """A sort key of folders, nulls last. The cells of a column are all integers or all text."""
    return tuple((cell is None, cell) for cell in folder)
