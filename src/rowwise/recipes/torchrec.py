"""A TorchRec ShardingPlan from a file of `rowwise plan --torchrec`. TorchRec is imported here and in `recipes/door`.

Known limit: tables must be in an EmbeddingBagCollection or EmbeddingCollection.
"""

import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from rowwise.base.errors import SpecError
from rowwise.planning.planner.export import TorchRecPlan, TorchRecTable


def sharding_plan(text: str | bytes, module: nn.Module, path: str = "", *, device: str = "cpu") -> Any:
    """A `torchrec.distributed.types.ShardingPlan` for `DistributedModelParallel(module, plan=...)`.

    Uses the collections of tables inside `module`, or only those under `path`. `device` is cpu or cuda. Each table of
    the plan must be in exactly one collection, with the planned size.
    """
    plan, types = TorchRecPlan.from_json(text), import_torchrec("torchrec.distributed.types")
    module_plans: dict[str, Any] = {}  # by the collection's path
    seen: dict[str, str] = {}  # by table: the collection's path
    for name, configs in _collections(module, path):
        module_plans[name] = types.EmbeddingModuleShardingPlan()
        for config in configs:
            if config.name not in plan.tables:
                raise SpecError(
                    f"table {config.name!r} of {_module_name(name)} is not in the plan", "a plan of all tables"
                )
            if config.name in seen:
                modules = f"{_module_name(seen[config.name])} and {_module_name(name)}"
                raise SpecError(f"table {config.name!r} is in {modules}", "one of them as `path`")
            seen[config.name] = name
            table = plan.tables[config.name]
            _check_size(config, table)
            module_plans[name][config.name] = parameter_sharding(table, plan.local_world, device)
    missing = [name for name in plan.tables if name not in seen]
    if missing:
        raise SpecError(
            f"no collection in {_module_name(path)} has table {missing[0]!r}", "the module that the plan was made for"
        )
    return types.ShardingPlan(plan=module_plans)


def import_torchrec(name: str) -> Any:
    """A module of TorchRec."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpecError(f"TorchRec cannot be imported ({error})", hint="install torchrec as its page says") from error


def _collections(module: nn.Module, path: str) -> Iterator[tuple[str, list[Any]]]:
    """The path and the table configs of each collection."""
    modules = import_torchrec("torchrec.modules.embedding_modules")
    for name, child in module.named_modules():
        if name != path and path and not name.startswith(path + "."):
            continue
        if isinstance(child, modules.EmbeddingBagCollection):
            yield name, list(child.embedding_bag_configs())
        elif isinstance(child, modules.EmbeddingCollection):
            yield name, list(child.embedding_configs())


def _module_name(path: str) -> str:
    return f"module {path!r}" if path else "the module"


def _check_size(config: Any, table: TorchRecTable) -> None:
    if not table.shards:
        return
    rows = max(shard.offsets[0] + shard.sizes[0] for shard in table.shards)
    dim = max(shard.offsets[1] + shard.sizes[1] for shard in table.shards)
    if (rows, dim) != (config.num_embeddings, config.embedding_dim):
        size = f"{config.num_embeddings} x {config.embedding_dim}"
        raise SpecError(f"table {config.name!r} is {size}, and {rows} x {dim} in the plan", "the same size")


def parameter_sharding(table: TorchRecTable, local_world: int, device: str) -> Any:
    """TorchRec's object for one table."""
    types = import_torchrec("torchrec.distributed.types")
    spec = None
    if table.shards:
        spec = types.EnumerableShardingSpec(
            [
                types.ShardMetadata(
                    shard_offsets=list(shard.offsets),
                    shard_sizes=list(shard.sizes),
                    placement=f"rank:{shard.rank}/{_device_name(device, shard.rank, local_world)}",
                )
                for shard in table.shards
            ]
        )
    cache = types.CacheParams(load_factor=table.cache_load_factor) if table.cache_load_factor is not None else None
    return types.ParameterSharding(
        sharding_type=table.sharding_type,
        compute_kernel=table.compute_kernel,
        ranks=list(table.ranks),
        sharding_spec=spec,
        cache_params=cache,
    )


def _device_name(device: str, rank: int, local_world: int) -> str:
    return f"{device}:{rank % local_world}" if device == "cuda" else device
