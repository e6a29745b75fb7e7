"""Finds the rows of tables that differ from those of another checkpoint, for an increment of it.

Both are read window by window. Known limits: changed rows are held in memory, up to a budget; all rows are read, even
if manifests show that few have changed.
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
    """Open the base of an increment."""
    try:
        return Checkpoint.open(folder)
    except CheckpointError as error:
        raise UnusableBaseError(str(error)) from None


def changes_since(
    base: Checkpoint,
    checkpoint: Checkpoint,
    tables: Mapping[str, Table],
    max_rows: Callable[[Table], int],
    tell: Tell | None = None,
) -> list[LocalShard] | None:
    """The changed rows of all tables; None if the base has other tables, or the changes exceed the budget.

    Args:
        base: has the row types of `tables`.
        checkpoint: read in the row types of `tables`.
        tables: by their names in `tables_of`.
        max_rows: max. changed rows of a table in a chain of increments.
        tell: called with (rows compared, total).
    """
    saved = tables_of(checkpoint.manifest)
    held = {name for name, entry in base.manifest.tensors.items() if entry.row_type is not None}
    if held != {table.name for table in saved.values()}:
        return None
    shards: list[LocalShard] = []
    progress = ProgressCounter(tell, sum(table.rows for table in tables.values()))
    for name, saved_table in saved.items():
        table, base_entry = tables[name], base.entry(saved_table.name)
        entry = TensorEntry.of(table)
        if structs.replace(base_entry, chunks=()) != entry:
            return None
        budget = max_rows(table) - sum(chunk.count for chunk in base_entry.chunks if chunk.ids is not None)
        changed = _changes(base, checkpoint, shard_outline(saved_table.name, entry), budget)
        if changed is None:
            return None
        shards.append(changed)
        progress.add(table.rows)
    return shards


def _changes(base: Checkpoint, checkpoint: Checkpoint, table: LocalShard, budget: int) -> LocalShard | None:
    ids: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    rows: list[Tensor] = [table.cut(0, 0).allocate().tensor]
    for begin, end in windows(checkpoint.entry(table.name), base.entry(table.name)):
        current, previous = (table.cut(begin, end).allocate() for _ in range(2))
        checkpoint.fill(current)
        try:
            base.fill(previous)
        except CheckpointError as error:
            raise UnusableBaseError(str(error)) from None
        new, old = (as_bytes(x.tensor).view(end - begin, -1) for x in (current, previous))
        differs = (new != old).any(1)
        ids.append(differs.nonzero().flatten() + begin)
        rows.append(current.tensor[differs])
        budget -= len(ids[-1])
        if budget < 0:
            return None
    return replace(table, tensor=torch.cat(rows), ids=torch.cat(ids).to(ids_dtype(table.shape[0])))
