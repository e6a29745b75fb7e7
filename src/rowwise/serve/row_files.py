"""Rows of cached tables in the files of a version, by cache key."""

import hashlib
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import CheckpointError, StoreError
from rowwise.base.inside import open_inside
from rowwise.checkpoint.manifest import TensorChunk
from rowwise.checkpoint.read import Checkpoint
from rowwise.serve.row_memory import CachedTables
from rowwise.serve.shared_rows import NewerChunks
from rowwise.tables.store.policy import Ints
from rowwise.tables.store.shared_cache import Bytes, read_rows


class _StoredChunk(NamedTuple):
    """Contiguous rows in a file."""

    first_key: int
    tag: int  # identifies its rows across versions
    file: int  # file descriptor
    begin: int  # offset in the file
    path: Path


@final
class RowFiles:
    """The rows of cached tables of one width. Files stay open, so the version may be deleted meanwhile."""

    def __init__(self, version: Checkpoint, cached: CachedTables, newer: NewerChunks) -> None:
        self._row_bytes = cached.shape.row_bytes
        opened: dict[str, int] = {}
        weakref.finalize(self, _close, opened.values())
        self._chunks = sorted(self._find(version, cached, newer, opened))
        self._first_K, self._file_K, self._begin_K = (
            np.array([getattr(chunk, name) for chunk in self._chunks], np.int64)
            for name in ("first_key", "file", "begin")
        )
        self._tag_K = np.array([chunk.tag for chunk in self._chunks], np.uint64)

    def tags(self, keys_M: Ints) -> NDArray[np.uint64]:
        """Tags that identify the rows of keys across versions."""
        return self._tag_K[self._chunk_of(keys_M)]

    def read(self, keys_M: Ints, rows_MB: Bytes) -> None:
        """Read rows; raises a StoreError with the file."""
        chunk_M = self._chunk_of(keys_M)
        begin_M = self._begin_K[chunk_M] + (keys_M - self._first_K[chunk_M]) * self._row_bytes
        file_M = self._file_K[chunk_M]
        for file in np.unique(file_M).tolist():
            in_file = np.flatnonzero(file_M == file)
            part = rows_MB if len(in_file) == len(keys_M) else np.empty((len(in_file), self._row_bytes), np.uint8)
            try:
                read_rows(file, begin_M[in_file], part)
            except OSError as error:
                path = self._chunks[int(chunk_M[in_file[0]])].path
                raise StoreError(f"{path}: its rows cannot be read: {error.strerror}", "an unchanged version") from None
            if part is not rows_MB:
                rows_MB[in_file] = part

    def _chunk_of(self, keys_M: Ints) -> Ints:
        return np.searchsorted(self._first_K, keys_M, "right") - 1

    def _find(
        self, version: Checkpoint, cached: CachedTables, newer: NewerChunks, opened: dict[str, int]
    ) -> Iterator[_StoredChunk]:
        firsts = cached.first_keys
        for table in cached.tables:
            entry, added, key = version.entry(table.name), newer.get(table.name, ()), firsts[table.name]
            for chunk in entry.chunks[: len(entry.chunks) - len(added)]:
                if (
                    chunk.ids is not None
                    or chunk.cols is not None
                    or chunk.bits is not None
                    or chunk.initial is not None
                ):
                    raise CheckpointError(
                        f"{version.folder}: {table.name} has chunks that are not whole rows",
                        "a full export, or --memory for all rows",
                    )
                yield self._open(version, table.name, chunk, key + chunk.rows[0], opened)
            key += table.rows
            for chunk in added:
                if chunk.count:
                    yield self._open(version, table.name, chunk, key, opened)
                key += chunk.count

    def _open(
        self, version: Checkpoint, name: str, chunk: TensorChunk, first_key: int, opened: dict[str, int]
    ) -> _StoredChunk:
        begin, folder = version.find_rows(name, chunk).begin, version.folder
        assert isinstance(folder, Path), "versions are served from folders"
        if chunk.file not in opened:
            with open_inside(folder, chunk.file) as file:
                opened[chunk.file] = os.dup(file.fileno())
        saved = version.manifest.files[chunk.file]
        # The tag includes the first key, as keys shift if other tables are cached or have grown.
        content = f"{chunk.crc32} {saved.size_bytes} {saved.head_crc32}"
        text = f"{name} {first_key} {chunk.rows} {chunk.key} {content}"
        tag = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return _StoredChunk(first_key, tag, opened[chunk.file], begin, folder / chunk.file)


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
