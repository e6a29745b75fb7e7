"""Assigns GPUs to ranks, and moves models to them, with caches of tables that `placement` leaves in host memory."""

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

USABLE = 0.8  # share of a GPU's free memory; batches, vectors and the dense model need the rest


def usable_of_device(device: torch.device) -> int:
    return int(USABLE * torch.cuda.mem_get_info(device)[0])


def gpu_of_rank(device: str, comm: Comm, gpus: int) -> int:
    """Index of a rank's GPU among the `gpus` visible to it; a launcher may expose one GPU per rank."""
    ranks = comm.topology.devices
    if torch.device(device).index is not None:
        raise SpecError(
            f"train.device={device!r} with {len(comm.ranks)} ranks, each of which has a GPU",
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
    """Raise if two ranks have the same GPU; `gpus_W`: UUID by rank."""
    for rank, gpu in enumerate(gpus_W):
        first = gpus_W.index(gpu)
        if first < rank:
            raise SpecError(
                f"ranks {first} and {rank} have the same GPU ({gpu}), but NCCL needs one GPU per rank",
                "as many GPUs as ranks, a smaller --nproc, or train.device=cpu",
            )


def take_gpu(device: str, comm: Comm) -> None:
    """Set this rank's own GPU as the current device; a collective. No-op for one rank, or on CPUs."""
    if torch.device(device).type != "cuda" or len(comm.ranks) == 1:
        return
    with raising_on_all_ranks(comm, during="choice of GPUs"):
        torch.cuda.set_device(gpu_of_rank(device, comm, torch.cuda.device_count()))
    check_own_gpus(all_gather_text(comm, str(torch.cuda.get_device_properties().uuid), "GPUs"))


def gpu_table_bytes(device: str, memory_bytes: int | None, comm: Comm) -> int | None:
    """Budget of each rank for tables on its GPU, the minimum over ranks; a collective. None for one rank, or on CPUs.

    `memory_bytes`: the recipe's budget; None: unlimited.
    """
    if torch.device(device).type != "cuda" or len(comm.ranks) == 1:
        return None
    free = usable_of_device(torch.device(device))
    budget = free if memory_bytes is None else min(free, memory_bytes)
    return min(map(int, all_gather_uneven(comm, torch.tensor([budget]), "memory")))


def move_to_device(
    model: nn.Module, device: str, memory_bytes: int | None, samples: int, *, whole: bool = False
) -> nn.Module:
    """Move a model to a device; tables that do not fit into a GPU's memory stay in host memory behind caches.

    `memory_bytes`: budget for tables on the GPU; None: most of its free memory. `samples`: batch size. `whole`: the
    model looks up all rows of a table at once, so they must fit.
    """
    target = torch.device(device)
    modules = [module for module in model.modules() if isinstance(module, Embeddings)]
    if target.type == "cuda":
        budget = usable_of_device(target) if memory_bytes is None else memory_bytes
        total = sum(table_bytes(table) for module in modules for table in module.tables)
        if whole and total > budget:
            raise TableMemoryError(
                f"the model reads all rows at once: they take {format_bytes(total)}, but the GPU has "
                f"{format_bytes(budget)} for tables",
                "a larger `memory`, or the CPU",
            )
        chosen = choose_of_modules([module.tables for module in modules], budget, samples)
        for module, cached in zip(modules, chosen, strict=True):
            if cached:
                module.cache_on(target, cached, samples)
    return model.to(target)


def move_sharded(model: nn.Module, plan: Plan, device: str, samples: int) -> nn.Module:
    """Move a rank's part of a model; tiles in host memory stay there: see `cache_tiles`."""
    if any(tile.tier == "host" for tile in plan.tiles):
        for module in model.modules():
            if isinstance(module, ShardedEmbeddings):
                module.cache_on(device, samples)
    return model.to(device)


class ServedTables(NamedTuple):
    """The tables of a served module, and the cache rows on a device of those that stay in host memory."""

    module: Embeddings
    newer: Mapping[str, int]  # rows of later versions, by table
    cache_rows: Mapping[str, int]


def choose_served(model: nn.Module, device_rows: DeviceRows, newer: Mapping[str, int]) -> list[ServedTables]:
    """Choose the tables and cache rows on a device that serves; `newer`: rows of later versions, by tensor."""
    served: list[ServedTables] = []
    for path, module in table_modules(model):
        assert isinstance(module, Embeddings)
        newer_rows = {table.name: newer.get(f"model/{full_name(path, table)}", 0) for table in module.tables}
        served.append(ServedTables(module, newer_rows, {}))
    tables = [
        [structs.replace(t, rows=t.rows + entry.newer[t.name], optimizer=Sgd()) for t in entry.module.tables]
        for entry in served
    ]
    try:
        chosen = choose_of_modules(tables, device_rows.memory_bytes, device_rows.samples)
    except TableMemoryError as error:
        raise SpecError(
            f"--device-memory {format_bytes(device_rows.memory_bytes)} is too small for the version's tables: "
            f"{error.problem}",
            "a larger size, or --device cpu",
        ) from None
    return [entry._replace(cache_rows=cached) for entry, cached in zip(served, chosen, strict=True)]


def memory_for_versions(device: torch.device) -> int:
    """Budget for the rows of a version on a GPU, which holds two versions during a switch."""
    return int(USABLE * torch.cuda.get_device_properties(device).total_memory) // 2


def serve_from_device(model: nn.Module, device_rows: DeviceRows, newer: Mapping[str, int]) -> None:
    """Move a model over rows in shared memory to a device, with its own slots for rows."""
    target = torch.device(device_rows.device)
    prepare_device(target)
    for module, newer_rows, cache_rows in choose_served(model, device_rows, newer):
        module.serve_on(target, cache_rows, device_rows.samples, newer_rows)
    model.to(target)


def describe_cached(model: nn.Module) -> str:
    """A line on the tables in host memory and their caches; empty without such tables."""
    modules = (module for module in model.modules() if isinstance(module, Embeddings))
    arenas = (module.arena for module in modules if module.arena.store is not None)
    return describe_pieces([piece for arena in arenas for piece in arena.pieces if piece.cache_rows is not None])
