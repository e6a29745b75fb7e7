"""Copies checkpoints between folders and object stores, and verifies every byte on the way.

[Note: Copied checkpoints]
The manifest makes a copy a checkpoint: it is created last, as one object, and only if there is none. A killed copy has
no manifest, is never taken for a checkpoint, and resumes when it is started again: existing files are not sent again.
That is safe because names of copied files begin with a digest of all sizes and checksums of the checkpoint: files of
another checkpoint have other names, so a copy overwrites none of them. Of two concurrent copies of checkpoints to one
place, one succeeds and the other raises. The copy of an increment has all files of its chain. Known limits: files of an
abandoned copy stay until they are removed; if a store ignores `If-None-Match`, the last of two concurrent copies wins.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import torch
from msgspec import structs

from rowwise.base.errors import CheckpointError
from rowwise.base.storage.folder import Folder, StorageFolder, as_storage, open_range
from rowwise.base.storage.interface import ObjectExistsError
from rowwise.checkpoint.files import reading_file
from rowwise.checkpoint.manifest import NAME, CheckpointManifest
from rowwise.checkpoint.named import is_checkpoint
from rowwise.checkpoint.read import Checkpoint, read_into
from rowwise.checkpoint.windows import ProgressCounter, Tell
from rowwise.tables.ops.checksum import crc32

FILES = 2  # copied concurrently, each in several requests
PIECE_bytes = 4 << 20
DIGEST = re.compile(r"[0-9a-f]{16}\.(?=.)")  # prefix of names of copied files


class OtherCheckpointError(CheckpointError):
    """The place has another checkpoint of this name."""


class _Copy(NamedTuple):
    """The manifest of a copy, and the source file of each of its files."""

    manifest: CheckpointManifest
    sources: dict[str, str]


class _CheckedSpan(NamedTuple):
    """Bytes of a file, and their checksum; None if they belong to no tensor."""

    begin: int
    end: int
    crc32: int | None


def copy_checkpoint(source: Checkpoint, into: Folder, tell: Tell | None = None) -> Folder:
    """Copy a checkpoint into a folder, under its own name; returns its place. See [Note: Copied checkpoints].

    Args:
        source: read completely; a damaged chunk raises, and the copy stays without a manifest.
        into: a folder of this machine or of an object store; need not exist.
        tell: called with (bytes present, total).
    """
    place = into / source.folder.name
    target, copy = as_storage(place), _rename_files(source.manifest)
    existing = CheckpointManifest.read(place) if is_checkpoint(place) else None
    if existing is not None:
        if (existing.files, existing.tensors) != (copy.manifest.files, copy.manifest.tensors):
            raise OtherCheckpointError(f"{place} exists, and is another checkpoint", hint="copy to another folder")
        if existing.data == copy.manifest.data:
            return place
    _copy_files(source, target, copy, tell)
    content = copy.manifest.to_json()
    if existing is not None:  # only the data of the run differ
        target.storage.write(target.inside(NAME), lambda: [content], len(content))
        return place
    try:
        target.storage.create(target.inside(NAME), content)
    except ObjectExistsError:
        raise OtherCheckpointError(
            f"{place} was created meanwhile, and is another checkpoint", hint="copy to another folder"
        ) from None
    return place


def remove_copy(place: StorageFolder) -> None:
    """Remove a copied checkpoint, complete or not: the manifest first, so that no reader takes it for complete."""
    for name in sorted(place.relative_names(), key=lambda name: name != NAME):
        place.storage.delete(place.inside(name))


def _copy_files(source: Checkpoint, target: StorageFolder, copy: _Copy, tell: Tell | None) -> None:
    present = {name: stored.size_bytes for name, stored in target.relative_names().items()}
    sizes = {name: file.size_bytes for name, file in copy.manifest.files.items()}
    missing = [name for name, size_bytes in sizes.items() if present.get(name) != size_bytes]
    total = sum(sizes.values())
    progress = ProgressCounter(tell, total, total - sum(sizes[name] for name in missing))

    def send(name: str) -> None:
        pieces: Callable[[], Iterator[memoryview]] = lambda: _verified_pieces(source, copy.sources[name])  # noqa: E731
        target.storage.write(target.inside(name), pieces, sizes[name])
        progress.add(sizes[name])

    with ThreadPoolExecutor(FILES) as pool:
        for future in [pool.submit(send, name) for name in missing]:
            try:
                future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)  # the first error ends the copy
                raise


def _rename_files(manifest: CheckpointManifest) -> _Copy:
    """The manifest with file names that begin with a digest of the checkpoint."""
    bare = {name: DIGEST.sub("", name, count=1) for name in manifest.files}
    if len(set(bare.values())) < len(bare):
        bare = {name: name for name in manifest.files}
    plain = _with_names(manifest, bare)
    digest = hashlib.sha256(msgspec.json.encode((plain.files, plain.tensors))).hexdigest()[:16]
    names = {name: f"{digest}.{short}" for name, short in bare.items()}
    return _Copy(_with_names(manifest, names), {new: old for old, new in names.items()})


def _with_names(manifest: CheckpointManifest, names: dict[str, str]) -> CheckpointManifest:
    tensors = {
        name: structs.replace(
            entry,
            chunks=tuple(
                structs.replace(chunk, file=names[chunk.file]) if chunk.initial is None else chunk
                for chunk in entry.chunks
            ),
        )
        for name, entry in manifest.tensors.items()
    }
    files = {names[name]: file for name, file in sorted(manifest.files.items())}
    return structs.replace(manifest, files=files, tensors=tensors)


def _verified_pieces(source: Checkpoint, name: str) -> Iterator[memoryview]:
    """The bytes of a file in order; raises if they do not match the manifest's checksums."""
    header, listed = source.header(name), source.manifest.files[name]
    sums = {
        run.key: run.crc32
        for entry in source.manifest.tensors.values()
        for chunk in entry.chunks
        if chunk.file == name and chunk.initial is None
        for run in (chunk, chunk.ids)
        if run is not None
    }
    spans = [_CheckedSpan(0, len(header.content), listed.head_crc32)]
    spans += [_CheckedSpan(span.begin, span.end, sums.get(key)) for key, span in header.ranges.items()]
    path = source.folder / name
    with reading_file(path), open_range(source.folder, name, 0, listed.size_bytes) as file:
        for span in spans:
            sum32 = 0
            for at in range(span.begin, span.end, PIECE_bytes):
                piece = bytearray(min(PIECE_bytes, span.end - at))
                read_into(file, memoryview(piece))
                sum32 = crc32(torch.frombuffer(piece, dtype=torch.uint8), sum32)
                yield memoryview(piece)
            if span.crc32 is not None and sum32 != span.crc32:
                fault = f"is damaged: bytes {span.begin:,} to {span.end:,} do not match their checksum"
                raise CheckpointError(f"{path} {fault}; `rowwise ckpt verify` names the tensors")
