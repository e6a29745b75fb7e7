"""Rows of versions in a file in memory that processes share: all rows of one version, and newer rows of later ones.

Behind its rows each table has room, which takes no memory until it is written. A version that is an increment of the
first one, with its tables at the same places, writes its changed rows there: chunk after chunk, in the order of its
manifest. So the places of rows follow from the manifest, and nothing is written that another version reads.
"""

import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn

from rowwise.base.errors import CheckpointError
from rowwise.base.quantity import format_bytes
from rowwise.base.storage.folder import Folder
from rowwise.checkpoint.manifest import CheckpointFile, CheckpointManifest, TensorChunk, TensorEntry
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.tables import full_name, table_modules
from rowwise.tables.embedding import Embeddings
from rowwise.tables.ops import rowtype
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.newer import NewerRows, NewerRowsOfTable
from rowwise.tables.spec import Table

ROOM_SHARE, MIN_ROOM = 4, 1024  # a table has room for so many newer rows: a quarter of its own, and some

PRIVATE = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on: few pages are ever written

NewerChunks = Mapping[str, tuple[TensorChunk, ...]]  # by tensor


class TablePlace(NamedTuple):
    """Where a table is in a file."""

    name: str  # of its tensor
    begin: int
    rows: int
    row_bytes: int


class SharedRows(NamedTuple):
    """A file with all rows of a version, and the newer rows of others.

    It has all that a version is compared with, so nothing of versions that are gone is read again.
    """

    file: int
    whole: int  # the version whose rows are all in the file
    newest: int  # the last one whose newer rows were written
    places: tuple[TablePlace, ...]
    tables: Mapping[str, TensorEntry]  # of the whole version, by tensor
    files: Mapping[str, CheckpointFile]  # of the whole version, by name
    newer: NewerChunks  # of the newest version
    tag: int = 0  # tells cached rows from those of other files, also of a version that had the same number

    @classmethod
    def of(
        cls,
        file: int,
        number: int,
        version: CheckpointManifest,
        places: tuple[TablePlace, ...],
        cached: Collection[str] = (),
    ) -> Self:
        """A file that has a version and nothing else; changed rows of `cached` tables are newer ones."""
        tables = {name: entry for name, entry in version.tensors.items() if entry.row_type is not None}
        newer: dict[str, tuple[TensorChunk, ...]] = dict.fromkeys(tables, ())
        for name in cached:
            chunks = tables[name].chunks
            newer[name] = tuple(chunk for chunk in chunks if chunk.ids is not None)
            tables[name] = structs.replace(tables[name], chunks=chunks[: len(chunks) - len(newer[name])])
        return cls(file, number, number, places, tables, version.files, newer)


def room_of(rows: int) -> int:
    return rows // ROOM_SHARE + MIN_ROOM


def newer_chunks(shared: SharedRows, version: CheckpointManifest) -> NewerChunks | None:
    """The chunks of tables that a version adds to the whole one; None: it is no increment, or the room is too small."""
    tables = {name: entry for name, entry in version.tensors.items() if entry.row_type is not None}
    if tables.keys() != shared.tables.keys():
        return None
    found: dict[str, tuple[TensorChunk, ...]] = {}
    for name, before in shared.tables.items():
        entry, count = tables[name], len(before.chunks)
        added = entry.chunks[count:]
        files = {chunk.file for chunk in before.chunks} - {""}
        same = before == structs.replace(entry, chunks=entry.chunks[:count]) and all(
            shared.files[file] == version.files[file] for file in files
        )
        fits = sum(chunk.count for chunk in added) <= room_of(entry.rows)
        if not (same and fits and all(map(_has_changed_rows, added))):
            return None
        found[name] = added
    return found


def _has_changed_rows(chunk: TensorChunk) -> bool:
    return chunk.ids is not None and chunk.cols is None and chunk.bits is None


class AddedChunks(NamedTuple):
    """What a version adds to shared rows, and how many chunks of each table are in the file already."""

    newer: NewerChunks
    written: Mapping[str, int]

    @property
    def grows(self) -> bool:
        """Whether there is anything to write."""
        return any(len(chunks) > self.written[name] for name, chunks in self.newer.items())


def added_chunks(shared: SharedRows, version: CheckpointManifest, places: tuple[TablePlace, ...]) -> AddedChunks | None:
    """What a version adds; None: its tables are at other places, or others have its places, or it is no increment."""
    newer = newer_chunks(shared, version) if places == shared.places else None
    if newer is None:
        return None
    written = {name: min(len(chunks), len(shared.newer[name])) for name, chunks in newer.items()}
    if all(chunks[: written[name]] == shared.newer[name][: written[name]] for name, chunks in newer.items()):
        return AddedChunks(newer, written)
    return None


class _ArenaPlace(NamedTuple):
    """Where the memory of an arena is in a file."""

    path: str  # of its module
    arena: Arena
    begin: int
    size: int


