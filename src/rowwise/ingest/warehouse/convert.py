"""Converts the rows of any reader to a warehouse, and resumes after a kill.

See [Note: going on] in `journal.py` and [Note: runs] in `spill.py`. Known limit: one process.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import final

import pyarrow as pa
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.base.scratch import Scratch
from rowwise.base.storage.folder import StorageFolder, parse_folder
from rowwise.ingest.kinds import holds_whole
from rowwise.ingest.reader import Reader, check_columns
from rowwise.ingest.warehouse.journal import (
    ConversionRequest,
    Journal,
    SourceSurvey,
    StoredWarehouse,
    WarehouseManifest,
)
from rowwise.ingest.warehouse.layout import VERSION, FlattenedColumns, WarehouseLayout, order_by_popularity
from rowwise.ingest.warehouse.parts import RowQueue, WarehouseWriter
from rowwise.ingest.warehouse.source import ConversionSource, Progress, UnitRows, rows_from
from rowwise.ingest.warehouse.spill import Spill, SpillRange, check_session
from rowwise.tables.spec import Value


class ConversionSummary(Value, frozen=True):
    """Counts of rows, files and bytes of a conversion."""

    rows: int
    columns: int
    files: int
    groups: int
    folders: int
    bytes: int
    seconds: float
    resumed: bool  # continued the conversion of an earlier process
    was_done: bool  # no-op: an earlier process had finished it


def convert(
    source: Reader,
    dest: str | Path,
    layout: WarehouseLayout,
    progress: Progress | None = None,
    used: Mapping[str, float] | None = None,
) -> ConversionSummary:
    """Write the rows of a reader as a warehouse. The same call resumes a conversion that was killed.

    Args:
        source: reads the rows, which must not change until the conversion is finished.
        dest: a new or empty folder or URL, or that of an unfinished conversion of the same source and layout.
        layout: how rows and columns are arranged.
        progress: called with the number of splits done, and of all.
        used: uses of each column, if the layout has no popularity; a resumed conversion keeps its original uses.
    """
    begin_s = time.perf_counter()
    rows = ConversionSource(source, layout)
    ordered = [name for name in (*layout.partition_by, layout.cluster_by, layout.sort_by) if name is not None]
    names = source.schema.names
    check_columns([n if n in names else n.partition(".")[0] for n in ordered], source.schema, rows.name)
    place = parse_folder(str(dest))
    store = StoredWarehouse(place) if isinstance(place, StorageFolder) else None
    request = ConversionRequest(version=VERSION, source=rows.digest(), layout=layout)
    with ExitStack() as stack:
        folder = place if isinstance(place, Path) else stack.enter_context(Scratch()).path / "warehouse"
        journal = Journal(folder, store)
        stack.enter_context(journal.lock())
        manifest, resumed = journal.read_manifest(request), False
        was_done = manifest is not None
        if manifest is None:
            resumed = journal.begin_or_resume(request)
            manifest = _Conversion(rows, folder, store, journal, progress or (lambda *_: None)).run(request, used or {})
        # A killed process may have written the manifest without cleaning up.
        shutil.rmtree(journal.folder / "spill", ignore_errors=True)
        journal.clean()
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
    def __init__(
        self,
        source: ConversionSource,
        dest: Path,
        store: StoredWarehouse | None,
        journal: Journal,
        progress: Progress,
    ) -> None:
        self._source, self._dest, self._store, self._journal, self._progress = source, dest, store, journal, progress
        self._layout = source.layout

    def run(self, request: ConversionRequest, used: Mapping[str, float]) -> WarehouseManifest:
        survey = self._journal.survey
        if survey is None:
            popularity = dict(used) if self._layout.popularity is None else self._layout.popularity
            survey = SourceSurvey(keys=self._source.keys(self._progress), popularity=popularity)
            self._journal.append(survey)
        flat = self._source.flat(survey.keys)
        empty = self._source.empty(flat)
        self._check_order_columns(empty.schema)
        self._layout.check_columns(len(flat.names))
        inside = tuple(name for name in flat.names if name not in self._layout.partition_by)
        columns = order_by_popularity(inside, survey.popularity)
        integers = {n: holds_whole(empty.schema.field(n).type) for n in self._layout.partition_by}
        kinds = {name: "int64" if is_integer else "string" for name, is_integer in integers.items()}
        writer = WarehouseWriter(self._dest, self._layout, columns, survey.popularity, kinds, self._store)
        if self._layout.spills:
            self._write_spilled(flat, writer)
        else:
            self._write_plain(flat, writer)
        if not self._journal.parts:
            raise DataError(f"{self._source.name}: no rows to convert", "files with rows")
        manifest = WarehouseManifest(asked=request, found=survey, columns=columns, parts=tuple(self._journal.parts))
        self._journal.finish(manifest)
        return manifest

    def _check_order_columns(self, schema: pa.Schema) -> None:
        """Refuse sort columns that are not written or have no order."""
        layout = self._layout
        for name in (*layout.partition_by, layout.cluster_by, layout.sort_by):
            if name is not None and name not in schema.names:
                raise DataError(
                    f"{self._source.name}: rows are ordered by {name!r}, which is not written",
                    f"{name!r} in --columns",
                    hint=f"the columns are {', '.join(schema.names[:40])}",
                )
        folders = set(layout.partition_by)
        if folders & {layout.cluster_by, layout.sort_by} or folders == set(schema.names):
            raise DataError(
                f"{self._source.name}: files do not hold the columns of --partition-by",
                "other columns in --cluster-by and --sort-by, and at least one more column",
            )
        for name in (*layout.partition_by, layout.cluster_by):
            if name is not None:
                check_session(schema.field(name).type, name, self._source.name)
        if layout.sort_by is not None and types.is_nested(schema.field(layout.sort_by).type):
            kind = schema.field(layout.sort_by).type
            raise DataError(f"{self._source.name}: column {layout.sort_by!r} holds {kind}", "numbers, times or text")

    def _write_plain(self, flat: FlattenedColumns, writer: WarehouseWriter) -> None:
        unit, row = (self._journal.parts[-1].unit, self._journal.parts[-1].row) if self._journal.parts else (0, 0)
        rows = RowQueue(self._make_pieces(flat, unit, row), len(self._source.splits))
        while rows.fill(1):
            self._journal.append(writer.write(rows, (), len(self._journal.parts)))

    def _make_pieces(self, flat: FlattenedColumns, unit: int, row: int) -> Iterator[UnitRows]:
        for piece in self._source.pieces(flat, unit, row):
            self._progress(piece.unit, len(self._source.splits))
            yield piece

    def _write_spilled(self, flat: FlattenedColumns, writer: WarehouseWriter) -> None:
        spill, splits = Spill(self._journal.folder / "spill", self._layout), len(self._source.splits)
        for split in spill.fill(self._source.pieces(flat, *spill.position)):
            self._progress(split, 2 * splits)
        ranges = spill.ranges()
        # One group of ranges per folder, as a file holds rows of one folder only.
        begins = [i for i, s in enumerate(ranges) if i == 0 or s.folder != ranges[i - 1].folder]
        for begin, end in zip(begins, [*begins[1:], len(ranges)], strict=True):
            self._write_folder(spill, ranges, range(begin, end), writer)
            self._progress(splits + splits * end // len(ranges), 2 * splits)

    def _write_folder(self, spill: Spill, ranges: list[SpillRange], units: range, writer: WarehouseWriter) -> None:
        done = [
            part for part in self._journal.parts if units.start < part.unit or (part.unit == units.start and part.row)
        ]
        parts = [part for part in done if part.unit < units.stop]
        if len(done) > len(parts):  # a later folder has files, so this one is complete
            return
        cells = ranges[units.start].folder
        unit, row = (parts[-1].unit, parts[-1].row) if parts else (units.start, 0)
        tables = (rows_from(spill.read(ranges[n]), n, row if n == unit else 0) for n in range(unit, units.stop))
        rows = RowQueue(chain.from_iterable(tables), units.stop)
        number = len(parts)
        while rows.fill(1):
            self._journal.append(writer.write(rows, cells, number))
            number += 1
