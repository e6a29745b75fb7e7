"""Sizes of row caches, and their memory, for tables that exceed the memory budget; pure.

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

SLOT_bytes = 13  # GPU bytes per slot besides the row and its state: row number, stamp, dirty flag
PARTS = 1 << 40  # steps of the search for the factor of caches on CPUs
MAX_NAMES = 3


def choose_cached(
    tables: Sequence[Table], budget_bytes: int, samples: int, resident_names: Collection[str] = ()
) -> dict[str, int]:
    """Cache rows on a GPU for each table that stays in host memory; empty if all tables fit into the budget.

    The smallest tables stay on the GPU: a sample reads as many rows of a small table as of a large one, so each of its
    bytes is read more often. The others divide the rest in proportion to their sizes; with a larger budget, one more
    table may stay on the GPU and leave smaller caches. Managed tables and `resident_names` always stay on the GPU.
    """
    if sum(map(table_bytes, tables)) <= budget_bytes:
        return {}
    min_bytes = {table.name: cached_bytes(table, 0, samples) for table in tables}
    free = (t for t in tables if t.managed is None and t.name not in resident_names)
    cached = sorted((t for t in free if min_bytes[t.name] < table_bytes(t)), key=table_bytes)
    names = {table.name for table in cached}
    resident = [table for table in tables if table.name not in names]  # a cache would not be smaller
    spare_bytes = budget_bytes - sum(map(table_bytes, resident)) - sum(min_bytes[name] for name in names)
    if spare_bytes < 0:
        needed = format_bytes(budget_bytes - spare_bytes)
        raise TableMemoryError(
            f"the tables need at least {needed} of the GPU's memory with rows in host memory, but the "
            f"budget is {format_bytes(budget_bytes)}",
            "a larger `memory`, fewer tables, or the CPU",
        )
    # A table stays on the GPU if its rows fit into the spare bytes and the bytes of its own smallest cache.
    while cached and table_bytes(cached[0]) <= spare_bytes + min_bytes[cached[0].name]:
        spare_bytes -= table_bytes(cached[0]) - min_bytes[cached.pop(0).name]
    total = sum(map(table_bytes, cached))
    return {t.name: _max_rows(t, min_bytes[t.name] + spare_bytes * table_bytes(t) // total, samples) for t in cached}


def _max_rows(table: Table, budget_bytes: int, samples: int) -> int:
    """Rows of the largest cache of a table that fits into the budget of a GPU, in whole sets."""
    counts = range(1, sets_of(table.rows) + 1)
    return WAYS * bisect_right(counts, budget_bytes, key=lambda sets: cached_bytes(table, sets * WAYS, samples))


def choose_of_modules(modules: Sequence[Sequence[Table]], budget_bytes: int, samples: int) -> list[dict[str, int]]:
    """`choose_cached` for the tables of several modules, with the budget divided by size; names are per module."""
    size_M = [sum(map(table_bytes, tables)) for tables in modules]
    if sum(size_M) <= budget_bytes:
        return [{} for _ in modules]
    parts = (budget_bytes * size // sum(size_M) for size in size_M)
    return [choose_cached(tables, part, samples) for tables, part in zip(modules, parts, strict=True)]


def cache_tiles(plan: Plan, tables: Sequence[Table], budget_bytes: int, samples: int) -> Plan:
    """Move tiles to host memory on ranks whose GPU is too small: see `choose_cached`.

    `samples`: global batch size. Replicated and managed tables stay on the GPUs.
    """
    by_name, tiles = _by_name(tables), list[Tile]()
    copies = Counter((tile.table, tile.rows, tile.cols) for tile in plan.tiles)
    for rank in range(plan.world):
        tiles_of_rank = {str(number): tile for number, tile in enumerate(plan.tiles_on(rank))}
        pieces = [structs.replace(piece_of(by_name[t.table], t), name=name) for name, t in tiles_of_rank.items()]
        resident = [
            name
            for name, t in tiles_of_rank.items()
            if copies[t.table, t.rows, t.cols] > 1 or by_name[t.table].managed is not None
        ]
        cached = choose_cached(pieces, budget_bytes, samples, resident)
        tiles += [
            structs.replace(tile, tier="host", cache_rows=min(cached[name], tile.rows[1] - tile.rows[0]))
            if name in cached
            else tile
            for name, tile in tiles_of_rank.items()
        ]
    # A forecast assumes that all rows are on the GPUs.
    forecast = plan.forecast if all(tile.tier == "device" for tile in tiles) else None
    return structs.replace(plan, tiles=tuple(sorted(tiles)), forecast=forecast)


def fill_caches(plan: Plan, tables: Sequence[Table], budget_bytes: int) -> Plan:
    """Enlarge the caches on CPUs by one factor per rank, until the tables of the rank take `budget_bytes`."""
    tiles = (tile for rank in range(plan.world) for tile in _fill_rank(plan.tiles_on(rank), tables, budget_bytes))
    return structs.replace(plan, tiles=tuple(sorted(tiles)))


def _fill_rank(tiles: Sequence[Tile], tables: Sequence[Table], budget_bytes: int) -> Sequence[Tile]:
    max_rows = max((tile.rows[1] for tile in tiles), default=1)

    def enlarge(part: int) -> list[Tile]:
        factor = 1 + (max_rows - 1) * part / PARTS
        return [_enlarge_cache(tile, factor) if tile.tier == "disk" else tile for tile in tiles]

    # The memory grows with the factor: a binary search finds the largest factor within the budget.
    part = bisect_right(range(1, PARTS), budget_bytes, key=lambda part: tiles_bytes(enlarge(part), tables))
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
    """A table in host memory with its slots on a GPU: cache slots, and overflow slots of a batch."""
    return TablePiece(table, table).cached(cache_rows, samples)


def cached_bytes(table: Table, cache_rows: int, samples: int) -> int:
    return slots_bytes(cached_piece(table, cache_rows, samples))


def slots_bytes(piece: TablePiece) -> int:
    """Memory of a GPU for the slots of a cached piece."""
    return piece.slots * (piece.table.row_bytes + FLOAT_bytes * state_width(piece.table) + SLOT_bytes)


def tiles_bytes(tiles: Iterable[Tile], tables: Sequence[Table], samples: int | None = None) -> int:
    """Memory that steps need for tiles: all rows with their state, or the caches of rows on a lower tier.

    `samples`: batch size, if a GPU caches the tiles of tier `host`; None: steps run in host memory.
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
    """Memory over all ranks, in bytes: resident rows with optimizer state, and caches of rows on disk."""
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
    """Workloads of uniform access, with `ids` ids per feature and sample."""
    return tuple(Workload(table=t, access=Access(pooling=ids * len(t.feature_names))) for t in tables)


