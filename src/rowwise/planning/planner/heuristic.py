"""A plan by a heuristic, in one pass: small tables replicated, large ones cut by rows, spread by bytes and reads.

It needs tables and a topology only: no model of the machine, no search. Ignored: costs of links, skewed access,
columns, and whether a rank's memory suffices.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import Plan, Tile
from rowwise.planning.planner.layouts import replicated, row_wise
from rowwise.tables.spec import Pooling, Table, Topology, check_tables, stored_bytes


class UnplacedTile(NamedTuple):
    """A tile without a rank, and its shares of all bytes stored and of all bytes that lookups read."""

    stored_share: float
    read_share: float
    tile: Tile


def simple_plan(
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch: int = 2048,
    ids: Mapping[str, float] | None = None,
    replicate_bytes: int = 1 << 20,
) -> Plan:
    """A plan that depends only on the arguments, with tables in any order.

    `batch` is samples of one rank in a step. `ids` is the mean number of ids per sample by table, over all of its
    features; by default one per feature.

    1. A table is *replicated* if its rows and optimizer state take at most `replicate_bytes` and that moves fewer bytes
       than an exchange. A rank of W sends (W-1)/W of: for an exchange, 8 bytes for each id, and a vector of floats out
       and its gradient back for each bag (each id of a sequence), times `batch`; for a replica, an all-reduce of a
       gradient as large as the table in floats, which goes around twice. So it is replicated where
       rows * dim <= batch * (ids + vectors * dim).
    2. The others have two *shares*: of all their bytes, and of the bytes that lookups read. A table whose larger share
       exceeds 1/W is cut by rows into pieces of at most half of 1/W, but into W pieces at most, and into no more than
       it has rows.
    3. Tables and pieces go, the largest first, to the rank whose larger share stays smallest. No share of a rank is
       then more than 2/W and the largest piece's; where both shares agree, it is 1/W and that.
    """
    check_tables(tables)
    if batch < 1 or replicate_bytes < 0:
        raise SpecError(
            f"simple_plan with batch={batch}, replicate_bytes={replicate_bytes}",
            "at least one sample, and a size of at least 0",
        )
    ids_of = _ids_by_table(tables, ids or {})
    tiles: list[Tile] = []
    distributed: list[Table] = []
    for table in sorted(tables, key=lambda table: table.name):
        if stored_bytes(table) <= replicate_bytes and _replication_is_cheaper(table, batch, ids_of[table.name]):
            tiles += replicated(table, range(topology.world))
        else:
            distributed.append(table)
    tiles += _assign_ranks(_cut_large_tables(distributed, ids_of, topology.world), topology.world)
    return Plan(world=topology.world, tiles=tuple(sorted(tiles)))


def _ids_by_table(tables: Sequence[Table], ids: Mapping[str, float]) -> dict[str, float]:
    ids_of: dict[str, float] = {table.name: len(table.feature_names) for table in tables}
    for name, count in ids.items():
        if name not in ids_of:
            raise SpecError(f"ids of table {name!r}: no such table", "names of tables to be placed")
        if not 0 <= count < math.inf:
            raise SpecError(f"ids of table {name!r}: {count}", "a finite number that is not negative")
    return ids_of | dict(ids)


def _replication_is_cheaper(table: Table, batch: int, ids: float) -> bool:
    """Whether the gradient of a replica is fewer bytes than ids and vectors of an exchange."""
    vectors = ids if table.pooling is Pooling.SEQUENCE else len(table.feature_names)
    return table.rows * table.dim <= batch * (ids + vectors * table.dim)


def _cut_large_tables(tables: Sequence[Table], ids_of: Mapping[str, float], world: int) -> list[UnplacedTile]:
    """Whole tables, and row pieces of those that are more than a rank's even share."""
    stored = list(map(stored_bytes, tables))
    read = [ids_of[table.name] * table.row_bytes for table in tables]
    all_stored, all_read = sum(stored), math.fsum(read) or 1.0  # 1 if no table is ever read
    pieces: list[UnplacedTile] = []
    for table, size, read_bytes in zip(tables, stored, read, strict=True):
        ranks = max(size * world / all_stored, read_bytes * world / all_read)  # rank shares that the table fills
        parts = 1 if ranks <= 1 else min(world, math.ceil(2 * ranks))
        for tile in row_wise(table, range(parts)):
            part = (tile.rows[1] - tile.rows[0]) / table.rows
            pieces.append(UnplacedTile(part * size / all_stored, part * read_bytes / all_read, tile))
    return pieces


def _assign_ranks(pieces: Sequence[UnplacedTile], world: int) -> list[Tile]:
    stored_W, read_W = [0.0] * world, [0.0] * world
    tiles: list[Tile] = []
    for stored, read, tile in sorted(pieces, key=lambda p: (-max(p.stored_share, p.read_share), p.tile)):
        rank = min(range(world), key=lambda rank: max(stored_W[rank] + stored, read_W[rank] + read))
        stored_W[rank] += stored
        read_W[rank] += read
        tiles.append(structs.replace(tile, rank=rank))
    return tiles
