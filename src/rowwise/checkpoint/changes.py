"""Finds the rows of tables that differ from those of another checkpoint, for an increment of it.

Both are read window by window. Known limits: changed rows are in memory, as many as there is room for; all rows are
read, also where manifests could tell that few have changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from rowwise.base.errors import CheckpointError
from rowwise.checkpoint.files import as_bytes
from rowwise.checkpoint.local_shard import LocalShard, ids_dtype
from rowwise.checkpoint.manifest import TensorEntry
from rowwise.checkpoint.named import tables_of
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.stream import shard_outline
from rowwise.checkpoint.windows import ProgressCounter, Tell, windows
from rowwise.tables.spec import Table


class UnusableBaseError(CheckpointError):
    """The base of an increment is damaged."""


def open_base(folder: Path) -> Checkpoint:
    """A checkpoint to write an increment of."""
    try:
        return Checkpoint.open(folder)
    except CheckpointError as error:
        raise UnusableBaseError(str(error)) from None


def changes_since(
    base: Checkpoint,
    checkpoint: Checkpoint,
    tables: Mapping[str, Table],
    room: Callable[[Table], int],
    tell: Tell | None = None,
) -> list[LocalShard] | None:
    """The changed rows of all tables; None: the base has other tables, or more rows differ than there is room for.

    Args:
        base: has the row types of `tables`.
        checkpoint: read in the row types of `tables`.
        tables: by name, as `tables_of` names them.
        room: how many changed rows of a table a chain of increments may have.
        tell: called with the rows compared, and the total.
    """
    saved = tables_of(checkpoint.manifest)
    held = {name for name, entry in base.manifest.tensors.items() if entry.row_type is not None}
    if held != {one.name for one in saved.values()}:
        return None
    shards: list[LocalShard] = []
    progress = ProgressCounter(tell, sum(table.rows for table in tables.values()))
    for name, one in saved.items():
        table, before = tables[name], base.entry(one.name)
        entry = TensorEntry.of(table)
        if structs.replace(before, chunks=()) != entry:
            return None
        left = room(table) - sum(chunk.count for chunk in before.chunks if chunk.ids is not None)
        found = _changes(base, checkpoint, shard_outline(one.name, entry), left)
        if found is None:
            return None
        shards.append(found)
        progress.add(table.rows)
    return shards


def _changes(base: Checkpoint, checkpoint: Checkpoint, whole: LocalShard, room: int) -> LocalShard | None:
    ids: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    rows: list[Tensor] = [whole.cut(0, 0).allocate().tensor]
    for begin, end in windows(checkpoint.entry(whole.name), base.entry(whole.name)):
        now, before = (whole.cut(begin, end).allocate() for _ in range(2))
        checkpoint.fill(now)
        try:
            base.fill(before)
        except CheckpointError as error:
            raise UnusableBaseError(str(error)) from None
        differs = (as_bytes(now.tensor).view(end - begin, -1) != as_bytes(before.tensor).view(end - begin, -1)).any(1)
        ids.append(differs.nonzero().flatten() + begin)
        rows.append(now.tensor[differs])
        room -= len(ids[-1])
        if room < 0:
            return None
    return replace(whole, tensor=torch.cat(rows), ids=torch.cat(ids).to(ids_dtype(whole.shape[0])))
