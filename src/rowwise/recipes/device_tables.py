"""Tables larger than a GPU's memory: which of them stay in host memory, and how many of their rows the GPU caches."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from msgspec import structs
from torch import nn

from rowwise.checkpoint.tables import full_name, table_modules
from rowwise.comm.interface import Comm
from rowwise.comm.status import all_gather_text, all_gather_uneven, raising_on_all_ranks
from rowwise.embedding import Embeddings
from rowwise.errors import SpecError, TableMemoryError
from rowwise.ops.layout import TablePiece
from rowwise.plan import Plan, Tile
from rowwise.quantity import format_bytes, format_percent
from rowwise.recipes.disk_tables import piece_of
from rowwise.row_optimizers import Sgd
from rowwise.serve.row_tiers import DeviceRows
from rowwise.shard.embeddings import ShardedEmbeddings
from rowwise.spec import Table, state_bytes, state_width
from rowwise.store.policy import WAYS
from rowwise.store.sizes import FLOAT_bytes
from rowwise.train.on_device import prepare_device

USABLE = 0.8  # of a GPU's free memory: batches, vectors and the dense model need the rest
SLOT_bytes = 13  # beside a row and its state: the row's number, a stamp, whether it has changed
MOST_NAMES = 3


def table_bytes(table: Table) -> int:
    return table.rows * (table.row_bytes + state_bytes(table))


def cached_bytes(table: Table, cache_rows: int, samples: int) -> int:
    """Memory of a GPU for so many cached rows of a table, and those that a batch has besides."""
    return slots_bytes(TablePiece(table, table).cached(cache_rows, samples))


def slots_bytes(piece: TablePiece) -> int:
    """Memory of a GPU for the slots of a cached piece."""
    return piece.slots * (piece.table.row_bytes + FLOAT_bytes * state_width(piece.table) + SLOT_bytes)


def choose_cached(
    tables: Sequence[Table], room_bytes: int, samples: int, whole_names: Collection[str] = ()
) -> dict[str, int]:
    """How many rows to cache of each table that stays in host memory; empty where all tables fit into the room.

    The smallest tables are on the GPU whole: a sample reads as many rows of them as of large ones, so a byte of them is
    read more often. The others share what is left, in proportion to their sizes: where more room lets one more table be
    whole, they may have fewer rows. Managed tables are always whole, and those of `whole_names`.
    """
    if sum(map(table_bytes, tables)) <= room_bytes:
        return {}
    least = {table.name: cached_bytes(table, 0, samples) for table in tables}
    free = (t for t in tables if t.managed is None and t.name not in whole_names)
    lower = sorted((t for t in free if least[t.name] < table_bytes(t)), key=table_bytes)
    names = {table.name for table in lower}
    whole = [table for table in tables if table.name not in names]  # a cache of them would be no smaller
    left = room_bytes - sum(map(table_bytes, whole)) - sum(least[name] for name in names)
    if left < 0:
        need = format_bytes(room_bytes - left)
        raise TableMemoryError(
            f"the tables need at least {need} of the GPU's memory with rows in host memory, and have "
            f"{format_bytes(room_bytes)}",
            "a larger `memory`, fewer tables, or the CPU",
        )
    while lower and table_bytes(lower[0]) <= left + least[lower[0].name]:
        left -= table_bytes(lower[0]) - least[lower.pop(0).name]
    total = sum(map(table_bytes, lower))
    return {
        table.name: _fill(table, least[table.name] + left * table_bytes(table) // total, samples) for table in lower
    }


def cache_tiles(plan: Plan, tables: Sequence[Table], room_bytes: int, samples: int) -> Plan:
    """The plan with tiles in host memory on ranks whose GPU has too little memory: see `choose_cached`.

    `samples`: of a batch of all ranks. Replicated and managed tables stay on the GPUs.
    """
    by_name, tiles = {table.name: table for table in tables}, list[Tile]()
    copies = Counter((tile.table, tile.rows, tile.cols) for tile in plan.tiles)
    for rank in range(plan.world):
        own = {str(number): tile for number, tile in enumerate(plan.tiles_on(rank))}
        pieces = [structs.replace(piece_of(by_name[t.table], t), name=name) for name, t in own.items()]
        whole = [
            name
            for name, t in own.items()
            if copies[t.table, t.rows, t.cols] > 1 or by_name[t.table].managed is not None
        ]
        cached = choose_cached(pieces, room_bytes, samples, whole)
        tiles += [
            structs.replace(tile, tier="host", cache_rows=min(cached[name], tile.rows[1] - tile.rows[0]))
            if name in cached
            else tile
            for name, tile in own.items()
        ]
    # A forecast is for rows that are all on the GPUs.
    forecast = plan.forecast if all(tile.tier == "device" for tile in tiles) else None
    return structs.replace(plan, tiles=tuple(sorted(tiles)), forecast=forecast)


def gpu_bytes_of_plan(plan: Plan, tables: Sequence[Table], rank: int, samples: int) -> int:
    """Memory that the tiles of a rank take on its GPU."""
    by_name = {table.name: table for table in tables}
    pieces = [(tile, piece_of(by_name[tile.table], tile)) for tile in plan.tiles_on(rank)]
    return sum(
        cached_bytes(piece, tile.cache_rows, samples) if tile.tier == "host" else table_bytes(piece)
        for tile, piece in pieces
    )


def _fill(table: Table, room_bytes: int, samples: int) -> int:
    """The most rows of a table whose cache takes so many bytes, as whole sets."""
    low, high = 0, -(-table.rows // WAYS)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cached_bytes(table, middle * WAYS, samples) <= room_bytes else (low, middle - 1)
    return low * WAYS


def free_of_device(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


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


def room_of_gpus(device: str, memory_bytes: int | None, comm: Comm) -> int | None:
    """Bytes that each of several ranks has for tables on its GPU; a collective. None: for one rank, or on CPUs.

    `memory_bytes`: the recipe's limit; None: none.
    """
    if torch.device(device).type != "cuda" or len(comm.ranks) == 1:
        return None
    free = int(USABLE * free_of_device(torch.device(device)))
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
        room = int(USABLE * free_of_device(where)) if memory_bytes is None else memory_bytes
        total = sum(table_bytes(table) for module in modules for table in module.tables)
        if whole and total > room:
            raise TableMemoryError(
                f"the model reads all rows at once: they take {format_bytes(total)}, and the GPU has "
                f"{format_bytes(room)} for tables",
                "a larger `memory`, or the CPU",
            )
        for module in modules if total > room else ():  # each has its part of the room: names are of a module
            share = room * sum(map(table_bytes, module.tables)) // total
            if cached := choose_cached(module.tables, share, samples):
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
    tables_of = [
        [structs.replace(t, rows=t.rows + one.newer[t.name], optimizer=Sgd()) for t in one.module.tables]
        for one in found
    ]
    bytes_of = [sum(map(table_bytes, tables)) for tables in tables_of]
    if sum(bytes_of) <= given.memory_bytes:
        return found
    try:
        return [
            one._replace(cache_rows=choose_cached(tables, given.memory_bytes * size // sum(bytes_of), given.samples))
            for one, tables, size in zip(found, tables_of, bytes_of, strict=True)
        ]
    except TableMemoryError as error:
        raise SpecError(
            f"--device-memory {format_bytes(given.memory_bytes)} is too small for the version's tables: "
            f"{error.problem}",
            "a larger size, or --device cpu",
        ) from None


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
    pieces = [
        piece
        for module in model.modules()
        if isinstance(module, Embeddings) and module.arena.store is not None
        for piece in module.arena.pieces
        if piece.cache_rows is not None
    ]
    rows = sum(piece.cache_rows or 0 for piece in pieces)
    return _describe([piece.table for piece in pieces], rows, sum(map(slots_bytes, pieces)))


def describe_cached_tiles(plan: Plan, tables: Sequence[Table], samples: int) -> str:
    """The same for the tiles of all ranks."""
    by_name = {table.name: table for table in tables}
    lower = [tile for tile in plan.tiles if tile.tier == "host"]
    parts = [piece_of(by_name[tile.table], tile) for tile in lower]
    here = sum(cached_bytes(part, tile.cache_rows, samples) for part, tile in zip(parts, lower, strict=True))
    return _describe(parts, sum(tile.cache_rows for tile in lower), here)


def _describe(tables: Sequence[Table], cached_rows: int, cached_bytes: int) -> str:
    if not tables:
        return ""
    known = list(dict.fromkeys(table.name for table in tables))
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    there, share = sum(map(table_bytes, tables)), format_percent(cached_rows / sum(table.rows for table in tables))
    names, here = ", ".join(known[:MOST_NAMES]), format_bytes(cached_bytes)
    return f"{names}{more} in {format_bytes(there)} of host memory; {share} of their rows cached in {here}"
