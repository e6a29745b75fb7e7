"""From any reader to a warehouse: the steps in their order.

See [Note: going on] and [Note: runs]. Known limits: one process does it all, and a warehouse is written on this
machine's disks only, where a rename replaces a file.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import final

import pyarrow as pa
from pyarrow import types

from rowwise.errors import DataError
from rowwise.ingest.reader import Reader, check_columns
from rowwise.ingest.warehouse.journal import ConversionRequest, Journal, SourceSurvey, WarehouseManifest
from rowwise.ingest.warehouse.layout import VERSION, FlattenedColumns, WarehouseLayout, order_by_popularity
from rowwise.ingest.warehouse.parts import RowQueue, UnitRows, WarehouseWriter
from rowwise.ingest.warehouse.source import ConversionSource, ProgressCallback
from rowwise.ingest.warehouse.spill import Spill, SpillRange, check_session
from rowwise.spec import Value


class ConversionSummary(Value, frozen=True):
    """Counts of rows, files and bytes of a conversion."""

    rows: int
    columns: int
    files: int
    groups: int
    folders: int
    bytes: int
    seconds: float
    resumed: bool  # an earlier process had begun
    was_done: bool  # or had even ended, so that there was nothing to do


def convert(
    source: Reader,
    dest: str | Path,
    how: WarehouseLayout,
    tell: ProgressCallback | None = None,
    used: Mapping[str, float] | None = None,
) -> ConversionSummary:
    """Write the rows of a reader as a warehouse. The same call goes on where a killed one stopped.

    Args:
        source: where rows come from; it must not change meanwhile.
        dest: a folder that is not there, is empty, or holds an unfinished conversion of the same.
        how: the layout.
        tell: is told how much is done.
        used: how often columns were used, where the layout has no popularity; what a conversion began with holds.
    """
    begin_s = time.perf_counter()
    place, rows = Path(dest), ConversionSource(source, how)
    ordered = [name for name in (*how.partition_by, how.cluster_by, how.sort_by) if name is not None]
    there = source.schema.names
    check_columns([n if n in there else n.partition(".")[0] for n in ordered], source.schema, rows.name)
    journal = Journal(place)
    asked = ConversionRequest(version=VERSION, source=rows.digest(), layout=how)
    with journal.alone():
        manifest, resumed = journal.done(asked), False
        was_done = manifest is not None
        if manifest is None:
            resumed = journal.take_up(asked)
            manifest = _Conversion(rows, place, journal, tell or _silent).run(asked, used or {})
        # What a kill may have left behind.
        shutil.rmtree(journal.place / "spill", ignore_errors=True)
        (journal.place / "journal.jsonl").unlink(missing_ok=True)
    return ConversionSummary(
        rows=sum(part.rows for part in manifest.parts),
        columns=len(manifest.columns),
        files=len(manifest.parts),
        groups=sum(part.groups for part in manifest.parts),
        folders=len({Path(part.path).parent for part in manifest.parts}),
        bytes=sum(part.bytes for part in manifest.parts),
        seconds=time.perf_counter() - begin_s,
        resumed=resumed,
        was_done=was_done,
    )


@final
class _Conversion:
    def __init__(self, source: ConversionSource, dest: Path, journal: Journal, tell: ProgressCallback) -> None:
        self._source, self._dest, self._journal, self._tell = source, dest, journal, tell
        self._how = source.how

    def run(self, asked: ConversionRequest, used: Mapping[str, float]) -> WarehouseManifest:
        found = self._journal.found
        if found is None:
            popularity = dict(used) if self._how.popularity is None else self._how.popularity
            found = SourceSurvey(keys=self._source.keys(self._tell), popularity=popularity)
            self._journal.note(found)
        flat = self._source.flat(found.keys)
        empty = self._source.empty(flat)
        self._check(empty.schema)
        self._how.check_columns(len(flat.names))
        inside = tuple(name for name in flat.names if name not in self._how.partition_by)
        columns = order_by_popularity(inside, found.popularity)
        writer = WarehouseWriter(self._dest, self._how, columns, found.popularity)
        writer.name_types({n: _folder_type(empty.schema.field(n).type) for n in self._how.partition_by})
        if self._how.spills:
            self._write_spilled(flat, writer)
        else:
            self._write_plain(flat, writer)
        if not self._journal.parts:
            raise DataError(f"{self._source.name}: no rows to convert")
        manifest = WarehouseManifest(asked=asked, found=found, columns=columns, parts=tuple(self._journal.parts))
        self._journal.finish(manifest)
        return manifest

    def _check(self, schema: pa.Schema) -> None:
        """The columns that rows are ordered by are there, and can be ordered."""
        how = self._how
        for name in (*how.partition_by, how.cluster_by, how.sort_by):
            if name is not None and name not in schema.names:
                out = f"--columns has to name it, too; there are: {', '.join(schema.names[:40])}"
                raise DataError(f"{self._source.name}: rows are ordered by {name!r}, which is not written: {out}")
        if set(how.partition_by) & {how.cluster_by, how.sort_by} or set(how.partition_by) == set(schema.names):
            raise DataError(f"{self._source.name}: the columns of folders are in no file: want others for the rest")
        for name in how.partition_by:
            check_session(schema.field(name).type, name, self._source.name)
        if how.cluster_by is not None:
            check_session(schema.field(how.cluster_by).type, how.cluster_by, self._source.name)
        if how.sort_by is not None and types.is_nested(schema.field(how.sort_by).type):
            kind = schema.field(how.sort_by).type
            raise DataError(f"{self._source.name}: column {how.sort_by!r} holds {kind}: want numbers, times or text")

    def _write_plain(self, flat: FlattenedColumns, writer: WarehouseWriter) -> None:
        unit, row = (self._journal.parts[-1].unit, self._journal.parts[-1].row) if self._journal.parts else (0, 0)
        rows = RowQueue(self._make_pieces(flat, unit, row), len(self._source.splits))
        while rows.fill(1):
            self._journal.note(writer.write(rows, (), len(self._journal.parts)))

    def _make_pieces(self, flat: FlattenedColumns, unit: int, row: int) -> Iterator[UnitRows]:
        for piece in self._source.pieces(flat, unit, row):
            self._tell(piece.split, len(self._source.splits))
            if piece.table.num_rows:
                yield UnitRows(piece.table, piece.split, piece.row - piece.table.num_rows)

    def _write_spilled(self, flat: FlattenedColumns, writer: WarehouseWriter) -> None:
        spill, splits = Spill(self._journal.place / "spill", self._how), len(self._source.splits)
        for split in spill.fill(self._source.pieces(flat, *spill.stands)):
            self._tell(split, 2 * splits)
        stretches = spill.stretches()
        # Files end where their folder does.
        begins = [i for i, s in enumerate(stretches) if i == 0 or s.folder != stretches[i - 1].folder]
        for begin, end in zip(begins, [*begins[1:], len(stretches)], strict=True):
            self._write_folder(spill, stretches, range(begin, end), writer)
            self._tell(splits + splits * end // len(stretches), 2 * splits)

    def _write_folder(self, spill: Spill, stretches: list[SpillRange], units: range, writer: WarehouseWriter) -> None:
        done = [
            part for part in self._journal.parts if units.start < part.unit or (part.unit == units.start and part.row)
        ]
        mine = [part for part in done if part.unit < units.stop]
        if len(done) > len(mine):
            return
        cells = stretches[units.start].folder
        unit, row = (mine[-1].unit, mine[-1].row) if mine else (units.start, 0)
        rows = RowQueue(_gather_rows(spill, stretches, range(unit, units.stop), row), units.stop)
        number = len(mine)
        while rows.fill(1):
            self._journal.note(writer.write(rows, cells, number))
            number += 1


def _gather_rows(spill: Spill, stretches: list[SpillRange], units: range, skip: int) -> Iterator[UnitRows]:
    for unit in units:
        done = 0
        for table in spill.read(stretches[unit]):
            done += table.num_rows
            kept = table.slice(max(table.num_rows - (done - skip), 0)) if unit == units.start else table
            yield UnitRows(kept, unit, done - kept.num_rows)


def _folder_type(kind: pa.DataType) -> str:
    plain: pa.DataType = kind.value_type if types.is_dictionary(kind) else kind
    return "int64" if types.is_integer(plain) else "string"


def _silent(_done: int, _of: int) -> None:
    """Nobody wants to know."""
