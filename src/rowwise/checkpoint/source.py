"""Files of other programs that hold named tensors: which there are, and some rows of one at a time.

Its own file because import knows nothing of formats. Nothing of a file runs: of torch's files only tensors are read.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rowwise.checkpoint.manifest import Span
from rowwise.errors import CheckpointError

KINDS = "want a file of torch.save (.pt, .pth), a .safetensors file or a folder of torch.distributed.checkpoint"
# What comes of bytes that are no pickle depends on what they happen to mean to it.
UNREADABLE = (
    pickle.UnpicklingError, EOFError, RuntimeError, ValueError, LookupError, AttributeError, TypeError, ImportError,
)  # fmt: skip


class Outline(NamedTuple):
    """What a tensor is, without what is in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[int, ...] = ()  # rows at which it is best read in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Named tensors somewhere; `read` gives some rows of one, a tensor without dimensions being one row."""

    place: Path
    tensors: Mapping[str, Outline]
    read: Callable[[str, Span], Tensor] = field(repr=False)


def open_torch(path: Path) -> Source:
    """What torch.save wrote; tensors inside of dicts have the names of these before their own."""
    try:
        found = _load(path)
    except UNREADABLE as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read: {why}; want a state dict: torch.save(model.state_dict(), ...), or {KINDS}"
        ) from None
    tensors = {name: x if x.dim() else x.view(1) for name, x in _flat(found)}
    if not tensors:
        raise CheckpointError(f"{path} holds a {type(found).__name__} without tensors; want a state dict")
    shapes = {name: tuple(x.shape) for name, x in _flat(found)}
    outlines = {name: Outline(shapes[name], x.dtype) for name, x in tensors.items()}
    return Source(place=path, tensors=outlines, read=lambda name, rows: tensors[name][slice(*rows)])


def open_safetensors(path: Path) -> Source:
    """A file of safetensors."""
    outlines: dict[str, Outline] = {}
    try:
        file = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118 - not a dict
            slices = file.get_slice(name)
            shape = tuple(slices.get_shape())
            rows = slices[:0] if shape else file.get_tensor(name)
            outlines[name] = Outline(shape, rows.dtype)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {KINDS}") from None

    def read(name: str, rows: Span) -> Tensor:
        return file.get_slice(name)[slice(*rows)] if outlines[name].shape else file.get_tensor(name).view(1)

    return Source(place=path, tensors=outlines, read=read)


def _load(path: Path) -> Any:
    """By way of the page cache, where the file is of a kind that allows it: what is not needed is not read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
    return torch.load(path, map_location="cpu", weights_only=True)


def _flat(found: Any, lead: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        yield lead.removesuffix("."), found.detach()
    elif isinstance(found, Mapping):
        for name, inside in found.items():
            yield from _flat(inside, f"{lead}{name}.")
