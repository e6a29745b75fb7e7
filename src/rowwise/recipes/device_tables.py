"""GPUs of ranks, and models whose tables are moved there, or cached where `placement` leaves them in host memory."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from msgspec import structs
from torch import nn

from rowwise.base.errors import SpecError, TableMemoryError
from rowwise.base.quantity import format_bytes
from rowwise.checkpoint.tables import full_name, table_modules
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import all_gather_text, all_gather_uneven, raising_on_all_ranks
from rowwise.parallel.plan import Plan
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.recipes.placement import choose_of_modules, describe_pieces, table_bytes
from rowwise.serve.row_tiers import DeviceRows
from rowwise.tables.embedding import Embeddings
from rowwise.tables.row_optimizers import Sgd
from rowwise.train.on_device import prepare_device

USABLE = 0.8  # of a GPU's free memory: batches, vectors and the dense model need the rest


def usable_of_device(device: torch.device) -> int:
    return int(USABLE * torch.cuda.mem_get_info(device)[0])


def gpu_of_rank(device: str, comm: Comm, gpus: int) -> int:
    """The GPU that a rank takes of the `gpus` that it sees; a launcher may show each rank one of its own."""
    ranks = comm.topology.devices
    if torch.device(device).index is not None:
        raise SpecError(
            f"train.device={device!r} with {len(comm.ranks)} ranks, of which each has a GPU",
            "train.device=cuda",
            hint="set CUDA_VISIBLE_DEVICES to leave GPUs out",
        )
    if 1 < gpus < ranks:
        raise SpecError(
            f"train.device={device!r} with {ranks} ranks on a host with {gpus} GPUs",
            f"--nproc {gpus}, or hosts with {ranks} GPUs",
        )
    return 0 if gpus == 1 else comm.rank % ranks


def check_own_gpus(gpus_W: Sequence[str]) -> None:
    """Raise if two ranks have the same GPU; `gpus_W` has an identifier for each rank."""
    for rank, gpu in enumerate(gpus_W):
        first = gpus_W.index(gpu)
        if first < rank:
            raise SpecError(
                f"ranks {first} and {rank} have the same GPU ({gpu}), and NCCL needs one for each",
                "as many GPUs as ranks, a smaller --nproc, or train.device=cpu",
            )


def take_gpu(device: str, comm: Comm) -> None:
    """Make a GPU of its own the current one of this rank; a collective. Nothing happens for one rank, or on CPUs."""
    if torch.device(device).type != "cuda" or len(comm.ranks) == 1:
        return
    with raising_on_all_ranks(comm, during="choice of GPUs"):
        torch.cuda.set_device(gpu_of_rank(device, comm, torch.cuda.device_count()))
    check_own_gpus(all_gather_text(comm, str(torch.cuda.get_device_properties().uuid), "GPUs"))


def gpu_table_bytes(device: str, memory_bytes: int | None, comm: Comm) -> int | None:
    """Bytes that each of several ranks has for tables on its GPU; a collective. None: for one rank, or on CPUs.

    `memory_bytes`: the recipe's limit; None: none.
    """
    if torch.device(device).type != "cuda" or len(comm.ranks) == 1:
        return None
    free = usable_of_device(torch.device(device))
    mine = free if memory_bytes is None else min(free, memory_bytes)
    return min(int(one) for one in all_gather_uneven(comm, torch.tensor([mine]), "memory"))


def move_to_device(
    model: nn.Module, device: str, memory_bytes: int | None, samples: int, *, whole: bool = False
) -> nn.Module:
    """Move a model, with the rows of tables that do not fit into a GPU's memory left in host memory.

    `memory_bytes`: of the GPU, for tables; None: most of what is free. `samples`: of a batch. `whole`: the model looks
    all rows of a table up at once, so they have to fit.
    """
    where = torch.device(device)
    modules = [module for module in model.modules() if isinstance(module, Embeddings)]
    if where.type == "cuda":
        room = usable_of_device(where) if memory_bytes is None else memory_bytes
        total = sum(table_bytes(table) for module in modules for table in module.tables)
        if whole and total > room:
            raise TableMemoryError(
                f"the model reads all rows at once: they take {format_bytes(total)}, and the GPU has "
                f"{format_bytes(room)} for tables",
                "a larger `memory`, or the CPU",
            )
        chosen = choose_of_modules([module.tables for module in modules], room, samples)
        for module, cached in zip(modules, chosen, strict=True):
            if cached:
                module.cache_on(where, cached, samples)
    return model.to(where)


def move_sharded(model: nn.Module, plan: Plan, device: str, samples: int) -> nn.Module:
    """Move a rank's part of a model, with the rows of tiles in host memory left there: see `cache_tiles`."""
    if any(tile.tier == "host" for tile in plan.tiles):
        for module in model.modules():
            if isinstance(module, ShardedEmbeddings):
                module.cache_on(device, samples)
    return model.to(device)


class ServedTables(NamedTuple):
    """The tables of a module that serves, and how many rows a device caches of those that it has in part."""

    module: Embeddings
    newer: Mapping[str, int]  # rows behind those of a table
    cache_rows: Mapping[str, int]


def choose_served(model: nn.Module, given: DeviceRows, newer: Mapping[str, int]) -> list[ServedTables]:
    """What of a model is on a device that serves; `newer`: rows behind those of a table, by tensor."""
    found: list[ServedTables] = []
    for path, module in table_modules(model):
        assert isinstance(module, Embeddings)
        behind = {table.name: newer.get(f"model/{full_name(path, table)}", 0) for table in module.tables}
        found.append(ServedTables(module, behind, {}))
    tables = [
        [structs.replace(t, rows=t.rows + one.newer[t.name], optimizer=Sgd()) for t in one.module.tables]
        for one in found
    ]
    try:
        chosen = choose_of_modules(tables, given.memory_bytes, given.samples)
    except TableMemoryError as error:
        raise SpecError(
            f"--device-memory {format_bytes(given.memory_bytes)} is too small for the version's tables: "
            f"{error.problem}",
            "a larger size, or --device cpu",
        ) from None
    return [one._replace(cache_rows=cached) for one, cached in zip(found, chosen, strict=True)]


def memory_for_versions(device: torch.device) -> int:
    """What a version's rows may take of a GPU's memory, where two are there while requests move to the next one."""
    return int(USABLE * torch.cuda.get_device_properties(device).total_memory) // 2


def serve_from_device(model: nn.Module, given: DeviceRows, newer: Mapping[str, int]) -> None:
    """Let a model whose rows are in shared memory compute on a device, with slots of its own for rows."""
    where = torch.device(given.device)
    prepare_device(where)
    for module, behind, cache_rows in choose_served(model, given, newer):
        module.serve_on(where, cache_rows, given.samples, behind)
    model.to(where)


def describe_cached(model: nn.Module) -> str:
    """Which tables are in host memory, and what is cached of them; empty where none is."""
    modules = (module for module in model.modules() if isinstance(module, Embeddings))
    arenas = (module.arena for module in modules if module.arena.store is not None)
    return describe_pieces([piece for arena in arenas for piece in arena.pieces if piece.cache_rows is not None])
