"""Writes and reads safetensors files without copies of tensors.

Any other program can read the files (`safetensors.safe_open`). The safetensors library is not used here: its writer
needs the whole file in memory, and its reader has no checksums. Bytes pass in buffers that stay in cache, so that a
checksum costs little beside the writing.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from rowwise.base.errors import CheckpointError, DamageError, StorageError, printable
from rowwise.base.storage.folder import Folder, read_range, size_of_file
from rowwise.base.textfile import decode_json, sync, write_new
from rowwise.checkpoint.manifest import MAX_DIMS, NUMBERS, CheckpointFile
from rowwise.tables.ops.checksum import crc32
from rowwise.tables.spec import Value

BUFFER_bytes = 1 << 20
FIRST_bytes = 64 << 10  # read first of a file: most headers are shorter
HEADER_bytes = 100_000_000  # the limit of the safetensors format
CODES = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "float32": "F32", "int32": "I32", "uint32": "U32",
    "float16": "F16", "bfloat16": "BF16", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
DTYPES = {getattr(torch, name): code for name, code in CODES.items()}
BYTES = {code: NUMBERS[name] for name, code in CODES.items()}


@contextmanager
def reading_file(path: Folder) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file."""
    try:
        yield
    except (CheckpointError, StorageError):
        raise
    except OSError as error:
        raise DamageError(f"{path} is missing or damaged: {error.strerror}; use another checkpoint") from None


class ByteRange(NamedTuple):
    """The bytes of a key in a file, with type and shape."""

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
    """The header of a safetensors file: type, shape and bytes of each tensor."""

    content: bytes
    ranges: dict[str, ByteRange]

    @classmethod
    def make(cls, tensors: Sequence[tuple[str, Tensor]]) -> Self:
        """The header of tensors in this order; the caller puts wider types first, so that all are aligned."""
        entries: dict[str, object] = {}
        at = 0
        for key, tensor in tensors:
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{key}: got {tensor.dtype}", f"one of {', '.join(CODES)}")
            end = at + tensor.numel() * tensor.element_size()
            entries[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return cls.parse(len(text).to_bytes(8, "little") + text, at)

    @classmethod
    def parse(cls, content: bytes, size_bytes: int) -> Self:
        """Parse the bytes before the first tensor; the keys must cover the `size_bytes` after them without gaps."""
        entries = decode_json(content[8:], dict[str, FileHeaderEntry])
        ranges: dict[str, ByteRange] = {}
        at = 0
        for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            valid = entry.dtype in BYTES and len(entry.shape) <= MAX_DIMS and all(n >= 0 for n in entry.shape)
            if not valid or begin != at or end != begin + math.prod(entry.shape) * BYTES[entry.dtype]:
                description = f"{entry.dtype[:20]!r} of shape {str(entry.shape)[:80]} from byte {begin} to {end}"
                raise ValueError(
                    f"its header has {key[:200]!r} as {description}; expected a dtype and its size from byte {at} on"
                )
            ranges[key] = ByteRange(len(content) + begin, len(content) + end, entry.dtype, entry.shape)
            at = end
        if at != size_bytes:
            raise ValueError(f"its header has keys of {at} bytes, expected the {size_bytes} that follow")
        return cls(content=content, ranges=ranges)

    @classmethod
    def read(cls, folder: Folder, name: str, expected: CheckpointFile) -> Self:
        """Read the header; raises unless it and the file's size match the manifest."""
        path = folder / name
        with reading_file(path):
            size = size_of_file(folder, name)
            start = read_range(folder, name, 0, min(FIRST_bytes, size))
            end = 8 + min(int.from_bytes(start[:8], "little"), size, HEADER_bytes)
            content = start[:end] + (read_range(folder, name, len(start), min(end, size)) if end > len(start) else b"")
        if size != expected.size_bytes:
            raise DamageError(
                f"{path} is missing or damaged: it has {size} bytes", expected.size_bytes, hint="use another checkpoint"
            )
        if zlib.crc32(content) != expected.head_crc32:
            raise DamageError(f"{path} is damaged: its header does not match its checksum; use another checkpoint")
        try:
            return cls.parse(content, size - len(content))
        except ValueError as error:
            fault = printable(str(error)).replace("\n", " ")[:300]
            raise DamageError(f"{path} is damaged: {fault}; use another checkpoint") from None


def write_file(
    path: Path, outlines: Sequence[tuple[str, Tensor]], tensors: Iterable[Tensor]
) -> tuple[CheckpointFile, list[int]]:
    """Write tensors under their keys and sync the file to the disk; returns the checksum of each tensor.

    `outlines` has the key, shape and type of each; they may be on the meta device.
    """
    header = FileHeader.make(outlines)
    checksums: list[int] = []
    size = len(header.content)
    with path.open("xb") as file:
        file.write(header.content)
        for tensor in tensors:
            sum32 = 0
            for bytes_N in split_bytes(tensor):
                sum32 = crc32(bytes_N, sum32)
                file.write(bytes_N.numpy().data)
                size += len(bytes_N)
            checksums.append(sum32)
        file.flush()
        os.fsync(file.fileno())
    return CheckpointFile(size_bytes=size, head_crc32=zlib.crc32(header.content)), checksums


def split_bytes(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor, about `BUFFER_bytes` at a time."""
    if tensor.is_cpu and tensor.is_contiguous():
        yield from as_bytes(tensor).split(BUFFER_bytes)
        return
    step = max(1, BUFFER_bytes // max(1, tensor[:1].numel() * tensor.element_size()))
    buffer = torch.empty((min(step, len(tensor)), *tensor.shape[1:]), dtype=tensor.dtype)
    for at in range(0, len(tensor), step):
        rows = tensor[at : at + step]
        yield as_bytes(buffer[: len(rows)].copy_(rows))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as bytes."""
    # Not reshape: the stride of a single number may be anything, and `view` then raises.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def write_bytes(path: Path, content: bytes) -> None:
    write_new(path, content)
    sync(path)
