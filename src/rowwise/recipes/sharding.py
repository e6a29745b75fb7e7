"""Chooses the sharding plan of a run, the recipe's or a searched one, and shards the model's tables by it.

Known limit: the search assumes uniform access; for measured access make the plan with `rowwise plan`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec import structs
from torch import nn

from rowwise.base.errors import SpecError, TableMemoryError
from rowwise.base.quantity import format_bytes
from rowwise.base.textfile import read_bytes
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.plan import Plan
from rowwise.parallel.shard.apply import shard
from rowwise.parallel.shard.embeddings import check_cached
from rowwise.parallel.shard.tiers import DEVICE_TIERS
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.hardware import PRESETS, Hardware, Machine, hardware_named
from rowwise.planning.perf.learned import model_of
from rowwise.planning.planner.bound import OptionTotals
from rowwise.planning.planner.constraints import ALL, Constraints
from rowwise.planning.planner.infeasible import InfeasibleError
from rowwise.planning.planner.layouts import LAYOUTS, REPLICATED, TABLE_WISE
from rowwise.planning.planner.machines import machine_named
from rowwise.planning.planner.methods.recshard import RECSHARD
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import make_plan, plan_by_method
from rowwise.planning.planner.problem import PlanRequest
from rowwise.recipes.dense_side import dense_side_of
from rowwise.recipes.device_tables import move_sharded
from rowwise.recipes.model_configs import SequenceModel
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.pinned_rows import CountedRows
from rowwise.recipes.placement import cache_tiles, fill_caches, has_disk_tables, tiles_bytes, uniform_workloads
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.table_memory import TableMemory, raise_if_short, single_rank_plan
from rowwise.tables.row_optimizers import needs_full_rows
from rowwise.tables.spec import Pooling, Table, Topology
from rowwise.tables.store.row_store import NO_HOT_ROWS, HotRows
from rowwise.tables.store.sizes import LOG_COPIES
from rowwise.train.step import embeddings_of

SEARCH_s = 0.05  # short, because the run waits for it
UNLIMITED_bytes = 1 << 50
WHOLE_ROWS = tuple(layout.name for layout in LAYOUTS if not layout.cuts_columns)
A_PROFILE = "a preset, a profile that `rowwise calibrate` has written, or --set hardware=null"


def tables_of(model: nn.Module) -> tuple[Table, ...]:
    return tuple(table for module in embeddings_of(model) for table in module.tables)


def choose_plan(
    recipe: Recipe,
    model: nn.Module,
    topology: Topology,
    memory: TableMemory | None = None,
    gpu_bytes: int | None = None,
    counted: CountedRows | None = None,
) -> Plan:
    """The recipe's plan unchanged; without one, whole tables on one rank or a searched plan for several.

    If `memory` is too small, some tables go to disk; raises if that does not help. A new plan has a forecast of the
    step, except for one rank without `hardware` and for tables on disk. `gpu_bytes`: budget per rank for tables on its
    GPU; None: tables are not on GPUs. `counted`: tables on disk pin rows, as RecShard divides the memory.
    """
    tables = tables_of(model)
    if recipe.plan is not None:
        plan = _read_plan(recipe, tables, topology)
        if gpu_bytes is not None:
            _check_gpus(plan, tables, gpu_bytes, recipe.max_samples)
        return plan
    request = make_request(recipe, tables, topology, usual_hardware(recipe))
    if topology.world > 1:
        host_memory = None if family_of(recipe.model).reads_whole_tables else memory
        rank_request = replace(request, dense=dense_side_of(recipe, model))
        plan = _place_on_ranks(rank_request, tables, host_memory, gpu_bytes, recipe.max_samples)
    else:
        plan = single_rank_plan(tables)
        if recipe.hardware is not None and tables:
            plan = structs.replace(plan, forecast=_search(_with_memory(request, UNLIMITED_bytes)).forecast)
    if memory is None or recipe.train.device != "cpu":
        return plan
    resident = replace(memory, tables=tables, plan=plan)
    return _place_on_disk(request, resident, counted) if resident.is_short else plan


def _check_gpus(plan: Plan, tables: Sequence[Table], gpu_bytes: int, samples: int) -> None:
    check_cached(plan, tables)
    for rank in range(plan.world):
        size = tiles_bytes(plan.tiles_on(rank), tables, samples)
        if size > gpu_bytes:
            raise TableMemoryError(
                f"the plan: rows and optimizer state of rank {rank} take {format_bytes(size)}, but its GPU has "
                f"{format_bytes(gpu_bytes)} for tables",
                "another --plan, or none",
            )


def _place_on_ranks(
    request: PlanRequest, tables: Sequence[Table], memory: TableMemory | None, gpu_bytes: int | None, samples: int
) -> Plan:
    """A plan with all rows on the devices, or else with rows in host memory behind caches that fill the GPUs.

    The latter is searched as if the devices had the ranks' shares of host memory, with tiles of whole rows and without
    replicas.
    """
    try:
        # On CPUs the search ignores memory: `measure_memory` knows what this machine has free, which a preset does not.
        return _search(_with_memory(request, UNLIMITED_bytes if gpu_bytes is None else gpu_bytes))
    except InfeasibleError as error:
        if gpu_bytes is None:
            raise
        limits = f"{request.machine.topology.world} GPUs, each with {format_bytes(gpu_bytes)} for tables"
        if memory is None:
            raise TableMemoryError(f"{limits}: {error}") from None
    host_share = UNLIMITED_bytes if None in memory.free_H else memory.rank_budget_bytes
    whole_rows = Constraints(layouts={ALL: tuple(name for name in WHOLE_ROWS if name != REPLICATED.name)})
    try:
        plan = _search(_with_memory(replace(request, constraints=whole_rows), host_share, host_bytes=0, disk_bytes=0))
    except InfeasibleError as error:
        raise TableMemoryError(f"{limits}, and {format_bytes(host_share)} of host memory: {error}") from None
    return cache_tiles(plan, tables, gpu_bytes, samples)


def _place_on_disk(request: PlanRequest, resident: TableMemory, counted: CountedRows | None = None) -> Plan:
    """A plan with tables on disk, whose caches fill the memory budget."""
    if counted is not None:
        request = replace(request, workloads=counted.workloads)
    budget = resident.rank_budget_bytes
    request = _with_memory(request, budget, host_bytes=0, disk_bytes=UNLIMITED_bytes)
    request = replace(request, tiers=frozenset({"device", "disk"}), buffers=False)
    min_bytes = _min_memory_bytes(request)
    if min_bytes > budget * resident.topology.devices:
        samples = f"the index of all rows and the rows of {request.batch:,} samples take {format_bytes(min_bytes)}"
        larger = (
            f"a larger --memory ({format_bytes(min_bytes)})" if resident.limited and resident.purpose != "use" else ""
        )
        raise_if_short(resident, f"; with rows on disk, {samples}", larger)
    try:
        plan = _search(request) if counted is None else _plan_with_pins(request)
    except InfeasibleError as error:
        raise_if_short(resident, f"; with rows on disk, {error}")
        raise
    plan = fill_caches(plan, resident.tables, budget)
    for host, free in enumerate(resident.disk_free_H):
        min_disk = replace(resident, plan=plan).disk_bytes(host) // LOG_COPIES
        if min_disk > free:  # a log also holds replaced records, but none of unchanged rows
            sizes = f"{format_bytes(min_disk)}, and {format_bytes(free)} are free on the disk"
            raise_if_short(resident, f"; rows on disk need up to {sizes}", "another disk by --set disk=FOLDER")
    return plan


def _plan_with_pins(request: PlanRequest) -> Plan:
    try:
        return plan_by_method(request, RECSHARD).plan
    except SpecError:
        problem = f"pin: {request.machine.topology.world} ranks do not hold whole tables on disk and their caches"
        raise TableMemoryError(problem, "pin=null, which may cut tables, or a larger `memory`") from None


def _search(request: PlanRequest) -> Plan:
    return make_plan(request, seconds=SEARCH_s, prove=False).plan


def _with_memory(request: PlanRequest, device_bytes: int, **other_bytes: int) -> PlanRequest:
    hardware = structs.replace(request.machine.hardware, device_bytes=device_bytes, **other_bytes)
    return replace(request, machine=structs.replace(request.machine, hardware=hardware))


def _min_memory_bytes(request: PlanRequest) -> float:
    """Memory of a host with the smallest option of each table, on disk or not."""
    problem = make_problem(request)
    memory_O = OptionTotals.of(problem).bytes_OM[:, 0]
    return float(np.minimum.reduceat(memory_O, problem.item_begin[:-1]).sum()) * problem.topology.devices


def _read_plan(recipe: Recipe, tables: Sequence[Table], topology: Topology) -> Plan:
    assert recipe.plan is not None
    world = topology.world
    try:
        plan = Plan.from_json(read_bytes(recipe.plan))
        if plan.world == world:
            plan.validate(tables)
            # A forecast for another wire does not apply to the run.
            wire = None if plan.forecast is None else plan.forecast.wire.in_words(topology)
            return plan if wire == recipe.wire_types.in_words(topology) else structs.replace(plan, forecast=None)
    except SpecError as error:
        raise SpecError(f"{recipe.plan}: {error}") from None
    raise SpecError(
        f"{recipe.plan} is a plan for {plan.world} ranks, but this run has {world}",
        f"--nproc {plan.world}, another --plan, or --set plan=null to search one",
    )


def usual_hardware(recipe: Recipe) -> Hardware:
    """The recipe's hardware, or a typical machine."""
    if recipe.hardware is not None:
        return load_hardware(recipe.hardware)
    return hardware_named("cpu" if recipe.train.device == "cpu" else "h100-like")


