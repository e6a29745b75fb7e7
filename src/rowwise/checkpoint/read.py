"""Reading a checkpoint: tensors by name, whole or any rectangle of them, every piece checked as it is read.

Only pieces that overlap what is wanted are read, and go straight to where they belong if they fit there as they are.
Otherwise a few rows at a time: their columns are picked out, and what is stored in another row type goes through
float32. Where the types are the same nothing is rounded. What was filled in before damage was met stays filled in.
"""

import math
import os
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

from rowwise.checkpoint.delta import decode_rows, ids_dtype
from rowwise.checkpoint.files import CODES, ByteRange, CHUNK_bytes, FileHeader, as_bytes
from rowwise.checkpoint.manifest import CheckpointManifest, PieceRows, Span, TensorChunk, TensorEntry, split_rows
from rowwise.checkpoint.parts import LocalShard
from rowwise.checkpoint.reshard import CopyRegion, overlaps, stored_spans
from rowwise.errors import CheckpointError
from rowwise.inside import open_inside
from rowwise.ops.checksum import crc32
from rowwise.ops.rowtype import pack, unpack
from rowwise.spec import RowType, Value
from rowwise.textfile import printable

THREADS = 2  # checksums take longer than reading
RUN_bytes = 64 << 20
RANGE_bytes = 8  # two floats, with which a row in fewer bits begins


class DamagedPiece(Value, frozen=True):
    """A piece that is not what was written."""

    tensor: str
    place: str  # which rows and columns
    file: str
    why: str


