"""TorchRec's own objects from a plan that was written for it (`rowwise plan --torchrec`).

Known limits: tables that another module holds than an Embedding(Bag)Collection.
"""

import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from rowwise.errors import SpecError
from rowwise.planner.export import TorchRecPlan, TorchRecTable


def sharding_plan(text: str | bytes, module: nn.Module, path: str = "", *, device: str = "cpu") -> Any:
    """A `torchrec.distributed.types.ShardingPlan` for `DistributedModelParallel(module, plan=...)`.

    `module` has collections of tables somewhere inside, or only those under `path` count; `device` is the kind of
    device that it is sharded over, cpu or cuda. Each table of the plan has to be in one of them, as large as planned.
    """
    plan, types = TorchRecPlan.from_json(text), _theirs("torchrec.distributed.types")
    made: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for name, configs in _collections(module, path):
        made[name] = types.EmbeddingModuleShardingPlan()
        for config in configs:
            if config.name not in plan.tables:
                raise SpecError(
                    f"table {config.name!r} of {_called(name)} is not in the plan: want a plan of all tables"
                )
            if config.name in seen:
                both = f"{_called(seen[config.name])} and {_called(name)}"
                raise SpecError(f"table {config.name!r} is in {both}: want one of them as `path`")
            seen[config.name] = name
            table = plan.tables[config.name]
            _check_size(config, table)
            made[name][config.name] = _sharding(table, plan.local_world, device)
    missing = [name for name in plan.tables if name not in seen]
    if missing:
        where = _called(path)
        raise SpecError(
            f"no collection in {where} has table {missing[0]!r}: want the module that the plan was made for"
        )
    return types.ShardingPlan(plan=made)


def _theirs(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpecError(f"TorchRec is not there ({error}): want `pip install torchrec`, as its page says") from error


def _collections(module: nn.Module, path: str) -> Iterator[tuple[str, list[Any]]]:
    """Collections by path, and the tables of each."""
    modules = _theirs("torchrec.modules.embedding_modules")
    for name, found in module.named_modules():
        if name != path and path and not name.startswith(path + "."):
            continue
        if isinstance(found, modules.EmbeddingBagCollection):
            yield name, list(found.embedding_bag_configs())
        elif isinstance(found, modules.EmbeddingCollection):
            yield name, list(found.embedding_configs())


def _called(path: str) -> str:
    return f"module {path!r}" if path else "the module"


def _check_size(config: Any, table: TorchRecTable) -> None:
    if not table.shards:
        return
    rows = max(shard.offsets[0] + shard.sizes[0] for shard in table.shards)
    dim = max(shard.offsets[1] + shard.sizes[1] for shard in table.shards)
    if (rows, dim) != (config.num_embeddings, config.embedding_dim):
        has = f"{config.num_embeddings} x {config.embedding_dim}"
        raise SpecError(f"table {config.name!r} is {has}, and {rows} x {dim} in the plan: want the same table")


def _sharding(table: TorchRecTable, local_world: int, device: str) -> Any:
    types = _theirs("torchrec.distributed.types")
    spec = None
    if table.shards:
        spec = types.EnumerableShardingSpec(
            [
                types.ShardMetadata(
                    shard_offsets=list(shard.offsets),
                    shard_sizes=list(shard.sizes),
                    placement=f"rank:{shard.rank}/{_place(device, shard.rank, local_world)}",
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


def _place(device: str, rank: int, local_world: int) -> str:
    return f"{device}:{rank % local_world}" if device == "cuda" else device
