"""Writing a checkpoint: everything into a folder under another name, which then gets its own in one step.

A kill at any moment leaves the former checkpoints as they were and at most a folder ending in `.part`, which the next
write removes. Memory: one piece at a time is copied, so a large table needs little beside itself.
"""

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rowwise.checkpoint.manifest import FORMAT, NAME, Entry, Manifest, Piece
from rowwise.errors import CheckpointError

PIECE_bytes = 64 << 20
FILE_bytes = 512 << 20
PART = ".part"


def write(folder: Path, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> Manifest:
    """Save the tensors, and `data` beside them in the manifest; the folder must not exist."""
    if folder.exists():
        raise CheckpointError(f"{folder} is there already; save under another name")
    part = folder.with_name(folder.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        writer = _Writer(part)
        entries = {name: writer.add(name, tensor) for name, tensor in tensors.items()}
        writer.flush()
        manifest = Manifest(format=FORMAT, tensors=entries, data=dict(data))
        _write_bytes(part / NAME, manifest.to_json())
        _sync(part)
        part.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:  # the latter is what a full disk is to safetensors
        shutil.rmtree(part, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{folder} was not saved: {why}; former ones are as they were") from error
    return manifest


def write_data(folder: Path, data: Mapping[str, Any]) -> None:
    """Replace the data of a checkpoint, in one step; its tensors stay."""
    part = folder / f"{NAME}{PART}"
    try:
        _write_bytes(part, structs.replace(Manifest.read(folder), data=dict(data)).to_json())
        part.replace(folder / NAME)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} stays as it was: {error.strerror or error}") from error


class _Writer:
    """Fills one file after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.waiting: dict[str, Tensor] = {}
        self.size = 0

    def add(self, name: str, tensor: Tensor) -> Entry:
        """Take a tensor, in pieces of whole rows."""
        rows = tensor.detach().reshape(tensor.shape or (1,))
        step = max(1, PIECE_bytes // max(1, rows[:1].numel() * rows.element_size())) if len(rows) else 1
        pieces = [self._piece(name, rows, k, min(k + step, len(rows))) for k in range(0, len(rows), step)]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Entry(dtype=dtype, shape=tuple(tensor.shape), pieces=tuple(pieces))

    def _piece(self, name: str, rows: Tensor, begin: int, end: int) -> Piece:
        # A copy: the tensor may change before its file is full, and views would be written whole.
        piece = rows[begin:end].cpu().contiguous().clone()
        key = f"{name}@{begin}"
        self.waiting[key] = piece
        self.size += piece.numel() * piece.element_size()
        found = Piece(begin=begin, end=end, file=self._file(), key=key, crc32=checksum(piece))
        if self.size >= FILE_bytes:
            self.flush()
        return found

    def _file(self) -> str:
        return f"{self.number:05}.safetensors"

    def flush(self) -> None:
        """Write the file that is being filled."""
        if self.waiting:
            path = self.folder / self._file()
            save_file(self.waiting, path)
            _sync(path)
            self.waiting.clear()
            self.number, self.size = self.number + 1, 0


def checksum(piece: Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(piece.reshape(-1).view(torch.uint8).numpy().data)


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _sync(path: Path) -> None:
    """Make sure it is on the disk before what refers to it is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
