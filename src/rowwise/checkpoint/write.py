"""Writing a checkpoint: all ranks into one folder under another name, which then gets its own in one step.

[Note: One checkpoint]
All ranks call `write` alike, with what each has. Rank 0 makes the folder `<name>.part`; each rank writes files of its
own into it and makes sure that they are on the disk; then all tell each other how it went. Rank 0 is sent what is in
the files, writes the manifest and renames the folder, and all leave once they have heard of it. A kill at any moment
leaves the former checkpoints as they were, and at most a folder ending in `.part`, which the next write removes. Files
of a checkpoint that it builds on are linked into the folder by rank 0, see `delta`.
Trouble of one rank, such as a full disk, is the same error on all of them. The folder is one that all ranks see.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from msgspec import structs

from rowwise.checkpoint.assign import deal
from rowwise.checkpoint.delta import encode
from rowwise.checkpoint.files import sync, write_bytes, write_file
from rowwise.checkpoint.manifest import (
    FORMAT,
    NAME,
    CheckpointFile,
    CheckpointManifest,
    PieceRows,
    TensorChunk,
    TensorEntry,
)
from rowwise.checkpoint.parts import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.comm.seam import Comm
from rowwise.comm.solo import solo
from rowwise.comm.status import all_gather_text, gather_object
from rowwise.errors import CheckpointError
from rowwise.spec import Value

THREADS = 2  # one waits for the disk, or adds up a checksum, while the other writes
PART = ".part"
T = TypeVar("T")


class FileSizes(NamedTuple):
    """The sizes at which tensors are cut into chunks, and chunks are put into files."""

    piece_bytes: int = 32 << 20
    file_bytes: int = 256 << 20
    short_bytes: int = 16 << 20  # no two files where one of this size does


SIZES = FileSizes()


class RankFiles(Value, frozen=True):
    """The files and tensors that one rank has written."""

    files: dict[str, CheckpointFile]
    tensors: dict[str, TensorEntry]


def write(
    folder: Path,
    parts: Sequence[LocalShard],
    data: Mapping[str, Any],
    comm: Comm | None = None,
    base: Checkpoint | None = None,
    sizes: FileSizes | None = None,
) -> CheckpointManifest:
    """Save the parts of all ranks, and rank 0's `data` beside them in the manifest; the folder must not exist.

    `base`: an earlier checkpoint, on top of which parts with `ids` are read. `sizes`: None: the usual ones.
    """
    comm = comm or solo()
    part, first = folder.with_name(folder.name + PART), comm.rank == 0
    failed = f"{folder} was not saved"
    run_on_all_ranks(comm, failed, lambda: _begin(folder, part) if first else None)
    try:
        own = own_parts(parts, comm)
        # Names that the files of an earlier checkpoint do not have.
        prefix = f"{comm.rank:05}" if base is None else f"{folder.name}.{comm.rank:05}"
        share = run_on_all_ranks(comm, failed, lambda: write_share(part, own, prefix, sizes or SIZES))
        shares = gather_object(comm, share, "checkpoint") or []
        run_on_all_ranks(comm, failed, lambda: _finish(folder, shares, data, base) if first else None)
    except CheckpointError:  # on all ranks
        if first:
            shutil.rmtree(part, ignore_errors=True)
        all_gather_text(comm, "", "checkpoint")  # once the folder is gone
        raise
    return CheckpointManifest.read(folder)


def write_data(folder: Path, data: Mapping[str, Any]) -> None:
    """Replace the data of a checkpoint, in one step; its tensors stay."""
    part = folder / f"{NAME}{PART}"
    try:
        write_bytes(part, structs.replace(CheckpointManifest.read(folder), data=dict(data)).to_json())
        part.replace(folder / NAME)
        sync(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} stays as it was: {error.strerror or error}") from error


def own_parts(parts: Sequence[LocalShard], comm: Comm) -> list[LocalShard]:
    """The parts that this rank writes: its own, and its share of shared tensors; called by all ranks."""
    shared = [part for part in parts if part.shared]
    own = [part for part in parts if not part.shared]
    listed = [(part.name, part.shape, str(part.tensor.dtype)) for part in shared]
    mine = torch.tensor([sum(part.size_bytes for part in own), zlib.crc32(repr(listed).encode())])
    told_W2 = comm.all_gather(mine, [2] * len(comm.ranks), "checkpoint").wait().view(-1, 2).tolist()
    for rank, (_, crc32) in zip(comm.ranks, told_W2, strict=True):
        if crc32 != told_W2[0][1]:
            want = "want the same tensors in the same order, or Part.whole(..., shared=False) on one rank"
            raise CheckpointError(f"ranks {comm.ranks[0]} and {rank} do not share the same tensors: {want}")
    cuts = deal([(len(part.tensor), part.row_bytes) for part in shared], [load for load, _ in told_W2])
    for part, dealt in zip(shared, cuts, strict=True):
        own += [part.cut(begin, end) for rank, begin, end in dealt if rank == comm.rank]
    places = {part.name: place for place, part in reversed(list(enumerate(parts)))}
    return sorted(own, key=lambda part: places[part.name])  # the order in which they were listed


def write_share(folder: Path, parts: Sequence[LocalShard], prefix: str, sizes: FileSizes) -> RankFiles:
    """Write parts into files of this rank's own, whose names begin so."""
    pieces = [piece for part in parts for piece in part.split(sizes.piece_bytes)]
    # Wider types first: see Head.
    order = sorted(range(len(pieces)), key=lambda k: -pieces[k].tensor.element_size())
    chosen = [[pieces[k] for k in some] for some in _fill_files(order, [piece.size_bytes for piece in pieces], sizes)]
    names = [f"{prefix}-{number:05}.safetensors" for number in range(len(chosen))]
    with ThreadPoolExecutor(THREADS) as pool:
        written = list(pool.map(_write_file, [folder / name for name in names], chosen))
    done = {id(part): piece for _, found in written for part, piece in found}
    of: dict[str, list[TensorChunk]] = {part.name: [] for part in parts}
    for part in pieces:
        of[part.name].append(done[id(part)])
    tensors = {part.name: structs.replace(part.entry, pieces=tuple(of[part.name])) for part in parts}
    return RankFiles(files={name: file for name, (file, _) in zip(names, written, strict=True)}, tensors=tensors)


