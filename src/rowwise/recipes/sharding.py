"""Chooses the sharding plan of a run, the recipe's or a searched one, and shards the model's tables by it.

Known limit: the search assumes one id for each feature of a sample, and uniform access; for measured access make the
plan with `rowwise plan`.
"""

from collections.abc import Sequence

from msgspec import structs
from torch import nn

from rowwise.comm.interface import Comm
from rowwise.errors import SpecError
from rowwise.perf.access import Access, Workload
from rowwise.perf.hardware import PRESETS, Hardware, Machine, hardware_named
from rowwise.perf.learned import model_of
from rowwise.plan import Plan, Tile
from rowwise.planner.constraints import ALL, Constraints
from rowwise.planner.layouts import LAYOUTS, TABLE_WISE
from rowwise.planner.machines import machine_named
from rowwise.planner.pipeline import make_plan
from rowwise.planner.problem import PlanRequest
from rowwise.recipes.recipe import Recipe
from rowwise.row_optimizers import needs_full_rows
from rowwise.shard.apply import shard
from rowwise.shard.tiers import DEVICE_TIERS
from rowwise.spec import Table, Topology, Wire
from rowwise.textfile import read_bytes
from rowwise.train.step import embeddings_of

SEARCH_s = 0.05  # short, because the run waits for it
UNLIMITED_bytes = 1 << 50
WANT = "want a preset, a profile that `rowwise calibrate` has written, or --set hardware=null"


def tables_of(model: nn.Module) -> tuple[Table, ...]:
    return tuple(table for module in embeddings_of(model) for table in module.tables)


def single_rank_plan(tables: Sequence[Table]) -> Plan:
    return Plan(world=1, tiles=tuple(Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, t.dim)) for t in tables))


def choose_plan(recipe: Recipe, model: nn.Module, topology: Topology) -> Plan:
    """The recipe's plan unchanged; without one, whole tables on one rank or a searched plan for several.

    A plan made here has a forecast of the step, except for one rank without `hardware`.
    """
    world, tables = topology.world, tables_of(model)
    hardware = None if recipe.hardware is None else load_hardware(recipe.hardware)
    if recipe.plan is None and world == 1:
        plan = single_rank_plan(tables)
        if hardware is None or not tables:
            return plan
        return structs.replace(plan, forecast=_search_plan(recipe, tables, topology, hardware).forecast)
    if recipe.plan is None:
        kind = "cpu" if recipe.train.device == "cpu" else "h100-like"
        return _search_plan(recipe, tables, topology, hardware or hardware_named(kind))
    try:
        plan = Plan.from_json(read_bytes(recipe.plan))
        if plan.world == world:
            plan.validate(tables)
            return _drop_other_forecast(recipe.wire, plan, topology)
    except SpecError as error:
        raise SpecError(f"{recipe.plan}: {error}") from None
    want = f"want --nproc {plan.world}, another --plan, or --set plan=null to search one"
    raise SpecError(f"{recipe.plan} is a plan for {plan.world} ranks, but this run has {world}: {want}")


def _drop_other_forecast(wire: Wire, plan: Plan, topology: Topology) -> Plan:
    """The plan, without a forecast for another wire than the run's."""
    if plan.forecast is None or plan.forecast.wire.in_words(topology) == wire.in_words(topology):
        return plan
    return structs.replace(plan, forecast=None)


def load_hardware(name: str) -> Hardware:
    """A preset by its name, or the profile in a JSON file."""
    try:
        return machine_named(f"1x1x{name}").hardware
    except FileNotFoundError:
        raise SpecError(f"hardware: {name}: no such file: {WANT}") from None
    except SpecError as error:
        if name.endswith(".json"):
            raise SpecError(f"hardware: {error}: {WANT}") from None
        raise SpecError(f"hardware {name!r}: no such preset, there are {', '.join(PRESETS)}: {WANT}") from None


def _search_plan(recipe: Recipe, tables: Sequence[Table], topology: Topology, hardware: Hardware) -> Plan:
    """A searched plan with its forecast; on one rank all tables are whole."""
    # The search ignores memory: check_memory knows the free memory of this machine, which a preset does not.
    unlimited = structs.replace(hardware, device_bytes=UNLIMITED_bytes)
    # Optimizers that couple columns exchange sums for column shards, which costs more than the cut saves.
    whole_rows = tuple(layout.name for layout in LAYOUTS if not layout.cuts_columns)
    coupled = {table.name: whole_rows for table in tables if needs_full_rows(table.optimizer)}
    layouts = {ALL: (TABLE_WISE.name,)} if topology.world == 1 else coupled
    request = PlanRequest(
        workloads=uniform_workloads(tables),
        machine=Machine(topology=topology, hardware=unlimited),
        model=model_of(unlimited, topology, recipe.wire),
        batch=step_samples(recipe),
        constraints=Constraints(layouts=layouts),
        tiers=DEVICE_TIERS,
    )
    return make_plan(request, seconds=SEARCH_s, prove=False).plan


def uniform_workloads(tables: Sequence[Table]) -> tuple[Workload, ...]:
    """The tables with uniform access by one id for each feature of a sample."""
    return tuple(Workload(table=t, access=Access(pooling=float(len(t.feature_names)))) for t in tables)


def step_samples(recipe: Recipe) -> int:
    """The global number of samples of an optimizer step."""
    return recipe.train.batch * recipe.train.accumulate


def shard_tables(recipe: Recipe, model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Shard the tables of a model by the plan, in place; a collective. One rank without a plan keeps them whole."""
    if len(comm.ranks) > 1 or recipe.plan is not None:
        train = recipe.train
        elastic, merge_shared = train.determinism == "elastic", train.merge_shared
        shard(model, plan, comm, wire=recipe.wire, elastic=elastic, merge_shared=merge_shared)
        model.to(recipe.train.device)


def rank_bytes(plan: Plan, tables: Sequence[Table]) -> list[int]:
    """Bytes of table rows on each rank."""
    by_name = {table.name: table for table in tables}
    bytes_W = [0] * plan.world
    for tile in plan.tiles:
        table = by_name[tile.table]
        rows, columns = tile.rows[1] - tile.rows[0], tile.cols[1] - tile.cols[0]
        bytes_W[tile.rank] += rows * table.row_bytes * columns // table.dim
    return bytes_W
