"""Safetensors files, written from tensors where they lie and read into them: no tensor is copied on its way.

Its own file because only this knows bytes. Anybody else can read the files (`safetensors.safe_open`). The library's own
writer wants all of a file in memory at once, and its reader knows no checksums. A file is gone through in chunks that
stay in cache, so its checksum costs little beside the writing.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from rowwise.checkpoint.manifest import File
from rowwise.errors import CheckpointError
from rowwise.ops.checksum import crc32

CHUNK_bytes = 1 << 20
DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64", torch.float32: "F32", torch.int32: "I32",
    torch.uint32: "U32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint16: "U16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Place(NamedTuple):
    """Where the bytes of a key begin and end in a file."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What stands before the tensors of a file: which there are, and where."""

    content: bytes
    places: dict[str, Place]

    @classmethod
    def make(cls, tensors: Sequence[tuple[str, Tensor]]) -> Self:
        """Of tensors one after the other; those of wider types come first, so that each begins at a place for it."""
        words: dict[str, object] = {}
        at = 0
        for key, tensor in tensors:
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{key}: safetensors files do not hold {tensor.dtype}")
            end = at + tensor.numel() * tensor.element_size()
            words[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(words, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return cls.parse(len(text).to_bytes(8, "little") + text)

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Of the bytes up to the first tensor."""
        places: dict[str, Place] = {}
        for key, word in json.loads(content[8:]).items():
            begin, end = word["data_offsets"]
            places[key] = Place(len(content) + begin, len(content) + end)
        return cls(content=content, places=places)

    @classmethod
    def read(cls, path: Path, known: File) -> Self:
        """Read and check it, and the size of its file."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                content = start + file.read(min(int.from_bytes(start, "little"), size))
        except OSError as error:
            raise CheckpointError(f"{path} is missing or damaged: {error.strerror}; use another checkpoint") from None
        if size != known.size_bytes:
            why = f"it has {size} bytes, want {known.size_bytes}"
            raise CheckpointError(f"{path} is missing or damaged: {why}; use another checkpoint")
        if zlib.crc32(content) != known.head_crc32:
            raise CheckpointError(f"{path} is damaged: its head does not match its checksum; use another checkpoint")
        return cls.parse(content)


def write_file(
    path: Path, tensors: Sequence[tuple[str, Tensor]], later: Iterable[Tensor] | None = None
) -> tuple[File, list[int]]:
    """Write tensors under their keys, and make sure that they are on the disk; gives the checksum of each.

    `later` gives each anew when it is its turn: then those in `tensors` need not be on any device.
    """
    head = Head.make(tensors)
    found: list[int] = []
    size = len(head.content)
    with path.open("xb") as file:
        file.write(head.content)
        for tensor in later or (tensor for _, tensor in tensors):
            sum32 = 0
            for chunk_N in chunks(tensor):
                sum32 = crc32(chunk_N, sum32)
                file.write(chunk_N.numpy().data)
                size += len(chunk_N)
            found.append(sum32)
        file.flush()
        os.fsync(file.fileno())
    return File(size_bytes=size, head_crc32=zlib.crc32(head.content)), found


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor, in order."""
    if tensor.is_cpu and tensor.is_contiguous():
        yield from as_bytes(tensor).split(CHUNK_bytes)
        return
    step = max(1, CHUNK_bytes // max(1, tensor[:1].numel() * tensor.element_size()))
    buffer = torch.empty((min(step, len(tensor)), *tensor.shape[1:]), dtype=tensor.dtype)
    for at in range(0, len(tensor), step):
        rows = tensor[at : at + step]
        yield as_bytes(buffer[: len(rows)].copy_(rows))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    # Not reshape: where there is one number, its stride may be anything, which view refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Make sure it is on the disk before what refers to it is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
