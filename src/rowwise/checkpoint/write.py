"""Writes a checkpoint atomically: all ranks write into one temporary folder, which rank 0 renames at the end.

[Note: One checkpoint]
`write` is a collective; each rank passes its local shards. Rank 0 makes the folder `<name>.part`. Each rank writes its
own files into it, syncs them to the disk, and exchanges its status. Rank 0 gathers the entries of all files, writes
the manifest and renames the folder; then all ranks return. A kill at any moment leaves earlier checkpoints unchanged,
and at most a folder ending in `.part`, which the next write removes. For an increment, rank 0 makes hard links to the
files of the base checkpoint (see `delta`). An error of one rank, such as a full disk, is raised on all. All ranks must
see the same folder.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from msgspec import structs
from torch import Tensor

from rowwise.base.errors import CheckpointError
from rowwise.base.storage.local import PART as PART
from rowwise.base.textfile import sync
from rowwise.checkpoint.assign import assign_rows
from rowwise.checkpoint.delta import encode, encoded_outline
from rowwise.checkpoint.files import write_bytes, write_file
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import (
    FORMAT,
    NAME,
    CheckpointFile,
    CheckpointManifest,
    ChunkRows,
    TensorChunk,
    TensorEntry,
)
from rowwise.checkpoint.read import Checkpoint
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import all_gather_text, gather_object
from rowwise.tables.spec import Value

THREADS = 2  # one writes while the other computes a checksum or waits for the disk
T = TypeVar("T")
Load = Callable[[LocalShard], Tensor]  # the rows of a shard


class FileSizes(NamedTuple):
    """Sizes of chunks and files."""

    chunk_bytes: int = 32 << 20  # tensors are cut into chunks of at most this size
    file_bytes: int = 256 << 20  # a file takes chunks up to this size
    short_bytes: int = 16 << 20  # a rank with less than this writes a single file


SIZES = FileSizes()


class RankFiles(Value, frozen=True):
    """The files and tensors that one rank has written."""

    files: dict[str, CheckpointFile]
    tensors: dict[str, TensorEntry]


def write(
    folder: Path,
    shards: Sequence[LocalShard],
    data: Mapping[str, Any],
    comm: Comm | None = None,
    base: Checkpoint | None = None,
    sizes: FileSizes | None = None,
) -> CheckpointManifest:
    """Save the shards of all ranks, and rank 0's `data` in the manifest; collective. The folder must not exist.

    `base`: the base checkpoint, if shards with `ids` make this an increment.
    """
    comm = comm or solo()
    unfinished, first = folder.with_name(folder.name + PART), comm.rank == 0
    failed = f"{folder} was not saved"
    run_on_all_ranks(comm, failed, lambda: _begin(folder, unfinished) if first else None)
    try:
        assigned = assign_shards(shards, comm)
        # An increment links files of its base into its folder, so its new files need other names.
        prefix = f"{comm.rank:05}" if base is None else f"{folder.name.removesuffix(PART)}.{comm.rank:05}"
        written = run_on_all_ranks(comm, failed, lambda: write_rank_files(unfinished, assigned, prefix, sizes or SIZES))
        written_W = gather_object(comm, written, "checkpoint") or []
        run_on_all_ranks(comm, failed, lambda: _finish(folder, written_W, data, base) if first else None)
    except CheckpointError:  # raised on all ranks
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
        all_gather_text(comm, "", "checkpoint")  # a barrier: no rank returns before the folder is removed
        raise
    return CheckpointManifest.read(folder)


def write_manifest(
    folder: Path,
    data: Mapping[str, Any],
    files: dict[str, CheckpointFile],
    tensors: dict[str, TensorEntry],
    chain_bytes: tuple[int, ...],
) -> CheckpointManifest:
    """Check and write the manifest of a folder."""
    manifest = CheckpointManifest(format=FORMAT, data=dict(data), files=files, tensors=tensors, chain_bytes=chain_bytes)
    manifest.check(NAME)
    write_bytes(folder / NAME, manifest.to_json())
    return manifest


def write_data(folder: Path, data: Mapping[str, Any]) -> None:
    """Replace the data of a checkpoint's manifest atomically; its tensors stay."""
    unfinished = folder / f"{NAME}{PART}"
    try:
        write_bytes(unfinished, structs.replace(CheckpointManifest.read(folder), data=dict(data)).to_json())
        unfinished.replace(folder / NAME)
        sync(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder / NAME} is unchanged: {error.strerror or error}", hint="make it writable"
        ) from error


