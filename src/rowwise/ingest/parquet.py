"""Parquet files as a `Reader`: a split is one row group of one file.

Only the footers are read to know the splits, and only the columns asked for to read one, so a wide table costs what
its used columns cost; see [Note: a sparse image] in `warehouse/image.py`. A reader that is sent to another process
carries names and no footers. Known limits: row groups are the unit of memory, so a file written as one huge group is
read whole by `read` (`pieces` cuts it), and page checksums unless asked for: checking them takes a tenth of the
decode.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import final

import msgspec
import pyarrow as pa
from pyarrow import parquet as pq
from pyarrow import types

from rowwise.errors import DataError
from rowwise.ingest.reader import Split, check_columns
from rowwise.ingest.warehouse import hive
from rowwise.ingest.warehouse.footer import check_chunks, check_footer
from rowwise.ingest.warehouse.image import SparseFile
from rowwise.ingest.warehouse.ranges import GAP_BYTES, ReadCounters
from rowwise.ingest.warehouse.statistics import RowGroup, groups_of
from rowwise.ingest.warehouse.storage import FileStore, is_url
from rowwise.ingest.where import ColumnBounds, RowFilter

ENDINGS = (".parquet", ".pq")
FOOTER_THREADS = 8  # waiting for a disk or a network, most of the time
STREAM_BYTES = 64 << 10  # of each column of `pieces`
UNFINISHED = Path("_rowwise") / "journal.jsonl"  # in a folder that convert has not done with


@final
class ParquetReader:
    """A Parquet file, a folder of them, a pattern such as `logs/day=*/*.parquet`, or a URL of these.

    Folders called `day=3` make a column `day`. Attributes of folders that are columns of the files, too, stay as the
    files have them.

    Args:
        path: where they are.
        where: row groups without a row that is wanted make no split; rows are not filtered.
        gap_bytes: wanted chunks this far apart at most are read in one go; 0: each for itself.
        verify: check the checksums of pages, where the writer left some.
        threads: decode columns in several threads; worker processes had better not.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        where: RowFilter | None = None,
        gap_bytes: int = GAP_BYTES,
        verify: bool = False,
        threads: bool = True,
    ) -> None:
        """List the files and read the first footer; one that is not Parquet is refused here."""
        if gap_bytes < 0:
            raise DataError(f"gap_bytes={gap_bytes}: want 0 or more")
        if not is_url(path) and (Path(path) / UNFINISHED).exists():
            raise DataError(f"{path}: is not converted to its end: give the same `rowwise data convert` command again")
        self._store = FileStore(path, ENDINGS)
        self._where, self._gap_bytes, self._verify, self._threads = where or RowFilter(), gap_bytes, verify, threads
        first = self._store.files[0]
        footer = self._footer(first)
        in_file = footer.schema.to_arrow_schema()
        texts = [hive.texts_of(source) for source in self._store.files]
        known = _folder_types(footer)
        self._folders = [f for f in hive.fields(texts, known) if f.name not in in_file.names]
        self._schema = pa.schema([*in_file, *self._folders])
        self._types = {field.name: field.type for field in self._schema}
        self._where.check(self._schema, first)
        self._counters, self._splits = ReadCounters(), None
        self._idle, self._lock = list[SparseFile](), threading.Lock()

    _splits: tuple[Split, ...] | None

    @property
    def schema(self) -> pa.Schema:
        """The columns of the first file and of the folders; other files need the ones that are read."""
        return self._schema

    @property
    def counters(self) -> ReadCounters:
        """Reads of this reader in this process so far."""
        return self._counters

    def splits(self) -> tuple[Split, ...]:
        """One for each row group that has rows, and may have some that are wanted."""
        if self._splits is None:
            files = [
                source
                for source in self._store.files
                if self._where.may_hold(self._folder_columns(source), self._schema)
            ]
            with ThreadPoolExecutor(min(FOOTER_THREADS, max(len(files), 1))) as pool:
                groups = list(pool.map(self._groups, files))
            made = [(s, g) for s, of_file in zip(files, groups, strict=True) for g in of_file]
            self._splits = tuple(_split(source, group) for source, group in made if group.may_hold)
            self._counters += ReadCounters(pruned_groups=len(made) - len(self._splits))
        return self._splits

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        with self._open_file(split.source) as image:
            inside = self._check(image, split, columns)
            table, counters = image.read(split.start, inside, gap=self._gap_bytes, threads=self._threads)
        with self._lock:
            self._counters += counters
        return self._with_folder_columns(table, split, columns)

    def pieces(self, split: Split, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """The same rows, at most so many at a time, in memory for as many; for groups of any size."""
        with self._open_file(split.source) as image:
            inside, footer = self._check(image, split, columns), image.footer
            paths = [image.paths[leaf] for name in inside for leaf in image.leaves[name]]
        with _naming(split.source), self._store.stream(split.source) as file:
            opened = pq.ParquetFile(file, metadata=footer, pre_buffer=False, buffer_size=STREAM_BYTES)
            for batch in opened.iter_batches(rows, [split.start], paths, use_threads=False):
                yield self._with_folder_columns(pa.Table.from_batches([batch]).select(list(inside)), split, columns)

    def __getstate__(self) -> dict[str, object]:
        """Names and settings; files are opened anew where they are read."""
        made_here = ("_idle", "_lock")
        state = {name: value for name, value in self.__dict__.items() if name not in made_here}
        return state | {"_splits": None, "_counters": ReadCounters()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._idle, self._lock = list[SparseFile](), threading.Lock()

    def stamp(self, source: str) -> tuple[int, int]:
        """Size and time of change of a file."""
        return self._store.stamp(source)

    def _groups(self, source: str) -> list[RowGroup]:
        return groups_of(self._footer(source, chunks=bool(self._where.all_of)), self._where, self._schema)

    def _folder_columns(self, source: str) -> dict[str, ColumnBounds]:
        """The columns that a file's folders name."""
        if not self._where.all_of:
            return {}
        cells = self._cells(source)
        return {n: ColumnBounds(least=v, most=v, nulls=int(v is None), rows=1) for n, v in cells.items()}

    def _cells(self, source: str) -> dict[str, hive.Cell]:
        texts = hive.texts_of(source)
        return {field.name: hive.cell(texts[field.name], field.type) for field in self._folders}

    def _footer(self, source: str, *, chunks: bool = False) -> pq.FileMetaData:
        """The checked footer of a file; with `chunks`, also of each column chunk."""
        opened = self._store.open(source)
        size = opened.size
        opened.close()
        if size == 0:
            raise DataError(f"{source}: the file is empty: want Parquet")
        with _naming(source), self._store.stream(source) as file:
            footer = pq.read_metadata(file)
            check_footer(footer)
            if chunks:
                check_chunks(footer, size)
        return footer

    @contextmanager
    def _open_file(self, source: str) -> Iterator[SparseFile]:
        """The file of the last split, or another in its place; several threads that read have one each."""
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

    def _check(self, image: SparseFile, split: Split, columns: Sequence[str]) -> list[str]:
        """The columns that are in the file; refuses one that is no longer what the splits were made of."""
        folders = {field.name for field in self._folders}
        inside = [name for name in columns if name not in folders]
        has = image.footer.num_row_groups
        out = "the file has changed since the splits were made: start anew, or put the old one back"
        if split.start >= has:
            raise DataError(f"{split.source}: want row group {split.start}, and there are {has}; {out}")
        rows = image.footer.row_group(split.start).num_rows
        if split.rows not in (None, rows):
            raise DataError(f"{split.source}: row group {split.start} has {rows} rows, and had {split.rows}; {out}")
        check_columns(inside, image.schema, split.source)
        for name in inside:
            self._check_type(image.types[name], name, split)
        return inside

    def _check_type(self, got: pa.DataType, name: str, split: Split) -> None:
        want = self._types.get(name, got)
        if got != want and not _alike(got, want):
            out = "write the files with one type for it, or read those of each type for themselves"
            where = f"row group {split.start}, column {name!r}"
            raise DataError(f"{split.source}: {where} holds {got}, and in {self._store.files[0]} {want}: {out}")

    def _with_folder_columns(self, table: pa.Table, split: Split, columns: Sequence[str]) -> pa.Table:
        """The table with its folder columns, in the requested order, of the schema's types."""
        if self._folders:
            cells = self._cells(split.source)
            for field in self._folders:
                if field.name in columns:
                    scalar = pa.scalar(cells[field.name], field.type)
                    table = table.append_column(field, pa.repeat(scalar, table.num_rows))
        for at, name in enumerate(table.column_names):
            want = self._types.get(name, table.field(at).type)
            if table.field(at).type != want:
                table = table.set_column(at, name, _cast(table[name], want, name, split))
        return table.select(list(columns))


def _folder_types(footer: pq.FileMetaData) -> dict[str, str]:
    """Types that `convert` has recorded for columns that became folders."""
    about = (footer.metadata or {}).get(b"rowwise")
    return {} if about is None else msgspec.json.decode(about, type=_About).partition_types


class _About(msgspec.Struct, frozen=True):
    partition_types: dict[str, str] = {}


def _split(source: str, group: RowGroup) -> Split:
    return Split(source=source, start=group.index, stop=group.index + 1, first_row=group.first_row, rows=group.rows)


def _alike(got: pa.DataType, want: pa.DataType) -> bool:
    """Whether one can stand for the other: the same kind of values in another width or layout."""
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    kinds = ((types.is_integer,), (types.is_floating,), texts, (types.is_null,))
    plain = got.value_type if types.is_dictionary(got) else got
    if types.is_dictionary(want):
        return _alike(plain, want.value_type)
    if types.is_null(plain) or plain == want:
        return True
    if (types.is_list(plain) or types.is_large_list(plain)) and (types.is_list(want) or types.is_large_list(want)):
        return plain.value_type == want.value_type or _alike(plain.value_type, want.value_type)
    return any(any(is_kind(plain) for is_kind in kind) and any(is_kind(want) for is_kind in kind) for kind in kinds)


def _cast(column: pa.ChunkedArray, want: pa.DataType, name: str, split: Split) -> pa.ChunkedArray:
    try:
        return column.cast(want)
    except pa.ArrowException as error:
        where = f"{split.source}: row group {split.start}, column {name!r}"
        out = "write the files with one type for it"
        raise DataError(f"{where} holds {column.type}, which does not fit into {want}: {error}; {out}") from error


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Arrow says what is wrong with a file, but not with which."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name}: cannot be read as Parquet: {error}") from error
