"""Infers a table's layout from its tiles. A plan holds tiles only, whoever made them, but re-planning needs layouts.

Tiles that match no layout of `LAYOUTS` have none.
"""

from collections.abc import Iterable, Sequence

from msgspec import structs

from rowwise.parallel.plan import Tile
from rowwise.planning.planner.kinds import PlacementKind, tiles_of
from rowwise.planning.planner.layouts import LAYOUTS, Layout
from rowwise.tables.spec import Table, Topology

Units = tuple[int, ...]


def infer_kind(
    table: Table, tiles: Sequence[Tile], topology: Topology, kinds: Iterable[PlacementKind] = ()
) -> tuple[PlacementKind, Units] | None:
    """The kind and units that make these tiles but for pinned rows, in any order; preferably one of `kinds`."""
    known, sorted_tiles = list(kinds), sorted(structs.replace(tile, pinned_rows=0) for tile in tiles)
    first = sorted_tiles[0]
    cached = first.cache_rows / (first.rows[1] - first.rows[0])
    for layout in LAYOUTS:
        units = _candidate_units(layout, sorted_tiles, topology)
        if not layout.differs_on(topology) or (layout.pieces is None and len(units) > 1):
            continue
        # Kinds that differ only in `cached` may make the same tiles of a small table: prefer a known one.
        matching = [kind for kind in known if kind[:3] == (layout, len(units), first.tier)]
        above = matching[0].cache_tier if matching else "device"
        for kind in (*matching, PlacementKind(layout, len(units), first.tier, cached, above)):
            if sorted(tiles_of(kind, table, units, topology)) == sorted_tiles:
                return kind, units
    return None


def _candidate_units(layout: Layout, tiles: Sequence[Tile], topology: Topology) -> Units:
    """The units that the tiles would be on if they were of this layout; for a wrong layout, other tiles result."""
    by_cols = sorted(tiles, key=lambda tile: (tile.cols, tile.rows))
    match layout.unit_kind:
        case "rank":
            return tuple(tile.rank for tile in by_cols)
        case "host":
            return tuple({tile.cols: topology.world + topology.host_of(tile.rank) for tile in by_cols}.values())
        case "all":
            return (topology.world + topology.hosts,)
