"""The tables of a module, sharded or not, as parts of tensors that are named after the tables alone.

One number a row (of a row-wise optimizer) is the same on all tiles that have columns of the row, so the one with the
first columns writes it. Not so where a plan is `approximate`: there each tile has its own, which is saved for each
block of columns; a plan with other cuts takes that of its first column.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from rowwise.checkpoint.manifest import Span, TensorEntry
from rowwise.checkpoint.parts import LocalShard
from rowwise.embedding import Embeddings
from rowwise.plan import Tile, column_block
from rowwise.row_optimizers import couples_columns
from rowwise.shard.embeddings import AnyEmbeddings
from rowwise.spec import Table, state_slots


class _StoredTile(NamedTuple):
    table: Table
    tile: Tile
    rows: Tensor
    state: dict[str, Tensor]
    touched: Tensor | None
    first: bool  # of all tiles of the table on all ranks
    shared: bool  # every rank has the same
    apart: bool  # its numbers for each row are its own


def modules_of(model: nn.Module) -> Iterator[tuple[str, AnyEmbeddings]]:
    """The modules that hold tables, with their paths."""
    for path, module in model.named_modules():
        if isinstance(module, AnyEmbeddings):
            yield path, module


def name_of(path: str, table: Table) -> str:
    return f"{path}.{table.name}" if path else table.name


def entries_of(path: str, module: AnyEmbeddings) -> dict[str, TensorEntry]:
    """Manifest entries of all tensors of a module's tables, whichever rank holds them; without pieces."""
    found: dict[str, TensorEntry] = {}
    for table in module.tables:
        name, shape, kind = name_of(path, table), (table.rows, table.dim), table.row_type
        found[f"model/{name}"] = TensorEntry(
            dtype=kind.facts.numbers, shape=shape, row_type=kind, column_group=table.column_group
        )
        found[f"rows/{name}/step"] = TensorEntry(dtype="int64", shape=())
        for slot, (width, _) in state_slots(table).items():
            found[f"rows/{name}/{slot}"] = TensorEntry(dtype="float32", shape=shape[:1] if width == 1 else shape)
    return found


def written_parts(path: str, module: AnyEmbeddings) -> Iterator[LocalShard]:
    """The parts that this rank writes; together, ranks write every element once."""
    for held in _held_shards(module):
        yield _rows(path, held)
        for slot, state in held.state.items():
            if held.first if state.dim() == 0 else state.dim() == 2 or held.tile.cols[0] == 0 or held.apart:
                apart = held.apart and state.dim() == 1
                yield _state(path, held, slot, _blocks(held) if apart else None)


def read_parts(path: str, module: AnyEmbeddings, saved: Mapping[str, TensorEntry]) -> Iterator[LocalShard]:
    """The parts that this rank reads from a checkpoint; marks the module as about to be overwritten."""
    for arena in module.arenas:
        arena.mark_all()
    for held in _held_shards(module):
        yield _rows(path, held)
        for slot, state in held.state.items():
            entry = saved.get(f"rows/{name_of(path, held.table)}/{slot}")
            apart = state.dim() == 1 and entry is not None and len(entry.shape) == 2
            first = _blocks(held)[0]
            yield _state(path, held, slot, (first, first + 1) if apart else None)


def _rows(path: str, held: _StoredTile) -> LocalShard:
    table, tile = held.table, held.tile
    return LocalShard(
        name=f"model/{name_of(path, table)}",
        tensor=held.rows,
        shape=(table.rows, table.dim),
        rows=tile.rows,
        cols=None if tile.cols == (0, table.dim) else tile.cols,
        row_type=table.row_type,
        column_group=table.column_group,
        shared=held.shared,
        touched=held.touched,
    )


def _blocks(held: _StoredTile) -> Span:
    block = column_block(held.table)
    return held.tile.cols[0] // block, -(-held.tile.cols[1] // block)


def _state(path: str, held: _StoredTile, slot: str, blocks: Span | None) -> LocalShard:
    """`blocks`: those that a number a row stands for, where it is saved for each of them."""
    table, tile, state = held.table, held.tile, held.state[slot]
    shape, rows, cols = (table.rows, table.dim)[: state.dim()], tile.rows, None
    if not shape:
        rows, state = (0, 1), state.view(1)
    elif blocks:
        cols, shape = blocks, (table.rows, -(-table.dim // column_block(table)))
        state = state.unsqueeze(1).expand(-1, cols[1] - cols[0])
    elif len(shape) == 2 and tile.cols != (0, table.dim):
        cols = tile.cols
    name = f"rows/{name_of(path, table)}/{slot}"
    touched = held.touched if shape else None
    return LocalShard(name=name, tensor=state, shape=shape, rows=rows, cols=cols, shared=held.shared, touched=touched)


def _held_shards(module: AnyEmbeddings) -> Iterator[_StoredTile]:
    if isinstance(module, Embeddings):
        for index, table in enumerate(module.tables):
            tile = Tile(table=table.name, rank=0, rows=(0, table.rows), cols=(0, table.dim))
            arena = module.arena
            touched = None if arena.touched is None else arena.touched.table(index)
            yield _StoredTile(table, tile, arena.table(index), arena.table_state(index), touched, True, True, False)
        return
    tables = {table.name: table for table in module.tables}
    copied = {table.name for table in module.routes.copied}
    firsts: dict[str, Tile] = {}
    apart: set[str] = set()
    for groups in module.routes.groups_W:
        for group in groups:
            for piece in group.pieces:
                table = module.tables[piece.table]
                firsts.setdefault(table.name, piece.tile)
                if piece.width < table.dim and couples_columns(table.optimizer) and not group.coupled:
                    apart.add(table.name)
    for local in module.local_tiles():
        name = local.tile.table
        shared = name in copied
        first = shared or firsts[name] == local.tile
        yield _StoredTile(
            tables[name], local.tile, local.rows, local.state, local.touched, first, shared, name in apart
        )