def load_hardware(name: str) -> Hardware:
    """A preset by its name, or the profile in a JSON file."""
    try:
        return machine_named(f"1x1x{name}").hardware
    except FileNotFoundError:
        raise SpecError(f"hardware: {name}: no such file", A_PROFILE) from None
    except SpecError as error:
        if name.endswith(".json"):
            raise SpecError(f"hardware: {error}", hint=f"use {A_PROFILE}") from None
        raise SpecError(f"hardware {name!r}: no such preset, there are {', '.join(PRESETS)}", A_PROFILE) from None


def make_request(recipe: Recipe, tables: Sequence[Table], topology: Topology, hardware: Hardware) -> PlanRequest:
    """The planner's request for these tables, limited by the machine only."""
    # Optimizers that couple columns exchange sums for column shards, which costs more than the cut saves.
    coupled = {table.name: WHOLE_ROWS for table in tables if needs_full_rows(table.optimizer)}
    layouts = {ALL: (TABLE_WISE.name,)} if topology.world == 1 else coupled
    return PlanRequest(
        workloads=workloads_of(recipe, tables, topology.world),
        machine=Machine(topology=topology, hardware=hardware),
        model=model_of(hardware, topology, recipe.wire_types),
        batch=step_samples(recipe),
        constraints=Constraints(layouts=layouts),
        tiers=DEVICE_TIERS,
    )


