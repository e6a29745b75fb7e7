"""Copies checkpoints between folders and object stores, and verifies every byte on the way.

[Note: Copied checkpoints]
The manifest makes a copy a checkpoint: it is created last, as one object, and only if there is none. A copy that was
killed has no manifest, is never taken for a checkpoint, and goes on where it ended when it is started again: files that
are there are not sent again. That is safe because the names of copied files begin with a digest of all sizes and
checksums of the checkpoint; a file of another checkpoint has another name, so no copy writes over files of another. Of
two checkpoints that are copied to one place at once, one gets the place, and the other's copy raises. The copy of an
increment has all files of its chain. Known limits: files of a copy that was given up stay until they are removed;
a store that ignores `If-None-Match` lets the last of two concurrent copies win.
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

FILES = 2  # copied at once; each in several requests
PIECE_bytes = 4 << 20
DIGEST = re.compile(r"[0-9a-f]{16}\.(?=.)")  # with which names of copied files begin


class OtherCheckpointError(CheckpointError):
    """The place has another checkpoint of this name."""


class _Copy(NamedTuple):
    """What is written: a manifest, and the files that it names by their names in the source."""

    manifest: CheckpointManifest
    sources: dict[str, str]


class _CheckedSpan(NamedTuple):
    """Bytes of a file, and their checksum; None: no tensor has them."""

    begin: int
    end: int
    crc32: int | None


def copy_checkpoint(source: Checkpoint, into: Folder, tell: Tell | None = None) -> Folder:
    """Copy a checkpoint into a folder, under its own name; returns its place. See [Note: Copied checkpoints].

    Args:
        source: is read whole; a damaged chunk raises, and the copy stays without a manifest.
        into: a folder of this machine or of an object store; need not exist.
        tell: called with the bytes that are there, and the total.
    """
    place = into / source.folder.name
    target, copy = as_storage(place), _rename_files(source.manifest)
    former = CheckpointManifest.read(place) if is_checkpoint(place) else None
    if former is not None:
        if (former.files, former.tensors) != (copy.manifest.files, copy.manifest.tensors):
            raise OtherCheckpointError(f"{place} exists, and is another checkpoint", hint="copy to another folder")
        if former.data == copy.manifest.data:
            return place
    _copy_files(source, target, copy, tell)
    content = copy.manifest.to_json()
    if former is not None:  # only the data of the run are new
        target.storage.write(target.inside(NAME), lambda: [content], len(content))
        return place
    try:
        target.storage.create(target.inside(NAME), content)
    except ObjectExistsError:
        raise OtherCheckpointError(
            f"{place} exists by now, and is another checkpoint", hint="copy to another folder"
        ) from None
    return place


def remove_copy(place: StorageFolder) -> None:
    """Remove a copied checkpoint, complete or not: the manifest first, so that no reader takes it for whole."""
    for name in sorted(place.relative_names(), key=lambda name: name != NAME):
        place.storage.delete(place.inside(name))


def _copy_files(source: Checkpoint, target: StorageFolder, copy: _Copy, tell: Tell | None) -> None:
    present = {name: one.size_bytes for name, one in target.relative_names().items()}
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
    """The manifest with names of files that say which checkpoint they belong to."""
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
    """The bytes of a file in order; raises where they do not match the manifest's checksums."""
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
                why = f"is damaged: bytes {span.begin:,} to {span.end:,} do not match their checksum"
                raise CheckpointError(f"{path} {why}; `rowwise ckpt verify` names the tensors")
