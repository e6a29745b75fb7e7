"""What a run is about to train, and what it takes: known before there is a folder, a table or a step."""

from dataclasses import replace
from pathlib import Path

from msgspec import structs
from torch import nn

from rowwise.checkpoint.read import Checkpoint
from rowwise.ingest.batch_shard import BatchShard
from rowwise.plan import Plan
from rowwise.recipes.compose import ResolvedRecipe, make_batcher, make_model, make_objective, resolve
from rowwise.recipes.place import choose_plan, rows_bytes, tables_of
from rowwise.recipes.recipe import Recipe, Tables, check_ranks
from rowwise.recipes.text import RECIPE
from rowwise.recipes.unused_keys import notes
from rowwise.spec import Topology, Value, state_width
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd
from rowwise.train.step import dense_parameters

FLOAT_bytes = 4


class Outlook(Value, frozen=True):
    """A run in numbers; memory is that of the model, which batches come on top of."""

    recipe: str
    dataset: str
    splits: dict[str, int]  # of the rows to train, validate and test on
    dense: int
    sparse: int
    labels: tuple[str, ...]
    model: str
    batch: int
    precision: str
    threads: int
    dense_parameters: int
    dense_bytes: int  # with gradients and optimizer state
    tables: int
    rows: int
    largest: str
    rows_bytes: int
    state_bytes: int
    ranks: int = 1
    hosts: int = 1
    fullest: int = 0  # the rank that holds most rows
    fullest_bytes: int = 0
    plan: str = ""  # where it is from
    notes: tuple[str, ...] = ()  # what is done otherwise than the recipe says, or not at all
    idle: int = 0  # ranks whose part of a batch has no samples


def outlook(resolved: ResolvedRecipe, model: nn.Module, plan: Plan, topology: Topology) -> Outlook:
    """Of a recipe, its model, whose tables may be smaller than the recipe's, and where the tables are."""
    recipe, parts, tables = resolved.recipe, resolved.parts, resolved.stored_tables
    world, size_bytes = topology.world, sum(table.rows * table.row_bytes for table in tables)
    held_W = rows_bytes(plan, tables_of(model)) if world > 1 else [size_bytes]
    deals = (BatchShard(rank=rank, world=world).part(recipe.train.batch) for rank in range(world))
    named = {"train": parts.train, "valid": parts.valid, "test": parts.test}
    parameters = sum(parameter.numel() for parameter in dense_parameters(model))
    assert recipe.train.threads is not None
    return Outlook(
        recipe=recipe.name,
        dataset=recipe.data.dataset,
        splits={name: len(rows.reader.splits()) for name, rows in named.items() if rows is not None},
        dense=len(resolved.columns.dense),
        sparse=len(resolved.columns.sparse),
        labels=resolved.tasks,
        model=type(model).__name__,
        batch=recipe.train.batch,
        precision=recipe.train.precision,
        threads=recipe.train.threads,
        dense_parameters=parameters,
        dense_bytes=parameters * FLOAT_bytes * (2 + _slots(recipe.train.optimizer)),
        tables=len(tables),
        rows=sum(table.rows for table in tables),
        largest=max(tables, key=lambda table: table.rows * table.row_bytes).name,
        rows_bytes=size_bytes,
        state_bytes=sum(table.rows * state_width(table) * FLOAT_bytes for table in tables),
        ranks=world,
        hosts=topology.hosts,
        fullest=max(range(world), key=held_W.__getitem__),
        fullest_bytes=max(held_W),
        plan=recipe.plan or "made for these ranks",
        notes=notes(resolved, topology),
        idle=sum(begin == end for begin, end in deals),
    )


def make_outlook(recipe: Recipe, ranks: int = 1) -> Outlook:
    """What a run of the recipe would be, on so many ranks of one host."""
    check_ranks(recipe, ranks)
    resolved, topology = resolve(recipe), Topology(devices=ranks)
    small = Tables(list=tuple(structs.replace(table, rows=1) for table in resolved.tables))
    described = ranks > 1 or recipe.plan is not None or any(table.id_map for table in resolved.tables)
    cut = replace(resolved, recipe=structs.replace(resolved.recipe, tables=small))
    # Tables that are to be sharded take no memory anyway, and a plan is for tables as they are.
    model = make_model(resolved, described=True) if described else make_model(cut)
    plan = choose_plan(resolved.recipe, model, topology)
    make_objective(resolved, model)
    make_batcher(resolved, resolved.parts.train)
    if resolved.recipe.init_from is not None:
        open_start(Path(resolved.recipe.init_from))
    return outlook(resolved, model, plan, topology)


def open_start(path: Path) -> Checkpoint:
    """What a warm start takes over: the best checkpoint of a run, or one by its folder."""
    return CheckpointFolder(path / "ckpt").open("best") if (path / RECIPE).is_file() else Checkpoint.open(path)


def _slots(optimizer: DenseOptimizer) -> int:
    """Numbers that are kept beside each weight."""
    match optimizer:
        case DenseSgd(momentum=momentum):
            return 1 if momentum else 0
        case DenseAdagrad():
            return 1
        case DenseAdam():
            return 2