@contextmanager
def reading_data(folder: Path) -> Iterator[None]:
    """Data beside the tensors, which may be anything, and are not of the types that are wanted, are one error."""
    try:
        yield
    except msgspec.ValidationError as error:
        why = printable(str(error))[:200].replace("\n", " ")
        raise CheckpointError(f"{folder} has a manifest whose data are not those of a run: {why}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was opened; nothing but its manifest is read yet."""

    folder: Path
    manifest: CheckpointManifest
    _heads: dict[str, FileHeader] = field(default_factory=dict, repr=False, compare=False)  # of the files read so far

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read the manifest, which says whether the checkpoint is whole."""
        return cls(folder=folder, manifest=CheckpointManifest.read(folder))

    def names(self) -> list[str]:
        return list(self.manifest.tensors)

    def entry(self, name: str) -> TensorEntry:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}")
        return self.manifest.tensors[name]

    def load(self, name: str, rows: Span | None = None, cols: Span | None = None) -> Tensor:
        """A tensor, or some rows and columns of it, as it is stored."""
        entry = self.entry(name)
        rows, columns = rows or (0, entry.rows), cols or (0, entry.columns)
        if not (0 <= rows[0] <= rows[1] <= entry.rows and 0 <= columns[0] <= columns[1] <= entry.columns):
            what = f"{self.folder}: tensor {name!r} has {entry.rows} rows and {entry.columns} columns"
            raise CheckpointError(f"{what}; got rows [{rows[0]}, {rows[1]}), columns [{columns[0]}, {columns[1]})")
        for copy in overlaps(entry, rows, columns):  # before there is memory for what the manifest says
            self._place(name, copy.piece, copy.piece)
        plain = cols is None and entry.row_type is None
        shape = entry.shape[1:] if plain else (entry.width(columns),)
        make = torch.zeros if entry.scaled else torch.empty  # codes are followed by what is not read
        out = make((rows[1] - rows[0], *shape), dtype=getattr(torch, entry.dtype))
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
        """Fill `out` with rows and columns of a tensor; those of a table in another row type, if one is given."""
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
    def fill(self, part: LocalShard) -> None:
        """Fill a part with what the checkpoint has there."""
        entry, wanted = self.entry(part.name), part.entry
        same = structs.replace(entry, pieces=()) == wanted
        if entry.shape != wanted.shape or not (same or (entry.row_type and wanted.row_type)):
            got, want = f"{entry.shape} of {entry.dtype}", f"{wanted.shape} of {wanted.dtype}"
            raise CheckpointError(
                f"{self.folder}: {part.name}: got {got}, want {want}; warm-start with init_from instead"
            )
        out = part.tensor
        if not out.is_cpu or (out.dim() > 2 and not out.is_contiguous()):
            out = torch.empty(out.shape, dtype=out.dtype)
        flat = out.view(len(out), -1) if out.numel() else out
        if same:
            self._fill_same(flat, part)
        elif wanted.scaled:
            self._fill_scaled(flat, part)
        else:
            self._fill_floats(flat, part)
        if out is not part.tensor:
            part.tensor.copy_(out)

    def fill_all(self, parts: Iterable[LocalShard]) -> None:
        """Fill several parts, of which each place is in one."""
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(self.fill, [run for part in parts for run in self._runs(part)]):
                pass

    def _runs(self, part: LocalShard) -> Iterator[LocalShard]:
        """A part in runs of rows that are worth a thread's while, cut where its pieces are."""
        begin, end = part.rows
        if part.name in self.manifest.tensors:
            for cut in sorted({piece.rows[1] for piece in self.entry(part.name).pieces}):
                if begin < cut < end and (cut - begin) * part.row_bytes >= RUN_bytes:
                    yield part.cut(begin, cut)
                    begin = cut
        yield part.cut(begin, end)

    def verify(self) -> None:
        """Read everything; raises for all pieces that are not what was written."""
        found = self.find_damage()
        if found:
            text = "; ".join(f"{bad.place} of tensor {bad.tensor!r}: {bad.why}" for bad in found)
            raise CheckpointError(text)

    def find_damage(self, tell: Callable[[TensorEntry, TensorChunk], None] | None = None) -> list[DamagedPiece]:
        """Every piece that is not what was written; `tell` hears of each that was read."""
        found: list[DamagedPiece] = []
        for name in self.names():
            entry = self.entry(name)
            for piece in entry.pieces:
                try:
                    self._ids(name, piece)
                    for _ in self._stream(name, piece):
                        pass
                except CheckpointError as error:
                    place = entry.place(piece.rows, entry.cols_of(piece))
                    found.append(DamagedPiece(tensor=name, place=place, file=piece.file, why=str(error)))
                if tell is not None:
                    tell(entry, piece)
        return found

    def _fill_same(self, flat: Tensor, part: LocalShard) -> None:
        entry = self.entry(part.name)
        cols = part.cols or (0, entry.columns)
        for copy in overlaps(entry, part.rows, cols):
            theirs = entry.cols_of(copy.piece)
            rows = flat[slice(*copy.rows_to)]
            plain = copy.piece.bits is None and copy.piece.ids is None
            fits = cols == theirs and copy.rows_from == (0, copy.piece.rows[1] - copy.piece.rows[0])
            if plain and fits and rows.is_contiguous():
                for _ in self._stream(part.name, copy.piece, rows):
                    pass
                continue
            spans_from = stored_spans(entry, theirs[1] - theirs[0], copy.cols_from)
            spans_to = stored_spans(entry, cols[1] - cols[0], copy.cols_to)
            for where, chunk in self._rows(part.name, copy):
                for span_from, span_to in zip(spans_from, spans_to, strict=True):
                    rows[where, slice(*span_to)] = chunk[:, slice(*span_from)]

    def _fill_floats(self, flat: Tensor, part: LocalShard) -> None:
        """In a type without scales: rounded to the nearest."""
        entry = self.entry(part.name)
        assert entry.row_type is not None
        for copy in overlaps(entry, part.rows, part.cols or (0, entry.columns)):
            theirs = entry.cols_of(copy.piece)
            rows = flat[slice(*copy.rows_to)]
            for where, chunk in self._rows(part.name, copy):
                weights = unpack(chunk, theirs[1] - theirs[0], entry.row_type, entry.column_group)
                rows[where, slice(*copy.cols_to)] = weights[:, slice(*copy.cols_from)].to(rows.dtype)

    def _fill_scaled(self, flat: Tensor, part: LocalShard) -> None:
        """Rounded to codes: all columns of a group have to be there at once, whichever pieces they are in."""
        entry, cols = self.entry(part.name), part.cols or (0, self.entry(part.name).columns)
        assert part.row_type is not None
        # Between the cuts of those that have all of their rows; the others are read for each run of rows again.
        found = [copy.rows_to for copy in overlaps(entry, part.rows, cols) if copy.piece.ids is None]
        for begin, end in split_rows(found):
            rows = (part.rows[0] + begin, part.rows[0] + end)
            weights = torch.empty(end - begin, cols[1] - cols[0])
            self._fill_floats(weights, replace(part, tensor=weights, rows=rows))
            flat[begin:end] = pack(weights, part.row_type, part.column_group)

    def _rows(self, name: str, copy: CopyRegion) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """A few rows of a piece at a time, as the tensor stores them, and which of those to copy to they are."""
        (first, last), piece, entry = copy.rows_from, copy.piece, self.entry(name)
        ids = self._ids(name, piece)
        for at, chunk in self._stream(name, piece):
            if ids is None:
                begin, end = max(first, at), min(last, at + len(chunk))
                where, chosen = slice(begin - first, end - first), slice(begin - at, end - at)
            else:
                near = ids[at : at + len(chunk)] - piece.rows[0]
                begin, end = torch.searchsorted(near, torch.tensor([first, last])).tolist()
                where, chosen = near[begin:end] - first, slice(begin, end)
            if begin < end:
                cols = entry.cols_of(piece)
                yield where, decode_rows(chunk[chosen], entry, piece.bits, cols[1] - cols[0])

    def _ids(self, name: str, piece: TensorChunk) -> Tensor | None:
        """The numbers of the rows of a piece that has some only."""
        if piece.ids is None:
            return None
        self._place(name, piece, piece.ids)
        out = torch.empty(piece.ids.count, 1, dtype=ids_dtype(self.entry(name)))
        for _ in self._read(name, piece, piece.ids, out):
            pass
        ids = out.flatten()
        inside = not len(ids) or piece.rows[0] <= int(ids[0]) <= int(ids[-1]) < piece.rows[1]
        if not inside or not bool((ids[1:] > ids[:-1]).all()):
            self._refuse(name, piece, f"do not ascend inside of rows {piece.rows[0]} to {piece.rows[1] - 1}")
        return ids

    def _stream(self, name: str, piece: TensorChunk, out: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Read a piece, a few rows at a time, into `out` or a buffer; at the end its checksum has to be right."""
        entry = self.entry(name)
        self._place(name, piece, piece)
        dtype = torch.uint8 if piece.bits else getattr(torch, entry.dtype)
        width = entry.width_of(piece)
        step = max(1, CHUNK_bytes // max(1, width * dtype.itemsize))
        out = torch.empty(min(step, piece.count), width, dtype=dtype) if out is None else out
        for at, chunk in self._read(name, piece, piece, out):
            if piece.bits and not bool(chunk[:, :RANGE_bytes].contiguous().view(torch.float32).isfinite().all()):
                self._refuse(name, piece, "have ends that are no numbers")
            yield at, chunk

    def _read(
        self, name: str, piece: TensorChunk, run: TensorChunk | PieceRows, out: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Read what is under a key into `out`, all at once or, if it has fewer rows, as many at a time."""
        path = self.folder / piece.file
        step = min(len(out), max(1, CHUNK_bytes // max(1, out[:1].numel() * out.element_size()))) or 1
        sum32, place = 0, self._place(name, piece, run)
        try:
            with open_inside(self.folder, piece.file) as file:
                os.lseek(file.fileno(), place.begin, os.SEEK_SET)
                for at in range(0, run.count, step):
                    rows = min(step, run.count - at)
                    chunk = out[at : at + rows] if len(out) == run.count else out[:rows]
                    bytes_N = as_bytes(chunk)
                    _read_into(file.fileno(), bytes_N.numpy().data)
                    sum32 = crc32(bytes_N, sum32)
                    yield at, chunk
        except OSError as error:
            raise CheckpointError(f"{path} is missing or damaged: {error.strerror}; use another checkpoint") from None
        if sum32 != run.crc32:
            self._refuse(name, piece, "do not match their checksum")

    def _refuse(self, name: str, piece: TensorChunk, why: str) -> NoReturn:
        entry, path = self.entry(name), self.folder / piece.file
        what = f"{entry.place(piece.rows, entry.cols_of(piece))} of tensor {name!r}"
        raise CheckpointError(f"{path} is damaged: {what} {why}; use another checkpoint")

    def check_heads(self) -> None:
        """Raise unless all files are there, and have what the manifest says; their contents are not read."""
        for name, entry in self.manifest.tensors.items():
            for piece in entry.pieces:
                for run in (piece, piece.ids):
                    if run is not None:
                        self._place(name, piece, run)

    def _place(self, name: str, piece: TensorChunk, run: TensorChunk | PieceRows) -> ByteRange:
        """Where a piece or its ids stand, if the head of their file says what the manifest says."""
        entry, rows = self.entry(name), run.count
        kind, width = ("uint8" if piece.bits else entry.dtype), entry.width_of(piece)
        if isinstance(run, PieceRows):
            kind, width = str(ids_dtype(entry)).removeprefix("torch."), 1
        place = self._head(piece.file).places.get(run.key)
        if place is None:
            self._refuse(name, piece, f"are not in its head, which has no {run.key[:200]!r}")
        got = (place.code, place.shape[:1], math.prod(place.shape[1:]))
        if got != (CODES[kind], (rows,), width):
            want = f"{rows} rows of {width} {CODES[kind]}"
            self._refuse(name, piece, f"are {place.code} of shape {place.shape} in its head, want {want}")
        return place

    def _head(self, file: str) -> FileHeader:
        if file not in self._heads:
            self._heads[file] = FileHeader.read(self.folder, file, self.manifest.files[file])
        return self._heads[file]


def _read_into(handle: int, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        count = os.readv(handle, [memory[at:]])
        if not count:
            raise OSError(5, "it is cut short")
        at += count
