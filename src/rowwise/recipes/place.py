"""Where the tables of a run live: as the recipe's plan says, or by one that is made for the ranks that there are.

Its own file because it is where planning and running meet: a plan is made or read here, and what a run then executes is
in its folder. Gives up: rows that are asked for more than others, and how fast this machine is; a plan made with more
knowledge (`rowwise plan`) is a file.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs
from torch import nn

from rowwise.comm.seam import Comm
from rowwise.errors import SpecError
from rowwise.perf.access import Access, Workload
from rowwise.perf.hardware import Machine, hardware_named
from rowwise.perf.roofline import Roofline
from rowwise.plan import Plan, Tile
from rowwise.planner.constraints import Constraints
from rowwise.planner.kinds import LAYOUTS
from rowwise.planner.make import make_plan
from rowwise.planner.problem import Question
from rowwise.recipes.recipe import Recipe
from rowwise.shard.apply import shard
from rowwise.spec import Table, Topology, couples_columns
from rowwise.train.step import embeddings_of

EFFORT_s = 0.05  # of search; a run waits for it
PLENTY_bytes = 1 << 50


def tables_of(model: nn.Module) -> tuple[Table, ...]:
    """All tables of a model, in order."""
    return tuple(table for module in embeddings_of(model) for table in module.tables)


def choose_plan(recipe: Recipe, model: nn.Module, topology: Topology) -> Plan:
    """The recipe's plan, as it is; without one every table whole on one rank, or a searched plan for several."""
    world, tables = topology.world, tables_of(model)
    if recipe.plan is None and world == 1:
        whole = (Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, t.dim)) for t in tables)
        return Plan(world=1, tiles=tuple(whole))
    if recipe.plan is None:
        return make_plan(_question(recipe, tables, topology), seconds=EFFORT_s, prove=False).plan
    try:
        plan = Plan.from_json(Path(recipe.plan).read_bytes())
        if plan.world == world:
            plan.validate(tables)
            return plan
    except SpecError as error:
        raise SpecError(f"{recipe.plan}: {error}") from None
    out = f"want --nproc {plan.world}, another --plan, or --set plan=null for one that is made for these ranks"
    raise SpecError(f"{recipe.plan} is a plan for {plan.world} ranks, and this run has {world}: {out}")


def _question(recipe: Recipe, tables: Sequence[Table], topology: Topology) -> Question:
    """Of tables that are asked for once a sample by each feature, on a machine that is typical of its kind."""
    kind = "cpu" if recipe.train.device == "cpu" else "h100-like"
    # Whether memory is enough shows when it is taken; a guess at it may not refuse a run.
    hardware = structs.replace(hardware_named(kind), device_bytes=PLENTY_bytes)
    # Row statistics of columns on several ranks have to be agreed on, which costs more than the cut saves.
    whole_rows = tuple(layout for layout in LAYOUTS if layout not in ("column_wise", "grid"))
    coupled = {table.name: whole_rows for table in tables if couples_columns(table.optimizer)}
    return Question(
        workloads=tuple(Workload(table=t, access=Access(pooling=float(len(t.feature_names)))) for t in tables),
        machine=Machine(topology=topology, hardware=hardware),
        model=Roofline(hardware, topology),
        batch=recipe.train.batch,
        constraints=Constraints(layouts=coupled),
    )


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
