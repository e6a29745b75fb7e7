"""Rewrites a checkpoint: in the files of another plan's ranks, or with other row types.

Loading works for any plan without this. Uses: fewer or more files, a full checkpoint from an increment, a smaller one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rowwise.base.errors import CheckpointError
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import CheckpointManifest, TensorEntry
from rowwise.checkpoint.named import SavedTable, choose_tables, tables_of
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.stream import shard_outline, write_streamed
from rowwise.checkpoint.windows import Tell
from rowwise.checkpoint.write import deal_shared
from rowwise.parallel.plan import Plan, Tile
from rowwise.tables.spec import RowType, Table

STATE = ("optimizers", "recorder")  # data of the manifest that belongs to tensors of state


def retype_tables(checkpoint: Checkpoint, default: RowType | None, by_name: Mapping[str, RowType]) -> dict[str, Table]:
    """The tables of a checkpoint with new row types: `by_name`, else `default`, else unchanged."""
    tables = tables_of(checkpoint.manifest)
    choose_tables(tables, list(by_name), checkpoint.folder)
    return {name: table.spec(by_name.get(name, default)) for name, table in tables.items()}


def rewrite(
    checkpoint: Checkpoint, folder: Path, plan: Plan, tables: Mapping[str, Table], *, state: bool, tell: Tell | None
) -> CheckpointManifest:
    """Write a checkpoint as the ranks of a plan would have written it.

    Args:
        checkpoint: the source.
        folder: the target; must not exist.
        plan: the plan of all tables of the checkpoint.
        tables: with their new row types, see `retype_tables`. Equal types are copied without rounding.
        state: whether to copy optimizer state, random numbers and everything else but weights.
        tell: called with (bytes done, total).
    """
    saved = tables_of(checkpoint.manifest)
    duplicates = [name for name, times in Counter(table.table for table in saved.values()).items() if times > 1]
    if duplicates:
        problem = f"{checkpoint.folder} has several tables {duplicates[0]!r}"
        raise CheckpointError(f"{problem}, which is ambiguous in a plan", hint="export them by their paths instead")
    plan.validate(list(tables.values()))
    own_W: list[list[LocalShard]] = [[] for _ in range(plan.world)]
    shared: list[LocalShard] = []
    table_tensors: set[str] = set()
    for name, table in saved.items():
        tiles = plan.tiles_of(table.table)
        for shard, rank in _table_shards(checkpoint, table, tables[name], tiles, state=state):
            (shared if rank is None else own_W[rank]).append(shard)
        table_tensors |= {table.name, *table.state.values()}
    for name, entry in checkpoint.manifest.tensors.items():
        if name not in table_tensors and (state or name.startswith("model/")):
            shared.append(shard_outline(name, entry))
    order = {name: k for k, name in enumerate(checkpoint.names())}
    dealt_W = deal_shared(shared, [sum(shard.size_bytes for shard in own) for own in own_W])
    shards_W = [
        sorted([*own, *dealt], key=lambda shard: order[shard.name]) for own, dealt in zip(own_W, dealt_W, strict=True)
    ]
    data = {key: value for key, value in checkpoint.manifest.data.items() if state or key not in STATE}
    return write_streamed(folder, shards_W, data, checkpoint.fill, tell)


def _table_shards(
    checkpoint: Checkpoint, saved: SavedTable, table: Table, tiles: Sequence[Tile], *, state: bool
) -> list[tuple[LocalShard, int | None]]:
    """The shards of a table and its state, each with its rank; None if all ranks have it."""
    names = {saved.name: TensorEntry.of(table)}
    names |= {name: checkpoint.entry(name) for name in saved.state.values() if state or name == saved.ids}
    replicated = len(tiles) > 1 and all(tile.rows == (0, table.rows) and tile.cols == (0, table.dim) for tile in tiles)
    shards: list[tuple[LocalShard, int | None]] = []
    for name, entry in names.items():
        if replicated:
            shards.append((shard_outline(name, entry), None))
        elif not entry.shape:
            shards.append((shard_outline(name, entry), min(tile.rank for tile in tiles)))
        elif entry.shape == saved.entry.shape:
            shards += [(shard_outline(name, entry, tile.rows, tile.cols), tile.rank) for tile in tiles]
        else:  # a number per row: written by the tile with the first columns
            shards += [(shard_outline(name, entry, tile.rows), tile.rank) for tile in tiles if tile.cols[0] == 0]
    return shards
