"""The outlook of a run before it starts: data, model, tables and memory. A dry run ends with it.

A dry run checks everything, writes nothing and allocates no tables, so large recipes can be checked on any machine.
"""

from dataclasses import replace
from pathlib import Path

from torch import nn

from rowwise.base.storage.folder import Folder, StorageFolder, parse_folder
from rowwise.checkpoint.named import open_named
from rowwise.checkpoint.read import Checkpoint
from rowwise.ingest.batch_shard import BatchShard
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.plan import Plan
from rowwise.recipes.compose import make_model, make_objective, make_small_model, resolve
from rowwise.recipes.dense_side import dense_side_of
from rowwise.recipes.device_tables import describe_cached
from rowwise.recipes.placement import (
    describe_cached_tiles,
    describe_disk_tables,
    has_disk_tables,
    memory_of_plan,
    rank_bytes,
)
from rowwise.recipes.recipe import Recipe, check_ranks
from rowwise.recipes.resolved import ResolvedRecipe, make_batcher
from rowwise.recipes.retrieval import decoded_bytes
from rowwise.recipes.sharding import choose_plan, tables_of
from rowwise.recipes.table_memory import measure_memory
from rowwise.recipes.text import RECIPE
from rowwise.recipes.unused_keys import find_notes
from rowwise.recipes.wires import decide_wire
from rowwise.tables.spec import Topology, Value, state_bytes
from rowwise.train.saved import CheckpointFolder
from rowwise.train.step import dense_parameters


class Outlook(Value, frozen=True):
    """The sizes of a run; memory is that of the model, without batches."""

    recipe: str
    dataset: str
    splits: dict[str, int]  # number of splits by use: train, valid, test
    dense: int
    sparse: int
    labels: tuple[str, ...]
    model: str
    batch: int
    precision: str
    threads: int
    dense_parameters: int
    dense_bytes: int  # memory of a rank, with gradients and optimizer state
    tables: int
    rows: int
    largest: str
    rows_bytes: int
    state_bytes: int
    ranks: int = 1
    hosts: int = 1
    fullest: int = 0  # the rank with the most bytes of rows
    fullest_bytes: int = 0
    plan: str = ""  # file of the recipe's plan
    notes: tuple[str, ...] = ()  # settings of the recipe that were replaced or have no effect
    disk: str = ""  # tables on disk, their cached rows and hit rate
    resident_bytes: int = 0  # with tables on disk: the other tables, with optimizer state
    cache_bytes: int = 0  # of cached rows, with optimizer state and indices
    pictures_bytes: int = 0  # of decoded pictures, on each rank
    idle: int = 0  # ranks without samples, because the batch has fewer blocks than ranks
    cached: str = ""  # tables in host memory whose rows a GPU caches
    wire: str = ""  # wire types that `wire: auto` has chosen, and their gain


def make_outlook(resolved: ResolvedRecipe, model: nn.Module, plan: Plan, topology: Topology) -> Outlook:
    """The outlook of a run. Sizes are from the recipe, because a dry run's model has smaller tables."""
    recipe, rows, tables = resolved.recipe, resolved.rows, resolved.stored_tables
    world, size_bytes = topology.world, sum(table.rows * table.row_bytes for table in tables)
    bytes_W = rank_bytes(plan, tables_of(model)) if world > 1 else [size_bytes]
    batch_shards = (BatchShard(rank=rank, world=world).part(recipe.train.batch) for rank in range(world))
    by_use = {"train": rows.train, "valid": rows.valid, "test": rows.test}
    resident_bytes, cache_bytes = memory_of_plan(plan, tables_of(model)) if has_disk_tables(plan) else (0, 0)
    on_gpus = recipe.train.device != "cpu"
    cached = describe_cached_tiles(plan, tables_of(model), recipe.max_samples) if on_gpus else ""
    parameters = sum(parameter.numel() for parameter in dense_parameters(model))
    assert recipe.train.threads is not None
    return Outlook(
        recipe=recipe.name,
        dataset=recipe.data.dataset,
        splits={use: len(selection.reader.splits()) for use, selection in by_use.items() if selection is not None},
        dense=len(resolved.columns.dense),
        sparse=len(resolved.columns.sparse),
        labels=resolved.tasks,
        model=type(model).__name__.removeprefix("FSDP"),  # torch's prefix of sharded models
        batch=recipe.train.batch,
        precision=recipe.train.precision,
        threads=recipe.train.threads,
        dense_parameters=parameters,
        dense_bytes=dense_side_of(recipe, model).cost(topology).resident_bytes,
        tables=len(tables),
        rows=sum(table.rows for table in tables),
        largest=max(tables, key=lambda table: table.rows * table.row_bytes).name,
        rows_bytes=size_bytes,
        state_bytes=sum(table.rows * state_bytes(table) for table in tables),
        ranks=world,
        hosts=topology.hosts,
        fullest=max(range(world), key=bytes_W.__getitem__),
        fullest_bytes=max(bytes_W),
        plan=recipe.plan or "made for these ranks",
        notes=find_notes(resolved, topology),
        disk=describe_disk_tables(plan, tables_of(model)),
        resident_bytes=resident_bytes,
        cache_bytes=cache_bytes,
        pictures_bytes=decoded_bytes(recipe.model, tables),
        cached=cached or describe_cached(model),
        idle=sum(begin == end for begin, end in batch_shards),
        wire=resolved.wire_choice.text() if resolved.wire_choice else "",
    )


def dry_run(recipe: Recipe, ranks: int = 1) -> Outlook:
    """The outlook of the recipe on this many ranks of one host."""
    check_ranks(recipe, ranks)
    topology = Topology(devices=ranks)
    resolved = decide_wire(resolve(recipe), topology)
    # Plans, id maps and a memory budget need tables of full size, on the meta device. Otherwise tables have one row.
    memory = None if recipe.memory is None else measure_memory(resolved, solo(), disk=Path(recipe.disk or ""))
    is_full_size = ranks > 1 or recipe.plan is not None or memory is not None
    if is_full_size or any(table.id_map or table.managed for table in resolved.tables):
        model = make_model(resolved, on_meta=True, reads=False)
    else:
        model = make_small_model(resolved)
    plan = choose_plan(resolved.recipe, model, topology, memory and replace(memory, topology=topology))
    make_objective(resolved, model)
    make_batcher(resolved, resolved.rows.train)
    if resolved.recipe.init_from is not None:
        open_warm_start(parse_folder(resolved.recipe.init_from))
    return make_outlook(resolved, model, plan, topology)


def open_warm_start(path: Folder) -> Checkpoint:
    """The checkpoint of a warm start: the best of a run, or the one in a folder; at a URL the newest."""
    if isinstance(path, StorageFolder):
        return open_named(path)
    return CheckpointFolder(path / "ckpt").open("best") if (path / RECIPE).is_file() else Checkpoint.open(path)
