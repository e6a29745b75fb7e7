"""Opens folders of torch.distributed.checkpoint, written by any number of ranks, without running their pickles.

Not supported: entries other than tensors, and files written with an extension (compression).
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from rowwise.base.errors import CheckpointError
from rowwise.base.inside import fault_of_name, open_inside
from rowwise.base.textfile import read_bytes
from rowwise.checkpoint.manifest import MAX_DIMS, NUMBERS, Span, TensorChunk, TensorEntry, find_coverage_fault
from rowwise.checkpoint.pickled import ORDERED, GlobalName, PickledObject, read_pickle
from rowwise.checkpoint.source import TensorOutline, TensorSource, load_tensor

METADATA = ".metadata"
METADATA_bytes = 1 << 28
ARCHIVE_bytes = 1 << 20  # max. overhead of a chunk beyond its numbers
RECORDS, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
KNOWN = {
    *((RECORDS, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((RECORDS, name) for name in ("MetadataIndex", "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (FILES, "_StorageInfo"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    *(("torch", name) for name in ("Size", "strided", *NUMBERS)),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3 pickle enum members with it
    ORDERED,
}  # fmt: skip
T = TypeVar("T")
Sizes = tuple[int, ...]


class _Chunk(NamedTuple):
    """A rectangle of a tensor, and its bytes in a file."""

    offsets: Sizes
    sizes: Sizes
    file: str
    begin: int
    size_bytes: int

    @property
    def rows(self) -> Span:
        """Rows of the tensor; a scalar is one row of one column."""
        return (self.offsets[0], self.offsets[0] + self.sizes[0]) if self.sizes else (0, 1)

    @property
    def cols(self) -> Span:
        """Columns: the second dimension."""
        return (self.offsets[1], self.offsets[1] + self.sizes[1]) if len(self.sizes) > 1 else (0, 1)


class _StoredTensor(NamedTuple):
    outline: TensorOutline
    chunks: list[_Chunk]


def open_dcp(folder: Path) -> TensorSource:
    try:
        content = read_bytes(folder / METADATA, METADATA_bytes, links=False)
        stored = _tensors(read_pickle(content, KNOWN))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {METADATA}, which is written last", "a complete save") from None
    except OSError as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error.strerror or error}") from None
    last_read: dict[_Chunk, Tensor] = {}  # at most one chunk: the next rows are often in the same chunk

    def load(chunk: _Chunk) -> Tensor:
        if chunk not in last_read:
            last_read.clear()
            with open_inside(folder, chunk.file) as file:
                file.seek(chunk.begin)
                content = file.read(chunk.size_bytes)
            last_read[chunk] = load_tensor(content, f"bytes {chunk.begin} to {chunk.begin + chunk.size_bytes - 1}")
        return last_read[chunk]

    def read(name: str, rows: Span) -> Tensor:
        shape, dtype, _ = stored[name].outline
        overlapping = [chunk for chunk in stored[name].chunks if chunk.rows[0] < rows[1] and rows[0] < chunk.rows[1]]
        try:
            for chunk in overlapping:  # before allocating what crafted metadata may claim
                _check_file(folder, chunk, math.prod(chunk.sizes) * dtype.itemsize)
            out = torch.empty((rows[1] - rows[0], *shape[1:]), dtype=dtype)
            for chunk in overlapping:
                _copy(out, rows, chunk, load(chunk))
        except OSError as error:
            raise CheckpointError(
                f"{folder}: {name}: a file is missing or damaged: {error.strerror or error}",
                "the whole folder, undamaged",
            ) from None
        return out

    return TensorSource(place=folder, tensors={name: tensor.outline for name, tensor in stored.items()}, read=read)


def _tensors(metadata: Any) -> dict[str, _StoredTensor]:
    """All tensors; raises unless the chunks of each cover it exactly once."""
    if not _is_kind(metadata, "Metadata"):
        kind = metadata.kind.name if isinstance(metadata, PickledObject) else type(metadata).__name__
        raise CheckpointError(f"it holds a {kind}", "the metadata of a checkpoint")
    places: dict[tuple[str, Sizes], tuple[str, int, int]] = {}
    for index, info in _field(metadata, "storage_data", dict).items():
        if (
            not _is_kind(index, "MetadataIndex")
            or not isinstance(info, PickledObject)
            or info.kind != (FILES, "_StorageInfo")
        ):
            raise CheckpointError("its storage_data is not that of files", "a save by FileSystemWriter")
        if _fields(index).get("offset") is not None:
            places[_field(index, "fqn", str), _sizes(_fields(index)["offset"])] = _place(info)
    if len({(file, begin) for file, begin, _ in places.values()}) < len(places):
        raise CheckpointError("two chunks have the same place in a file")
    entries = _field(metadata, "state_dict_metadata", dict).items()
    return {name: _stored(name, x, places) for name, x in entries if _is_kind(x, "TensorStorageMetadata")}


def _stored(name: Any, record: Any, places: Mapping[tuple[str, Sizes], tuple[str, int, int]]) -> _StoredTensor:
    shape, properties = _sizes(_field(record, "size", object)), _field(record, "properties", PickledObject).state
    dtype = properties[0] if type(properties) is tuple and properties else None
    if not isinstance(dtype, GlobalName) or dtype.module != "torch" or dtype.name not in NUMBERS:
        raise CheckpointError(f"{name!r} has an unknown dtype", f"one of {', '.join(NUMBERS)}")
    chunks: list[_Chunk] = []
    for chunk in _field(record, "chunks", list):
        offsets, sizes = _sizes(_field(chunk, "offsets", object)), _sizes(_field(chunk, "sizes", object))
        place = places.get((name, offsets))
        if place is None or len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{name!r} has a chunk at {offsets} that is in no file", "a complete save")
        if math.prod(sizes) * NUMBERS[dtype.name] > place[2]:
            raise CheckpointError(f"{name!r} has {place[2]} bytes for a chunk of {sizes}", "a complete save")
        if offsets[2:] != (0,) * len(offsets[2:]) or sizes[2:] != shape[2:]:
            raise CheckpointError(f"{name!r} is cut along its third dimension", "cuts along the first two")
        chunks.append(_Chunk(offsets, sizes, *place))
    inner = math.prod(shape[2:])
    cover = [
        TensorChunk(rows=c.rows, cols=(c.cols[0] * inner, c.cols[1] * inner), file="", key="", crc32=0) for c in chunks
    ]
    fault = find_coverage_fault(TensorEntry(dtype=dtype.name, shape=shape), cover)
    if fault:
        raise CheckpointError(f"{name!r}: {fault}")
    cuts = {cut for chunk in chunks for cut in chunk.rows} if shape else set()
    return _StoredTensor(TensorOutline(shape, getattr(torch, dtype.name), tuple(sorted(cuts))), chunks)


def _place(info: PickledObject) -> tuple[str, int, int]:
    """The file of a chunk, its first byte, and its number of bytes."""
    if _fields(info).get("transform_descriptors"):
        raise CheckpointError("its files went through an extension", hint="save it without one")
    file, begin, size = _field(info, "relative_path", str), _field(info, "offset", int), _field(info, "length", int)
    if fault := fault_of_name(file):
        raise CheckpointError(f"it names the file {file[:80]!r}, which is not used: {fault}")
    return file, begin, size


def _check_file(folder: Path, chunk: _Chunk, needed_bytes: int) -> None:
    with open_inside(folder, chunk.file) as file:
        size = os.fstat(file.fileno()).st_size
    if not 0 <= chunk.begin <= chunk.begin + chunk.size_bytes <= size:
        raise CheckpointError(f"{chunk.file} has {size} bytes", chunk.begin + chunk.size_bytes)
    if chunk.size_bytes > needed_bytes + ARCHIVE_bytes:
        problem = f"{chunk.file} has {chunk.size_bytes} bytes for a chunk of {needed_bytes}"
        raise CheckpointError(problem, f"at most {ARCHIVE_bytes:,} more")


def _copy(out: Tensor, rows: Span, chunk: _Chunk, content: Tensor) -> None:
    """Copy a chunk's rows into `out`, which holds the tensor's rows `rows`."""
    if tuple(content.shape) != chunk.sizes or content.dtype != out.dtype:
        raise CheckpointError(
            f"{chunk.file} holds {tuple(content.shape)} of {content.dtype}", f"{chunk.sizes} of {out.dtype}"
        )
    begin, end = max(rows[0], chunk.rows[0]), min(rows[1], chunk.rows[1])
    content = (content if content.dim() else content.view(1))[begin - chunk.rows[0] : end - chunk.rows[0]]
    into = out[begin - rows[0] : end - rows[0]]
    (into.narrow(1, chunk.cols[0], content.shape[1]) if content.dim() > 1 else into).copy_(content)


def _is_kind(value: object, name: str) -> TypeGuard[PickledObject]:
    return isinstance(value, PickledObject) and value.kind == (RECORDS, name)


def _fields(record: Any) -> dict[str, Any]:
    state = record.state if isinstance(record, PickledObject) else None
    return state if isinstance(state, dict) else {}


def _field(record: Any, name: str, kind: type[T]) -> T:
    """A field of a pickled object; raises unless it is of this type."""
    value = _fields(record).get(name)
    if value is None or not isinstance(value, kind):
        raise CheckpointError(f"{name} is a {type(value).__name__}")
    return value


def _sizes(value: Any) -> Sizes:
    """The numbers of a torch.Size or a tuple."""
    is_size = isinstance(value, PickledObject) and value.kind == ("torch", "Size") and value.args
    numbers = value.args[0] if is_size else value
    if type(numbers) not in (tuple, list) or len(numbers) > MAX_DIMS:
        raise CheckpointError(f"a shape is a {type(numbers).__name__}")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
        raise CheckpointError("a shape has sizes that are no whole numbers from 0 to 2**48")
    return tuple(numbers)
