"""Rows of versions in a memfd shared by processes: all rows of a base version, and newer rows of later ones.

Each table has spare capacity behind its rows, which takes no memory until it is written. An increment of the base
version with the same layout appends its changed rows there, chunk by chunk in the order of its manifest. So the
positions of rows follow from the manifest, and rows that another version reads are never overwritten.
"""

import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self
from weakref import WeakValueDictionary

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

SPARE_DIVISOR, MIN_SPARE = 4, 1024  # spare rows of a table: a quarter of its rows, plus 1024

_MAPPED: WeakValueDictionary[tuple[int, int], mmap.mmap] = WeakValueDictionary()  # by device and inode of the file
PRIVATE = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE, named from Python 3.13 on; few pages are ever written

NewerChunks = Mapping[str, tuple[TensorChunk, ...]]  # by tensor


class TablePlace(NamedTuple):
    """Position of a table in a file."""

    name: str  # of its tensor
    begin: int  # offset
    rows: int
    row_bytes: int


class SharedRows(NamedTuple):
    """A file with all rows of a base version, and newer rows of increments.

    It records everything to compare versions with, so that deleted versions are never read again.
    """

    file: int
    base: int  # version whose rows are all in the file
    newest: int  # last increment whose rows were written
    places: tuple[TablePlace, ...]
    tables: Mapping[str, TensorEntry]  # of the base version, by tensor
    files: Mapping[str, CheckpointFile]  # of the base version, by name
    newer: NewerChunks  # of the newest version
    tag: int = 0  # identifies cached rows across files, even of a reused version number

    @classmethod
    def of(
        cls,
        file: int,
        number: int,
        version: CheckpointManifest,
        places: tuple[TablePlace, ...],
        cached: Collection[str] = (),
    ) -> Self:
        """A file with a version only; changed rows of `cached` tables count as newer rows."""
        tables = {name: entry for name, entry in version.tensors.items() if entry.row_type is not None}
        newer: dict[str, tuple[TensorChunk, ...]] = dict.fromkeys(tables, ())
        for name in cached:
            chunks = tables[name].chunks
            newer[name] = tuple(chunk for chunk in chunks if chunk.ids is not None)
            tables[name] = structs.replace(tables[name], chunks=chunks[: len(chunks) - len(newer[name])])
        return cls(file, number, number, places, tables, version.files, newer)


def spare_rows(rows: int) -> int:
    return rows // SPARE_DIVISOR + MIN_SPARE


def newer_chunks(shared: SharedRows, version: CheckpointManifest) -> NewerChunks | None:
    """Chunks that a version adds to the base; None if it is not an increment, or exceeds the spare capacity."""
    tables = {name: entry for name, entry in version.tensors.items() if entry.row_type is not None}
    if tables.keys() != shared.tables.keys():
        return None
    newer: dict[str, tuple[TensorChunk, ...]] = {}
    for name, base_entry in shared.tables.items():
        entry, count = tables[name], len(base_entry.chunks)
        added = entry.chunks[count:]
        files = {chunk.file for chunk in base_entry.chunks} - {""}
        is_unchanged = base_entry == structs.replace(entry, chunks=entry.chunks[:count]) and all(
            shared.files[file] == version.files[file] for file in files
        )
        fits = sum(chunk.count for chunk in added) <= spare_rows(entry.rows)
        if not (is_unchanged and fits and all(map(_has_changed_rows, added))):
            return None
        newer[name] = added
    return newer


def _has_changed_rows(chunk: TensorChunk) -> bool:
    return chunk.ids is not None and chunk.cols is None and chunk.bits is None


class AddedChunks(NamedTuple):
    """Chunks that a version adds to shared rows, and the number already written, by table."""

    newer: NewerChunks
    written: Mapping[str, int]

    @property
    def grows(self) -> bool:
        """Whether there are chunks to write."""
        return any(len(chunks) > self.written[name] for name, chunks in self.newer.items())


def added_chunks(shared: SharedRows, version: CheckpointManifest, places: tuple[TablePlace, ...]) -> AddedChunks | None:
    """Chunks that a version adds; None if the layout differs, or it does not extend the written increments."""
    newer = newer_chunks(shared, version) if places == shared.places else None
    if newer is None:
        return None
    written = {name: min(len(chunks), len(shared.newer[name])) for name, chunks in newer.items()}
    if all(chunks[: written[name]] == shared.newer[name][: written[name]] for name, chunks in newer.items()):
        return AddedChunks(newer, written)
    return None


class _ArenaPlace(NamedTuple):
    """Position of an arena in a file."""

    path: str  # of the module
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
    """A table with its positions in an arena and a file."""

    name: str  # of its tensor
    table: Table
    base: int  # offset in the arena
    begin: int  # offset in the file


