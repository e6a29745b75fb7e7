"""Opens files of other programs as named tensors, with rows read on demand.

No code in a file runs: torch files are loaded with `weights_only`, after `pickled` has checked that the pickle is
bounded in time and memory.
"""

import io
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rowwise.base.errors import CheckpointError, printable
from rowwise.base.inside import has_control
from rowwise.base.textfile import open_regular
from rowwise.checkpoint.manifest import Span
from rowwise.checkpoint.pickled import read_pickle

KINDS = "a file of torch.save (.pt, .pth), a .safetensors file or a folder of torch.distributed.checkpoint"
# Errors that torch.load raises for arbitrary bytes.
UNREADABLE = (
    pickle.UnpicklingError, EOFError, RuntimeError, ValueError, LookupError, AttributeError, TypeError, ImportError,
    ArithmeticError, AssertionError, MemoryError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
ARCHIVE = b"PK"  # first bytes of torch files since 1.6
PICKLE_bytes = 1 << 28
OLD_PICKLES = 5  # a file of torch before 1.6 begins with five pickles
MAX_NAMES, MAX_DEPTH = 100_000, 100  # limits of nested dicts


class TensorOutline(NamedTuple):
    """The type and shape of a tensor, without its contents."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[int, ...] = ()  # rows at which chunks of the file begin or end


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Named tensors of a file or folder; `read` returns rows of a tensor (a scalar is one row)."""

    place: Path
    tensors: Mapping[str, TensorOutline]
    read: Callable[[str, Span], Tensor] = field(repr=False)

    def __post_init__(self) -> None:
        for name in self.tensors:
            if has_control(name):
                raise CheckpointError(f"{self.place} has a tensor {name[:80]!r}", "a name without control characters")


def open_torch(path: Path) -> TensorSource:
    """Open a file of torch.save; names of tensors in nested dicts are dotted paths."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_bounded(file)
        with warnings.catch_warnings(action="ignore"):  # torch warns of pickle protocols
            content = _load(path)
        flat = dict(_flat(content, size))
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(
            f"{path} cannot be read: {_reason(error)}", f"a state dict: torch.save(model.state_dict(), ...), or {KINDS}"
        ) from None
    tensors = {name: x if x.dim() else x.view(1) for name, x in flat.items()}
    if not tensors:
        raise CheckpointError(f"{path} holds a {type(content).__name__} without tensors", "a state dict")
    outlines = {name: TensorOutline(tuple(x.shape), x.dtype) for name, x in flat.items()}
    return TensorSource(place=path, tensors=outlines, read=lambda name, rows: tensors[name][slice(*rows)])


def load_tensor(content: bytes, where: str) -> Tensor:
    """The tensor in a file of torch.save; torch.distributed.checkpoint writes one per chunk.

    Since 2.10 torch compares the size of a tensor with the bytes of its record.
    """
    try:
        if not content.startswith(ARCHIVE):
            raise CheckpointError("it is not an archive")
        _check_bounded(io.BytesIO(content))
        with warnings.catch_warnings(action="ignore"):  # torch warns of pickle protocols
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(loaded, Tensor):
            raise CheckpointError(f"it holds a {type(loaded).__name__}")
        ((_, tensor),) = _flat(loaded, len(content))
        return tensor
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{where} are no tensor of torch.save: {_reason(error)}") from None


def open_safetensors(path: Path) -> TensorSource:
    outlines: dict[str, TensorOutline] = {}
    try:
        open_regular(path).close()  # raises for a pipe, on which safe_open would block
        file = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118 - not a dict
            slices = file.get_slice(name)
            shape = tuple(slices.get_shape())
            rows = slices[:0] if shape else file.get_tensor(name)
            outlines[name] = TensorOutline(shape, rows.dtype)
    except (SafetensorError, OSError) as error:
        reason = printable(str(error)).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {reason}", KINDS) from None

    def read(name: str, rows: Span) -> Tensor:
        return file.get_slice(name)[slice(*rows)] if outlines[name].shape else file.get_tensor(name).view(1)

    return TensorSource(place=path, tensors=outlines, read=read)


def _reason(error: Exception) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return text.partition("\n")[0] or type(error).__name__


def _load(path: Path) -> Any:
    """Load with mmap if torch can map this file format, so that only used tensors are read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_bounded(file: BinaryIO) -> None:
    """Raise for a pickle without bounds in time or memory, and for a compressed archive (a zip bomb)."""
    if file.read(len(ARCHIVE)) != ARCHIVE:
        file.seek(0)
        content = io.BytesIO(file.read(PICKLE_bytes))
        for _ in range(OLD_PICKLES):
            read_pickle(content, None)
        return
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise CheckpointError("its archive is compressed, which torch does not do")
            if info.filename.endswith(".pkl"):
                if info.file_size > PICKLE_bytes:
                    raise CheckpointError(f"its pickle has {info.file_size:,} bytes", f"at most {PICKLE_bytes:,}")
                read_pickle(archive.read(info), None)


def _flat(content: Any, size_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors by dotted path; raises for tensors larger than their storage or the file."""
    stack: list[tuple[str, Any, int]] = [("", content, 0)]
    count = 0
    while stack:
        name, value, depth = stack.pop()
        count += 1
        if count > MAX_NAMES or depth > MAX_DEPTH:
            raise CheckpointError(f"it has more than {MAX_NAMES:,} entries, or dicts more than {MAX_DEPTH} deep")
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
                raise CheckpointError(f"{name!r} is not a plain tensor: it is {value.layout} on {value.device}")
            storage_bytes = value.untyped_storage().nbytes()
            if value.numel() * value.element_size() > storage_bytes or storage_bytes > size_bytes:
                raise CheckpointError(f"{name!r} has {value.numel()} numbers, more than the file holds")
            yield name, value.detach()
        elif isinstance(value, Mapping):
            lead = f"{name}." if name else ""
            stack += [(f"{lead}{key}", inner, depth + 1) for key, inner in reversed(list(value.items()))]