def _arenas_of(model: nn.Module) -> list[_ArenaPlace]:
    places: list[_ArenaPlace] = []
    begin = 0
    for path, module in table_modules(model):
        for arena in module.arenas:
            size = -(-arena.rows.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
            places.append(_ArenaPlace(path, arena, begin, size))
            begin += size
    return places


class TableInArena(NamedTuple):
    """A table, and where its memory is."""

    name: str  # of its tensor
    table: Table
    base: int  # first byte in the arena
    begin: int  # first byte in the file


def _tables_of(place: _ArenaPlace) -> Iterator[TableInArena]:
    path, arena, begin, _ = place
    for table, offset in zip(arena.tables, arena.offsets, strict=True):
        yield TableInArena(f"model/{full_name(path, table)}", table, offset.base, begin + offset.base)


def memory_of_tables(model: nn.Module) -> list[tuple[Arena, list[TableInArena]]]:
    """The tables in each arena of a model."""
    return [(place.arena, list(_tables_of(place))) for place in _arenas_of(model)]


def reserve_rows(model: nn.Module) -> tuple[TablePlace, ...]:
    """Lay the tables of a model on the meta device out with room behind each; returns their places in a file."""
    for _, module in table_modules(model):
        assert isinstance(module, Embeddings)
        module.reserve(lambda table: room_of(table.rows))
    return tuple(
        TablePlace(one.name, one.begin, one.table.rows, one.table.row_bytes)
        for place in _arenas_of(model)
        for one in _tables_of(place)
    )


def map_rows(
    model: nn.Module, file: int, version: Path, *, fresh: bool, cached: Collection[str] = (), private: bool = False
) -> None:
    """Let tables that `reserve_rows` has laid out have their memory in a file.

    Args:
        model: the tables are on the meta device.
        file: of all versions.
        version: for messages.
        fresh: the file is empty.
        cached: tables whose rows are not in the file. Their places have the rows of a batch, see `CachedRows`.
        private: what this process writes is for itself alone.
    """
    places = _arenas_of(model)
    used = [
        (one.begin, one.table.rows * one.table.row_bytes)
        for place in places
        for one in _tables_of(place)
        if one.name not in cached
    ]
    size = max(mmap.PAGESIZE, sum(place.size for place in places))
    try:
        if fresh:
            os.ftruncate(file, size)
            for begin, count in used:  # else a lack of memory would end the process at the first write
                os.posix_fallocate(file, begin, max(1, count))
        memory = mmap.mmap(file, size, flags=PRIVATE if private else mmap.MAP_SHARED)
    except OSError as error:
        raise _too_small(version, sum(count for _, count in used), error) from None
    for _, arena, begin, _ in places:
        arena.attach(torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=arena.rows.numel()))


def write_newer(
    model: nn.Module, file: int, version: Checkpoint, added: AddedChunks, cached: Collection[str] = ()
) -> None:
    """Write the chunks that a version adds into the room of tables in a file, but for those that are `cached`."""
    newer, written = added
    for place in _arenas_of(model):
        for one in _tables_of(place):
            if one.name in cached:
                continue
            at, width = one.table.rows * one.table.row_bytes, one.table.row_bytes
            for number, chunk in enumerate(newer[one.name]):
                size = chunk.count * width
                if number >= written[one.name] and size:
                    try:
                        os.posix_fallocate(file, one.begin + at, size)
                    except OSError as error:
                        raise _too_small(version.folder, size, error) from None
                    room = place.arena.rows[one.base + at :][:size].view(rowtype.dtype_of(one.table.row_type))
                    version.read_changed(one.name, chunk, room.view(chunk.count, -1))
                at += size


def use_newer(
    model: nn.Module, version: Checkpoint, newer: NewerChunks, pause: Callable[[], object] = lambda: None
) -> None:
    """Let lookups of a model read the newer rows of a version, and no row of the room otherwise."""
    for place in _arenas_of(model):
        found: list[NewerRowsOfTable] = []
        for one in _tables_of(place):
            ids_C, places_C = _last_places(one.table.rows, [version.read_ids(one.name, c) for c in newer[one.name]])
            found.append(NewerRowsOfTable(base=one.base, rows=one.table.rows, ids_C=ids_C, places_C=places_C))
            if len(ids_C):
                pause()
        place.arena.places = NewerRows(found)


def _last_places(rows: int, ids_of_chunks: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The ids of all chunks, and behind `rows` rows the place of the last one that has each."""
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *ids_of_chunks]).numpy()
    found, last = np.unique(ids[::-1], return_index=True)
    return torch.from_numpy(found), torch.from_numpy(rows + len(ids) - 1 - last)


def _too_small(version: Folder, need: int, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{version} needs {format_bytes(need)} of memory for its rows: {error.strerror}",
        "a machine with more memory, or an export with --rows int8",
    )
