"""Exports tensors as a folder of torch.distributed.checkpoint; `dcp_source` reads such folders."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rowwise.checkpoint.atomic import atomic_output
from rowwise.checkpoint.export import load_window
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.windows import ProgressCounter, Tell, windows


def export_dcp(
    checkpoint: Checkpoint, folder: Path, names: Mapping[str, str], tell: Tell | None = None
) -> dict[str, tuple[int, ...]]:
    """Write tensors under other names, tables as float32, for dcp.load into a state dict; returns their shapes."""
    planner = _WindowPlanner(checkpoint, names, tell)
    with atomic_output(folder) as unfinished:
        writer = FileSystemWriter(unfinished, single_file_per_rank=True, sync_files=True)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return {new: checkpoint.entry(name).shape for name, new in names.items()}


@final
class _WindowPlanner(SavePlanner):
    """Plans chunks of rows, and reads each chunk when torch writes it."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], tell: Tell | None) -> None:
        self._checkpoint, self._names = checkpoint, {new: name for name, new in names.items()}
        self._progress = ProgressCounter(tell, sum(checkpoint.entry(name).rows for name in names))

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """A no-op, as there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """All tensors, in windows of rows."""
        return SavePlan([item for new in self._names for item in self._items(new)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan of a single rank; names are flat keys, not paths through nested dicts."""
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = {new: (new,) for new in self._names}
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of one chunk."""
        data = write_item.tensor_data
        assert data is not None
        name = self._names[write_item.index.fqn]
        sizes, offsets = data.chunk.sizes, data.chunk.offsets
        rows = (offsets[0], offsets[0] + sizes[0]) if sizes else (0, 1)
        self._progress.add(rows[1] - rows[0])
        return load_window(self._checkpoint, name, rows) if sizes else self._checkpoint.load(name)

    def _items(self, new: str) -> Iterable[WriteItem]:
        entry = self._checkpoint.entry(self._names[new])
        dtype = torch.float32 if entry.row_type else getattr(torch, entry.dtype)
        size, properties = torch.Size(entry.shape), TensorProperties(dtype)
        for begin, end in windows(entry) if entry.rows else [(0, 0)]:
            offsets = torch.Size([begin, *([0] * (len(size) - 1))] if size else [])
            chunk = ChunkStorageMetadata(offsets, torch.Size([end - begin, *size[1:]] if size else []))
            data = TensorWriteData(chunk=chunk, properties=properties, size=size)
            yield WriteItem(index=MetadataIndex(new, offsets), type=WriteItemType.SHARD, tensor_data=data)
