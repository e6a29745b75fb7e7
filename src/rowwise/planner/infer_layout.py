"""The layout that a table's tiles are of, read back from the tiles.

Known limits: tiles that no layout of ours makes; they have none.
"""

from collections.abc import Iterable, Sequence

from rowwise.plan import Tile
from rowwise.planner.kinds import PlacementKind, tiles_of
from rowwise.planner.layouts import LAYOUTS, Layout
from rowwise.spec import Table, Topology

Units = tuple[int, ...]


def infer_layout(
    table: Table, tiles: Sequence[Tile], topology: Topology, kinds: Iterable[PlacementKind] = ()
) -> tuple[PlacementKind, Units] | None:
    """The kind and the units that make just these tiles, in any order; if it is one of `kinds`, that one."""
    known, wanted = list(kinds), sorted(tiles)
    first = wanted[0]
    cached = first.cache_rows / (first.rows[1] - first.rows[0])
    for layout in LAYOUTS:
        units = _units(layout, wanted, topology)
        if not layout.differs_on(topology) or (layout.pieces is None and len(units) > 1):
            continue
        same = [kind for kind in known if kind[:3] == (layout, len(units), first.tier)]
        for kind in (*same, PlacementKind(layout, len(units), first.tier, cached)):
            if sorted(tiles_of(kind, table, units, topology)) == wanted:
                return kind, units
    return None


def _units(layout: Layout, tiles: Sequence[Tile], topology: Topology) -> Units:
    """Those that tiles would be on, if they were of a layout: a wrong one makes other tiles."""
    by_cols = sorted(tiles, key=lambda tile: (tile.cols, tile.rows))
    match layout.span:
        case "rank":
            return tuple(tile.rank for tile in by_cols)
        case "host":
            return tuple({tile.cols: topology.world + topology.host_of(tile.rank) for tile in by_cols}.values())
        case "all":
            return (topology.world + topology.hosts,)