def _tables_of(place: _ArenaPlace) -> Iterator[TableInArena]:
    path, arena, begin, _ = place
    for table, offset in zip(arena.tables, arena.offsets, strict=True):
        yield TableInArena(f"model/{full_name(path, table)}", table, offset.base, begin + offset.base)


def memory_of_tables(model: nn.Module) -> list[tuple[Arena, list[TableInArena]]]:
    """The arenas of a model, with their tables."""
    return [(place.arena, list(_tables_of(place))) for place in _arenas_of(model)]


def reserve_rows(model: nn.Module) -> tuple[TablePlace, ...]:
    """Lay out the tables of a model on the meta device with spare capacity; returns their positions in a file."""
    for _, module in table_modules(model):
        assert isinstance(module, Embeddings)
        module.reserve(lambda table: spare_rows(table.rows))
    return tuple(
        TablePlace(table.name, table.begin, table.table.rows, table.table.row_bytes)
        for place in _arenas_of(model)
        for table in _tables_of(place)
    )


def map_rows(
    model: nn.Module, file: int, version: Path, *, fresh: bool, cached: Collection[str] = (), private: bool = False
) -> None:
    """Map the tables laid out by `reserve_rows` to a file.

    Args:
        model: with tables on the meta device.
        file: descriptor of the memfd.
        version: for messages.
        fresh: whether the file is empty, to be allocated.
        cached: tables not in the file; their memory has the rows of a batch, see `CachedRows`.
        private: map copy-on-write.
    """
    places = _arenas_of(model)
    extents = [
        (table.begin, table.table.rows * table.table.row_bytes)
        for place in places
        for table in _tables_of(place)
        if table.name not in cached
    ]
    size = max(mmap.PAGESIZE, sum(place.size for place in places))
    try:
        if fresh:
            os.ftruncate(file, size)
            for begin, count in extents:  # else out of memory would be a SIGBUS at the first write
                os.posix_fallocate(file, begin, max(1, count))
        memory = mmap.mmap(file, size, flags=PRIVATE) if private else _map_shared(file, size)
    except OSError as error:
        raise _too_small(version, sum(count for _, count in extents), error) from None
    for _, arena, begin, _ in places:
        arena.attach(torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=arena.rows.numel()))


def _map_shared(file: int, size: int) -> mmap.mmap:
    """The mapping of a file, one for all versions in it: page faults of one version are spared the others."""
    status = os.fstat(file)
    memory = _MAPPED.get((status.st_dev, status.st_ino))
    if memory is None:
        memory = _MAPPED[status.st_dev, status.st_ino] = mmap.mmap(file, size)
    return memory


def write_newer(
    model: nn.Module, file: int, version: Checkpoint, added: AddedChunks, cached: Collection[str] = ()
) -> None:
    """Append the chunks that a version adds to the spare capacity of tables, except `cached` ones."""
    newer, written = added
    for place in _arenas_of(model):
        for table in _tables_of(place):
            if table.name in cached:
                continue
            offset, width = table.table.rows * table.table.row_bytes, table.table.row_bytes
            for number, chunk in enumerate(newer[table.name]):
                size = chunk.count * width
                if number >= written[table.name] and size:
                    try:
                        os.posix_fallocate(file, table.begin + offset, size)
                    except OSError as error:
                        raise _too_small(version.folder, size, error) from None
                    spare = place.arena.rows[table.base + offset :][:size].view(rowtype.dtype_of(table.table.row_type))
                    version.read_changed(table.name, chunk, spare.view(chunk.count, -1))
                offset += size


def use_newer(
    model: nn.Module, version: Checkpoint, newer: NewerChunks, pause: Callable[[], object] = lambda: None
) -> None:
    """Redirect lookups of a model to the newer rows of a version, where it has any."""
    for place in _arenas_of(model):
        newer_of_tables: list[NewerRowsOfTable] = []
        for table in _tables_of(place):
            ids_C, places_C = _last_places(
                table.table.rows, [version.read_ids(table.name, c) for c in newer[table.name]]
            )
            newer_of_tables.append(
                NewerRowsOfTable(base=table.base, rows=table.table.rows, ids_C=ids_C, places_C=places_C)
            )
            if len(ids_C):
                pause()
        place.arena.places = NewerRows(newer_of_tables)


def _last_places(rows: int, ids_of_chunks: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Unique ids of all chunks, and the position of the last chunk row of each, behind `rows` rows."""
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *ids_of_chunks]).numpy()
    # In reversed order the first occurrence of an id is its newest row.
    unique_ids, last = np.unique(ids[::-1], return_index=True)
    return torch.from_numpy(unique_ids), torch.from_numpy(rows + len(ids) - 1 - last)


def _too_small(version: Folder, need: int, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{version} needs {format_bytes(need)} of memory for its rows: {error.strerror}",
        "a machine with more memory, or an export with --rows int8",
    )
