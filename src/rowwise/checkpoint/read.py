"""Reading a checkpoint: tensors by name, whole or some of their rows, every piece checked as it is read."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rowwise.checkpoint.manifest import Entry, Manifest, Piece
from rowwise.checkpoint.write import checksum
from rowwise.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was opened; nothing but its manifest is read yet."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read the manifest, which says whether the checkpoint is whole."""
        return cls(folder=folder, manifest=Manifest.read(folder))

    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self.manifest.tensors)

    def entry(self, name: str) -> Entry:
        """What is known of a tensor."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}")
        return self.manifest.tensors[name]

    def load(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """A tensor, or its rows [begin, end); only the pieces that overlap them are read."""
        entry = self.entry(name)
        rows = entry.shape[0] if entry.shape else 1
        end = rows if end is None else end
        shape = (end - begin, *entry.shape[1:]) if entry.shape else (1,)
        if not 0 <= begin <= end <= rows:
            raise CheckpointError(f"{self.folder}: tensor {name!r} has {rows} rows; got [{begin}, {end})")
        out = torch.empty(shape, dtype=getattr(torch, entry.dtype))
        self.copy_into(out, name, begin)
        return out if entry.shape else out.reshape(())

    @torch.no_grad()
    def copy_into(self, out: Tensor, name: str, begin: int = 0) -> None:
        """Fill `out` with the rows from `begin` on, a piece at a time: a large table needs little beside itself."""
        out = out if out.dim() else out.view(1)
        end = begin + len(out)
        for piece in self.entry(name).pieces:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                found = self._read(name, piece)
                out[first - begin : last - begin].copy_(found[first - piece.begin : last - piece.begin])

    def verify(self) -> None:
        """Read everything; raises for the first piece that is not what was written."""
        for name in self.names():
            self.load(name)

    def _read(self, name: str, piece: Piece) -> Tensor:
        path = self.folder / piece.file
        try:
            with safe_open(path, "pt") as file:
                found = file.get_tensor(piece.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}; use another checkpoint") from None
        if checksum(found) != piece.crc32:
            what = f"rows {piece.begin} to {piece.end - 1} of tensor {name!r}"
            raise CheckpointError(f"{path} is damaged: {what} do not match their checksum; use another checkpoint")
        return found