def assign_shards(shards: Sequence[LocalShard], comm: Comm) -> list[LocalShard]:
    """The shards that this rank writes: its own, and rows of shared ones; collective."""
    shared = [shard for shard in shards if shard.shared]
    own = [shard for shard in shards if not shard.shared]
    # A checksum verifies that all ranks list the same tensors, on which the cuts below rely.
    outlines = [(shard.name, shard.shape, str(shard.tensor.dtype)) for shard in shared]
    load_and_crc32 = torch.tensor([sum(shard.size_bytes for shard in own), zlib.crc32(repr(outlines).encode())])
    gathered_W2 = comm.all_gather(load_and_crc32, [2] * len(comm.ranks), "checkpoint").wait().view(-1, 2).tolist()
    for rank, (_, crc32) in zip(comm.ranks, gathered_W2, strict=True):
        if crc32 != gathered_W2[0][1]:
            raise CheckpointError(
                f"ranks {comm.ranks[0]} and {rank} do not share the same tensors",
                "the same tensors in the same order, or LocalShard.whole(..., shared=False) on one rank",
            )
    own += deal_shared(shared, [load for load, _ in gathered_W2])[comm.rank]
    places = {shard.name: place for place, shard in reversed(list(enumerate(shards)))}
    return sorted(own, key=lambda shard: places[shard.name])  # in the order of `shards`


def deal_shared(shared: Sequence[LocalShard], loads_W: Sequence[int]) -> list[list[LocalShard]]:
    """The rows of shared shards for each rank to write; `loads_W`: bytes of each rank's own shards."""
    dealt_W: list[list[LocalShard]] = [[] for _ in loads_W]
    cuts = assign_rows([(len(shard.tensor), shard.row_bytes) for shard in shared], loads_W)
    for shard, assigned in zip(shared, cuts, strict=True):
        for rank, begin, end in assigned:
            dealt_W[rank].append(shard.cut(begin, end))
    return dealt_W


def write_rank_files(
    folder: Path,
    shards: Sequence[LocalShard],
    prefix: str,
    sizes: FileSizes,
    *,
    load: Load = LocalShard.load,
    threads: int = THREADS,
) -> RankFiles:
    """Write shards into files of this rank, whose names begin with `prefix`; a thread loads one chunk at a time."""
    chunks_of: dict[str, list[TensorChunk]] = {shard.name: [] for shard in shards}
    stored: list[LocalShard] = []
    for shard in shards:
        if shard.initial is not None:
            chunk = TensorChunk(rows=shard.rows, cols=shard.cols, file="", key="", crc32=0, initial=shard.initial)
            chunks_of[shard.name].append(chunk)
            shard = shard.written_rows()
        stored.append(shard)
    cuts = [cut for shard in stored for cut in shard.split(sizes.chunk_bytes)]
    # Wider types first, which aligns every tensor: see `FileHeader.make`.
    order = sorted(range(len(cuts)), key=lambda k: -cuts[k].tensor.element_size())
    files = [[cuts[k] for k in ks] for ks in _fill_files(order, [cut.size_bytes for cut in cuts], sizes, threads)]
    names = [f"{prefix}-{number:05}.safetensors" for number in range(len(files))]
    with ThreadPoolExecutor(threads) as pool:
        written = list(pool.map(partial(_write_file, load), [folder / name for name in names], files))
    chunk_of = {id(cut): chunk for _, chunks in written for cut, chunk in chunks}
    for cut in cuts:
        chunks_of[cut.name].append(chunk_of[id(cut)])
    tensors = {shard.name: structs.replace(shard.entry, chunks=tuple(chunks_of[shard.name])) for shard in shards}
    return RankFiles(files={name: file for name, (file, _) in zip(names, written, strict=True)}, tensors=tensors)


def merge_rank_files(written_W: Iterable[RankFiles]) -> tuple[dict[str, CheckpointFile], dict[str, TensorEntry]]:
    """The files and tensors of all ranks; chunks are sorted, so their order does not depend on the ranks."""
    files: dict[str, CheckpointFile] = {}
    tensors: dict[str, TensorEntry] = {}
    chunks_of: dict[str, list[TensorChunk]] = {}
    for written in written_W:
        files |= written.files
        for name, entry in written.tensors.items():
            bare = structs.replace(entry, chunks=())
            if tensors.setdefault(name, bare) != bare:
                raise CheckpointError(
                    f"tensor {name!r} is {tensors[name]} on one rank and {bare} on another",
                    "the same tables and layers on all ranks",
                )
            chunks_of.setdefault(name, []).extend(entry.chunks)
    for chunks in chunks_of.values():
        chunks.sort(key=lambda chunk: (chunk.ids is not None, chunk.rows, chunk.cols or ()))
    return files, {name: structs.replace(entry, chunks=tuple(chunks_of[name])) for name, entry in tensors.items()}


