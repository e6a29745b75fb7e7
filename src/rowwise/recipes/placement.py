"""How many rows of tables are cached where there is no memory for all of them, and what that takes; pure.

`choose_cached` fills a GPU in front of host memory, `fill_caches` host memory in front of a disk.

Known limit: hit rates assume uniform access, because the data is not read; skewed access hits more.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import ceil

import numpy as np
from msgspec import structs

from rowwise.base.errors import TableMemoryError
from rowwise.base.quantity import format_bytes, format_percent
from rowwise.parallel.plan import Plan, Tile
from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.tables.ops.layout import TablePiece
from rowwise.tables.spec import Table, state_bytes, state_width
from rowwise.tables.store.policy import WAYS, sets_of
from rowwise.tables.store.sizes import FLOAT_bytes, cache_bytes, disk_bytes

SLOT_bytes = 13  # of a GPU, beside a row and its state: the row's number, a stamp, whether it has changed
PARTS = 1 << 40  # of the largest factor of caches on CPUs
MAX_NAMES = 3


def choose_cached(
    tables: Sequence[Table], room_bytes: int, samples: int, whole_names: Collection[str] = ()
) -> dict[str, int]:
    """How many rows a GPU caches of each table that stays in host memory; empty where all tables fit into the room.

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
    return {t.name: _max_rows(t, least[t.name] + left * table_bytes(t) // total, samples) for t in lower}


def _max_rows(table: Table, room_bytes: int, samples: int) -> int:
    """The most rows of a table whose cache on a GPU takes so many bytes, as whole sets."""
    counts = range(1, sets_of(table.rows) + 1)
    return WAYS * bisect_right(counts, room_bytes, key=lambda sets: cached_bytes(table, sets * WAYS, samples))


def choose_of_modules(modules: Sequence[Sequence[Table]], room_bytes: int, samples: int) -> list[dict[str, int]]:
    """`choose_cached` for the tables of several modules, each with its part of the room: names are of a module."""
    size_M = [sum(map(table_bytes, tables)) for tables in modules]
    if sum(size_M) <= room_bytes:
        return [{} for _ in modules]
    parts = (room_bytes * size // sum(size_M) for size in size_M)
    return [choose_cached(tables, part, samples) for tables, part in zip(modules, parts, strict=True)]


def cache_tiles(plan: Plan, tables: Sequence[Table], room_bytes: int, samples: int) -> Plan:
    """The plan with tiles in host memory on ranks whose GPU has too little memory: see `choose_cached`.

    `samples`: of a batch of all ranks. Replicated and managed tables stay on the GPUs.
    """
    by_name, tiles = _by_name(tables), list[Tile]()
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


def fill_caches(plan: Plan, tables: Sequence[Table], room_bytes: int) -> Plan:
    """The plan with its caches on CPUs enlarged by one factor on each rank, until tables take `room_bytes` there."""
    tiles = (tile for rank in range(plan.world) for tile in _fill_rank(plan.tiles_on(rank), tables, room_bytes))
    return structs.replace(plan, tiles=tuple(sorted(tiles)))


def _fill_rank(tiles: Sequence[Tile], tables: Sequence[Table], room_bytes: int) -> Sequence[Tile]:
    most = max((tile.rows[1] for tile in tiles), default=1)

    def enlarge(part: int) -> list[Tile]:
        factor = 1 + (most - 1) * part / PARTS
        return [_enlarge_cache(tile, factor) if tile.tier == "disk" else tile for tile in tiles]

    part = bisect_right(range(1, PARTS), room_bytes, key=lambda part: tiles_bytes(enlarge(part), tables))
    return enlarge(part) if part else tiles


def _enlarge_cache(tile: Tile, factor: float) -> Tile:
    cache_rows = min(int(factor * max(tile.cache_rows, WAYS)), tile.rows[1] - tile.rows[0])
    return structs.replace(tile, cache_rows=cache_rows)


def piece_of(table: Table, tile: Tile) -> Table:
    """The rows and columns of a tile as a table."""
    return structs.replace(table, rows=tile.rows[1] - tile.rows[0], dim=tile.cols[1] - tile.cols[0], managed=None)


def table_bytes(table: Table) -> int:
    return table.rows * (table.row_bytes + state_bytes(table))


def cached_piece(table: Table, cache_rows: int, samples: int) -> TablePiece:
    """A table in host memory with its slots on a GPU: of its cache, and of the rows that a batch has besides."""
    return TablePiece(table, table).cached(cache_rows, samples)


def cached_bytes(table: Table, cache_rows: int, samples: int) -> int:
    return slots_bytes(cached_piece(table, cache_rows, samples))


def slots_bytes(piece: TablePiece) -> int:
    """Memory of a GPU for the slots of a cached piece."""
    return piece.slots * (piece.table.row_bytes + FLOAT_bytes * state_width(piece.table) + SLOT_bytes)


def tiles_bytes(tiles: Iterable[Tile], tables: Sequence[Table], samples: int | None = None) -> int:
    """Memory that steps need for tiles: of all rows with their state, or of the caches of rows that are elsewhere.

    `samples`: of a batch, where tiles of the tier `host` are behind a GPU; None: steps use host memory.
    """
    by_name = _by_name(tables)

    def size_of(tile: Tile) -> int:
        piece = piece_of(by_name[tile.table], tile)
        if tile.tier == "disk":
            return cache_bytes(piece, tile.cache_rows)
        if tile.tier == "host" and samples is not None:
            return cached_bytes(piece, tile.cache_rows, samples)
        return table_bytes(piece)

    return sum(map(size_of, tiles))


def memory_of_plan(plan: Plan, tables: Sequence[Table]) -> tuple[int, int]:
    """Bytes of memory, over all ranks: of rows and optimizer state that stay there, and of the caches of other rows."""
    cached = tiles_bytes((tile for tile in plan.tiles if tile.tier == "disk"), tables)
    return tiles_bytes(plan.tiles, tables) - cached, cached


def rank_bytes(plan: Plan, tables: Sequence[Table]) -> list[int]:
    """Bytes of table rows on each rank."""
    by_name, bytes_W = _by_name(tables), [0] * plan.world
    for tile in plan.tiles:
        table = by_name[tile.table]
        rows, columns = tile.rows[1] - tile.rows[0], tile.cols[1] - tile.cols[0]
        bytes_W[tile.rank] += rows * table.row_bytes * columns // table.dim
    return bytes_W


def has_disk_tables(plan: Plan) -> bool:
    return any(tile.tier == "disk" for tile in plan.tiles)


def uniform_workloads(tables: Sequence[Table], ids: float = 1.0) -> tuple[Workload, ...]:
    """The tables with uniform access, by so many ids for each feature of a sample."""
    return tuple(Workload(table=t, access=Access(pooling=ids * len(t.feature_names))) for t in tables)


def describe_disk_tables(plan: Plan, tables: Sequence[Table]) -> str:
    """Which tables are on disk, how many of their rows are cached, and the hit rate; empty without such tables."""
    lower = [tile for tile in plan.tiles if tile.tier == "disk"]
    on_disk = [table for table in tables if any(tile.table == table.name for tile in lower)]
    if not on_disk:
        return ""
    by_name = _by_name(on_disk)
    share_T = np.array([_cached_share([tile for tile in lower if tile.table == t.name]) for t in on_disk])
    rows_T = np.array([float(t.rows) for t in on_disk])
    curves = Curves.of(uniform_workloads(on_disk), 1)
    hit_T = curves.hit_rate(np.arange(len(on_disk)), share_T * rows_T)
    hit = float(hit_T @ curves.pooling_T / curves.pooling_T.sum())
    stored = format_bytes(sum(disk_bytes(piece_of(by_name[tile.table], tile)) for tile in lower))
    return (
        f"{_first_names(by_name)} on disk, in up to {stored}: {ceil(share_T @ rows_T):,} of {int(rows_T.sum()):,} rows"
        f" cached in {format_bytes(tiles_bytes(lower, tables))} of memory; {hit:.0%} of lookups hit if access is"
        " uniform, more if it is skewed"
    )


def _cached_share(tiles: Sequence[Tile]) -> float:
    """The share of a table's rows that its caches hold; column pieces cache rows of their own."""
    return sum(tile.cache_rows for tile in tiles) / sum(tile.rows[1] - tile.rows[0] for tile in tiles)


def describe_cached_tiles(plan: Plan, tables: Sequence[Table], samples: int) -> str:
    """Which tables are in host memory, and what the GPUs of all ranks cache of them; empty where none is."""
    by_name = _by_name(tables)
    lower = [tile for tile in plan.tiles if tile.tier == "host"]
    return describe_pieces([cached_piece(piece_of(by_name[t.table], t), t.cache_rows, samples) for t in lower])


def describe_pieces(pieces: Sequence[TablePiece]) -> str:
    """The same for pieces with a cache."""
    if not pieces:
        return ""
    tables, cached_rows = [piece.table for piece in pieces], sum(piece.cache_rows or 0 for piece in pieces)
    there, share = sum(map(table_bytes, tables)), format_percent(cached_rows / sum(table.rows for table in tables))
    here = format_bytes(sum(map(slots_bytes, pieces)))
    names = _first_names(_by_name(tables))
    return f"{names} in {format_bytes(there)} of host memory; {share} of their rows cached in {here}"


def _first_names(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return ", ".join(known[:MAX_NAMES]) + more


def _by_name(tables: Sequence[Table]) -> dict[str, Table]:
    return {table.name: table for table in tables}
