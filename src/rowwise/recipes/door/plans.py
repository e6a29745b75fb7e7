"""TorchRec's `ShardingPlan`s as tiles, and tiles as a `ShardingPlan`."""

from collections.abc import Sequence
from typing import Any

from msgspec import structs
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import Plan, Tile
from rowwise.planning.planner import simple_plan
from rowwise.planning.planner.export import TorchRecShard, TorchRecTable
from rowwise.recipes.door.sources import CollectionSource
from rowwise.recipes.torchrec import parameter_sharding
from rowwise.tables.row_optimizers import needs_full_rows
from rowwise.tables.spec import Table, Topology


def make_plan(sources: Sequence[CollectionSource], topology: Topology, device: str) -> ShardingPlan:
    """Our plan of all tables in TorchRec's classes."""
    tables = [_rename(number, entry.table) for number, source in enumerate(sources) for entry in source.tables]
    plan = simple_plan(tables, topology) if tables else Plan(world=topology.world, tiles=())
    module_plans: dict[str, Any] = {}
    for number, source in enumerate(sources):
        module_plans[source.path] = EmbeddingModuleShardingPlan()
        for table in (entry.table for entry in source.tables):
            described = _describe(table, plan.tiles_of(_rename(number, table).name), topology.world)
            module_plans[source.path][table.name] = parameter_sharding(described, topology.devices, device)
    return ShardingPlan(plan=module_plans)


def _rename(collection: int, table: Table) -> Table:
    """The table under a name of its own in the plan: two collections may have tables and features of one name."""
    features = tuple(f"{collection}:{feature}" for feature in table.feature_names)
    return structs.replace(table, name=f"{collection}:{table.name}", features=features)


def check_paths(plan: Any, sources: Sequence[CollectionSource]) -> None:
    """Raise for a plan that lacks a collection, or has a module that is none."""
    paths = {source.path for source in sources}
    for path in plan.plan.keys() - paths:
        raise SpecError(f"the plan has module {path!r}", f"collections of this model only: {', '.join(sorted(paths))}")
    for source in sources:
        if not plan.get_plan_for_module(source.path):
            raise SpecError(f"the plan lacks {source.name}", "a plan of all collections of the model")


def tiles_of(source: CollectionSource, module_plan: Any, world: int) -> Plan:
    """The tiles of one collection; as in TorchRec, a table of cut columns has an optimizer for each piece of them."""
    tables = [entry.table for entry in source.tables]
    for name in module_plan.keys() - {table.name for table in tables}:
        raise SpecError(f"the plan has table {name!r}, which {source.name} lacks", "the plan of this model")
    tiles: list[Tile] = []
    for table in tables:
        if table.name not in module_plan:
            raise SpecError(f"the plan lacks table {table.name!r} of {source.name}", "a plan of all its tables")
        tiles += _tiles_of_table(table, module_plan[table.name], world)
    widths = {table.name: table.dim for table in tables if needs_full_rows(table.optimizer)}
    cut = {tile.table for tile in tiles if tile.cols != (0, widths.get(tile.table, tile.cols[1]))}
    plan = Plan(world=world, tiles=tuple(tiles), approximate=tuple(sorted(cut & widths.keys())))
    plan.validate(tables)
    return plan


def _tiles_of_table(table: Table, sharding: Any, world: int) -> list[Tile]:
    if sharding.sharding_type == "data_parallel":
        return [Tile(table.name, rank, (0, table.rows), (0, table.dim)) for rank in range(world)]
    shards = [] if sharding.sharding_spec is None else sharding.sharding_spec.shards
    tiles: list[Tile] = []
    for shard in shards:
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        if rows and columns:
            tiles.append(Tile(table.name, shard.placement.rank(), (row, row + rows), (column, column + columns)))
    return tiles


def _describe(table: Table, tiles: Sequence[Tile], world: int) -> TorchRecTable:
    if len(tiles) > 1 and all(tile.rows == (0, table.rows) and tile.cols == (0, table.dim) for tile in tiles):
        return TorchRecTable("data_parallel", "dense", tuple(range(world)), ())
    shards = tuple(
        TorchRecShard(
            (tile.rows[0], tile.cols[0]), (tile.rows[1] - tile.rows[0], tile.cols[1] - tile.cols[0]), tile.rank
        )
        for tile in tiles
    )
    kind = "table_wise" if len(tiles) == 1 else "row_wise"  # `simple_plan` cuts rows only
    return TorchRecTable(kind, "fused", tuple(shard.rank for shard in shards), shards)