def extend_entries(base: Checkpoint, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors of an increment: the base's chunks first, then the chunks of changed rows, which overwrite them."""
    extended: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        is_full = any(chunk.ids is None for chunk in entry.chunks)
        extended[name] = entry if is_full else structs.replace(entry, chunks=base.entry(name).chunks + entry.chunks)
    return extended


def run_on_all_ranks(comm: Comm, failed: str, action: Callable[[], T]) -> T:
    """Run an action on each rank; if it fails on any, all raise the same error, which begins with `failed`."""
    result: list[T] = []
    reason = ""
    try:
        result.append(action())
    except OSError as error:
        reason = str(error if isinstance(error, CheckpointError) else error.strerror or error)
    reasons_W = all_gather_text(comm, reason, "checkpoint")
    if any(reasons_W):
        by_rank = [f"rank {r}: {text}" for r, text in zip(comm.ranks, reasons_W, strict=True) if text]
        reasons = reason if len(reasons_W) == 1 else "; ".join(by_rank)
        raise CheckpointError(f"{failed}: {reasons}; earlier checkpoints are unchanged")
    return result[0]


def _begin(folder: Path, unfinished: Path) -> None:
    if folder.exists():
        raise CheckpointError("it exists already", hint="choose another name")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _finish(folder: Path, written_W: Sequence[RankFiles], data: Mapping[str, Any], base: Checkpoint | None) -> None:
    unfinished = folder.with_name(folder.name + PART)
    files, tensors = merge_rank_files(written_W)
    chain_bytes = (sum(file.size_bytes for file in files.values()),)
    if base is not None:
        assert isinstance(base.folder, Path), "an increment of a checkpoint in another file system"
        tensors, chain_bytes = extend_entries(base, tensors), base.manifest.chain_bytes + chain_bytes
        for name in {chunk.file for entry in tensors.values() for chunk in entry.chunks} - files.keys() - {""}:
            os.link(base.folder / name, unfinished / name)
            files[name] = base.manifest.files[name]
    write_manifest(unfinished, data, files, tensors, chain_bytes)
    sync(unfinished)
    unfinished.rename(folder)
    sync(folder.parent)


def _write_file(
    load: Load, path: Path, shards: Sequence[LocalShard]
) -> tuple[CheckpointFile, list[tuple[LocalShard, TensorChunk]]]:
    outlines = {chunk_key(shard): encoded_outline(shard) for shard in shards}
    outlines |= {_ids_key(shard): shard.ids for shard in shards if shard.ids is not None}
    ordered = sorted(outlines.items(), key=lambda item: -item[1].element_size())  # wider types first
    chunks = {chunk_key(shard): shard for shard in shards}
    tensors = (encode(chunks[key], load(chunks[key])) if key in chunks else ids for key, ids in ordered)
    try:
        file, sums = write_file(path, ordered, tensors)
    except CheckpointError:
        raise
    except OSError as error:
        expected = f"{sum(x.nbytes for x in outlines.values()):,} bytes of free space" if error.strerror else ""
        raise CheckpointError(f"{path.name}: {error.strerror or error}", expected) from error
    crc32s = {key: crc32 for (key, _), crc32 in zip(ordered, sums, strict=True)}
    return file, [(shard, _chunk(shard, path.name, crc32s)) for shard in shards]


def _chunk(shard: LocalShard, file: str, crc32s: Mapping[str, int]) -> TensorChunk:
    key, ids = chunk_key(shard), None
    if shard.ids is not None:
        ids = ChunkRows(count=len(shard.ids), key=_ids_key(shard), crc32=crc32s[_ids_key(shard)])
    return TensorChunk(
        rows=shard.rows, cols=shard.cols, file=file, key=key, crc32=crc32s[key], bits=shard.bits, ids=ids
    )


def _fill_files(order: Iterable[int], bytes_of: Sequence[int], sizes: FileSizes, threads: int) -> list[list[int]]:
    """The chunks of each file, in this order; at least one file per thread, unless files would be too short."""
    files: list[list[int]] = []
    limit = min(sizes.file_bytes, max(sizes.short_bytes, -(-sum(bytes_of) // threads)))
    file_bytes = limit
    for k in order:
        if file_bytes >= limit:
            files.append([])
            file_bytes = 0
        files[-1].append(k)
        file_bytes += bytes_of[k]
    return files


def _ids_key(shard: LocalShard) -> str:
    return f"{chunk_key(shard)} ids"


def chunk_key(shard: LocalShard) -> str:
    """The key of a chunk in its file: name and rectangle, as a file may hold several chunks of a tensor."""
    where = f"{shard.rows[0]}:{shard.rows[1]}" + ("" if shard.cols is None else f", {shard.cols[0]}:{shard.cols[1]}")
    return f"{shard.name}[{where}]"
