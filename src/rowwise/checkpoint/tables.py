"""The local shards of a module's tables, sharded or not; names of tensors follow from module and table alone.

A row-wise optimizer keeps one number per row. All tiles with columns of the row have the same number, so the tile with
the first columns writes it. In an `approximate` plan each tile has its own number, which is saved once per column
block; a tile of another plan reads the number of its first block.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import Span, TensorEntry
from rowwise.parallel.plan import Tile, column_block
from rowwise.parallel.shard.embeddings import AnyEmbeddings
from rowwise.tables.embedding import Embeddings
from rowwise.tables.managed import ID
from rowwise.tables.row_optimizers import needs_full_rows
from rowwise.tables.spec import Table, state_slots
from rowwise.tables.store.row_stream import RowStream, outline_stream


class _StoredTile(NamedTuple):
    table: Table
    tile: Tile
    rows: Tensor | RowStream
    state: dict[str, Tensor | RowStream]
    touched: Tensor | None
    first: bool  # whether it is the first of the table's tiles on all ranks
    shared: bool  # every rank has an equal copy
    per_block: bool  # numbers per row differ between column tiles


def table_modules(model: nn.Module) -> Iterator[tuple[str, AnyEmbeddings]]:
    """The modules with tables, each with its path in the model."""
    for path, module in model.named_modules():
        if isinstance(module, AnyEmbeddings):
            yield path, module


def full_name(path: str, table: Table) -> str:
    return f"{path}.{table.name}" if path else table.name


def tensor_entries(path: str, module: AnyEmbeddings) -> dict[str, TensorEntry]:
    """The tensors of a module's tables on all ranks, without chunks."""
    entries: dict[str, TensorEntry] = {}
    for table in module.tables:
        name, shape = full_name(path, table), (table.rows, table.dim)
        entries[f"model/{name}"] = TensorEntry.of(table)
        entries[f"rows/{name}/step"] = TensorEntry(dtype="int64", shape=())
        for slot, (width, _) in state_slots(table).items():
            entries[f"rows/{name}/{slot}"] = TensorEntry(dtype="float32", shape=shape[:1] if width == 1 else shape)
        for slot in () if table.managed is None else table.managed.initial_state:
            entries[f"rows/{name}/{slot}"] = TensorEntry(dtype="int64", shape=shape[:1])
    return entries


def is_needed_for_lookups(name: str) -> bool:
    """Whether inference reads a tensor: weights and the ids of managed tables, not optimizer state."""
    return not name.startswith("rows/") or name.endswith(f"/{ID}")


def shards_to_write(path: str, module: AnyEmbeddings) -> Iterator[LocalShard]:
    """The shards that this rank writes; over all ranks they cover each tensor exactly once."""
    for stored in _stored_tiles(module):
        yield _rows(path, stored)
        for slot, state in stored.state.items():
            # A count of updates: by the first tile. A number per row: by the tile with the first columns.
            dims = len(state.shape)
            if stored.first if dims == 0 else dims == 2 or stored.tile.cols[0] == 0 or stored.per_block:
                per_block = stored.per_block and dims == 1
                yield _state(path, stored, slot, _blocks(stored) if per_block else None)


def shards_to_read(path: str, module: AnyEmbeddings, saved: Mapping[str, TensorEntry]) -> Iterator[LocalShard]:
    """The shards that this rank fills from a checkpoint with the tensors `saved`; the caller writes into them."""
    for arena in module.arenas:
        arena.mark_all()  # the next checkpoint must save all rows
    for stored in _stored_tiles(module):
        if not isinstance(stored.rows, Tensor):
            stored.rows.forget()  # rows absent from the checkpoint have their initial values
        yield _rows(path, stored)
        for slot, state in stored.state.items():
            entry = saved.get(f"rows/{full_name(path, stored.table)}/{slot}")
            per_block = len(state.shape) == 1 and entry is not None and len(entry.shape) == 2
            first = _blocks(stored)[0]
            yield _state(path, stored, slot, (first, first + 1) if per_block else None)


def _rows(path: str, stored: _StoredTile) -> LocalShard:
    table, tile = stored.table, stored.tile
    tensor, stream = outline_stream(stored.rows)
    return LocalShard(
        name=f"model/{full_name(path, table)}",
        tensor=tensor,
        shape=(table.rows, table.dim),
        rows=tile.rows,
        cols=None if tile.cols == (0, table.dim) else tile.cols,
        row_type=table.row_type,
        column_group=table.column_group,
        shared=stored.shared,
        touched=stored.touched,
        stream=stream,
        stream_row=tile.rows[0],
    )


def _blocks(stored: _StoredTile) -> Span:
    block = column_block(stored.table)
    return stored.tile.cols[0] // block, -(-stored.tile.cols[1] // block)


def _state(path: str, stored: _StoredTile, slot: str, blocks: Span | None) -> LocalShard:
    """A shard of optimizer state; `blocks`: the column blocks for which its number per row is saved."""
    table, tile = stored.table, stored.tile
    state, stream = outline_stream(stored.state[slot])
    shape, rows, cols = (table.rows, table.dim)[: state.dim()], tile.rows, None
    if not shape:
        rows, state = (0, 1), state.view(1)
    elif blocks:
        cols, shape = blocks, (table.rows, -(-table.dim // column_block(table)))
        state = state.unsqueeze(1).expand(-1, cols[1] - cols[0])
    elif len(shape) == 2 and tile.cols != (0, table.dim):
        cols = tile.cols
    name = f"rows/{full_name(path, table)}/{slot}"
    return LocalShard(
        name=name,
        tensor=state,
        shape=shape,
        rows=rows,
        cols=cols,
        shared=stored.shared,
        touched=stored.touched if shape else None,
        stream=stream,
        stream_row=tile.rows[0],
    )


def _stored_tiles(module: AnyEmbeddings) -> Iterator[_StoredTile]:
    if isinstance(module, Embeddings):
        for index, table in enumerate(module.tables):
            tile = Tile(table=table.name, rank=0, rows=(0, table.rows), cols=(0, table.dim))
            arena = module.arena
            touched = None if arena.touched is None else arena.touched.table(index)
            state: dict[str, Tensor | RowStream] = {**arena.table_state(index)}
            yield _StoredTile(table, tile, arena.table(index), state, touched, True, True, False)
        return
    tables = {table.name: table for table in module.tables}
    replicated = {table.name for table in module.routes.replicated}
    firsts: dict[str, Tile] = {}
    per_block: set[str] = set()
    for groups in module.routes.groups_W:
        for group in groups:
            for piece in group.pieces:
                table = module.tables[piece.table]
                firsts.setdefault(table.name, piece.tile)
                if piece.width < table.dim and needs_full_rows(table.optimizer) and not group.needs_full_rows:
                    per_block.add(table.name)
    for local in module.local_tiles():
        name = local.tile.table
        shared = name in replicated
        first = shared or firsts[name] == local.tile
        yield _StoredTile(
            tables[name], local.tile, local.rows, local.state, local.touched, first, shared, name in per_block
        )
