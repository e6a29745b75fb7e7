"""Tables on disk: bytes of their tiles, caches that fill the memory that is left, and the line that a run prints.

Known limit: hit rates assume uniform access, because the data is not read; skewed access hits more.
"""

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
from msgspec import structs

from rowwise.perf.access import Access, Curves, Workload
from rowwise.plan import Plan, Tile
from rowwise.quantity import format_bytes
from rowwise.spec import Table, state_width
from rowwise.store.policy import WAYS
from rowwise.store.sizes import FLOAT_bytes, cache_bytes, disk_bytes

HALVINGS = 40
MOST_NAMES = 3


def uniform_workloads(tables: Sequence[Table], ids: float = 1.0) -> tuple[Workload, ...]:
    """The tables with uniform access, by so many ids for each feature of a sample."""
    return tuple(Workload(table=t, access=Access(pooling=ids * len(t.feature_names))) for t in tables)


def piece_of(table: Table, tile: Tile) -> Table:
    """The rows and columns of a tile as a table."""
    return structs.replace(table, rows=tile.rows[1] - tile.rows[0], dim=tile.cols[1] - tile.cols[0], managed=None)


def cache_bytes_of_tile(table: Table, tile: Tile) -> int:
    return cache_bytes(piece_of(table, tile), tile.cache_rows)


def disk_bytes_of_tile(table: Table, tile: Tile) -> int:
    return disk_bytes(piece_of(table, tile)) if tile.tier == "disk" else 0


def has_disk_tables(plan: Plan) -> bool:
    return any(tile.tier == "disk" for tile in plan.tiles)


def memory_of_plan(plan: Plan, tables: Sequence[Table]) -> tuple[int, int]:
    """Bytes of memory, over all ranks: of rows and optimizer state that stay there, and of the caches of other rows."""
    by_name = {table.name: table for table in tables}
    sizes = [(tile.tier == "disk", _memory_of_tile(by_name[tile.table], tile)) for tile in plan.tiles]
    cached = sum(size for on_disk, size in sizes if on_disk)
    return sum(size for _, size in sizes) - cached, cached


def fill_caches(plan: Plan, tables: Sequence[Table], room_bytes: int) -> Plan:
    """The plan with its caches enlarged by one factor on each rank, until tables take `room_bytes` there."""
    by_name = {table.name: table for table in tables}
    tiles = tuple(
        tile for rank in range(plan.world) for tile in _fill_rank(plan.tiles_on(rank), by_name, room_bytes)
    )  # fmt: skip
    return structs.replace(plan, tiles=tuple(sorted(tiles)))


def _fill_rank(tiles: Sequence[Tile], tables: Mapping[str, Table], room_bytes: int) -> list[Tile]:
    def enlarge(factor: float) -> list[Tile]:
        return [_enlarge_cache(tile, factor) if tile.tier == "disk" else tile for tile in tiles]

    low, high = 1.0, float(max((tile.rows[1] for tile in tiles), default=1))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        needed = sum(_memory_of_tile(tables[tile.table], tile) for tile in enlarge(middle))
        low, high = (middle, high) if needed <= room_bytes else (low, middle)
    return enlarge(low) if low > 1 else list(tiles)


def _enlarge_cache(tile: Tile, factor: float) -> Tile:
    return structs.replace(
        tile, cache_rows=min(int(factor * max(tile.cache_rows, WAYS)), tile.rows[1] - tile.rows[0])
    )  # fmt: skip


def _memory_of_tile(table: Table, tile: Tile) -> int:
    if tile.tier == "disk":
        return cache_bytes_of_tile(table, tile)
    piece = piece_of(table, tile)
    return piece.rows * (piece.row_bytes + FLOAT_bytes * state_width(piece))


def describe_disk_tables(plan: Plan, tables: Sequence[Table]) -> str:
    """Which tables are on disk, how many of their rows are cached, and the hit rate; empty without such tables."""
    lower = [tile for tile in plan.tiles if tile.tier == "disk"]
    on_disk = [table for table in tables if any(tile.table == table.name for tile in lower)]
    if not on_disk:
        return ""
    by_name = {table.name: table for table in on_disk}
    share_T = np.array([_cached_share([tile for tile in lower if tile.table == t.name]) for t in on_disk])
    rows_T = np.array([float(t.rows) for t in on_disk])
    curves = Curves.of(uniform_workloads(on_disk), 1)
    hit_T = curves.hit_rate(np.arange(len(on_disk)), share_T * rows_T)
    hit = float(hit_T @ curves.pooling_T / curves.pooling_T.sum())
    names = ", ".join(table.name for table in on_disk[:MOST_NAMES])
    more = f" and {len(on_disk) - MOST_NAMES} more" if len(on_disk) > MOST_NAMES else ""
    stored = format_bytes(sum(disk_bytes_of_tile(by_name[tile.table], tile) for tile in lower))
    cached = format_bytes(sum(cache_bytes_of_tile(by_name[tile.table], tile) for tile in lower))
    return (
        f"{names}{more} on disk, in up to {stored}: {ceil(share_T @ rows_T):,} of {int(rows_T.sum()):,} rows cached"
        f" in {cached} of memory; {hit:.0%} of lookups hit if access is uniform, more if it is skewed"
    )


def _cached_share(tiles: Sequence[Tile]) -> float:
    """The share of a table's rows that its caches hold; column pieces cache rows of their own."""
    return sum(tile.cache_rows for tile in tiles) / sum(tile.rows[1] - tile.rows[0] for tile in tiles)
