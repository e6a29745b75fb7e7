"""torch.distributed.checkpoint: tables written as its files; its files, by any number of ranks, read a bit at a time.

Its own file because it is the one place besides `comm` that knows torch.distributed, of which it needs no processes.
The metadata is a pickle, which could hold a program; here only what such metadata is made of is let in. Gives up:
entries that are no tensors.
"""

import enum
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rowwise.checkpoint.appear import appearing
from rowwise.checkpoint.export import load_window
from rowwise.checkpoint.manifest import Span
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.source import UNREADABLE, Outline, Source
from rowwise.checkpoint.windows import Tell, windows
from rowwise.errors import CheckpointError

METADATA = ".metadata"
HOMES = (  # of what metadata is made of
    "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "collections", "pathlib",
    "pathlib._local",
)  # fmt: skip
NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout")}


def export_dcp(
    checkpoint: Checkpoint, folder: Path, names: Mapping[str, str], tell: Tell | None = None
) -> dict[str, tuple[int, ...]]:
    """Write tensors under other names, tables as float32, for dcp.load into a plain state dict; gives their shapes."""
    writing = _Writing(checkpoint, names, tell)
    with appearing(folder) as part:
        writer = FileSystemWriter(part, single_file_per_rank=True, sync_files=True)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(writing.create_local_plan())
        plans, metadata = writing.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        writer.finish(metadata, [writer.write_data(plan, writing).wait()])
    return {new: checkpoint.entry(name).shape for name, new in names.items()}


def open_dcp(folder: Path) -> Source:
    """A folder that torch.distributed.checkpoint wrote, by any number of ranks."""
    metadata = _read_metadata(folder)
    stored = {n: x for n, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
    outlines: dict[str, Outline] = {}
    for name, one in stored.items():
        have = sum(torch.Size(chunk.sizes).numel() for chunk in one.chunks)
        if have != one.size.numel():
            raise CheckpointError(f"{folder}: {name}: its pieces have {have} numbers, want {one.size.numel()}")
        cuts = {at for c in one.chunks if c.sizes for at in (c.offsets[0], c.offsets[0] + c.sizes[0])}
        outlines[name] = Outline(tuple(one.size), one.properties.dtype, tuple(sorted(cuts)))
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)

    def read(name: str, rows: Span) -> Tensor:
        one = stored[name]
        offsets = torch.Size([rows[0], *([0] * (len(one.size) - 1))] if one.size else [])
        sizes = torch.Size([rows[1] - rows[0], *one.size[1:]] if one.size else [])
        out = torch.empty(sizes, dtype=one.properties.dtype)
        items = create_read_items_for_chunk_list(name, one, [ChunkStorageMetadata(offsets, sizes)])
        try:
            reader.read_data(LoadPlan(items), _Reading(out)).wait()
        except (OSError, *UNREADABLE) as error:
            raise CheckpointError(f"{folder}: {name}: a file is missing or damaged: {error}") from error
        return out if one.size else out.view(1)

    return Source(place=folder, tensors=outlines, read=read)


@final
class _Writing(SavePlanner):
    """Says what is written, and reads it when it is its turn."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], tell: Tell | None) -> None:
        self._checkpoint, self._names, self._tell = checkpoint, {new: name for name, new in names.items()}, tell
        self._done, self._total = 0, sum(checkpoint.entry(name).rows for name in names)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """There is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """All of it, in runs of rows."""
        return SavePlan([item for new in self._names for item in self._items(new)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """This is the only rank; names are whole, not paths through dicts."""
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = {new: (new,) for new in self._names}
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """One run of rows."""
        data = write_item.tensor_data
        assert data is not None
        name = self._names[write_item.index.fqn]
        sizes, offsets = data.chunk.sizes, data.chunk.offsets
        rows = (offsets[0], offsets[0] + sizes[0]) if sizes else (0, 1)
        self._done += rows[1] - rows[0]
        if self._tell is not None:
            self._tell(self._done, self._total)
        return load_window(self._checkpoint, name, rows) if sizes else self._checkpoint.load(name)

    def _items(self, new: str) -> Iterable[WriteItem]:
        entry = self._checkpoint.entry(self._names[new])
        dtype = torch.float32 if entry.row_type else getattr(torch, entry.dtype)
        size, about = torch.Size(entry.shape), TensorProperties(dtype)
        for begin, end in windows(entry) if entry.rows else [(0, 0)]:
            offsets = torch.Size([begin, *([0] * (len(size) - 1))] if size else [])
            chunk = ChunkStorageMetadata(offsets, torch.Size([end - begin, *size[1:]] if size else []))
            data = TensorWriteData(chunk=chunk, properties=about, size=size)
            yield WriteItem(index=MetadataIndex(new, offsets), type=WriteItemType.SHARD, tensor_data=data)


@final
class _Reading(LoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        """There is no state dict."""

    def create_local_plan(self) -> LoadPlan:
        """Made by whoever reads."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As it is."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Only tensors are asked for."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a piece goes."""
        out = self._out
        for dim, (begin, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            out = out.narrow(dim, begin, size)
        return out

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is there already."""


@final
class _Unpickler(pickle.Unpickler):
    """Lets in what metadata is made of, and nothing that runs."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = module_name in HOMES or (module_name, global_name) in NAMES
        if known or (module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)):
            return super().find_class(module_name, global_name)
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no metadata is made of")


def _member(kind: object, name: str) -> object:
    """By which Python 3.11.0 to 3.11.3 write members of an enumeration down; of anything else it is refused."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks {kind!r} for {name!r}, which no metadata does")
    return kind[name]


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {METADATA}: torch.distributed.checkpoint did not complete it") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; want the metadata of a checkpoint")
    return found
