"""Where the tables of a run live: as the recipe's plan says, or by one that is made for the ranks that there are.

How fast the machine is, the recipe may say (`hardware`). Known limits: rows that are asked for more than others; a
plan made with more knowledge (`rowwise plan`) is a file.
"""

from collections.abc import Sequence

from msgspec import structs
from torch import nn

from rowwise.comm.seam import Comm
from rowwise.errors import SpecError
from rowwise.perf.access import Access, Workload
from rowwise.perf.hardware import PRESETS, Hardware, Machine, hardware_named
from rowwise.perf.learned import model_of
from rowwise.plan import Plan, Tile
from rowwise.planner.constraints import ALL, Constraints
from rowwise.planner.layouts import LAYOUTS, TABLE_WISE
from rowwise.planner.machines import machine_named
from rowwise.planner.make import make_plan
from rowwise.planner.problem import PlanRequest
from rowwise.recipes.recipe import Recipe
from rowwise.row_optimizers import couples_columns
from rowwise.shard.apply import shard
from rowwise.shard.tiers import RUNS
from rowwise.spec import Table, Topology, Wire
from rowwise.textfile import read_bytes
from rowwise.train.step import embeddings_of

EFFORT_s = 0.05  # of search; a run waits for it
PLENTY_bytes = 1 << 50
WANT = "want a preset, a profile that `rowwise calibrate` has written, or --set hardware=null"


def tables_of(model: nn.Module) -> tuple[Table, ...]:
    """All tables of a model, in order."""
    return tuple(table for module in embeddings_of(model) for table in module.tables)


def whole_plan(tables: Sequence[Table]) -> Plan:
    return Plan(world=1, tiles=tuple(Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, t.dim)) for t in tables))


def choose_plan(recipe: Recipe, model: nn.Module, topology: Topology) -> Plan:
    """The recipe's plan, as it is; without one every table whole on one rank, or a searched plan for several.

    What is made here says what a step is expected to take, unless it is for one rank and nobody knows the hardware.
    """
    world, tables = topology.world, tables_of(model)
    hardware = None if recipe.hardware is None else hardware_of(recipe.hardware)
    if recipe.plan is None and world == 1:
        whole = whole_plan(tables)
        if hardware is None or not tables:
            return whole
        return structs.replace(whole, forecast=_made(recipe, tables, topology, hardware).forecast)
    if recipe.plan is None:
        kind = "cpu" if recipe.train.device == "cpu" else "h100-like"
        return _made(recipe, tables, topology, hardware or hardware_named(kind))
    try:
        plan = Plan.from_json(read_bytes(recipe.plan))
        if plan.world == world:
            plan.validate(tables)
            return _forecast_for(recipe.wire, plan, topology)
    except SpecError as error:
        raise SpecError(f"{recipe.plan}: {error}") from None
    out = f"want --nproc {plan.world}, another --plan, or --set plan=null for one that is made for these ranks"
    raise SpecError(f"{recipe.plan} is a plan for {plan.world} ranks, and this run has {world}: {out}")


def _forecast_for(wire: Wire, plan: Plan, topology: Topology) -> Plan:
    """A plan, without a forecast that is for vectors on another wire than those of this run."""
    if plan.forecast is None or plan.forecast.wire.in_words(topology) == wire.in_words(topology):
        return plan
    return structs.replace(plan, forecast=None)


def hardware_of(name: str) -> Hardware:
    """A preset by its name, or the profile in a JSON file."""
    try:
        return machine_named(f"1x1x{name}").hardware
    except FileNotFoundError:
        raise SpecError(f"hardware: {name}: there is no such file: {WANT}") from None
    except SpecError as error:
        if name.endswith(".json"):
            raise SpecError(f"hardware: {error}: {WANT}") from None
        raise SpecError(f"hardware {name!r}: there are {', '.join(PRESETS)}: {WANT}") from None


def _made(recipe: Recipe, tables: Sequence[Table], topology: Topology, hardware: Hardware) -> Plan:
    """A plan that is searched for, with its forecast; on one rank there is nothing to choose."""
    # Whether memory is enough shows when it is taken; a guess at it may not refuse a run.
    plenty = structs.replace(hardware, device_bytes=PLENTY_bytes)
    # Row statistics of columns on several ranks have to be agreed on, which costs more than the cut saves.
    whole_rows = tuple(layout.name for layout in LAYOUTS if not layout.cuts_columns)
    coupled = {table.name: whole_rows for table in tables if couples_columns(table.optimizer)}
    layouts = {ALL: (TABLE_WISE.name,)} if topology.world == 1 else coupled
    question = PlanRequest(
        workloads=tuple(Workload(table=t, access=Access(pooling=float(len(t.feature_names)))) for t in tables),
        machine=Machine(topology=topology, hardware=plenty),
        model=model_of(plenty, topology, recipe.wire),
        batch=step_samples(recipe),
        constraints=Constraints(layouts=layouts),
        tiers=RUNS,
    )
    return make_plan(question, seconds=EFFORT_s, prove=False).plan


def step_samples(recipe: Recipe) -> int:
    """Samples of a step, of all ranks together."""
    return recipe.train.batch * recipe.train.accumulate


def place_model(recipe: Recipe, model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Put the tables of a model where a plan says, in place; called by all ranks.

    One process without a plan of its own keeps its tables as they are.
    """
    if len(comm.ranks) > 1 or recipe.plan is not None:
        train = recipe.train
        elastic, merge_shared = train.determinism == "elastic", train.merge_shared
        shard(model, plan, comm, wire=recipe.wire, elastic=elastic, merge_shared=merge_shared)
        model.to(recipe.train.device)


def rows_bytes(plan: Plan, tables: Sequence[Table]) -> list[int]:
    known = {table.name: table for table in tables}
    held_W = [0] * plan.world
    for tile in plan.tiles:
        table = known[tile.table]
        held_W[tile.rank] += (
            (tile.rows[1] - tile.rows[0]) * table.row_bytes * (tile.cols[1] - tile.cols[0]) // table.dim
        )
    return held_W
