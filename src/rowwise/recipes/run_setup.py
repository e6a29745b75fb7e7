"""From a recipe to the training job of a rank: the agreed recipe, a plan, a model with its tables, a feed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from rowwise.base.errors import SpecError
from rowwise.base.storage.folder import parse_folder
from rowwise.base.textfile import read_bytes
from rowwise.ingest.transform import MapId
from rowwise.ingest.transform import decode as decode_transforms
from rowwise.ingest.vocabulary import check_grown
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import on_first_rank
from rowwise.parallel.plan import Plan
from rowwise.recipes.compose import make_job, make_model, parts_of, resolve, set_threads
from rowwise.recipes.device_tables import gpu_table_bytes, take_gpu
from rowwise.recipes.feed import Feed
from rowwise.recipes.hosts import NetworkOfRun, ordered_links
from rowwise.recipes.outlook import open_warm_start
from rowwise.recipes.pinned_rows import count_rows
from rowwise.recipes.placement import has_disk_tables
from rowwise.recipes.recipe import Recipe, check_ranks
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.run_files import DISK, TRANSFORMS
from rowwise.recipes.sharding import choose_plan, shard_tables, tables_of
from rowwise.recipes.table_memory import Purpose, find_memory_notes, measure_memory, raise_if_short
from rowwise.recipes.trained import resolve_saved
from rowwise.recipes.wires import decide_wire
from rowwise.tables.store.row_store import NO_HOT_ROWS
from rowwise.train.dense_parallel import ShardedConstruction, shard_dense, shards_of
from rowwise.train.run_folder import RunFolder
from rowwise.train.snapshot import WarmStartMatch, warm_start
from rowwise.train.trainer import TrainingJob


def agree_on_recipe(recipe: Recipe, comm: Comm, network: NetworkOfRun | None) -> ResolvedRecipe:
    """Resolve the recipe on the first rank, for all ranks; a collective."""
    if not recipe.name:
        raise SpecError("the recipe has no name", "a name, as it names the run's folder")
    check_ranks(recipe, comm.topology.world)
    topology = comm.topology
    links = lambda: None if network is None else ordered_links(network, topology.hosts)  # noqa: E731 - called by the first rank
    return _resolve_on_first_rank(lambda: decide_wire(resolve(recipe), topology, links()), comm)


def agree_on_saved(path: Path, changes: Sequence[str], comm: Comm) -> ResolvedRecipe:
    """Resolve the recipe of a saved run, with changes, for all ranks; a collective."""
    topology = comm.topology
    return _resolve_on_first_rank(lambda: decide_wire(resolve_saved(path, changes, topology.world), topology), comm)


def _resolve_on_first_rank(call: Callable[[], ResolvedRecipe], comm: Comm) -> ResolvedRecipe:
    """Broadcast the recipe that the first rank resolves, as resolving may take a pass over the data."""
    local: list[ResolvedRecipe] = []

    def resolve_here() -> Recipe:
        local.append(call())
        return local[0].recipe

    recipe = on_first_rank(comm, resolve_here)
    # Other ranks open the data, but use the first rank's recipe: their processors might resolve another one.
    return local[0] if local else replace(resolve(recipe), recipe=recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetup:
    """The training job of a rank, the plan of its tables and its feed."""

    job: TrainingJob
    plan: Plan
    feed: Feed
    notes: tuple[str, ...]  # warnings about the memory of tables


def set_up_job(
    resolved: ResolvedRecipe, comm: Comm, near: Path, folder: Callable[[], RunFolder], purpose: Purpose = "train"
) -> JobSetup:
    """Build the job of this rank; a collective. On several ranks no rank ever allocates all tables.

    `folder` makes the run's folder and is called only for tables on disk; `near`: a path on the same file system.
    """
    set_threads(resolved.recipe)
    recipe, topology = resolved.recipe, comm.topology
    take_gpu(recipe.train.device, comm)
    memory = measure_memory(resolved, comm, purpose, near if recipe.disk is None else Path(recipe.disk))
    is_sharded = topology.world > 1 or recipe.plan is not None or (memory.is_short and recipe.train.device == "cpu")
    # Memory is checked before tables are allocated: meta tables when they are sharded, others with the model.
    if not is_sharded:
        on_first_rank(comm, lambda: raise_if_short(memory))
    parallel = recipe.train.dense_parallel
    construction = ShardedConstruction(comm, shards_of(parallel, topology))
    with construction:
        model = make_model(resolved, on_meta=is_sharded)
    gpu_bytes = gpu_table_bytes(recipe.train.device, recipe.memory_bytes, comm)
    counted = None
    if recipe.pin is not None and (recipe.plan is not None or memory.is_short):
        samples = recipe.pin
        counted = on_first_rank(comm, lambda: count_rows(resolved, model, samples))
    plan = on_first_rank(comm, lambda: choose_plan(recipe, model, topology, memory, gpu_bytes, counted))
    if is_sharded:
        on_first_rank(comm, lambda: raise_if_short(replace(memory, tables=tables_of(model), plan=plan)))
    disk = None
    if has_disk_tables(plan):
        disk = folder().path / DISK if recipe.disk is None else Path(recipe.disk)
    shard_tables(recipe, model, plan, comm, disk, NO_HOT_ROWS if counted is None else counted.hot_rows)
    parts_of(recipe.model).share(model, comm)
    shard_dense(model, parallel, comm, construction)
    feed = Feed(resolved, comm)
    job = make_job(resolved, model, feed, comm, plan.forecast, feed.quarantine)
    notes = find_memory_notes(memory, recipe.memory_bytes if recipe.train.device == "cpu" else None, disk)
    return JobSetup(job=replace(job, health=lambda: feed.health), plan=plan, feed=feed, notes=notes)


def start_warm(resolved: ResolvedRecipe, model: nn.Module) -> WarmStartMatch | None:
    if resolved.recipe.init_from is None:
        return None
    source = parse_folder(resolved.recipe.init_from)
    if isinstance(source, Path) and (source / TRANSFORMS).is_file():
        # Rows of a vocabulary keep their weights only if the new one appends ids to it.
        transforms = {step.transform.makes: step.transform for step in resolved.transforms.steps}
        for old in decode_transforms(read_bytes(source / TRANSFORMS)):
            new = transforms.get(old.makes)
            if isinstance(old, MapId) and isinstance(new, MapId):
                check_grown(old.column, old.mapping, new.mapping, str(source))
    return warm_start(open_warm_start(source), model)
