"""Writing a checkpoint of tensors that are read bit by bit while it is written: they need not fit into memory.

The parts say what is to be written, and by whom; their tensors are on no device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from msgspec import structs
from torch import Tensor

from rowwise.checkpoint import windows, write
from rowwise.checkpoint.assign import deal
from rowwise.checkpoint.atomic import atomic_output
from rowwise.checkpoint.files import write_bytes, write_file
from rowwise.checkpoint.manifest import FORMAT, NAME, CheckpointFile, CheckpointManifest, Span, TensorChunk, TensorEntry
from rowwise.checkpoint.parts import LocalShard
from rowwise.checkpoint.windows import Tell
from rowwise.checkpoint.write import RankFiles, merge

Read = Callable[[LocalShard], None]  # fills a part, which has memory then


def shard_outline(name: str, entry: TensorEntry, rows: Span | None = None, cols: Span | None = None) -> LocalShard:
    """Part of a tensor, without memory."""
    rows = rows or (0, entry.rows)
    plain = cols is None and entry.row_type is None
    shape = entry.shape[1:] if plain else (entry.width(cols or (0, entry.columns)),)
    tensor = torch.empty((rows[1] - rows[0], *shape), dtype=getattr(torch, entry.dtype), device="meta")
    return LocalShard(
        name=name, tensor=tensor, shape=entry.shape, rows=rows, cols=cols,
        row_type=entry.row_type, column_group=entry.column_group,
    )  # fmt: skip


def deal_shared(own_W: Sequence[Sequence[LocalShard]], shared: Sequence[LocalShard]) -> list[list[LocalShard]]:
    """The parts that each rank writes of shared tensors: `write.own_parts` for all ranks at once."""
    found_W = [list(own) for own in own_W]
    loads_W = [sum(part.size_bytes for part in own) for own in own_W]
    cuts = deal([(len(part.tensor), part.row_bytes) for part in shared], loads_W)
    for part, dealt in zip(shared, cuts, strict=True):
        for rank, begin, end in dealt:
            found_W[rank].append(part.cut(begin, end))
    return found_W


def write_streamed(
    folder: Path, parts_W: Sequence[Sequence[LocalShard]], data: Mapping[str, Any], read: Read, tell: Tell | None = None
) -> CheckpointManifest:
    """Save described parts as so many ranks would have; the folder must not exist."""
    total = sum(part.size_bytes for parts in parts_W for part in parts)
    ahead = _Ahead(read, lambda done: tell(done, total) if tell else None)
    with atomic_output(folder) as part:
        part.mkdir()
        shares = [_write_rank(part, parts, rank, ahead.of(parts)) for rank, parts in enumerate(parts_W)]
        files, tensors = merge(shares)
        manifest = CheckpointManifest(format=FORMAT, data=dict(data), files=files, tensors=tensors)
        manifest.check(NAME)
        write_bytes(part / NAME, manifest.to_json())
    return manifest


def _write_rank(
    folder: Path, parts: Sequence[LocalShard], rank: int, give: Callable[[LocalShard], Tensor]
) -> RankFiles:
    """The files of one rank, in the order of its parts; wider types first, see `files.Head`."""
    files: dict[str, CheckpointFile] = {}
    found: dict[str, list[TensorChunk]] = {part.name: [] for part in parts}
    pieces = [piece for part in parts for piece in _cut(part)]
    pieces.sort(key=lambda piece: -piece.tensor.element_size())
    for number, some in enumerate(_fill_files(pieces)):
        name, keys = f"{rank:05}-{number:05}.safetensors", [_key(piece) for piece in some]
        heads = [(key, piece.tensor) for key, piece in zip(keys, some, strict=True)]
        files[name], sums = write_file(folder / name, heads, (give(piece) for piece in some))
        for piece, key, crc32 in zip(some, keys, sums, strict=True):
            found[piece.name].append(TensorChunk(rows=piece.rows, cols=piece.cols, file=name, key=key, crc32=crc32))
    tensors = {part.name: structs.replace(part.entry, pieces=tuple(found[part.name])) for part in parts}
    return RankFiles(files=files, tensors=tensors)


def _key(piece: LocalShard) -> str:
    """A key of the piece: its tensor may be in many files."""
    cols = "" if piece.cols is None else f", {piece.cols[0]}:{piece.cols[1]}"
    return f"{piece.name}[{piece.rows[0]}:{piece.rows[1]}{cols}]"


def _cut(part: LocalShard) -> list[LocalShard]:
    step = max(1, write.SIZES.piece_bytes // max(1, part.row_bytes))
    return [part.cut(k, min(k + step, part.rows[1])) for k in range(*part.rows, step)]


def _fill_files(pieces: Sequence[LocalShard]) -> list[list[LocalShard]]:
    found: list[list[LocalShard]] = []
    held_bytes = write.SIZES.file_bytes
    for piece in pieces:
        if held_bytes >= write.SIZES.file_bytes:
            found.append([])
            held_bytes = 0
        found[-1].append(piece)
        held_bytes += piece.size_bytes
    return found


@final
class _Ahead:
    """Reads several pieces ahead; the tensors that they are cut from have pieces that are read whole."""

    def __init__(self, read: Read, tell: Callable[[int], None]) -> None:
        self._read, self._tell = read, tell
        self._done = 0
        self._held: LocalShard | None = None

    def of(self, parts: Sequence[LocalShard]) -> Callable[[LocalShard], Tensor]:
        """The source of these parts' pieces, in their order."""
        by_name: dict[str, list[LocalShard]] = {}
        for part in parts:
            by_name.setdefault(part.name, []).append(part)

        def give(piece: LocalShard) -> Tensor:
            held = self._held
            if held is None or not _has(held, piece):
                whole = next(part for part in by_name[piece.name] if _has(part, piece))
                end = min(whole.rows[1], piece.rows[0] + max(1, windows.WINDOW_bytes // max(1, whole.row_bytes)))
                self._held = held = _allocate(whole.cut(piece.rows[0], max(end, piece.rows[1])))
                self._read(held)
            self._done += piece.size_bytes
            self._tell(self._done)
            return held.cut(*piece.rows).tensor

        return give


def _has(part: LocalShard, piece: LocalShard) -> bool:
    inside = part.rows[0] <= piece.rows[0] and piece.rows[1] <= part.rows[1]
    return inside and (part.name, part.cols) == (piece.name, piece.cols)


def _allocate(part: LocalShard) -> LocalShard:
    # Zeros, as int8 rows end with bytes that no column fills: the same files each time.
    return replace(part, tensor=torch.zeros_like(part.tensor, device="cpu"))
