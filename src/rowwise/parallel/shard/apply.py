"""`shard(model, plan, comm)`: replaces each `Embeddings` of a model by its `ShardedEmbeddings`.

Dense modules stay as they are and keep their parameters' names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from rowwise.base.errors import SpecError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.plan import Plan
from rowwise.parallel.shard.embeddings import (
    ShardedEmbeddings,
    check_merge_shared,
    check_pinned,
    check_sharding,
    check_tiers,
)
from rowwise.tables.embedding import Embeddings
from rowwise.tables.spec import Table, Wire
from rowwise.tables.store.row_store import NO_HOT_ROWS, HotRows, OpenStore
from rowwise.tables.store.row_stream import RowStream

Module = TypeVar("Module", bound=nn.Module)
RUN_bytes = 32 << 20


def shard(  # noqa: PLR0913 - all but the first three have defaults
    model: Module,
    plan: Plan,
    comm: Comm,
    *,
    wire: Wire | None = None,
    elastic: bool = False,
    merge_shared: bool = False,
    disk: Path | OpenStore | None = None,
    hot_rows: HotRows = NO_HOT_ROWS,
) -> Module:
    """Replace every `Embeddings` in a model by this rank's tiles of it, in place; collective.

    Rows and optimizer state are copied from the model. Tables on `device="meta"` are initialised on the CPU, with the
    values they would have had on one device. The plan covers the tables of all modules. `merge_shared`: gradients of
    shared bags are summed before they are sent, which sends less and is equal up to rounding. `disk`: the folder of
    rows on disk, or a function that opens another store. `hot_rows`: the rows of tables whose tiles pin some of them,
    the hottest first.
    """
    wire = wire or Wire()
    paths = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, Embeddings)]
    modules = list(dict.fromkeys(module for _, module in paths))  # a module may have several names in a model
    tables: list[Table] = [table for module in modules for table in module.tables]
    if isinstance(model, Embeddings):
        raise SpecError("shard() replaces the Embeddings inside a model", "a module that holds them")
    # All checks come before the first allocation: an error leaves the model as it was.
    check_sharding(plan, comm, wire, elastic=elastic)
    check_merge_shared(merge_shared, elastic=elastic)
    plan.validate(tables)
    plans = {module: _plan_of_module(plan, module) for module in modules}
    for module, module_plan in plans.items():
        check_tiers(module_plan, _device_of_rows(module), disk)
        check_pinned(module_plan, module.tables, hot_rows)
    sharded: dict[Embeddings, ShardedEmbeddings] = {}
    for module, module_plan in plans.items():
        device = _device_of_rows(module)
        sharded[module] = ShardedEmbeddings(
            module.tables,
            module_plan,
            comm,
            wire=wire,
            elastic=elastic,
            device=device,
            disk=disk,
            hot_rows=hot_rows,
            update_in_backward=module.update_in_backward,
        )
        sharded[module].merge_shared = merge_shared
        sharded[module].vector_type = module.vector_type
        copy_tables(module, sharded[module])
    for path, module in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, sharded[module])
    # DistributedDataParallel would copy the rows of rank 0 to all ranks.
    rows = {id(parameter) for module in sharded.values() for parameter in module.parameters()}
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in rows]
    cast(Any, model)._ddp_params_and_buffers_to_ignore = [
        *getattr(model, "_ddp_params_and_buffers_to_ignore", ()),
        *names,
    ]
    return model


def _plan_of_module(plan: Plan, module: Embeddings) -> Plan:
    """The tiles of one module's tables."""
    names = {table.name for table in module.tables}
    return Plan(
        world=plan.world,
        tiles=tuple(tile for tile in plan.tiles if tile.table in names),
        approximate=tuple(name for name in plan.approximate if name in names),
    )


def _device_of_rows(module: Embeddings) -> torch.device:
    """The device of the sharded rows: that of the module's rows, or the CPU for `meta`."""
    rows = module.arena.rows
    return torch.device("cpu") if rows.is_meta else rows.device


@torch.no_grad()
def copy_tables(module: Embeddings, sharded: ShardedEmbeddings) -> None:
    """Copy this rank's tiles of rows and optimizer state out of an unsharded module."""
    sharded.fill(module.seed)  # also sets the keys of the random numbers of stochastic rounding
    if module.arena.rows.is_meta:
        return
    states = module.optimizer_state()
    for local in sharded.local_tiles():
        tile = local.tile
        rows, columns = slice(*tile.rows), slice(*tile.cols)
        table = next(t for t in module.tables if t.name == tile.table)
        stored = module.table(tile.table)[rows]
        for begin, values in _row_runs(stored):
            full_width = columns == slice(0, table.dim)
            _write_rows(local.rows, begin, values if full_width else cut_columns(values, table, columns))
        for name, state in local.state.items():
            full = states[tile.table][name]
            if isinstance(state, torch.Tensor) and not state.dim():
                state.copy_(full)
                continue
            for begin, values in _row_runs(full[rows] if full.dim() == 1 else full[rows, columns]):
                _write_rows(state, begin, values)


def _row_runs(rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Runs of bounded size, each with its first row."""
    step = max(1, RUN_bytes // max(1, rows[:1].nbytes))
    for begin in range(0, len(rows), step):
        yield begin, rows[begin : begin + step]


def _write_rows(target: torch.Tensor | RowStream, begin: int, values: torch.Tensor) -> None:
    if isinstance(target, torch.Tensor):
        target[begin : begin + len(values)].copy_(values)
    else:
        target.write(begin, values.contiguous())


def cut_columns(stored: torch.Tensor, table: Table, columns: slice) -> torch.Tensor:
    """Columns of stored rows; of int8 rows they begin and end between two scale groups."""
    if stored.dtype != torch.uint8:
        return stored[:, columns]
    scale_group = table.column_group or table.dim
    groups = -(-table.dim // scale_group)
    first, last = columns.start // scale_group, -(-columns.stop // scale_group)
    codes = stored[:, 8 * groups + columns.start : 8 * groups + -(-columns.stop // 4) * 4]
    return torch.cat([stored[:, 8 * first : 8 * last], codes], 1)