def merge(shares: Iterable[RankFiles]) -> tuple[dict[str, CheckpointFile], dict[str, TensorEntry]]:
    """One manifest of all ranks' pieces, in an order that does not depend on the ranks."""
    files: dict[str, CheckpointFile] = {}
    found: dict[str, TensorEntry] = {}
    pieces: dict[str, list[TensorChunk]] = {}
    for share in shares:
        files |= share.files
        for name, entry in share.tensors.items():
            bare = structs.replace(entry, pieces=())
            if found.setdefault(name, bare) != bare:
                raise CheckpointError(f"tensor {name!r} is {found[name]} on one rank and {bare} on another")
            pieces.setdefault(name, []).extend(entry.pieces)
    ordered = {name: sorted(some, key=lambda piece: (piece.rows, piece.cols or ())) for name, some in pieces.items()}
    return files, {name: structs.replace(entry, pieces=tuple(ordered[name])) for name, entry in found.items()}


def merge_entries(base: Checkpoint, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """An entry with the changed pieces in front of the pieces that they replace."""
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        whole = any(piece.ids is None for piece in entry.pieces)
        found[name] = entry if whole else structs.replace(entry, pieces=base.entry(name).pieces + entry.pieces)
    return found


def run_on_all_ranks(comm: Comm, failed: str, action: Callable[[], T]) -> T:
    """Do something on each rank; where it fails on one, all raise the same error, which begins with `failed`."""
    found: list[T] = []
    reason = ""
    try:
        found.append(action())
    except OSError as error:
        reason = str(error if isinstance(error, CheckpointError) else error.strerror or error)
    reasons_W = all_gather_text(comm, reason, "checkpoint")
    if any(reasons_W):
        alone = len(reasons_W) == 1
        said = [text if alone else f"rank {r}: {text}" for r, text in zip(comm.ranks, reasons_W, strict=True) if text]
        raise CheckpointError(f"{failed}: {'; '.join(said)}; earlier checkpoints are unchanged")
    return found[0]


def _begin(folder: Path, part: Path) -> None:
    if folder.exists():
        raise CheckpointError("it exists already: want another name")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _finish(folder: Path, shares: Sequence[RankFiles], data: Mapping[str, Any], base: Checkpoint | None) -> None:
    part = folder.with_name(folder.name + PART)
    files, tensors = merge(shares)
    chain_bytes = (sum(file.size_bytes for file in files.values()),)
    if base is not None:
        tensors, chain_bytes = merge_entries(base, tensors), base.manifest.chain_bytes + chain_bytes
        for name in {piece.file for entry in tensors.values() for piece in entry.pieces} - files.keys():
            os.link(base.folder / name, part / name)
            files[name] = base.manifest.files[name]
    manifest = CheckpointManifest(format=FORMAT, data=dict(data), files=files, tensors=tensors, chain_bytes=chain_bytes)
    manifest.check(NAME)
    write_bytes(part / NAME, manifest.to_json())
    sync(part)
    part.rename(folder)
    sync(folder.parent)


def _write_file(path: Path, parts: Sequence[LocalShard]) -> tuple[CheckpointFile, list[tuple[LocalShard, TensorChunk]]]:
    tensors = {_key(part): encode(part) for part in parts}
    tensors |= {_ids_key(part): part.ids for part in parts if part.ids is not None}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # wider types first: see Head
    try:
        file, sums = write_file(path, ordered)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror or error}") from error
    crc32s = {key: crc32 for (key, _), crc32 in zip(ordered, sums, strict=True)}
    return file, [(part, _write_piece(part, path.name, crc32s)) for part in parts]


def _write_piece(part: LocalShard, file: str, crc32s: Mapping[str, int]) -> TensorChunk:
    key, ids = _key(part), None
    if part.ids is not None:
        ids = PieceRows(count=len(part.ids), key=_ids_key(part), crc32=crc32s[_ids_key(part)])
    return TensorChunk(rows=part.rows, cols=part.cols, file=file, key=key, crc32=crc32s[key], bits=part.bits, ids=ids)


def _fill_files(order: Iterable[int], bytes_of: Sequence[int], sizes: FileSizes) -> list[list[int]]:
    found: list[list[int]] = []
    limit = min(sizes.file_bytes, max(sizes.short_bytes, -(-sum(bytes_of) // THREADS)))
    held_bytes = limit
    for k in order:
        if held_bytes >= limit:
            found.append([])
            held_bytes = 0
        found[-1].append(k)
        held_bytes += bytes_of[k]
    return found


def _ids_key(part: LocalShard) -> str:
    return f"{_key(part)} ids"


def _key(part: LocalShard) -> str:
    where = f"{part.rows[0]}:{part.rows[1]}" + ("" if part.cols is None else f", {part.cols[0]}:{part.cols[1]}")
    return f"{part.name}[{where}]"
