"""Finds the rows of tables that differ from those of another checkpoint, for an increment of it.

Both are read window by window. Known limits: changed rows are in memory; all rows are read, also where manifests could
tell that few have changed.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from msgspec import structs
from torch import Tensor

from rowwise.checkpoint.files import as_bytes
from rowwise.checkpoint.local_shard import LocalShard, ids_dtype
from rowwise.checkpoint.manifest import TensorEntry
from rowwise.checkpoint.named import tables_of
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.stream import shard_outline
from rowwise.checkpoint.windows import windows
from rowwise.spec import Table


def changes_since(base: Checkpoint, checkpoint: Checkpoint, tables: Mapping[str, Table]) -> list[LocalShard] | None:
    """The changed rows of all tables; None: the base has other tables.

    Args:
        base: has the row types of `tables`.
        checkpoint: read in the row types of `tables`.
        tables: by name, as `tables_of` names them.
    """
    shards: list[LocalShard] = []
    for name, saved in tables_of(checkpoint.manifest).items():
        kind, group = tables[name].row_type, tables[name].column_group
        bare = structs.replace(saved.entry, dtype=kind.facts.numbers, row_type=kind, column_group=group, chunks=())
        held = base.manifest.tensors.get(saved.name)
        if held is None or structs.replace(held, chunks=()) != bare:
            return None
        shards.append(_changes(base, checkpoint, saved.name, bare))
    return shards


def _changes(base: Checkpoint, checkpoint: Checkpoint, name: str, entry: TensorEntry) -> LocalShard:
    whole = shard_outline(name, entry)
    ids: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    rows: list[Tensor] = [whole.cut(0, 0).allocate().tensor]
    for begin, end in windows(checkpoint.entry(name), base.entry(name)):
        now, before = (whole.cut(begin, end).allocate() for _ in range(2))
        checkpoint.fill(now)
        base.fill(before)
        differs = (as_bytes(now.tensor).view(end - begin, -1) != as_bytes(before.tensor).view(end - begin, -1)).any(1)
        ids.append(differs.nonzero().flatten() + begin)
        rows.append(now.tensor[differs])
    return replace(whole, tensor=torch.cat(rows), ids=torch.cat(ids).to(ids_dtype(entry.rows)))
