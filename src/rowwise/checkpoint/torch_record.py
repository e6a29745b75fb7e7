"""Reads a tensor that torch.save wrote into a range of a file, as torch.distributed.checkpoint does for each chunk.

torch.load is not used: its pickle runs nothing here, and sizes in it are compared with the bytes of the file. Not
supported: tensors on other devices, sparse and quantised tensors, compressed archives.
"""

import io
import os
import zipfile
from typing import BinaryIO, TypeGuard, final

import torch
from torch import Tensor

from rowwise.checkpoint.manifest import NUMBERS
from rowwise.checkpoint.pickled import ORDERED, GlobalName, Persistent, PickledObject, read_pickle
from rowwise.errors import CheckpointError

STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
UNTYPED = ("torch.storage", "UntypedStorage")
REBUILD = {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")}
KNOWN = REBUILD | {("torch", name) for name in (*STORAGES, *NUMBERS)} | {UNTYPED, ORDERED}
PICKLE_bytes = 1 << 16  # of one tensor


def load_tensor(file: BinaryIO, begin: int, size: int) -> Tensor:
    """The tensor in a range of bytes of a file."""
    try:
        with zipfile.ZipFile(_FileWindow(file.fileno(), begin, size)) as archive:
            return _tensor(archive)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OverflowError) as error:
        raise CheckpointError(f"bytes {begin} to {begin + size - 1} are no tensor of torch.save: {error}") from None


def _tensor(archive: zipfile.ZipFile) -> Tensor:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
        raise CheckpointError("its archive is compressed, which torch does not do")
    pickle = members.get("data.pkl")
    if pickle is None or pickle.file_size > PICKLE_bytes:
        raise CheckpointError("its archive has no data.pkl of a tensor")
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise CheckpointError("its numbers are big-endian")
    stored = read_pickle(archive.read(pickle), KNOWN)
    if not isinstance(stored, PickledObject) or stored.kind not in REBUILD or len(stored.args) < 4:
        raise CheckpointError("it holds no tensor")
    storage, offset, size, stride = stored.args[:4]
    if not isinstance(storage, PickledObject) or storage.kind != Persistent:
        raise CheckpointError("it holds no tensor")
    dtype, key = _storage(storage, stored)
    content = members.get(f"data/{key}")
    if content is None:
        raise CheckpointError(f"its archive has no data/{str(key)[:40]}")
    _check_bounds(offset, size, stride, content.file_size // dtype.itemsize)
    numbers = torch.frombuffer(bytearray(archive.read(content)) or bytearray(dtype.itemsize), dtype=dtype)
    return numbers.as_strided(size, stride, offset)


def _storage(storage: PickledObject, stored: PickledObject) -> tuple[torch.dtype, str]:
    """The dtype of a tensor, and the name of its data in the archive."""
    fields = storage.args[0]
    if type(fields) is not tuple or len(fields) != 5 or fields[0] != "storage" or not isinstance(fields[1], GlobalName):
        raise CheckpointError("it holds no tensor")
    _, kind, key, _, _ = fields
    dtype = STORAGES.get(kind.name)
    if kind == UNTYPED and len(stored.args) > 6 and isinstance(stored.args[6], GlobalName):
        dtype = getattr(torch, stored.args[6].name) if stored.args[6].name in NUMBERS else None
    if dtype is None or not isinstance(key, str):
        raise CheckpointError("its dtype is not supported")
    return dtype, key


def _check_bounds(offset: object, size: object, stride: object, count: int) -> None:
    """Raise unless the tensor's shape and strides stay within `count` numbers."""
    at = (offset,)
    if not (_is_numbers(size) and _is_numbers(stride) and _is_numbers(at) and len(size) == len(stride)):
        raise CheckpointError("its shape and strides are not whole numbers")
    numbers, last = 1, at[0]
    for n, step in zip(size, stride, strict=True):
        numbers *= n
        last += (n - 1) * step
    if numbers > count or (numbers and last >= count):
        raise CheckpointError(f"its shape {size} needs more than the {count} numbers in its file")


def _is_numbers(numbers: object) -> TypeGuard[tuple[int, ...]]:
    return type(numbers) is tuple and len(numbers) <= 64 and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)


@final
class _FileWindow(io.RawIOBase):
    """A range of bytes of a file as a file of its own; `read` allocates no more than the bytes that exist."""

    def __init__(self, handle: int, begin: int, size: int) -> None:
        super().__init__()
        self._handle, self._begin, self._size, self._at = handle, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise ValueError("a place before its first byte")
        self._at = at
        return at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        content = bytearray()
        while len(content) < count:
            more = os.pread(self._handle, count - len(content), self._begin + self._at)
            if not more:
                raise EOFError("it ends too early")
            content += more
            self._at += len(more)
        return bytes(content)
