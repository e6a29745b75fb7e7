"""Reads a checkpoint: tensors by name, whole or any rectangle, every chunk verified as it is read.

Only chunks that overlap the rectangle are read. A chunk of the same layout is read straight into the target's memory.
Others are read a few rows at a time: columns are selected, and rows of another row type are converted through float32.
Equal row types are copied without rounding. If a chunk is damaged, the target keeps what was read before.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from rowwise.base.errors import CheckpointError, DamageError, did_you_mean, printable
from rowwise.base.storage.folder import Folder, OpenRange, open_range
from rowwise.checkpoint.delta import decode_rows
from rowwise.checkpoint.files import CODES, BUFFER_bytes, ByteRange, FileHeader, as_bytes, reading_file
from rowwise.checkpoint.local_shard import LocalShard, ids_dtype
from rowwise.checkpoint.manifest import NAME, CheckpointManifest, ChunkRows, Span, TensorChunk, TensorEntry, split_rows
from rowwise.checkpoint.reshard import CopyRegion, copy_regions, stored_spans
from rowwise.checkpoint.windows import cut_rows
from rowwise.tables.ops.arena import initial_rows
from rowwise.tables.ops.checksum import crc32
from rowwise.tables.ops.layout import TablePiece
from rowwise.tables.ops.rowtype import pack, unpack
from rowwise.tables.spec import Constant, RowType, Table, Value

THREADS = 2  # checksums take longer than reading
STORE_THREADS = 8  # requests to an object store take longer than checksums
RUN_bytes = 64 << 20  # min. bytes of a thread's task
RANGE_bytes = 8  # a row rounded to fewer bits begins with two floats


class DamagedChunk(Value, frozen=True):
    """A chunk that does not match its checksum, or its file."""

    tensor: str
    place: str  # its rows and columns
    file: str
    why: str


@contextmanager
def reading_data(folder: Folder) -> Iterator[None]:
    """Turn a wrong type in the manifest's data into a CheckpointError."""
    try:
        yield
    except msgspec.ValidationError as error:
        problem = printable(str(error))[:200].replace("\n", " ")
        raise CheckpointError(f"{folder / NAME}: its data are not those of a training run: {problem}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An open checkpoint: its manifest, and methods that read tensors."""

    folder: Folder
    manifest: CheckpointManifest
    _headers: dict[str, FileHeader] = field(default_factory=dict, repr=False, compare=False)  # of all files read

    @classmethod
    def open(cls, folder: Folder) -> "Checkpoint":
        """Read and check the manifest; no tensor is read."""
        return cls(folder=folder, manifest=CheckpointManifest.read(folder))

    def names(self) -> list[str]:
        return list(self.manifest.tensors)

    def entry(self, name: str) -> TensorEntry:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}; {nearest_name(name, self.manifest.tensors)}")
        return self.manifest.tensors[name]

    def load(self, name: str, rows: Span | None = None, cols: Span | None = None) -> Tensor:
        """A tensor, or a rectangle of it, in its stored type."""
        entry = self.entry(name)
        rows, columns = rows or (0, entry.rows), cols or (0, entry.columns)
        if not (0 <= rows[0] <= rows[1] <= entry.rows and 0 <= columns[0] <= columns[1] <= entry.columns):
            size = f"{self.folder}: tensor {name!r} has {entry.rows} rows and {entry.columns} columns"
            raise CheckpointError(f"{size}; got rows [{rows[0]}, {rows[1]}), columns [{columns[0]}, {columns[1]})")
        for copy in copy_regions(entry, rows, columns):  # before allocating what a crafted manifest may claim
            if copy.chunk.initial is None:
                self._find_range(name, copy.chunk, copy.chunk)
        plain = cols is None and entry.row_type is None
        shape = entry.shape[1:] if plain else (entry.stored_width(columns),)
        allocate = torch.zeros if entry.scaled else torch.empty  # scaled rows end with padding, which is not filled
        out = allocate((rows[1] - rows[0], *shape), dtype=getattr(torch, entry.dtype))
        self.copy_into(out, name, rows, cols)
        return out if entry.shape else out.reshape(())

    def copy_into(
        self,
        out: Tensor,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        row_type: RowType | None = None,
    ) -> None:
        """Fill `out` with a rectangle of a tensor; `row_type`: of `out`, by default the table's."""
        entry = self.entry(name)
        group = entry.column_group if row_type in (None, entry.row_type) else None
        rows, kind = rows or (0, entry.rows), row_type or entry.row_type
        self.fill(
            LocalShard(
                name=name, tensor=out if out.dim() else out.view(1), shape=entry.shape, rows=rows, cols=cols,
                row_type=kind, column_group=group,
            )
        )  # fmt: skip

    @torch.no_grad()
    def fill(self, shard: LocalShard) -> None:
        """Fill a shard with its rectangle of the tensor."""
        entry, wanted = self.entry(shard.name), shard.entry
        same = structs.replace(entry, chunks=()) == wanted
        if entry.shape != wanted.shape or not (same or (entry.row_type and wanted.row_type)):
            raise CheckpointError(
                f"{self.folder}: {shard.name}: got {entry.shape} of {entry.dtype}",
                f"{wanted.shape} of {wanted.dtype}",
                hint="warm-start with init_from instead",
            )
        out = shard.tensor
        if shard.stream is None and out.is_cpu and (out.dim() <= 2 or out.is_contiguous()):
            self._fill_memory(shard, same=same)
            return
        if same and self._fill_changed(shard):
            return
        begin, cuts = shard.rows[0], sorted({chunk.rows[1] for chunk in entry.chunks})
        # Windows end at chunk boundaries, as each window reads all of the chunks that it overlaps.
        for first, end in cut_rows(len(out), max(1, shard.row_bytes), [cut - begin for cut in cuts]):
            window = shard.cut(begin + first, begin + end)
            buffer = window.allocate()
            self._fill_memory(buffer, same=same)
            window.store(buffer.tensor)

    def fill_all(self, shards: Iterable[LocalShard]) -> None:
        """Fill shards, which must not overlap, in several threads."""
        with ThreadPoolExecutor(THREADS if isinstance(self.folder, Path) else STORE_THREADS) as pool:
            for _ in pool.map(self.fill, [run for shard in shards for run in self._split_rows(shard)]):
                pass

    def _split_rows(self, shard: LocalShard) -> Iterator[LocalShard]:
        """Split a shard into tasks for threads, at ends of chunks; of at least `RUN_bytes` in a folder."""
        begin, end = shard.rows
        min_bytes = RUN_bytes if isinstance(self.folder, Path) else 1
        if shard.name in self.manifest.tensors:
            for cut in sorted({chunk.rows[1] for chunk in self.entry(shard.name).chunks}):
                if begin < cut < end and (cut - begin) * shard.row_bytes >= min_bytes:
                    yield shard.cut(begin, cut)
                    begin = cut
        yield shard.cut(begin, end)

    def read_ids(self, name: str, chunk: TensorChunk) -> Tensor:
        """The row numbers of a chunk of changed rows, ascending."""
        ids = self._read_ids(name, chunk)
        assert ids is not None, "a chunk of all rows"
        return ids.long()

    def read_changed(self, name: str, chunk: TensorChunk, out: Tensor) -> None:
        """Fill `out` with the rows of a chunk of changed rows, as they are stored."""
        assert chunk.bits is None
        for _ in self._read_chunk(name, chunk, out):
            pass

    def verify(self) -> None:
        """Read everything; raises one error that lists all damaged chunks."""
        damage = "; ".join(f"{bad.place} of tensor {bad.tensor!r}: {bad.why}" for bad in self.find_damage())
        if damage:
            raise DamageError(f"{damage} (`rowwise ckpt verify RUN` names an undamaged one)")

    def find_damage(self, tell: Callable[[TensorEntry, TensorChunk], None] | None = None) -> list[DamagedChunk]:
        """All damaged chunks; `tell` is called after each chunk."""
        damage: list[DamagedChunk] = []
        for name in self.names():
            entry = self.entry(name)
            for chunk in entry.chunks:
                try:
                    self.check_rows(name, chunk)
                except CheckpointError as error:
                    place = entry.describe(chunk.rows, entry.chunk_cols(chunk))
                    damage.append(DamagedChunk(tensor=name, place=place, file=chunk.file, why=str(error)))
                if tell is not None:
                    tell(entry, chunk)
        return damage

    def _fill_changed(self, shard: LocalShard) -> bool:
        """Fill the changed rows of a stream whose other rows already have their initial values; False if it cannot."""
        entry = self.entry(shard.name)
        cols = shard.cols or (0, entry.columns)
        copies = list(copy_regions(entry, shard.rows, cols))
        if shard.initial is None or any(entry.chunk_cols(copy.chunk) != cols for copy in copies):
            return False
        if any(copy.chunk.ids is None and copy.chunk.initial != shard.initial for copy in copies):
            return False
        for copy in copies:
            if copy.chunk.ids is not None:
                for index, rows in self._read_rows(shard.name, copy):
                    assert isinstance(index, Tensor)
                    shard.store_rows(index.long() + copy.rows_to[0], rows)
        return True

    def _fill_memory(self, shard: LocalShard, *, same: bool) -> None:
        flat = shard.tensor.view(len(shard.tensor), -1) if shard.tensor.numel() else shard.tensor
        if same:
            self._fill_same(flat, shard)
        elif shard.entry.scaled:
            self._fill_scaled(flat, shard)
        else:
            self._fill_floats(flat, shard)

    def _fill_same(self, flat: Tensor, shard: LocalShard) -> None:
        """Fill from the same row type: bytes are copied."""
        entry = self.entry(shard.name)
        cols = shard.cols or (0, entry.columns)
        for copy in copy_regions(entry, shard.rows, cols):
            chunk_cols = entry.chunk_cols(copy.chunk)
            rows = flat[slice(*copy.rows_to)]
            plain = copy.chunk.bits is None and copy.chunk.ids is None
            fits = cols == chunk_cols and copy.rows_from == (0, copy.chunk.rows[1] - copy.chunk.rows[0])
            if plain and fits and rows.is_contiguous():  # straight from the file into the target
                for _ in self._read_chunk(shard.name, copy.chunk, rows):
                    pass
                continue
            spans_from = stored_spans(entry, chunk_cols[1] - chunk_cols[0], copy.cols_from)
            spans_to = stored_spans(entry, cols[1] - cols[0], copy.cols_to)
            for index, buffer in self._read_rows(shard.name, copy):
                for span_from, span_to in zip(spans_from, spans_to, strict=True):
                    rows[index, slice(*span_to)] = buffer[:, slice(*span_from)]

    def _fill_floats(self, flat: Tensor, shard: LocalShard) -> None:
        """Fill a row type without scales from another row type: rounds to nearest."""
        entry = self.entry(shard.name)
        assert entry.row_type is not None
        for copy in copy_regions(entry, shard.rows, shard.cols or (0, entry.columns)):
            chunk_cols = entry.chunk_cols(copy.chunk)
            rows = flat[slice(*copy.rows_to)]
            for index, buffer in self._read_rows(shard.name, copy):
                weights = unpack(buffer, chunk_cols[1] - chunk_cols[0], entry.row_type, entry.column_group)
                rows[index, slice(*copy.cols_to)] = weights[:, slice(*copy.cols_from)].to(rows.dtype)

    def _fill_scaled(self, flat: Tensor, shard: LocalShard) -> None:
        """Fill a row type with scales from another row type.

        A scale needs all columns of its group, which may be in several chunks: so full rows are collected in float32.
        """
        entry, cols = self.entry(shard.name), shard.cols or (0, self.entry(shard.name).columns)
        assert shard.row_type is not None
        # Rows between the cuts of full chunks, to bound memory; chunks of changed rows are read again for each span.
        full = [copy.rows_to for copy in copy_regions(entry, shard.rows, cols) if copy.chunk.ids is None]
        for begin, end in split_rows(full):
            rows = (shard.rows[0] + begin, shard.rows[0] + end)
            weights = torch.empty(end - begin, cols[1] - cols[0])
            self._fill_floats(weights, replace(shard, tensor=weights, rows=rows))
            flat[begin:end] = pack(weights, shard.row_type, shard.column_group)

    def _read_rows(self, name: str, copy: CopyRegion) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """The rows of a copy region a few at a time, in the table's row type, each with their index in the target."""
        (first, last), chunk, entry = copy.rows_from, copy.chunk, self.entry(name)
        ids = self._read_ids(name, chunk)
        for at, buffer in self._read_chunk(name, chunk):
            if ids is None:
                begin, end = max(first, at), min(last, at + len(buffer))
                index, chosen = slice(begin - first, end - first), slice(begin - at, end - at)
            else:
                relative = ids[at : at + len(buffer)] - chunk.rows[0]
                begin, end = torch.searchsorted(relative, torch.tensor([first, last])).tolist()
                index, chosen = relative[begin:end] - first, slice(begin, end)
            if begin < end:
                cols = entry.chunk_cols(chunk)
                yield index, decode_rows(buffer[chosen], entry, chunk.bits, cols[1] - cols[0])

    def _read_ids(self, name: str, chunk: TensorChunk) -> Tensor | None:
        """The row numbers of a chunk of changed rows; None for a full chunk."""
        if chunk.ids is None:
            return None
        self._find_range(name, chunk, chunk.ids)
        out = torch.empty(chunk.ids.count, 1, dtype=ids_dtype(self.entry(name).rows))
        for _ in self._read(name, chunk, chunk.ids, out):
            pass
        ids = out.flatten()
        inside = not len(ids) or chunk.rows[0] <= int(ids[0]) <= int(ids[-1]) < chunk.rows[1]
        if not inside or not bool((ids[1:] > ids[:-1]).all()):
            self._raise_damaged(name, chunk, "have row numbers that do not ascend within these rows")
        return ids

    def _read_chunk(self, name: str, chunk: TensorChunk, out: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Read a chunk a few rows at a time, into `out` or a buffer; raises at the end if its checksum is wrong."""
        entry = self.entry(name)
        if chunk.initial is None:
            self._find_range(name, chunk, chunk)
        dtype = torch.uint8 if chunk.bits else getattr(torch, entry.dtype)
        width = entry.chunk_width(chunk)
        step = max(1, BUFFER_bytes // max(1, width * dtype.itemsize))
        out = torch.empty(min(step, chunk.count), width, dtype=dtype) if out is None else out
        if chunk.initial is not None:
            for at in range(0, chunk.count, step):
                rows = min(step, chunk.count - at)
                buffer = out[at : at + rows] if len(out) == chunk.count else out[:rows]
                buffer.copy_(_initial_rows(entry, chunk, at, rows))
                yield at, buffer
            return
        for at, buffer in self._read(name, chunk, chunk, out):
            if chunk.bits and not bool(buffer[:, :RANGE_bytes].contiguous().view(torch.float32).isfinite().all()):
                self._raise_damaged(name, chunk, "have a range that is not finite")
            yield at, buffer

    def _read(
        self, name: str, chunk: TensorChunk, run: TensorChunk | ChunkRows, out: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Read a chunk or its row numbers into `out`; an `out` with fewer rows is a reused buffer."""
        step = min(len(out), max(1, BUFFER_bytes // max(1, out[:1].numel() * out.element_size()))) or 1
        if not isinstance(self.folder, Path) and len(out) == run.count:
            step = max(
                1, run.count
            )  # from a store at once, in several requests; from a file in steps that fit in cache
        sum32, stored = 0, self._find_range(name, chunk, run)
        opened = open_range(self.folder, chunk.file, stored.begin, stored.end)
        with reading_file(self.folder / chunk.file), opened as file:
            for at in range(0, run.count, step):
                rows = min(step, run.count - at)
                buffer = out[at : at + rows] if len(out) == run.count else out[:rows]
                bytes_N = as_bytes(buffer)
                read_into(file, bytes_N.numpy().data)
                sum32 = crc32(bytes_N, sum32)
                yield at, buffer
        if sum32 != run.crc32:
            self._raise_damaged(name, chunk, "do not match their checksum")

    def _raise_damaged(self, name: str, chunk: TensorChunk, fault: str) -> NoReturn:
        entry, path = self.entry(name), self.folder / chunk.file
        place = f"{entry.describe(chunk.rows, entry.chunk_cols(chunk))} of tensor {name!r}"
        raise DamageError(f"{path} is damaged: {place} {fault}; use another checkpoint")

    def find_rows(self, name: str, chunk: TensorChunk) -> ByteRange:
        """The bytes of a chunk of rows in its file."""
        return self._find_range(name, chunk, chunk)

    def check_rows(self, name: str, chunk: TensorChunk) -> None:
        """Read a chunk of rows; raises if it does not match its checksum."""
        self._read_ids(name, chunk)
        for _ in self._read_chunk(name, chunk):
            pass

    def check_headers(self) -> None:
        """Raise unless all files exist with the keys, types and shapes of the manifest; reads headers only."""
        for name, entry in self.manifest.tensors.items():
            for chunk in entry.chunks:
                for run in (chunk, chunk.ids):
                    if run is not None and chunk.initial is None:
                        self._find_range(name, chunk, run)

    def _find_range(self, name: str, chunk: TensorChunk, run: TensorChunk | ChunkRows) -> ByteRange:
        """The bytes of a chunk or its row numbers; raises unless the file's header agrees with the manifest."""
        entry, rows = self.entry(name), run.count
        kind, width = ("uint8" if chunk.bits else entry.dtype), entry.chunk_width(chunk)
        if isinstance(run, ChunkRows):
            kind, width = str(ids_dtype(entry.rows)).removeprefix("torch."), 1
        stored = self.header(chunk.file).ranges.get(run.key)
        if stored is None:
            self._raise_damaged(name, chunk, f"are not in its header, which has no key {run.key[:200]!r}")
        layout = (stored.code, stored.shape[:1], math.prod(stored.shape[1:]))
        if layout != (CODES[kind], (rows,), width):
            expected = f"{rows} rows of {width} {CODES[kind]}"
            self._raise_damaged(
                name, chunk, f"are {stored.code} of shape {stored.shape} in its header, expected {expected}"
            )
        return stored

    def header(self, file: str) -> FileHeader:
        if file not in self._headers:
            self._headers[file] = FileHeader.read(self.folder, file, self.manifest.files[file])
        return self._headers[file]


def _initial_rows(entry: TensorEntry, chunk: TensorChunk, at: int, count: int) -> Tensor:
    """Rows [at, at + count) of a chunk with initial values."""
    assert chunk.initial is not None
    cols = entry.chunk_cols(chunk)
    if entry.row_type is None:
        assert isinstance(chunk.initial.init, Constant)
        return torch.full((count, entry.chunk_width(chunk)), chunk.initial.init.value)
    full = Table(name="t", rows=entry.rows, dim=entry.columns, row_type=entry.row_type,
                 column_group=entry.column_group, init=chunk.initial.init)  # fmt: skip
    piece = TablePiece.cut(full, (0, entry.rows), cols, ())
    return initial_rows(piece, chunk.initial.key, torch.arange(chunk.rows[0] + at, chunk.rows[0] + at + count))


def nearest_name(name: str, known: Iterable[str]) -> str:
    words = list(known)
    if guess := did_you_mean(name, words, cutoff=0.5):
        return guess
    suffix = f" and {len(words) - 8} more" if len(words) > 8 else ""
    return f"there are {', '.join(words[:8]) or 'none'}{suffix}"


def read_into(file: OpenRange, memory: memoryview) -> None:
    """Fill the memory with the next bytes of a file."""
    at = 0
    while at < len(memory):
        count = file.readinto(memory[at:])
        if not count:
            raise OSError(5, "it ends too early")
        at += count