def describe_disk_tables(plan: Plan, tables: Sequence[Table]) -> str:
    """A line on the tables on disk, their cached rows and hit rate; empty without such tables."""
    disk_tiles = [tile for tile in plan.tiles if tile.tier == "disk"]
    on_disk = [table for table in tables if any(tile.table == table.name for tile in disk_tiles)]
    if not on_disk:
        return ""
    by_name = _by_name(on_disk)
    share_T = np.array([_cached_share([tile for tile in disk_tiles if tile.table == t.name]) for t in on_disk])
    rows_T = np.array([float(t.rows) for t in on_disk])
    curves = Curves.of(uniform_workloads(on_disk), 1)
    hit_T = curves.hit_rate(np.arange(len(on_disk)), share_T * rows_T)
    hit = float(hit_T @ curves.pooling_T / curves.pooling_T.sum())
    stored = format_bytes(sum(disk_bytes(piece_of(by_name[tile.table], tile)) for tile in disk_tiles))
    pinned_rows = sum(tile.pinned_rows for tile in disk_tiles)
    pinned = f", {pinned_rows:,} of them pinned" if pinned_rows else ""
    memory = f"{format_bytes(tiles_bytes(disk_tiles, tables))} of memory{pinned}"
    return (
        f"{_first_names(by_name)} on disk, in up to {stored}: {ceil(share_T @ rows_T):,} of {int(rows_T.sum()):,} rows"
        f" cached in {memory}; {hit:.0%} of lookups hit if access is uniform, more if it is skewed"
    )


def _cached_share(tiles: Sequence[Tile]) -> float:
    """The share of a table's rows that its caches hold; column shards have separate caches."""
    return sum(tile.cache_rows for tile in tiles) / sum(tile.rows[1] - tile.rows[0] for tile in tiles)


def describe_cached_tiles(plan: Plan, tables: Sequence[Table], samples: int) -> str:
    """A line on the tables in host memory and their caches on the GPUs of all ranks; empty without such tables."""
    by_name = _by_name(tables)
    host_tiles = [tile for tile in plan.tiles if tile.tier == "host"]
    return describe_pieces([cached_piece(piece_of(by_name[t.table], t), t.cache_rows, samples) for t in host_tiles])


def describe_pieces(pieces: Sequence[TablePiece]) -> str:
    """A line on pieces in host memory and their caches; empty without pieces."""
    if not pieces:
        return ""
    tables, cached_rows = [piece.table for piece in pieces], sum(piece.cache_rows or 0 for piece in pieces)
    host, gpu = format_bytes(sum(map(table_bytes, tables))), format_bytes(sum(map(slots_bytes, pieces)))
    share = format_percent(cached_rows / sum(table.rows for table in tables))
    return f"{_first_names(_by_name(tables))} in {host} of host memory; {share} of their rows cached in {gpu}"


def _first_names(names: Iterable[str]) -> str:
    all_names = list(names)
    more = f" and {len(all_names) - MAX_NAMES} more" if len(all_names) > MAX_NAMES else ""
    return ", ".join(all_names[:MAX_NAMES]) + more


def _by_name(tables: Sequence[Table]) -> dict[str, Table]:
    return {table.name: table for table in tables}