def workloads_of(recipe: Recipe, tables: Sequence[Table], world: int) -> tuple[Workload, ...]:
    """The tables with uniform access, as a step looks them up.

    A feature has one id in a sample, or those of a sequence model: a full list and its share of the scored items. A
    step over a graph reads each row once, for any batch size, and exchanges one vector per row.
    """
    model, batch = recipe.model, recipe.train.batch
    if family_of(model).mixes_a_graph:
        sequences = (structs.replace(t, pooling=Pooling.SEQUENCE) for t in tables)
        return tuple(Workload(table=t, access=Access(pooling=t.rows / batch)) for t in sequences)
    if not isinstance(model, SequenceModel):
        return uniform_workloads(tables)
    scored = tables[0].rows if model.negatives is None else model.negatives
    return uniform_workloads(tables, model.length + 1 + scored * world / batch)  # a rank looks up its scored items


def step_samples(recipe: Recipe) -> int:
    """Global number of samples of an optimizer step."""
    return recipe.train.batch * recipe.train.accumulate


def shard_tables(
    recipe: Recipe, model: nn.Module, plan: Plan, comm: Comm, disk: Path | None, hot_rows: HotRows = NO_HOT_ROWS
) -> None:
    """Shard the tables of a model by the plan, in place; a collective. No-op for one rank with whole tables in memory.

    `disk` is the folder of tables on disk; `hot_rows` are those of tables whose tiles pin rows.
    """
    if len(comm.ranks) > 1 or recipe.plan is not None or has_disk_tables(plan):
        train = recipe.train
        elastic, merge_shared = train.determinism == "elastic", train.merge_shared
        wire = recipe.wire_types
        shard(model, plan, comm, wire=wire, elastic=elastic, merge_shared=merge_shared, disk=disk, hot_rows=hot_rows)
        if train.device != "cpu":  # tables are there already; dense parameters may still be on meta
            move_sharded(model, plan, train.device, recipe.max_samples)
