"""Where the tables of a run live: as the recipe's plan says, or by a simple one for the ranks that there are.

Its own file because it is where planning and running meet: a plan is made or read here, and what a run then executes is
in its folder. Gives up: rows that are asked for more than others; a plan made with more thought is a file.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from rowwise.comm.seam import Comm
from rowwise.errors import SpecError
from rowwise.plan import Plan, Tile
from rowwise.planner.simple import simple_plan
from rowwise.recipes.recipe import Recipe
from rowwise.shard.apply import shard
from rowwise.spec import Table, Topology
from rowwise.train.step import embeddings_of


def tables_of(model: nn.Module) -> tuple[Table, ...]:
    """All tables of a model, in order."""
    return tuple(table for module in embeddings_of(model) for table in module.tables)


def choose_plan(recipe: Recipe, model: nn.Module, topology: Topology) -> Plan:
    """The recipe's plan, as it is; without one every table whole on one rank, or a simple plan for several."""
    world, tables = topology.world, tables_of(model)
    if recipe.plan is None and world == 1:
        whole = (Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, t.dim)) for t in tables)
        return Plan(world=1, tiles=tuple(whole))
    if recipe.plan is None:
        # Each module by itself: features are looked up once in each.
        batch = max(1, recipe.train.batch // world)
        plans = (simple_plan(module.tables, topology, batch=batch) for module in embeddings_of(model))
        return Plan(world=world, tiles=tuple(sorted(tile for plan in plans for tile in plan.tiles)))
    try:
        plan = Plan.from_json(Path(recipe.plan).read_bytes())
        if plan.world == world:
            plan.validate(tables)
            return plan
    except SpecError as error:
        raise SpecError(f"{recipe.plan}: {error}") from None
    out = f"want --nproc {plan.world}, another --plan, or --set plan=null for one that is made for these ranks"
    raise SpecError(f"{recipe.plan} is a plan for {plan.world} ranks, and this run has {world}: {out}")


def place(recipe: Recipe, model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Put the tables of a model where a plan says, in place; called by all ranks.

    One process without a plan of its own keeps its tables as they are.
    """
    if len(comm.ranks) > 1 or recipe.plan is not None:
        shard(model, plan, comm, wire=recipe.wire, elastic=recipe.train.determinism == "elastic")
        model.to(recipe.train.device)


def rows_bytes(plan: Plan, tables: Sequence[Table]) -> list[int]:
    """Of the rows on each rank."""
    known = {table.name: table for table in tables}
    held_W = [0] * plan.world
    for tile in plan.tiles:
        table = known[tile.table]
        held_W[tile.rank] += (
            (tile.rows[1] - tile.rows[0]) * table.row_bytes * (tile.cols[1] - tile.cols[0]) // table.dim
        )
    return held_W
