"""`shard`: the one verb that makes a model run on several ranks.

The model stays what it is, and keeps the names of its dense parameters; only its `Embeddings` are replaced. Apart from
`embeddings` because it knows of models.
"""

from typing import TypeVar

import torch
from torch import nn

from rowwise.comm.seam import Comm
from rowwise.embedding import Embeddings
from rowwise.errors import SpecError
from rowwise.plan import Plan
from rowwise.shard.embeddings import ShardedEmbeddings, check, check_merging, check_tiers
from rowwise.spec import Table, Wire

Module = TypeVar("Module", bound=nn.Module)


def shard(
    model: Module,
    plan: Plan,
    comm: Comm,
    *,
    wire: Wire | None = None,
    elastic: bool = False,
    merge_shared: bool = False,
) -> Module:
    """Replace every `Embeddings` in a model by this rank's share of it, in place; called by all ranks.

    Rows and optimizer state are copied from the model. Tables that are on no device yet (`device="meta"`) are filled as
    they would have been there, on the CPU. The plan covers the tables of all its modules. `merge_shared`: gradients of
    bags that samples share are added up before they travel, which is less to send and equal up to rounding.
    """
    wire = wire or Wire()
    found = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, Embeddings)]
    modules = list(dict.fromkeys(module for _, module in found))  # a model may have one under several names
    tables: list[Table] = [table for module in modules for table in module.tables]
    if isinstance(model, Embeddings):
        raise SpecError("shard() replaces the Embeddings inside a model: want a module that holds them")
    # All that can be wrong with a plan is found before anything is taken or given up.
    check(plan, comm, wire, elastic=elastic)
    check_merging(merge_shared, elastic=elastic)
    plan.validate(tables)
    shares = {module: _share(plan, module) for module in modules}
    for module, share in shares.items():
        check_tiers(share, _device(module))
    made: dict[Embeddings, ShardedEmbeddings] = {}
    for module, share in shares.items():
        device = _device(module)
        made[module] = ShardedEmbeddings(module.tables, share, comm, wire=wire, elastic=elastic, device=device)
        made[module].merge_shared = merge_shared
        copy_tables(module, made[module])
    for path, module in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made[module])
    return model


def _share(plan: Plan, module: Embeddings) -> Plan:
    """What a plan says about the tables of a module."""
    names = {table.name for table in module.tables}
    return Plan(
        world=plan.world,
        tiles=tuple(tile for tile in plan.tiles if tile.table in names),
        approximate=tuple(name for name in plan.approximate if name in names),
    )


def _device(module: Embeddings) -> torch.device:
    """Where its share of rows will live."""
    rows = module.arena.rows
    return torch.device("cpu") if rows.is_meta else rows.device


@torch.no_grad()
def copy_tables(module: Embeddings, sharded: ShardedEmbeddings) -> None:
    """Give each rank its pieces of the rows and of the optimizer state."""
    sharded.fill(module.seed)  # also for the keys of random numbers
    if module.arena.rows.is_meta:
        return
    states = module.optimizer_state()
    for held in sharded.held():
        tile = held.tile
        rows, columns = slice(*tile.rows), slice(*tile.cols)
        table = next(t for t in module.tables if t.name == tile.table)
        stored = module.table(tile.table)[rows]
        held.rows.copy_(stored if held.rows.shape == stored.shape else cut_columns(stored, table, columns))
        for name, mine in held.state.items():
            whole = states[tile.table][name]
            mine.copy_(whole if not whole.dim() else whole[rows] if whole.dim() == 1 else whole[rows, columns])


def cut_columns(stored: torch.Tensor, table: Table, columns: slice) -> torch.Tensor:
    """Columns of rows as they are stored; those of int8 rows begin and end with a group that shares a scale."""
    if stored.dtype != torch.uint8:
        return stored[:, columns]
    group = table.column_group or table.dim
    groups = -(-table.dim // group)
    first, last = columns.start // group, -(-columns.stop // group)
    codes = stored[:, 8 * groups + columns.start : 8 * groups + -(-columns.stop // 4) * 4]
    return torch.cat([stored[:, 8 * first : 8 * last], codes], 1)
