"""Safetensors files, written from tensors where they lie and read into them: no tensor is copied on its way.

Anybody else can read the files (`safetensors.safe_open`). The library's own writer wants all of a file in memory at
once, and its reader knows no checksums. A file is gone through in chunks that stay in cache, so its checksum costs
little beside the writing.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from rowwise.checkpoint.manifest import MOST_DIMS, NUMBERS, CheckpointFile
from rowwise.errors import CheckpointError
from rowwise.inside import open_inside
from rowwise.ops.checksum import crc32
from rowwise.spec import Value
from rowwise.textfile import decode_json, printable, write_new

CHUNK_bytes = 1 << 20
HEAD_bytes = 100_000_000  # as the format has it
CODES = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "float32": "F32", "int32": "I32", "uint32": "U32",
    "float16": "F16", "bfloat16": "BF16", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
DTYPES = {getattr(torch, name): code for name, code in CODES.items()}
BYTES = {code: NUMBERS[name] for name, code in CODES.items()}


class ByteRange(NamedTuple):
    """The range of bytes of a key in a file, with type and shape."""

    begin: int
    end: int
    code: str
    shape: tuple[int, ...]


class FileHeaderEntry(Value, frozen=True):
    """The type, shape and byte range of one key in a file's header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """The header of a safetensors file: which tensors it holds, and where."""

    content: bytes
    places: dict[str, ByteRange]

    @classmethod
    def make(cls, tensors: Sequence[tuple[str, Tensor]]) -> Self:
        """Lay tensors out one after another, wider dtypes first, so that each begins aligned."""
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
        return cls.parse(len(text).to_bytes(8, "little") + text, at)

    @classmethod
    def parse(cls, content: bytes, size_bytes: int) -> Self:
        """Parse the bytes up to the first tensor; each range of bytes belongs to one key."""
        words = decode_json(content[8:], dict[str, FileHeaderEntry])
        places: dict[str, ByteRange] = {}
        at = 0
        for key, word in sorted(words.items(), key=lambda item: item[1].data_offsets):
            begin, end = word.data_offsets
            sound = word.dtype in BYTES and len(word.shape) <= MOST_DIMS and all(n >= 0 for n in word.shape)
            if not sound or begin != at or end != begin + math.prod(word.shape) * BYTES[word.dtype]:
                got = f"{word.dtype[:20]!r} of shape {str(word.shape)[:80]} from {begin} to {end}"
                raise ValueError(f"its head has {key[:200]!r} as {got}, after {at} bytes")
            places[key] = ByteRange(len(content) + begin, len(content) + end, word.dtype, word.shape)
            at = end
        if at != size_bytes:
            raise ValueError(f"its head has keys of {at} bytes, and {size_bytes} follow")
        return cls(content=content, places=places)

    @classmethod
    def read(cls, folder: Path, name: str, known: CheckpointFile) -> Self:
        """Read and check it, and the size of its file."""
        path = folder / name
        try:
            with open_inside(folder, name) as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                content = start + file.read(min(int.from_bytes(start, "little"), size, HEAD_bytes))
        except OSError as error:
            raise CheckpointError(f"{path} is missing or damaged: {error.strerror}; use another checkpoint") from None
        if size != known.size_bytes:
            why = f"it has {size} bytes, want {known.size_bytes}"
            raise CheckpointError(f"{path} is missing or damaged: {why}; use another checkpoint")
        if zlib.crc32(content) != known.head_crc32:
            raise CheckpointError(f"{path} is damaged: its head does not match its checksum; use another checkpoint")
        try:
            return cls.parse(content, size - len(content))
        except ValueError as error:
            why = printable(str(error)).replace("\n", " ")[:300]
            raise CheckpointError(f"{path} is damaged: {why}; use another checkpoint") from None


def write_file(
    path: Path, tensors: Sequence[tuple[str, Tensor]], later: Iterable[Tensor] | None = None
) -> tuple[CheckpointFile, list[int]]:
    """Write tensors under their keys, and make sure that they are on the disk; gives the checksum of each.

    `later` gives each anew when it is its turn: then those in `tensors` need not be on any device.
    """
    head = FileHeader.make(tensors)
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
    return CheckpointFile(size_bytes=size, head_crc32=zlib.crc32(head.content)), found


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
    write_new(path, content)
    sync(path)


def sync(path: Path) -> None:
    """Make sure it is on the disk before what refers to it is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
