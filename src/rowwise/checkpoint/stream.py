"""Writes a checkpoint from tensors read window by window, which need not fit into memory.

The shards describe what each rank writes; their tensors are on the meta device. Unlike a `RowStream` of one tensor, a
`Read` function reads all of them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from rowwise.checkpoint import windows, write
from rowwise.checkpoint.atomic import atomic_output
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import CheckpointManifest, Span, TensorEntry
from rowwise.checkpoint.windows import ProgressCounter, Tell
from rowwise.checkpoint.write import Load, merge_rank_files, write_manifest, write_rank_files

Read = Callable[[LocalShard], None]  # fills a shard that has memory


def shard_outline(name: str, entry: TensorEntry, rows: Span | None = None, cols: Span | None = None) -> LocalShard:
    """A shard on the meta device: shapes without memory."""
    rows, cols = rows or (0, entry.rows), None if cols == (0, entry.columns) else cols
    plain = cols is None and entry.row_type is None
    shape = entry.shape[1:] if plain else (entry.stored_width(cols or (0, entry.columns)),)
    tensor = torch.empty((rows[1] - rows[0], *shape), dtype=getattr(torch, entry.dtype), device="meta")
    return LocalShard(
        name=name, tensor=tensor, shape=entry.shape, rows=rows, cols=cols,
        row_type=entry.row_type, column_group=entry.column_group,
    )  # fmt: skip


def write_streamed(
    folder: Path, shards_W: Sequence[Sequence[LocalShard]], data: dict[str, Any], read: Read, tell: Tell | None = None
) -> CheckpointManifest:
    """Write the shards of each rank into one folder, which must not exist."""
    progress = ProgressCounter(tell, sum(shard.size_bytes for shards in shards_W for shard in shards))
    reader = _WindowReader(read, progress)
    with atomic_output(folder) as unfinished:
        unfinished.mkdir()
        written_W = [
            # In one thread, as chunks are loaded in the order of the shards.
            write_rank_files(unfinished, shards, f"{rank:05}", write.SIZES, load=reader.load_from(shards), threads=1)
            for rank, shards in enumerate(shards_W)
        ]
        files, tensors = merge_rank_files(written_W)
        written = sum(file.size_bytes for file in files.values())
        manifest = write_manifest(unfinished, data, files, tensors, (written,))
    return manifest


@final
class _WindowReader:
    """Reads windows of several chunks, so that a source chunk is not read again for each written chunk."""

    def __init__(self, read: Read, progress: ProgressCounter) -> None:
        self._read, self._progress = read, progress
        self._window: LocalShard | None = None

    def load_from(self, shards: Sequence[LocalShard]) -> Load:
        """A function that loads chunks of these shards, called in their order."""
        by_name: dict[str, list[LocalShard]] = {}
        for shard in shards:
            by_name.setdefault(shard.name, []).append(shard)

        def load(cut: LocalShard) -> Tensor:
            window = self._window
            if window is None or not _covers(window, cut):
                source = next(shard for shard in by_name[cut.name] if _covers(shard, cut))
                row_bytes = max(source.row_bytes, 4 * source.columns)  # rows of another type pass through float32
                end = min(source.rows[1], cut.rows[0] + max(1, windows.WINDOW_bytes // max(1, row_bytes)))
                self._window = window = source.cut(cut.rows[0], max(end, cut.rows[1])).allocate()
                self._read(window)
            self._progress.add(cut.size_bytes)
            return window.cut(*cut.rows).tensor

        return load


def _covers(shard: LocalShard, cut: LocalShard) -> bool:
    covers_rows = shard.rows[0] <= cut.rows[0] and cut.rows[1] <= shard.rows[1]
    return covers_rows and (shard.name, shard.cols) == (cut.name, cut.cols)
