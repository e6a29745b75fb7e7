"""A `Reader` of Parquet files: a split is one row group of one file.

`splits` reads only footers, and `read` only the requested columns, so unused columns of a wide table cost nothing; see
[Note: a sparse image] in `warehouse/image.py`. A reader is pickled without footers. Known limits: `read` takes memory
for a whole row group (`pieces` does not); page checksums are verified only with `verify`, which adds a tenth to the
time of decoding.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import final

import msgspec
import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.base.errors import DataError
from rowwise.base.storage.read_cache import CacheFolder
from rowwise.ingest.lake.snapshot import TableSnapshot
from rowwise.ingest.reader import Split, check_columns
from rowwise.ingest.union import FlatColumn, can_cast, flat_columns, unite
from rowwise.ingest.warehouse import hive
from rowwise.ingest.warehouse.footer import check_chunks, check_footer
from rowwise.ingest.warehouse.hive import FolderConstants
from rowwise.ingest.warehouse.image import SparseFile
from rowwise.ingest.warehouse.ranges import GAP_BYTES, ReadCounters
from rowwise.ingest.warehouse.statistics import RowGroup, groups_of
from rowwise.ingest.warehouse.storage import FINISH, UNFINISHED, FileStore, is_url
from rowwise.ingest.where import RowFilter

ENDINGS = (".parquet", ".pq")
FOOTER_THREADS = 8  # they mostly wait for a disk or a network
STREAM_BYTES = 64 << 10  # buffer of each column in `pieces`


@final
class ParquetReader:
    """Reads the rows of Parquet files.

    The schema is the union of all files' columns, each with a type that holds the values of all files; fields of
    structs are columns `a.b`. Folders called `day=3` make a column `day`, unless the files have a column of that name.

    Args:
        path: a file, a folder, a pattern such as `logs/day=*/*.parquet`, a URL of one of these, or a table's snapshot.
        where: skip row groups in which no row can pass this filter; single rows are not filtered.
        gap_bytes: merge reads of wanted chunks that are at most this far apart; 0 never merges.
        verify: verify the checksums of pages, if the writer made some.
        threads: decode columns in several threads; not useful in worker processes.
        cache: read cache for files at URLs; None sends every read to the store.
    """

    def __init__(
        self,
        path: str | Path | TableSnapshot,
        *,
        where: RowFilter | None = None,
        gap_bytes: int = GAP_BYTES,
        verify: bool = False,
        threads: bool = True,
        cache: CacheFolder | None = None,
    ) -> None:
        """List the files and read the footers of those that may have rows of the filter."""
        if gap_bytes < 0:
            raise DataError(f"gap_bytes={gap_bytes}", "0 or more")
        self._where, self._gap_bytes, self._verify, self._threads = where or RowFilter(), gap_bytes, verify, threads
        footers: dict[str, pq.FileMetaData] = {}
        inside: Collection[str] = ()
        if isinstance(path, TableSnapshot):
            self._where.check(path.schema, path.name)
            self._store = FileStore(path.root, ENDINGS, cache, files=path.files, gone=path.gone)
            constants = path
        else:
            if not is_url(path) and (Path(path) / UNFINISHED).exists():
                raise DataError(f"{path}: its conversion is unfinished", hint=FINISH)
            self._store = FileStore(path, ENDINGS, cache)
            first = self._store.files[0]
            footers = {first: self._footer(first, chunks=bool(self._where.all_of))}
            constants = FolderConstants(self._store.files, _folder_types(footers[first]))
            inside = flat_columns(footers[first].schema.to_arrow_schema())
        self._constants: TableSnapshot | FolderConstants = constants
        kept = [source for source in self._store.files if self._may_hold(source, inside)]
        footers |= self._footers([source for source in kept if source not in footers])
        schemas = {source: footers[source].schema.to_arrow_schema() for source in (kept or footers)}
        union = unite(schemas)
        if isinstance(constants, TableSnapshot):
            constants.check_ids(schemas)
            union = union._replace(types={n: union.types[n] for n in constants.schema.names if n in union.types})
        else:
            constants.hide(union.types)
        self._sources, self.notes, self._lacking = union.sources, union.notes, union.lacking
        self._folders = [field for field in self._constants.schema if field.name not in union.types]
        self._schema = pa.schema([*union.types.items(), *self._folders])
        self._types = {field.name: field.type for field in self._schema}
        self._where.check(self._schema, path.name if isinstance(path, TableSnapshot) else self._store.files[0])
        self._counters, self._splits = ReadCounters(), None
        self._splits = self._list(kept, {source: self._groups(footers[source]) for source in kept})
        self._idle, self._lock = list[SparseFile](), threading.Lock()

    _splits: tuple[Split, ...] | None

    @property
    def schema(self) -> pa.Schema:
        """The columns of all files and of the folders; a column has no value in a file that lacks it."""
        return self._schema

    @property
    def counters(self) -> ReadCounters:
        """Counters of all reads of this reader in this process."""
        return self._counters

    def splits(self) -> tuple[Split, ...]:
        """A split for each row group that has rows, and may have rows that pass the filter."""
        if self._splits is None:  # unpickled in another process
            files = [source for source in self._store.files if self._may_hold(source)]
            self._splits = self._list(files, {name: self._groups(f) for name, f in self._footers(files).items()})
        return self._splits

    def _list(self, files: Sequence[str], groups: Mapping[str, list[RowGroup]]) -> tuple[Split, ...]:
        pairs = [(source, group) for source in files for group in groups[source]]
        splits = tuple(_split(source, group) for source, group in pairs if group.may_hold)
        self._counters += ReadCounters(pruned_groups=len(pairs) - len(splits))
        return splits

    def _footers(self, files: Sequence[str]) -> dict[str, pq.FileMetaData]:
        with ThreadPoolExecutor(min(FOOTER_THREADS, max(len(files), 1))) as pool:
            read = pool.map(partial(self._footer, chunks=bool(self._where.all_of)), files)
            return dict(zip(files, read, strict=True))

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        with self._open_image(split.source) as image:
            inside, flat = self._check_split(image, split, columns)
            table, counters = image.read(split.start, inside, gap=self._gap_bytes, threads=self._threads)
        with self._lock:
            self._counters += counters
        return self._complete(table, flat, split, columns)

    def pieces(self, split: Split, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """The rows of a split in tables of at most `rows` rows; holds one table in memory, not the row group."""
        with self._open_image(split.source) as image:
            (inside, flat), footer = self._check_split(image, split, columns), image.footer
            paths = [image.paths[leaf] for name in inside for leaf in image.leaves[name]]
        with _name_file_in_errors(split.source), self._store.stream(split.source) as file:
            opened = pq.ParquetFile(file, metadata=footer, pre_buffer=False, buffer_size=STREAM_BYTES)
            for batch in opened.iter_batches(rows, [split.start], paths, use_threads=False):
                yield self._complete(pa.Table.from_batches([batch]).select(list(inside)), flat, split, columns)

    def __getstate__(self) -> dict[str, object]:
        """Names and settings; another process opens the files itself."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("_idle", "_lock")}
        return state | {"_splits": None, "_counters": ReadCounters()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._idle, self._lock = list[SparseFile](), threading.Lock()

    def stamp(self, source: str) -> tuple[int, int]:
        """Size in bytes and modification time of a file."""
        return self._store.stamp(source)

    def _groups(self, footer: pq.FileMetaData) -> list[RowGroup]:
        return groups_of(footer, self._where, self._schema)

    def _may_hold(self, source: str, inside: Collection[str] = ()) -> bool:
        """Whether a file may have rows of the filter, by its constants, except columns that are also `inside` files."""
        if not self._where.all_of:
            return True
        bounds = {name: bound for name, bound in self._constants.bounds(source).items() if name not in inside}
        return self._where.may_hold(bounds, self._constants.schema)

    def _footer(self, source: str, *, chunks: bool = False) -> pq.FileMetaData:
        """Read and check a file's footer; `chunks` checks each column chunk, too."""
        opened = self._store.open(source)
        size = opened.size
        opened.close()
        if size == 0:
            raise DataError(f"{source}: the file is empty", "a Parquet file")
        with _name_file_in_errors(source), self._store.stream(source) as file:
            footer = pq.read_metadata(file)
            check_footer(footer)
            if chunks:
                check_chunks(footer, size)
        return footer

    @contextmanager
    def _open_image(self, source: str) -> Iterator[SparseFile]:
        """An open file, reused if the last split came from it; each concurrent reader has its own."""
        with self._lock:
            image = self._idle.pop() if self._idle else None
        if image is None or image.source != source:
            footer = self._footer(source, chunks=True)
            if image is not None:
                image.close()
            image = SparseFile(source, self._store.open(source), footer, verify=self._verify)
        try:
            yield image
        finally:
            with self._lock:
                self._idle.append(image)

    def _check_split(
        self, image: SparseFile, split: Split, columns: Sequence[str]
    ) -> tuple[list[str], dict[str, FlatColumn]]:
        """The columns to read from a file, and their fields; refuses a file that has changed since `splits`."""
        check_columns(columns, self._schema, split.source)
        folders = self._folder_names
        flat = {name: image.flat[name] for name in columns if name in image.flat and name not in folders}
        inside = list(dict.fromkeys(column.root for column in flat.values()))
        groups = image.footer.num_row_groups
        changed = "the file has changed since the splits were made"
        hint = "put the old file back, or start a new run"
        if split.start >= groups:
            raise DataError(f"{split.source}: no row group {split.start}, only {groups}: {changed}", hint=hint)
        rows = image.footer.row_group(split.start).num_rows
        if split.rows not in (None, rows):
            raise DataError(
                f"{split.source}: row group {split.start} has {rows} rows, had {split.rows}: {changed}", hint=hint
            )
        check_columns(inside, image.schema, split.source)
        for name in columns:
            if name not in flat and name not in folders and split.source not in self._lacking.get(name, ()):
                raise DataError(f"{split.source}: no column {name!r}: {changed}", hint=hint)
        for name, column in flat.items():
            self._check_type(column.kind, name, split)
        return inside, flat

    @property
    def _folder_names(self) -> set[str]:
        return {field.name for field in self._folders}

    def _check_type(self, got: pa.DataType, name: str, split: Split) -> None:
        wanted = self._types.get(name, got)
        if got != wanted and not can_cast(got, wanted):
            expected = f"files with one type for {name!r}"
            hint = "name such files by a pattern, write the others anew, or leave the column out by inspect --ignore"
            where = f"row group {split.start}, column {name!r}"
            problem = f"{split.source}: {where} holds {got}, but {wanted} in {self._sources[name]}"
            raise DataError(problem, expected, hint=hint)

    def _complete(
        self, table: pa.Table, flat: Mapping[str, FlatColumn], split: Split, columns: Sequence[str]
    ) -> pa.Table:
        """Add the columns of folders and of other files, cast to the types of the schema, and order the columns."""
        if any(column.path for column in flat.values()):
            table = pa.table({name: column.take_from(table) for name, column in flat.items()})
        table = hive.complete(table, columns, self._schema, self._constants.values(split.source))
        for at, name in enumerate(table.column_names):
            wanted = self._types.get(name, table.field(at).type)
            if table.field(at).type != wanted:
                table = table.set_column(at, name, _cast(table[name], wanted, name, split))
        return table.select(list(columns))


def _folder_types(footer: pq.FileMetaData) -> dict[str, str]:
    """The types of the folders' columns, as `convert` wrote them into the footer."""
    about = (footer.metadata or {}).get(b"rowwise")
    return {} if about is None else msgspec.json.decode(about, type=_FooterNote).partition_types


class _FooterNote(msgspec.Struct, frozen=True):
    partition_types: dict[str, str] = {}


def _split(source: str, group: RowGroup) -> Split:
    return Split(source=source, start=group.index, stop=group.index + 1, first_row=group.first_row, rows=group.rows)


def _cast(column: pa.ChunkedArray, wanted: pa.DataType, name: str, split: Split) -> pa.ChunkedArray:
    try:
        return column.cast(wanted)
    except pa.ArrowException as error:
        where = f"{split.source}: row group {split.start}, column {name!r}"
        expected = f"files with one type for {name!r}"
        raise DataError(f"{where} holds {column.type}, which does not fit into {wanted}: {error}", expected) from error


@contextmanager
def _name_file_in_errors(name: str) -> Iterator[None]:
    """Turn Arrow's errors into a DataError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{name}: cannot be read as Parquet: {str(error).rstrip('.')}", "an undamaged Parquet file"
        ) from error
